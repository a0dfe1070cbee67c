"""What `megatron-rl eval` was asked for, and what of it can be refused before anything is loaded. Without torch."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.arguments import write_problem
from megatron_rl.errors import DataError, MegatronRLError, ModelError
from megatron_rl.recipe.dataset import PLACE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The command line, value by value; None: see the field."""

    model: Path
    sets: tuple[tuple[str, Path], ...]  # (name, file); the name is part of the seeds
    samples: int
    pass_at: tuple[int, ...]
    reward: str
    seed: int  # a run's `run.seed`
    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # -1: no limit
    prompt_template: str  # text around each problem
    prompt_truncation: Literal["drop", "left"]
    max_prompt_tokens: int | None  # none: 1024, or half of the model's positions if it has fewer than 2048
    max_tokens: int | None  # of a response; none: what the positions leave, at most 32768
    yarn: float | None  # factor
    yarn_original: int | None  # none: max_position_embeddings
    since: datetime.date | None
    until: datetime.date | None  # not part of the window
    limit: int | None
    skip_unusable: bool
    dtype: Literal["float32", "bfloat16"] | None  # none: that of config.json
    tp: int
    replicas: int
    threads: int  # CPU threads of an engine worker
    max_concurrent: int
    kv_cache_gib: int
    gpu_memory_fraction: float
    start_timeout_s: float
    request_timeout_s: float
    restarts: int
    grader_workers: int
    grader_timeout_s: float
    grader_memory_gib: float
    reasoning: Literal["auto", "required"]
    allow_weak_sandbox: bool  # run programs although a layer of isolation is missing
    out: Path | None
    samples_out: Path | None
    log_dir: Path | None  # none: a temporary one, kept if the evaluation fails


def named_file(text: str) -> tuple[str, Path]:
    """`NAME=FILE`, or `FILE`, whose name without its suffix is taken. Raises ValueError for a name that is none."""
    name, equals, file = text.partition("=")
    if not equals or Path(text).exists():
        file = text
        name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(text).stem).lstrip("_-")
    if not _NAME.fullmatch(name) or not file:
        raise ValueError(
            f"got {text!r}, must be FILE or NAME=FILE with a name of letters, digits, '_' and '-', such as "
            f"aime24=data/aime24.jsonl"
        )
    return name, Path(file)


def option_problems(options: EvalOptions) -> Iterator[MegatronRLError]:
    """What makes no sense, is not there or cannot be written."""
    yield from _sample_problems(options)
    yield from _set_problems(options)
    for flag, path in (("--out", options.out), ("--samples-out", options.samples_out)):
        if path is not None and not path.parent.is_dir():
            yield MegatronRLError(
                f"{flag} {path}: no directory {path.parent}; give the path of a file in a directory that exists"
            )
        elif path is not None and (problem := write_problem(path)):
            yield MegatronRLError(f"{flag} {path}: {problem}")
    if options.out is not None and options.out == options.samples_out:
        yield MegatronRLError(f"--out and --samples-out are both {options.out}; give two files")
    if options.prompt_template.count(PLACE) != 1:
        yield MegatronRLError(
            f"--prompt-template: got {options.prompt_template!r}, must hold {PLACE} once, where the problem goes"
        )
    if options.yarn is None and options.yarn_original is not None:
        yield MegatronRLError("--yarn-original: not used without --yarn FACTOR; remove it or give the factor")
    if options.since is not None and options.until is not None and options.since >= options.until:
        yield MegatronRLError(
            f"--since {options.since} --until {options.until}: the window is empty; it holds the days from --since up "
            f"to the one before --until"
        )


def _sample_problems(options: EvalOptions) -> Iterator[MegatronRLError]:
    for k in options.pass_at:
        if k > options.samples:
            yield MegatronRLError(
                f"--pass-at: got {k} with --n {options.samples}, must be at most --n: fewer samples say nothing "
                f"unbiased about pass@{k}; raise --n to {k} or leave {k} out"
            )
    if options.temperature == 0 and options.samples > 1:
        yield MegatronRLError(
            f"--temperature 0 draws the same sample every time, --n {options.samples} of them tell no more than one; "
            f"give --n 1, or a temperature above 0"
        )


def _set_problems(options: EvalOptions) -> Iterator[MegatronRLError]:
    for name, count in Counter(name for name, _ in options.sets).items():
        if count > 1:
            yield MegatronRLError(f"--data: {count} sets are named {name!r}; tell them apart by NAME=FILE")
    for name, file in options.sets:
        if not file.is_file():
            yield DataError(f"--data {name}: no file {file}; relative paths start at {Path.cwd()}")


def model_problems(path: Path) -> Iterator[MegatronRLError]:
    """What a directory lacks of a model."""
    if not path.is_dir():
        yield ModelError(f"--model {path}: no such directory; give a Hugging Face directory")
        return
    if not (path / "config.json").is_file():
        hint = "give a Hugging Face directory"
        if (path / "model" / "config.json").is_file():
            hint = f"this is a run directory: give {path / 'model'}, its final weights"
        elif (path / "checkpoints").is_dir():
            hint = f"this is a run directory: export it first, tools/convert_checkpoint.py export {path} DIR"
        yield ModelError(f"--model {path}: no config.json there; {hint}")
        return
    if not any(path.glob("*.safetensors")):
        yield ModelError(f"--model {path}: no *.safetensors there; give a directory that holds weights")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        yield DataError(
            f"--model {path}: no tokenizer there, none of {', '.join(_TOKENIZER_FILES)}; copy them"
        )

"""What `megatron-rl eval` was asked for, and what of it can be refused before anything is loaded. Without torch."""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


def check_options(options: EvalOptions) -> None:
    """Raises MegatronRLError, one line each, for what makes no sense or is not there."""
    _check_samples(options)
    _check_files(options)
    _check_model(options.model)
    if options.prompt_template.count(PLACE) != 1:
        raise MegatronRLError(
            f"--prompt-template: got {options.prompt_template!r}, must hold {PLACE} once, where the problem goes"
        )
    if options.yarn is None and options.yarn_original is not None:
        raise MegatronRLError("--yarn-original: not used without --yarn FACTOR; remove it or give the factor")
    if options.since is not None and options.until is not None and options.since >= options.until:
        raise MegatronRLError(
            f"--since {options.since} --until {options.until}: the window is empty; it holds the days from --since up "
            f"to the one before --until"
        )


def _check_samples(options: EvalOptions) -> None:
    for k in options.pass_at:
        if k > options.samples:
            raise MegatronRLError(
                f"--pass-at: got {k} with --n {options.samples}, must be at most --n: fewer samples say nothing "
                f"unbiased about pass@{k}; raise --n to {k} or leave {k} out"
            )
    if options.temperature == 0 and options.samples > 1:
        raise MegatronRLError(
            f"--temperature 0 draws the same sample every time, --n {options.samples} of them tell no more than one; "
            f"give --n 1, or a temperature above 0"
        )


def _check_files(options: EvalOptions) -> None:
    twice = [name for name, count in Counter(name for name, _ in options.sets).items() if count > 1]
    if twice:
        raise MegatronRLError(f"--data: two sets are named {twice[0]!r}; tell them apart by NAME=FILE")
    for name, file in options.sets:
        if not file.is_file():
            raise DataError(f"--data {name}: no file {file}; relative paths start at {Path.cwd()}")
    written = [("--out", options.out), ("--samples-out", options.samples_out)]
    for flag, path in written:
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            what = "is a directory" if path.is_dir() else f"no directory {path.parent}"
            raise MegatronRLError(
                f"{flag} {path}: {what}; give the path of a file in a directory that exists"
            )
        if path is not None and not os.access(path.parent, os.W_OK):
            raise MegatronRLError(
                f"{flag} {path}: nothing can be written in {path.parent}; choose another place"
            )
    if options.out is not None and options.out == options.samples_out:
        raise MegatronRLError(f"--out and --samples-out are both {options.out}; give two files")


def _check_model(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"--model {path}: no such directory; give a Hugging Face directory")
    if not (path / "config.json").is_file():
        hint = "give a Hugging Face directory"
        if (path / "model" / "config.json").is_file():
            hint = f"this is a run directory: give {path / 'model'}, its final weights"
        elif (path / "checkpoints").is_dir():
            hint = f"this is a run directory: export it first, tools/convert_checkpoint.py export {path} DIR"
        raise ModelError(f"--model {path}: no config.json there; {hint}")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"--model {path}: no *.safetensors there; give a directory that holds weights")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(
            f"--model {path}: no tokenizer there, none of {', '.join(_TOKENIZER_FILES)}; copy them"
        )

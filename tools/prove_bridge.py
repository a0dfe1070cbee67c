"""Prove on a model of yours that no weight is lost or misplaced between Hugging Face, megatron-core and vLLM.

The chain: transformers answers three chat prompts greedily; megatron-core loads the model over tp * pp processes and
scores the same tokens; vLLM starts on scrambled weights and talks nonsense; the weights are transferred and vLLM must
give transformers' answers, token by token; the model is exported and every tensor compared bit by bit; one optimizer
step, and trainer and engine are compared again. All in float32 on this machine. Prints a table and a verdict.

Exit code 0: proven, 1: refuted, 2: the chain could not be walked to its end, for the reason printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.arguments import positive_int
from megatron_rl.errors import LostPeerError, MegatronRLError, ModelError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.platform.process import run_process
from megatron_rl.reshard.tables import check_target
from megatron_rl.train import launcher, rank_process
from megatron_rl.verify.place import deadline

PROVEN, REFUTED, BROKEN = 0, 1, 2
SCRAMBLED, EXPORTED, REPORT, LOGS = "scrambled", "exported", "report.json", "logs"  # in the place of a proof
SIDE_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
SPELLINGS = {"dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"}
# float32 through other kernels: after 30 layers transformers alone is 3e-5 from float64, and 9e-5 was the most found
# between an engine of three workers and a trainer of six ranks; what is in the wrong place differs by whole nats
SAME_NATS = 3e-4
APART_NATS = 0.01  # what must have changed has changed by more


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """An exported model against its source."""

    tensors: int  # of the export
    changed: list[str]  # names of tensors that are not in both, or not bit by bit the same as float32
    files: list[str]  # names of what accompanies the weights and is not the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the table."""

    claim: str
    measured: str
    holds: bool


def checks_of(report: dict[str, Any], comparison: Comparison, *, layout: str, engine: str) -> list[Check]:
    """What must hold, in the order of the chain. `report` is what the ranks measured."""
    num_answers = len(report["answers"])

    def same(claim: str, key: str) -> Check:
        return Check(claim=claim, measured=_nats(report[key]), holds=report[key] <= SAME_NATS)

    def apart(claim: str, key: str) -> Check:
        # scrambled weights may give anything, so not a number is as far apart as any number
        return Check(claim=claim, measured=_nats(report[key]), holds=not report[key] <= APART_NATS)

    def answered(claim: str, key: str, wanted: int) -> Check:
        return Check(claim=claim, measured=f"{report[key]} of {num_answers}", holds=report[key] == wanted)

    changed, files = comparison.changed, comparison.files
    return [
        same(f"trainer {layout} = transformers", "trainer_to_transformers"),
        apart(f"{engine} on scrambled weights differs", "scrambled_engine_gap"),
        answered("  and gives none of transformers' answers", "scrambled_answers_equal", 0),
        same(f"{engine} after the transfer = trainer", "engine_to_trainer"),
        same(f"{engine} after the transfer = transformers", "engine_to_transformers"),
        answered("  and gives transformers' answers, token by token", "answers_equal", num_answers),
        Check(
            claim="exported tensors are bit by bit the original's",
            measured=f"{len(changed)} of {comparison.tensors} differ: {', '.join(changed[:3])}"
            if changed
            else f"all {comparison.tensors}",
            holds=comparison.tensors > 0 and not changed,
        ),
        Check(
            claim="exported config, tokenizer and other files are the original's",
            measured=", ".join(files) or "all",
            holds=not files,
        ),
        apart("one optimizer step changes the log-probs", "step_moved"),
        same(f"{engine} after the second transfer = trainer", "trained_engine_to_trainer"),
    ]


def _nats(value: float) -> str:
    return f"{value:.2g} nats"


def table(report: dict[str, Any], checks: Sequence[Check]) -> str:
    """The answers, the checks and the verdict, to be read on a terminal."""
    lines = []
    for answer in report["answers"]:
        lines.append(f"prompt             {answer['prompt']}")
        for who in ("transformers", "before", "after"):
            shown = who if who == "transformers" else f"vLLM {who} sync"
            lines.append(f"  {shown:<17}{answer[who]!r}")
    width = max(len(check.claim) for check in checks)
    lines += ["", *(f"{'ok  ' if c.holds else 'FAIL'}  {c.claim:<{width}}  {c.measured}" for c in checks), ""]
    seconds = " and ".join(f"{s:.2f}" for s in report["sync_s"])
    lines.append(
        f"largest gaps over {report['num_tokens']} tokens; each transfer {report['sync_bytes']:,} bytes,"
    )
    lines.append(f"{seconds} s; peak memory of the ranks {sum(report['peak_rss_mib']):,} MiB together")
    failed = sum(not check.holds for check in checks)
    lines.append(
        f"verdict: refuted, {failed} of {len(checks)} checks failed" if failed else "verdict: proven"
    )
    return "\n".join(lines)


def prove(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the ranks, wait for them, judge their report. Leaves nothing behind but `args.keep`."""
    layout = ParallelLayout(tp=args.tp, pp=args.pp)
    spec = ModelSpec.from_hf(args.model)
    spec.check_layout(layout)
    check_target(spec, tp=args.engine_tp)
    with deadline(args.timeout_s), _place(args.keep) as place, launcher.held_port() as port:
        write_scrambled(args.model, place / SCRAMBLED)
        own = ["--place", str(place), "--port", str(port)]
        command = [sys.executable, __file__, *argv, *own]
        if code := launcher.launch_local(command, nproc=layout.world_size, log_dir=place / LOGS):
            # beyond 128: interrupted
            return code if code > 128 else BROKEN
        report = json.loads((place / REPORT).read_text())
        comparison = compare(args.model, place / EXPORTED, tied=spec.tied)
    checks = checks_of(
        report, comparison, layout=f"tp{args.tp} x pp{args.pp}", engine=f"vLLM tp{args.engine_tp}"
    )
    print(table(report, checks))
    return PROVEN if all(check.holds for check in checks) else REFUTED


def write_scrambled(model: Path, out: Path) -> None:
    """A model of the same shape whose every tensor holds the source's values in reverse order."""
    out.mkdir()
    shutil.copyfile(model / "config.json", out / "config.json")
    with open_files(model) as tensors:
        scrambled = {name: reverse(read(name)) for name, read in tensors.items()}
    save_file(scrambled, out / "model.safetensors", metadata={"format": "pt"})


def reverse(tensor: Tensor) -> Tensor:
    return tensor.flatten().flip(0).view(tensor.shape)


def compare(source: Path, target: Path, *, tied: bool) -> Comparison:
    """Read both with safetensors itself, so that a mistake of our readers cannot hide one of our writers."""
    with open_files(source) as ours, open_files(target) as theirs:
        # a checkpoint may repeat the tied head; an export does not
        names = {name for name in ours if not (tied and name == "lm_head.weight")}
        changed = names ^ theirs.keys()
        for name in names & theirs.keys():
            pair = [get[name](name).float() for get in (ours, theirs)]
            if pair[0].shape != pair[1].shape or not torch.equal(*(t.view(torch.int32) for t in pair)):
                changed.add(name)
        return Comparison(tensors=len(theirs), changed=sorted(changed), files=changed_files(source, target))


@contextmanager
def open_files(model: Path) -> Iterator[dict[str, Callable[[str], Tensor]]]:
    """Name of each tensor of a directory to what reads it. Raises ModelError without sound safetensors files."""
    paths = sorted(model.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{model}: holds no .safetensors file; pickled weights are not read")
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(str(path), framework="pt")) for path in paths]
        except SafetensorError as error:
            raise ModelError(f"{model}: not complete safetensors files: {error}; download it again") from None
        yield {name: file.get_tensor for file in opened for name in file.keys()}  # noqa: SIM118


def changed_files(source: Path, target: Path) -> list[str]:
    """Names of files beside the weights that are not the same in both; of config.json the meaning counts."""
    files = {
        path.name
        for directory in (source, target)
        for path in directory.iterdir()
        if path.suffix in SIDE_SUFFIXES and not path.name.endswith(".index.json")
    }
    changed = []
    for name in sorted(files):
        pair = [directory / name for directory in (source, target)]
        if not all(path.is_file() for path in pair):
            changed.append(name)
        elif name == "config.json":
            changed += [name] if config_of(source) != config_of(target) else []
        elif pair[0].read_bytes() != pair[1].read_bytes():
            changed.append(name)
    return changed


def config_of(model: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """What config.json says, apart from spellings that transformers 4 and 5 do not share, and the dtype."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return ModelSpec.from_hf(model), {key: config[key] for key in config.keys() - SPELLINGS}


@contextmanager
def _place(keep: Path | None) -> Iterator[Path]:
    """Where the ranks write: the new directory `keep`, or one that is removed afterwards."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="prove_bridge_") as scratch:
            yield Path(scratch)
        return
    if keep.exists():
        raise ModelError(f"--keep: {keep} exists already; remove it, or name another directory")
    keep.mkdir(parents=True)
    try:
        yield keep
    finally:
        shutil.rmtree(keep / SCRAMBLED, ignore_errors=True)


def _run_rank(args: argparse.Namespace, rank: int) -> int:
    rank_process.enter_rank()
    try:
        from megatron_rl.platform.quiet import silence_library_warnings

        silence_library_warnings()
        # the file beside this one; loading megatron-core takes seconds, and only ranks need it
        from prove_bridge_rank import Job, run_rank

        job = Job(
            model=args.model,
            scrambled=args.place / SCRAMBLED,
            exported=args.place / EXPORTED,
            report=args.place / REPORT,
            logs=args.place / LOGS,
            layout=ParallelLayout(tp=args.tp, pp=args.pp),
            engine_tp=args.engine_tp,
            max_tokens=args.max_tokens,
            port=args.port,
            timeout_s=args.timeout_s,
        )
        run_rank(job, rank=rank)
        return PROVEN
    except LostPeerError as error:
        # a consequence: the rank that stopped has the cause
        return _reported(str(error), 1, is_consequence=True)
    except MegatronRLError as error:
        return _reported(str(error), BROKEN)
    except Exception:
        return _reported(traceback.format_exc(), 1)


def _reported(message: str, code: int, *, is_consequence: bool = False) -> int:
    if not rank_process.report_failure(message, exit_code=code, is_consequence=is_consequence):
        print(f"error: {message}", file=sys.stderr)
    return code


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  fetch_smollm2.py models/smollm2\n  prove_bridge.py models/smollm2 --tp 3 --pp 2",
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="Hugging Face directory with a chat template"
    )
    for name, default, meaning in (
        ("tp", 1, "tensor-parallel degree of the trainer"),
        ("pp", 1, "pipeline stages of the trainer"),
        ("engine-tp", 1, "workers of the vLLM engine"),
        ("max-tokens", 32, "longest answer"),
    ):
        parser.add_argument(
            f"--{name}", type=positive_int, default=default, help=f"{meaning} (default: {default})"
        )
    parser.add_argument(
        "--timeout-s", type=float, default=900.0, help="end all of it after so many seconds (default: 900)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="new directory for the exported model, report.json and logs"
    )
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(argv)
    rank = rank_process.rank_environment()
    if rank is not None and args.place is not None:
        return _run_rank(args, rank.rank)
    try:
        return prove(args, argv)
    except MegatronRLError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or args.model}: {error.strerror or error}", file=sys.stderr)
    return BROKEN


if __name__ == "__main__":
    run_process(main)

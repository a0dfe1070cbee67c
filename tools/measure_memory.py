"""Compare predicted with measured memory of training on this machine: each phase of each pipeline stage, in bytes.

Loads a model over the ranks of a layout, takes two steps of SFT and one of RL on random tokens, and prints the most
that live tensors took beside what `megatron-rl check --gpu` would predict. Needs a directory with weights; on CPU also
a C++ compiler. Exit code 0: every phase within 10 %, 1: not, 2: it could not be run, for the reason printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_rl.arguments import positive_int
from megatron_rl.errors import LostPeerError, MegatronRLError
from megatron_rl.platform.process import run_process
from megatron_rl.reshard.plan_text import size_text
from megatron_rl.train import launcher, rank_process
from megatron_rl.verify.layouts import layout_text, parse_layout

BOUND = 0.1
WITHIN, BEYOND, NOT_RUN = 0, 1, 2
_TIMEOUT_S = 1800.0

EXAMPLES = """examples:
  measure_memory.py models/tiny --layout tp=2,sp --tokens 4096
  measure_memory.py models/tiny --layout pp=2,vpp=2 --microbatches 4 --recompute full
"""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = _parse(given)
    place = rank_process.rank_environment()
    if place is not None:
        return _as_rank(args, place.rank)
    try:
        _check(args)
        with tempfile.TemporaryDirectory(prefix="measure_memory_") as scratch:
            return _start(args, given, Path(scratch))
    except MegatronRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_RUN


def _check(args: argparse.Namespace) -> None:
    if args.sequence % 2 or args.tokens % args.sequence:
        raise MegatronRLError(
            f"--tokens {args.tokens} --sequence {args.sequence}: micro-batches must be full and half of a sequence "
            "trained on; make --sequence an even number that divides --tokens"
        )


def _start(args: argparse.Namespace, given: list[str], scratch: Path) -> int:
    """Start the ranks and print what they measured."""
    from measure_memory_rank import build_counter

    from megatron_rl.platform.device import has_accelerator

    layout = parse_layout(args.layout)
    if not has_accelerator():
        build_counter(scratch)
    command = [sys.executable, str(Path(__file__).resolve()), *given]
    with launcher.held_port() as port:
        command += ["--scratch", str(scratch), "--port", str(port)]
        code = launcher.launch_local(command, nproc=layout.world_size, log_dir=scratch / "logs")
    if code:
        return code if code > 128 else NOT_RUN
    found = json.loads((scratch / "found.json").read_text())
    print(f"{layout_text(layout)}, {args.dtype}, {args.microbatches} micro-batches of {args.tokens} tokens")
    print(f"{'pp rank':>8}  {'phase':<12}{'predicted':>12}{'measured':>12}   error")
    for one in found:
        predicted, measured = one["predicted"], one["measured"]
        error = f"{predicted / measured - 1:+.1%}"
        print(
            f"{one['pp_rank']:>8}  {one['phase']:<12}{size_text(predicted):>12}{size_text(measured):>12}{error:>8}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    worst = max(abs(one["predicted"] / one["measured"] - 1) for one in found)
    print(f"worst: {worst:.1%}")
    return WITHIN if worst <= BOUND else BEYOND


def _as_rank(args: argparse.Namespace, rank: int) -> int:
    rank_process.enter_rank()
    try:
        from megatron_rl.platform.loading import loading_libraries
        from megatron_rl.platform.quiet import silence_library_warnings

        silence_library_warnings()
        with loading_libraries():
            from megatron_rl.platform.device import import_megatron

            import_megatron()
        _measure(args, rank)
        return 0
    except LostPeerError as error:
        rank_process.report_failure(str(error), exit_code=1, is_consequence=True)
        return 1
    except MegatronRLError as error:
        rank_process.report_failure(str(error), exit_code=NOT_RUN)
        return NOT_RUN
    except Exception:
        rank_process.report_failure(traceback.format_exc(), exit_code=1)
        return 1


def _measure(args: argparse.Namespace, rank: int) -> None:
    from measure_memory_rank import LiveBytes, Setting, measure

    from megatron_rl.parallel.collectives import all_gather_object
    from megatron_rl.parallel.groups import destroy_process_groups, init_process_groups

    layout = parse_layout(args.layout)
    init_process_groups(
        layout,
        rank=rank,
        world_size=layout.world_size,
        master_addr="127.0.0.1",
        master_port=args.port,
        timeout_s=_TIMEOUT_S,
    )
    setting = Setting(
        hf_path=args.model,
        layout=layout,
        dtype=args.dtype,
        recompute=args.recompute,
        tokens=args.tokens,
        sequence=args.sequence,
        microbatches=args.microbatches,
    )
    own = measure(setting, rank=rank, live=LiveBytes(args.scratch / "live_bytes.so"))
    every = all_gather_object([asdict(one) for one in own])
    if rank == 0:
        # the first rank of each pipeline stage
        firsts = every[:: layout.tp * layout.dp]
        (args.scratch / "found.json").write_text(json.dumps([one for of_rank in firsts for one in of_rank]))
    destroy_process_groups()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory with weights")
    parser.add_argument(
        "--layout",
        default="tp=1",
        metavar="LAYOUT",
        help='such as "tp=2,sp" or "pp=2,dp=2" (default: one process)',
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument(
        "--tokens", type=positive_int, default=2048, metavar="N", help="of a micro-batch (default: 2048)"
    )
    parser.add_argument(
        "--sequence", type=positive_int, default=256, metavar="N", help="positions (default: 256)"
    )
    parser.add_argument(
        "--microbatches", type=positive_int, default=2, metavar="N", help="of a step and dp rank (default: 2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_process(main)

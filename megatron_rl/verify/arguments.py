"""The command line of `verify`: its parsers, and which function runs each proof. Without torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_rl.arguments import positive_int, seconds, seed
from megatron_rl.verify.layouts import is_override

_PROOFS = "exit code 0: proven, 1: refuted, 2: could not be run, for the reason printed"
_SubParsers = argparse._SubParsersAction


def add_verify(commands: _SubParsers[argparse.ArgumentParser]) -> dict[str, argparse.ArgumentParser]:
    """The parser of each proof by name, below `verify`."""
    verify = commands.add_parser(
        "verify", help="prove layout, resume or parity on a recipe of yours", description=_PROOFS
    )
    proofs = verify.add_subparsers(title="proofs", metavar="PROOF", required=True)
    layout = _parser(proofs, "layout", "loss and every gradient of each layout against one process", _layout)
    layout.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="LAYOUT",
        help='such as "tp=2" "tp=2,pp=2,sp" "dp=2" (default: those, pp=2, and the recipe\'s own)',
    )
    layout.add_argument("--json", type=Path, metavar="FILE", help="write every gap of every tensor")
    resume = _parser(proofs, "resume", "a run killed and resumed against one that was not", _resume)
    resume.add_argument(
        "--kills", type=positive_int, default=3, metavar="N", help="times that it is killed (default: 3)"
    )
    resume.add_argument(
        "--seed", type=seed, default=1, metavar="S", help="of the moments of the kills (default: 1)"
    )
    resume.add_argument(
        "--layout", metavar="LAYOUT", help="resume in this layout, such as tp=2; SFT losses within 1e-6"
    )
    _parser(proofs, "parity", "log-probs of trainer, engine and transformers on the same tokens", _parity)
    return dict(proofs.choices)


def _parser(
    proofs: _SubParsers[argparse.ArgumentParser],
    name: str,
    what: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = proofs.add_parser(name, help=what, description=f"Prove {what}; {_PROOFS}.")
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; paths inside it as in `train`")
    parser.add_argument("overrides", nargs="*", default=[], metavar="path=value")
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="a small model of the same kind with random weights, first rows of the data; needs no weights",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="new directory for what the proof writes (default: removed)"
    )
    parser.add_argument(
        "--timeout-s", type=seconds, default=1800.0, metavar="S", help="end after so long (default: 1800)"
    )
    parser.set_defaults(run=run)
    return parser


def _layout(args: argparse.Namespace) -> int:
    from megatron_rl.verify.layout import verify_layout

    # overrides behind the layouts look like one to argparse
    args.overrides = [*args.overrides, *filter(is_override, args.layouts)]
    args.layouts = [text for text in args.layouts if not is_override(text)]
    return verify_layout(args)


def _resume(args: argparse.Namespace) -> int:
    from megatron_rl.verify.resume import verify_resume

    return verify_resume(args)


def _parity(args: argparse.Namespace) -> int:
    from megatron_rl.verify.parity import verify_parity

    return verify_parity(args)

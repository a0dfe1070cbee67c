"""Convert models between Hugging Face directories and distributed checkpoints, and prove that nothing changed.

One process, no GPU, one tensor in memory at a time, whatever the size of the model. What is written appears under its
name only when it is complete.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.arguments import positive_int
from megatron_rl.errors import MegatronRLError, ModelError
from megatron_rl.model.compare import Comparison, compare_models
from megatron_rl.model.convert import OpenModel, export_hf, import_hf, open_model
from megatron_rl.model.spec import ModelSpec
from megatron_rl.platform.quiet import silence_library_warnings
from megatron_rl.reshard.plan_text import size_text
from megatron_rl.train.launcher import free_port

SAME, DIFFERENT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
GIGABYTE = 1000**3
SHOWN = 12  # differences that are printed
# float32 sums of a few thousand products in another order; a wrong layout is off by whole numbers
BOUND = 1e-3
PROBE_LENGTHS = (7, 48)  # tokens of the sequences whose logits are compared

EXAMPLES = """examples:
  convert_checkpoint.py import models/Qwen2.5-7B checkpoints/qwen --tp 4 --pp 2
  convert_checkpoint.py export runs/mine exported --dtype bfloat16 --verify
  convert_checkpoint.py verify models/Qwen2.5-7B exported --logits
"""


class _NotTheSame(ModelError):
    """An export that did not hold what it was made from."""


def run_import(args: argparse.Namespace) -> int:
    began = time.monotonic()
    spec = import_hf(args.hf_dir, args.out, tp=args.tp, pp=args.pp, dtype=DTYPES[args.dtype])
    files = list(args.out.rglob("*.distcp"))
    print(
        f"wrote {args.out}: {spec.family}, {spec.num_layers} layers, {_amount(files, began)}\n"
        f"to train from it: model.hf_path={args.out / 'hf'} model.checkpoint={args.out}"
    )
    return SAME


def run_export(args: argparse.Namespace) -> int:
    began, dtype = time.monotonic(), DTYPES[args.dtype]
    with open_model(args.checkpoint, hf_source=args.hf_source) as model:
        check = _verifier(model, dtype=dtype, bound=args.bound) if args.verify else None
        limit = int(args.max_file_gb * GIGABYTE)
        export_hf(model, args.out, dtype=dtype, max_file_bytes=limit, check=check)
    files = list(args.out.glob("*.safetensors"))
    print(f"wrote {args.out}: {model.spec.family}, {model.spec.num_layers} layers, {_amount(files, began)}")
    return SAME


def run_verify(args: argparse.Namespace) -> int:
    with (
        open_model(args.a, hf_source=args.hf_source) as a,
        open_model(args.b, hf_source=args.hf_source) as b,
    ):
        same = _report(compare_models(a, b), allow_rounding=args.allow_rounding)
        if args.logits:
            same &= _report_logits(_logits(a), _logits(b), bound=args.bound)
    print(f"verdict  {'the same model' if same else 'NOT the same model'}")
    return SAME if same else DIFFERENT


def _verifier(model: OpenModel, *, dtype: torch.dtype | None, bound: float) -> Callable[[Path], None]:
    """Raises _NotTheSame when the exported directory is not what is in `model`."""

    def check(exported: Path) -> None:
        with open_model(exported) as written:
            same = _report(compare_models(model, written), allow_rounding=dtype is not None)
            same &= _report_logits(_logits(model, rounded_to=dtype), _logits(written), bound=bound)
        if not same:
            raise _NotTheSame(f"{model.path}: the export does not hold the same model; nothing was written")

    return check


def _report(result: Comparison, *, allow_rounding: bool) -> bool:
    rounded = sum(difference.is_rounding for difference in result.tensors)
    equal = result.num_tensors - len(result.tensors)
    print(
        f"tensors  {result.num_tensors} compared, {result.num_bytes:,} bytes: {equal} the same byte for byte, "
        f"{rounded} after rounding, {len(result.tensors) - rounded} different"
    )
    listed = [d for d in result.tensors if not (allow_rounding and d.is_rounding)]
    _list([f"{difference.name}: {difference.text}" for difference in listed])
    print(f"files    {result.num_files} compared: {result.num_files - len(result.files)} the same")
    _list(result.files)
    print(f"config   {len(result.config) or 'no'} differences")
    _list(result.config)
    return result.is_same(allow_rounding=allow_rounding)


def _list(lines: Sequence[str]) -> None:
    for line in lines[:SHOWN]:
        print(f"         {line}")
    if len(lines) > SHOWN:
        print(f"         and {len(lines) - SHOWN} more")


def _report_logits(a: Tensor, b: Tensor, *, bound: float) -> bool:
    if a.shape != b.shape:
        print(f"logits   {list(a.shape)} in A, {list(b.shape)} in B")
        return False
    gap = (a - b).abs()
    # not `max() <= bound`: NaN must not pass
    within = bool((gap <= bound).all())
    print(
        f"logits   of {a.shape[0]} tokens differ by up to {gap.max():.3g}, {gap.mean():.3g} on average; "
        f"{'within' if within else 'OVER'} the bound of {bound:g}"
    )
    return within


def _logits(model: OpenModel, *, rounded_to: torch.dtype | None = None) -> Tensor:
    """Of a HF directory by transformers, of a checkpoint by megatron-core; float32."""
    sequences = probe_sequences(model.spec)
    if model.sharded is None:
        return hf_logits(model.path, sequences)
    # imports megatron-core, which converting does not need
    from megatron_rl.model.probe import checkpoint_logits

    return checkpoint_logits(model.sharded, model.spec, sequences, port=free_port(), rounded_to=rounded_to)


def probe_sequences(spec: ModelSpec) -> list[list[int]]:
    """The same tokens for every model of this vocabulary."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(spec.vocab_size, (min(length, spec.max_positions),), generator=generator).tolist()
        for length in PROBE_LENGTHS
    ]


def hf_logits(path: Path, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[T, V] of all sequences. Raises ModelError when transformers does not find every weight, or finds others."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    wrong = {
        what: sorted(map(str, info[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if any(wrong.values()):
        raise ModelError(f"{path}: transformers does not load all of it: {wrong}")
    with torch.no_grad():
        return torch.cat([model.eval()(torch.tensor([sequence])).logits[0] for sequence in sequences])


def _amount(files: Sequence[Path], began: float) -> str:
    size = size_text(sum(path.stat().st_size for path in files))
    return f"{len(files)} {'file' if len(files) == 1 else 'files'}, {size}, {time.monotonic() - began:.1f} s"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _import_parser(commands)
    _export_parser(commands)
    _verify_parser(commands)
    return parser.parse_args(argv)


Commands = argparse._SubParsersAction


def _import_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "import",
        help="Hugging Face directory to a distributed checkpoint",
        description="Write a checkpoint in megatron-core's torch_dist format, with config and tokenizer beside it. "
        "Any layout can load it; --tp and --pp only decide how it is cut into files, one for each rank.",
    )
    parser.add_argument("hf_dir", type=Path, metavar="HF_DIR", help="config.json, safetensors, tokenizer")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; must not exist yet")
    for axis, meaning in (("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(
            f"--{axis}",
            type=positive_int,
            default=1,
            metavar="N",
            help=f"{meaning}-parallel degree of the run that will mostly load it (default: 1)",
        )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="keep", help="of the weights (default: as each tensor is)"
    )
    parser.set_defaults(run=run_import)


def _export_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "export",
        help="checkpoint to a Hugging Face directory",
        description="Write a directory that transformers and vLLM load without anything else: weights, config, "
        "generation config, tokenizer and chat template.",
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CKPT",
        help="a run directory (its latest checkpoint), one checkpoint of it, an imported checkpoint, or a directory of "
        "megatron-core's dist_checkpointing; saved in any layout",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; must not exist yet")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="keep",
        help="keep: each tensor as it was saved, float32 parts stay float32 (default)",
    )
    _add_hf_source(parser)
    parser.add_argument(
        "--max-file-gb", type=positive_number, default=5.0, metavar="GB", help="largest file (default: 5)"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="before publishing, compare every tensor, and the logits of transformers on the export with those of "
        "megatron-core on the checkpoint; holds the whole model in memory, twice",
    )
    _add_bound(parser)
    parser.set_defaults(run=run_export)


def _verify_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="are two models the same?",
        description="Compare names, shapes, dtypes and bytes of every tensor, the files beside them, and the config. "
        "Exit code 0: the same model; 1: not; 2: could not be compared.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, type=Path, metavar=name.upper(), help="a Hugging Face directory, or anything `export` takes"
        )
    _add_hf_source(parser)
    parser.add_argument(
        "--allow-rounding",
        action="store_true",
        help="tensors that are equal after rounding to the narrower dtype are the same",
    )
    parser.add_argument(
        "--logits",
        action="store_true",
        help="compare logits on fixed tokens too: of directories by transformers, of checkpoints by megatron-core",
    )
    _add_bound(parser)
    parser.set_defaults(run=run_verify)


def _add_hf_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hf-source",
        type=Path,
        metavar="DIR",
        help="where config and tokenizer of a checkpoint are (default: where its run found them, or beside it)",
    )


def _add_bound(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bound",
        type=positive_number,
        default=BOUND,
        metavar="X",
        help=f"largest difference of logits in float32 (default: {BOUND:g})",
    )


def positive_number(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be above 0")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    silence_library_warnings()
    try:
        code: int = args.run(args)
        return code
    except MegatronRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return DIFFERENT if isinstance(error, _NotTheSame) else USER_ERROR
    except OSError as error:
        place = error.filename or getattr(args, "out", "a file")
        print(
            f"error: {place}: {error.strerror or error}; is there room, and may it be written?",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())

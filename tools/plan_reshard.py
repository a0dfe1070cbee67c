"""Show how weights would travel from a training layout into inference engines, before anything is started.

Builds and proves the same plan that training executes, from a model's config.json alone: no weights, no GPU, no
torch. Prints what every rank sends and every engine worker receives, how far that is from the least possible, and on
request the path of one tensor.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence

from megatron_rl.arguments import positive_int
from megatron_rl.errors import MegatronRLError, ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.recipe.problems import did_you_mean
from megatron_rl.reshard.placement import Placement
from megatron_rl.reshard.plan import DEFAULT_BUCKET_BYTES, ReshardPlan, plan_reshard

USER_ERROR = 2
MIB = 2**20
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SOURCE = {
    "tp": "tensor parallel degree",
    "pp": "pipeline stages",
    "dp": "data parallel copies (also counts the ranks over which experts are spread)",
    "vpp": "model chunks per pipeline stage",
    "ep": "expert parallel degree",
    "etp": "tensor parallel degree inside an expert (default: tp)",
    "first_stage_layers": "layers of the first pipeline stage (default: an even share)",
    "last_stage_layers": "layers of the last pipeline stage (default: an even share)",
}
TARGET = {"tp": "workers of one engine", "replicas": "engines"}

EXAMPLES = """examples:
  # 8 training ranks into four engines of two workers, all on one machine
  plan_reshard.py --config models/Qwen3-8B/config.json --source tp=4,pp=2 --target tp=2,replicas=4

  # 32 GPUs train, 32 others generate: enter each machine once, and see what that saves
  plan_reshard.py --config qwen32b.json --source tp=8,pp=4 --target tp=4,replicas=8 --ranks-per-node 8 --two-tier

  # where one tensor goes
  plan_reshard.py --config qwen32b.json --source tp=8,pp=4 --target tp=4,replicas=8 \\
      --tensor model.layers.0.self_attn.k_proj.weight
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else argv)
    try:
        gc.disable()  # millions of small objects that all stay: looking through them costs a fifth of the time
        began = time.perf_counter()
        plan = build_plan(args)
        seconds = time.perf_counter() - began
        print(show(plan, args, seconds))
    except MegatronRLError as error:
        print(f"error: {_in_options(str(error))}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        sys.stderr.close()  # the reader, such as `head`, has seen enough
    return 0


def build_plan(args: argparse.Namespace) -> ReshardPlan:
    """The plan that the options describe. Raises MegatronRLError that names the option to change."""
    spec = ModelSpec.from_hf(args.config)
    source = degrees(args.source, SOURCE, "--source")
    target = {"tp": 1, "replicas": 1} | degrees(args.target, TARGET, "--target")
    layout = ParallelLayout(**source, sp=source.get("tp", 1) > 1)
    spec.check_layout(layout)
    workers = target["tp"] * target["replicas"]
    per_node = args.ranks_per_node
    if per_node is None and (args.colocated or args.two_tier):
        per_node = 8
    placement = None
    if per_node is not None:
        placement = Placement.packed(layout.world_size, workers, per_node, args.colocated)
    return plan_reshard(
        spec,
        layout,
        target_tp=target["tp"],
        replicas=target["replicas"],
        element_bytes=ELEMENT_BYTES[args.dtype],
        placement=placement,
        bucket_bytes=args.bucket_mib * MIB,
        two_tier=args.two_tier,
    )


def degrees(text: str, known: Mapping[str, str], option: str) -> dict[str, int]:
    """`tp=4,pp=2` as a mapping. Raises ReshardError naming the option and what it takes."""
    found: dict[str, int] = {}
    for item in text.split(","):
        key, _, number = item.partition("=")
        key = key.strip()
        if key not in known:
            hint = did_you_mean(key, known) or f"; known here: {', '.join(known)}"
            raise ReshardError(f"{option}: unknown key {key!r} in {text!r}{hint}")
        if key in found:
            raise ReshardError(f"{option}: {key} is given twice in {text!r}")
        if not number.strip().isdecimal() or int(number) < 1:
            raise ReshardError(f"{option}: {key}: got {number!r}, must be a whole number of at least 1")
        found[key] = int(number)
    return found


def show(plan: ReshardPlan, args: argparse.Namespace, seconds: float) -> str:
    if args.tensor is not None:
        return plan.explain_tensor(args.tensor)
    if args.json:
        facts = plan.summary() | {"build_seconds": seconds, "digest": plan.digest()}
        return json.dumps({"summary": facts, "plan": json.loads(plan.to_json())})
    return f"{plan.explain()}\n\nbuilt and proven complete in {seconds:.2f} s"


def _in_options(message: str) -> str:
    """The same message with a recipe's keys as the options of this tool."""
    for key, option in (("layout.", "--source "), ("engine.", "--target "), ("model.hf_path", "--config")):
        message = message.replace(key, option)
    return message


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="plan_reshard.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="CONFIG_JSON",
        help="a model's config.json, or the directory that has it",
    )
    parser.add_argument(
        "--source", required=True, metavar="KEY=N,...", help=f"how training holds the model; {_keys(SOURCE)}"
    )
    parser.add_argument("--target", required=True, metavar="KEY=N,...", help=f"the engines; {_keys(TARGET)}")
    parser.add_argument(
        "--dtype", choices=ELEMENT_BYTES, default="bfloat16", help="of the engines and on the wire (bfloat16)"
    )
    parser.add_argument(
        "--bucket-mib",
        type=positive_int,
        default=DEFAULT_BUCKET_BYTES // MIB,
        metavar="N",
        help="weights that a worker receives at a time, in MiB (256)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=positive_int,
        metavar="N",
        help="GPUs of a machine, filled in order of rank (without this option: all on one machine)",
    )
    parser.add_argument(
        "--colocated", action="store_true", help="engines run on the GPUs of the trainer ranks, not on others"
    )
    parser.add_argument(
        "--two-tier", action="store_true", help="every byte enters a machine once; workers there pass it on"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print summary and whole plan as JSON")
    what.add_argument(
        "--tensor", metavar="NAME", help="print who holds, needs and sends which part of one tensor"
    )
    return parser.parse_args(argv)


def _keys(known: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {text}" for key, text in known.items())


if __name__ == "__main__":
    sys.exit(main())

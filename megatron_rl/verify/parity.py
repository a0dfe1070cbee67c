"""`verify parity`: log-probs of trainer, engines and transformers on the same tokens."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.recipe.resolve import run_layout
from megatron_rl.recipe.stages import RlStage
from megatron_rl.train.launcher import held_port
from megatron_rl.verify.jobs import ParityJob
from megatron_rl.verify.place import deadline, open_place, say
from megatron_rl.verify.prepare import prepare
from megatron_rl.verify.rank import start_ranks
from megatron_rl.verify.table import NOT_RUN, PROVEN, REFUTED, columns, verdict


def verify_parity(args: argparse.Namespace) -> int:
    """The exit code. Raises MegatronRLError for what cannot be run."""
    with deadline(args.timeout_s), open_place(args.keep) as place, held_port() as port:
        prepared = prepare(args.recipe, args.overrides, place, shrink=args.shrink)
        recipe = prepared.recipe
        if not any(isinstance(stage, RlStage) for stage in recipe.stages):
            say("the recipe has no RL stage, so no engine: trainer and transformers are compared")
        layout = run_layout(recipe.layout, world_size=prepared.world_size)
        say(f"starting {layout.world_size} trainer process{'es' if layout.world_size > 1 else ''}")
        job = ParityJob(
            recipe=str(prepared.path),
            layout=layout,
            place=str(place),
            port=port,
            timeout_s=args.timeout_s,
        )
        if code := start_ranks(job, nproc=layout.world_size, place=place):
            # beyond 128: interrupted
            return code if code > 128 else NOT_RUN
        result = json.loads(job.results.read_text())
    return report(result, dtype=recipe.model.dtype)


def report(result: Mapping[str, Any], *, dtype: str) -> int:
    """Print the table and the verdict, and return the exit code."""
    print()
    print("\n".join(parity_table(result)))
    about = f"nats over {result['tokens']} tokens of {result['prompts']} prompts, {dtype}; bound {result['bound']:g}"
    if len(result["rows"]) > 1:
        about += f"; the weights had moved by {result['moved']:.2g} since the engines were started"
    print(about)
    faults = parity_faults(result)
    pairs = len(result["rows"])
    print(verdict(faults, proven=f"{pairs} pair{'s' if pairs > 1 else ''} give the same log-probs"))
    return REFUTED if faults else PROVEN


def parity_table(result: Mapping[str, Any]) -> list[str]:
    """One line per pair of sides."""
    rows: list[Sequence[str]] = [("pair", "mean", "p99", "max", "values", "where it is largest")]
    for row in result["rows"]:
        rows.append(
            (
                f"{row['one']} - {row['other']}",
                f"{row['mean']:.1e}",
                f"{row['p99']:.1e}",
                f"{row['max']:.1e}",
                str(row["num_values"]),
                _place(row, result),
            )
        )
    return columns(rows)


def parity_faults(result: Mapping[str, Any]) -> list[str]:
    """Pairs over the bound, and a transfer that could not have been noticed to fail, in words."""
    bound = result["bound"]
    faults = [
        f"{row['one']} and {row['other']} differ by {row['max']:.3g} nats at {_place(row, result)}"
        + (" (not a number, or other tokens)" if math.isinf(row["max"]) else "")
        for row in result["rows"]
        if not row["max"] <= bound
    ]
    if len(result["rows"]) > 1 and not result["moved"] > bound:
        faults.append(
            f"the optimizer moved log-probs by {result['moved']:.3g} nats only, so that an engine on old weights would "
            "not be noticed"
        )
    return faults


def _place(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    worst = row["worst"]
    text = result["texts"][worst["probe"]][worst["position"]]
    return f"prompt {worst['probe']}, token {worst['position']} ({text!r})"

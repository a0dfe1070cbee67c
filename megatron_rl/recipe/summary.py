"""The derived numbers of a checked recipe, for people and for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.recipe.load import LoadedRecipe
from megatron_rl.recipe.resolve import Resolved


def summary_data(loaded: LoadedRecipe, resolved: Resolved) -> dict[str, Any]:
    """Plain JSON types: recipe, layout, model, and one entry per stage."""
    return {
        "recipe": loaded.recipe.name,
        "source": loaded.source,
        "world_size": resolved.layout.world_size,
        "layout": dataclasses.asdict(resolved.layout),
        "model": {
            "hf_path": loaded.recipe.model.hf_path,
            "dtype": loaded.recipe.model.dtype,
            "family": resolved.spec.family,
            "num_parameters": resolved.num_parameters,
            "num_layers": resolved.spec.num_layers,
            "layers_per_pp_rank": resolved.layers_per_pp_rank,
            "padded_vocab": resolved.padded_vocab,
            "max_positions": resolved.spec.max_positions,
        },
        "stages": [dataclasses.asdict(stage) for stage in resolved.stages],
    }


def summary_table(loaded: LoadedRecipe, resolved: Resolved) -> str:
    """The same numbers as aligned text."""
    layout, spec = resolved.layout, resolved.spec
    rows = [
        ("recipe", f"{loaded.recipe.name} ({loaded.source})"),
        ("world", f"{layout.world_size} processes = tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"),
        ("chunks", f"vpp {layout.vpp}, sequence parallel {'on' if layout.sp else 'off'}"),
        ("model", f"{spec.family}, {resolved.num_parameters:,} parameters, {loaded.recipe.model.dtype}"),
        ("layers", f"{spec.num_layers}, {resolved.layers_per_pp_rank} per pp rank"),
        ("vocabulary", f"{spec.vocab_size:,}, padded to {resolved.padded_vocab:,}"),
    ]
    for i, stage in enumerate(resolved.stages):
        rows += [
            ("", ""),
            (f"stages.{i}", stage.kind),
            ("  optimizer steps", f"{stage.optimizer_steps:,}"),
            ("  samples per step", f"{stage.samples_per_step:,}"),
            ("  samples per dp rank", f"{stage.samples_per_step_per_dp:,}"),
        ]
        if stage.rollouts_per_iteration:
            rows += [
                ("  iterations", f"{stage.iterations:,}"),
                ("  rollouts per iteration", f"{stage.rollouts_per_iteration:,}"),
                ("  tokens per iteration", f"at most {stage.max_tokens_per_iteration:,}"),
            ]
        rows.append(("  tokens in all", f"at most {stage.max_tokens_total:,}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)

"""The derived numbers of a checked recipe, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_rl.recipe.amounts import most_prompts_drawn
from megatron_rl.recipe.load import LoadedRecipe
from megatron_rl.recipe.resolve import Resolved
from megatron_rl.recipe.stages import RlStage, SftStage, Stage
from megatron_rl.recipe.transfer import RANKS_PER_NODE, transfer_summary
from megatron_rl.recipe.vllm_options import unchecked_notice
from megatron_rl.reshard.plan_text import size_text, summary_rows
from megatron_rl.rewards.sandbox.bubblewrap import find_bubblewrap


def summary_data(
    loaded: LoadedRecipe, resolved: Resolved, *, gpus_per_node: int = RANKS_PER_NODE
) -> dict[str, Any]:
    """Plain JSON types: recipe, layout, model, and one entry per stage, for RL with its weight transfer."""
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
            "stage_layers": resolved.stage_layers,
            "padded_vocab": resolved.padded_vocab,
            "max_positions": resolved.spec.max_positions,
        },
        "stages": [
            dataclasses.asdict(stage) | {"reshard_plan": _transfer(loaded, resolved, i, gpus_per_node)}
            for i, stage in enumerate(resolved.stages)
        ],
    }


def summary_table(
    loaded: LoadedRecipe,
    resolved: Resolved,
    *,
    gpus_per_node: int = RANKS_PER_NODE,
    more: Sequence[tuple[str, str]] = (),
) -> str:
    """The same numbers as aligned text, and `more` rows below them."""
    layout, spec = resolved.layout, resolved.spec
    rows = [
        ("recipe", f"{loaded.recipe.name} ({loaded.source})"),
        ("world", f"{layout.world_size} processes = tp {layout.tp} x pp {layout.pp} x dp {layout.dp}"),
        ("chunks", f"vpp {layout.vpp}, sequence parallel {'on' if layout.sp else 'off'}"),
        *_experts(resolved),
        ("model", f"{spec.family}, {resolved.num_parameters:,} parameters, {loaded.recipe.model.dtype}"),
        ("layers", f"{spec.num_layers}, {_per_stage(resolved)}"),
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
                ("  iterations", f"{_at_most(_is_promoted(loaded, i))}{stage.iterations:,}"),
                (
                    "  rollouts per iteration",
                    f"{_at_most(_is_refilled(loaded, i))}{stage.rollouts_per_iteration:,}",
                ),
                ("  tokens per iteration", f"at most {stage.max_tokens_per_iteration:,}"),
            ]
        wanted = loaded.recipe.stages[i]
        if isinstance(wanted, SftStage) and wanted.epochs is not None:
            rows.append(
                (
                    "  passes",
                    f"{wanted.epochs:g} over the rows of {wanted.data}, of which some may be dropped",
                )
            )
        rows += _reference(loaded, resolved, wanted)
        rows += _sandbox(wanted)
        rows += _engine(wanted)
        rows.append(("  tokens in all", f"at most {stage.max_tokens_total:,}"))
        if (transfer := _transfer(loaded, resolved, i, gpus_per_node)) is not None:
            rows += [(f"  {what}", how_much) for what, how_much in summary_rows(transfer)]
    rows += more
    return aligned(rows)


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns of text, the first as wide as its longest entry."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def _at_most(is_bound: bool) -> str:
    return "at most " if is_bound else ""


def _is_promoted(loaded: LoadedRecipe, stage: int) -> bool:
    """Whether a rule may end the stage, or a window of it, before its iterations are over."""
    wanted = loaded.recipe.stages[stage]
    if not isinstance(wanted, RlStage):
        return False
    return wanted.promote is not None or any(window.promote is not None for window in wanted.curriculum)


def _is_refilled(loaded: LoadedRecipe, stage: int) -> bool:
    wanted = loaded.recipe.stages[stage]
    sampling = wanted.dynamic_sampling if isinstance(wanted, RlStage) else None
    return sampling is not None and sampling.kind == "refill"


def _per_stage(resolved: Resolved) -> str:
    sizes = resolved.stage_layers
    return (
        f"{sizes[0]} per pp rank" if len(set(sizes)) == 1 else f"{', '.join(map(str, sizes))} on the pp ranks"
    )


def _experts(resolved: Resolved) -> list[tuple[str, str]]:
    layout, moe = resolved.layout, resolved.spec.moe
    if moe is None:
        return []
    spread = f"{moe.num_experts}, of which a token takes {moe.experts_per_token}; "
    return [("experts", spread + f"ep {layout.ep} x etp {layout.expert_tp} x {layout.expert_dp} replicas")]


def _reference(loaded: LoadedRecipe, resolved: Resolved, stage: Stage) -> list[tuple[str, str]]:
    """What the reference policy of a KL term costs each rank; nothing for a stage without one."""
    if not isinstance(stage, RlStage) or stage.algorithm.kl is None:
        return []
    layout = resolved.layout
    element = 2 if loaded.recipe.model.dtype == "bfloat16" else 4
    part = resolved.num_parameters * element / (layout.tp * layout.pp)
    text = f"about {size_text(part)} of host memory per rank, {size_text(2 * part)} while it scores"
    return [("  reference policy", text)]


def _sandbox(stage: Stage) -> list[tuple[str, str]]:
    """Whether programs could be confined on this machine, and the longest that their tests can take."""
    if not isinstance(stage, RlStage) or "code_tests" not in stage.rewards:
        return []
    sandbox, found = stage.sandbox, find_bubblewrap()
    here = found if isinstance(found, str) else f"bubblewrap {found.version} is here"
    tests = most_prompts_drawn(stage) * stage.group_size * sandbox.max_tests
    worst_s = tests * sandbox.wall_s / sandbox.slots
    return [
        ("  sandbox", f"{sandbox.slots} slots; {here}"),
        (
            "  tests per iteration",
            f"at most {tests:,}; {worst_s:,.0f} s if every one ran into its {sandbox.wall_s:g} s",
        ),
    ]


def _engine(stage: Stage) -> list[tuple[str, str]]:
    """Where its replicas run, if there are several, and what could not be checked of them."""
    if not isinstance(stage, RlStage):
        return []
    engine, rows = stage.engine, []
    if engine.hosts:
        by_host = [
            f"{host}: {', '.join(map(str, range(i, engine.replicas, len(engine.hosts)))) or 'none'}"
            for i, host in enumerate(engine.hosts)
        ]
        rows.append(("  engine replicas", "; ".join(by_host)))
    if (notice := unchecked_notice(engine.vllm)) is not None:
        rows.append(("  engine.vllm", notice))
    return rows


def _transfer(
    loaded: LoadedRecipe, resolved: Resolved, stage: int, gpus_per_node: int
) -> dict[str, Any] | None:
    """The summary of an RL stage's reshard plan; None for SFT, which transfers nothing."""
    wanted = loaded.recipe.stages[stage]
    if not isinstance(wanted, RlStage):
        return None
    return transfer_summary(
        resolved.spec,
        resolved.layout,
        wanted,
        dtype=loaded.recipe.model.dtype,
        gpus_per_node=gpus_per_node,
    )

"""Which charts a report has, by section. A chart none of whose metrics a run has is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rl.report.evaluations import evaluation_cards
from megatron_rl.report.figures import Card, Chart, curves
from megatron_rl.report.heat import difficulty_cards
from megatron_rl.report.source import Source
from megatron_rl.report.times import time_cards
from megatron_rl.report.transfers import parity_card

_SPAN = {"reward/mean": "reward/std"}
_NO_PARTS = ("reward/mean", "reward/std", "reward/kl_ref", "reward/worker_restarts")
_MAX_NAMED = 8  # metrics of one chart

_LEARNING = (
    Chart(
        title="Reward",
        metrics={"mean": "reward/mean"},
        bands=_SPAN,
        unit="reward",
        note="mean over the rollouts of an iteration; the band of a single run is ± their standard deviation",
    ),
    Chart(
        title="SFT loss",
        metrics={"loss": "sft/loss"},
        unit="nats per token",
    ),
    Chart(
        title="Verdicts",
        metrics={
            "correct": "reward/correct_frac",
            "wrong": "reward/wrong_frac",
            "no answer": "reward/no_answer_frac",
            "truncated": "reward/truncated_frac",
            "bad gold": "reward/bad_gold_frac",
            "time-out": "reward/timeout_frac",
            "grader error": "reward/error_frac",
        },
        unit="share of rollouts",
        is_share=True,
    ),
    Chart(
        title="Groups that teach nothing",
        metrics={
            "zero advantage": "reward/zero_advantage_frac",
            "all right": "reward/all_right_frac",
            "all wrong": "reward/all_wrong_frac",
            "dropped": "reward/dropped_frac",
        },
        unit="share of groups",
        is_share=True,
    ),
)

_RESPONSES = (
    Chart(
        title="Response length",
        metrics={
            "mean": "rollout/response_tokens_mean",
            "95th percentile": "rollout/response_tokens_p95",
            "longest": "rollout/response_tokens_max",
        },
        bands={"rollout/response_tokens_mean": "rollout/response_tokens_std"},
        unit="tokens",
        note="the band of a single run is ± the standard deviation over rollouts",
    ),
    Chart(
        title="Truncated responses",
        metrics={"truncated": "rollout/truncated_frac"},
        unit="share of rollouts",
        is_share=True,
    ),
)

_POLICY = (
    Chart(title="Policy loss", metrics={"loss": "policy/loss"}, unit="loss"),
    Chart(
        title="Clipped tokens",
        metrics={"above": "policy/clip_high_frac", "below": "policy/clip_low_frac"},
        unit="share of trained tokens",
        is_share=True,
    ),
    Chart(
        title="Entropy",
        metrics={"RL": "policy/entropy", "SFT": "sft/entropy"},
        unit="nats per token",
    ),
    Chart(
        title="Distance from the old and the reference policy",
        metrics={"KL to old": "policy/kl_old", "KL to reference": "policy/kl_ref"},
        unit="nats per token",
    ),
    Chart(
        title="Gradient norm",
        metrics={"RL": "policy/grad_norm", "SFT": "sft/grad_norm"},
        unit="norm",
        is_log=True,
    ),
    Chart(title="Learning rate", metrics={"lr": "optim/lr"}, unit="learning rate", is_exact=True),
)

_MISMATCH = (
    Chart(
        title="Trainer against engine, sampled tokens",
        metrics={"mean": "mismatch/mean", "99th percentile": "mismatch/p99", "largest": "mismatch/max"},
        unit="|difference| of log-probs, nats",
        is_log=True,
        note="before the first update of an iteration, over every trained token",
    ),
    Chart(
        title="Correction of the mismatch",
        metrics={
            "mean weight": "mismatch/weight_mean",
            "largest weight": "mismatch/weight_max",
            "tokens kept": "mismatch/kept_frac",
            "effective sample size": "mismatch/ess_frac",
        },
        unit="factor, or share of tokens",
    ),
    Chart(
        title="Staleness",
        metrics={"mean": "rollout/staleness_mean", "largest": "rollout/staleness_max"},
        unit="transfers",
        note="weight transfers between the sampling of a token and the training on it",
        is_rare=True,
    ),
)

_MACHINE = (
    Chart(
        title="Packing",
        metrics={"reached": "batch/packing_efficiency", "possible": "batch/packing_bound"},
        unit="share of positions filled",
        is_share=True,
    ),
    Chart(
        title="Work that waits or is lost",
        metrics={
            "heaviest rank over the mean": "batch/dp_imbalance",
            "padding": "batch/padding_frac",
        },
        unit="share",
        is_share=True,
        is_rare=True,
    ),
    Chart(
        title="Busiest engine over the mean",
        metrics={"engines": "engine/imbalance"},
        unit="seconds over their mean",
    ),
    Chart(
        title="Generation beside training",
        metrics={
            "generating": "overlap/generate_s",
            "grading": "overlap/reward_s",
            "hidden by training": "overlap/hidden_s",
        },
        unit="seconds per iteration",
    ),
    Chart(
        title="Groups not waited for",
        metrics={"late": "stragglers/late_groups", "dropped as too old": "stragglers/stale_groups"},
        unit="groups per iteration",
    ),
    Chart(title="Throughput", metrics={"tokens": "throughput/tokens_per_s"}, unit="tokens/s"),
    Chart(
        title="Memory",
        metrics={"host, largest rank": "memory/rss_gib", "GPU peak, largest rank": "memory/gpu_peak_gib"},
        unit="GiB",
    ),
)


def sections(sources: Sequence[Source]) -> dict[str, list[Card]]:
    """Title of each section with its cards; those without any are left out."""
    parts = _named(sources, "Parts of the reward", "mean of the part, without its weight", _is_part)
    found = {
        "Evaluation": evaluation_cards(sources),
        "Learning": _cards((*_LEARNING, parts), sources),
        "Responses": _cards(_RESPONSES, sources),
        "Difficulty": difficulty_cards(sources),
        "Policy": _cards(_POLICY, sources),
        "Trainer against engine": [*_cards(_MISMATCH, sources), *parity_card(sources)],
        "Time and memory": [*time_cards(sources), *_cards(_MACHINE, sources)],
    }
    return {title: cards for title, cards in found.items() if cards}


def _named(sources: Sequence[Source], title: str, unit: str, is_meant: Callable[[str], bool]) -> Chart:
    """A chart of the metrics whose names only a recipe knows, or whose number grows with the project."""
    names = dict.fromkeys(name for source in sources for line in source.run.lines for name in line)
    chosen = [name for name in names if is_meant(name)][:_MAX_NAMED]
    return Chart(title=title, metrics={name.partition("/")[2]: name for name in chosen}, unit=unit)


def _is_part(name: str) -> bool:
    """Whether it is the mean of one part of the reward."""
    return name.startswith("reward/") and name not in _NO_PARTS and not name.endswith("_frac")


def _cards(charts: Sequence[Chart], sources: Sequence[Source]) -> list[Card]:
    cards = (curves(chart, sources) for chart in charts)
    return [card for card in cards if card is not None]

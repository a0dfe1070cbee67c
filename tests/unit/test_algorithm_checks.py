"""Which settings of an algorithm are refused: what nothing reads, what counters itself, what is defined otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from megatron_rl.recipe.algorithm import (
    CORRECTION_DEFAULTS,
    AdvantageName,
    AggregateName,
    CorrectionConfig,
    CorrectionKind,
    EntropyConfig,
    KlConfig,
    KlEstimatorName,
    SurrogateName,
    kl_estimator,
    option,
)
from megatron_rl.recipe.algorithm_checks import algorithm_problems
from megatron_rl.recipe.stages import AlgorithmConfig
from tests.helpers.source import ROOT

NEEDS = {
    "gspo": {"aggregate": "sequence_mean"},
    "gspo_token": {"aggregate": "sequence_mean"},
    "gmpo": {"aggregate": "sequence_mean"},
    "sapo": {"aggregate": "sequence_mean"},
    "dro": {"tau": 0.1},
    "decoupled_ppo": {"correction": CorrectionConfig(kind="icepop", low=0.0, high=5.0)},
}


def _found(algorithm: AlgorithmConfig) -> dict[str, str]:
    return {problem.path: problem.text for problem in algorithm_problems(algorithm, "a")}


@pytest.mark.parametrize("surrogate", get_args(SurrogateName))
def test_every_surrogate_passes_with_its_own_values_alone(surrogate: Any) -> None:
    assert _found(AlgorithmConfig(surrogate=surrogate, **NEEDS.get(surrogate, {}))) == {}


@pytest.mark.parametrize("surrogate", get_args(SurrogateName))
def test_an_option_that_the_surrogate_does_not_read_is_refused(surrogate: Any) -> None:
    reads = {
        "clip_low": "ppo grpo clip_higher gppo gppo_only_high ce_gppo decoupled_ppo cispo gspo gspo_token gmpo",
        "clip_high": "ppo clip_higher gppo gppo_only_high ce_gppo decoupled_ppo cispo gspo gspo_token gmpo",
        "dual_clip": "ppo grpo clip_higher gppo gppo_only_high ce_gppo decoupled_ppo gspo gspo_token",
        "beta_low": "gppo ce_gppo",
        "beta_high": "gppo ce_gppo",
        "tau_positive": "sapo",
        "tau_negative": "sapo",
        "tau": "dro",
        "unified_mask": "cispo",
    }
    for name, users in reads.items():
        values = {"unified_mask": True, "clip_low": 0.3, "dual_clip": 4.0}
        algorithm = replace(
            AlgorithmConfig(surrogate=surrogate, **NEEDS.get(surrogate, {})), **{name: values.get(name, 0.5)}
        )
        found = _found(algorithm)
        if surrogate in users.split():
            assert found == {}
        else:
            assert set(found) == {f"a.{name}"}
            assert (
                f"not used by surrogate {surrogate}, only by {', '.join(users.split())}" in found[f"a.{name}"]
            )


def test_bounds_of_the_default_surrogate_may_stay_when_another_is_tried() -> None:
    assert _found(AlgorithmConfig(surrogate="grpo", clip_low=0.2, clip_high=0.28, beta_low=1.0)) == {}


KL = KlConfig(coefficient=0.1)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"dual_clip": 1.0}, "dual_clip", "must be above 1"),
    ({"surrogate": "dro"}, "tau", "surrogate dro needs it"),
    *(
        ({"surrogate": name, "aggregate": "token_mean"}, "aggregate", "must be sequence_mean")
        for name in ("gspo", "gspo_token", "gmpo", "sapo")
    ),
    ({"loss_length": 100}, "loss_length", "only by token_sum_norm"),
    ({"aggregate": "sequence_mean", "normaliser": "micro_batch"}, "normaliser", "an average of token means"),
    ({"advantage": "group_mean", "advantage_std": "unbiased"}, "advantage_std", "only by group_std"),
    ({"kl": replace(KL, estimator="k1")}, "kl.estimator", "whose gradient is zero on average"),
    ({"kl": replace(KL, where="reward", estimator="k3")}, "kl.estimator", "must be k1 in the reward"),
    ({"surrogate": "dro", "tau": 1.0, "kl": KL}, "kl.where", "squared distance to the old policy"),
    ({"entropy": EntropyConfig()}, "entropy.coefficient", "does nothing"),
    ({"entropy": EntropyConfig(coefficient=0.1, delta=0.1)}, "entropy.delta", "set target"),
    (
        {"entropy": EntropyConfig(coefficient=0.1, max_coefficient=1.0)},
        "entropy.max_coefficient",
        "set target",
    ),
    (
        {"entropy": EntropyConfig(coefficient=0.1, target=0.2)},
        "entropy.coefficient",
        "at most max_coefficient",
    ),
    ({"correction": CorrectionConfig(veto=1e-4)}, "correction.veto", "kind none does not use"),
    ({"correction": CorrectionConfig(batch_normalise=True)}, "correction.batch_normalise", "kind none"),
    ({"correction": CorrectionConfig(high=2.0)}, "correction.high", "not used by kind none"),
    (
        {"correction": CorrectionConfig(kind="token_tis", low=0.5)},
        "correction.low",
        "not used by kind token_tis",
    ),
    ({"correction": CorrectionConfig(kind="token_tis", high=0.9)}, "correction.high", "have 1 between them"),
    ({"correction": CorrectionConfig(kind="icepop", low=1.5)}, "correction.low", "have 1 between them"),
    ({"correction": CorrectionConfig(kind="cis", veto=1.0)}, "correction.veto", "must be below 1"),
    ({"correction": CorrectionConfig(kind="cis", old="rollout")}, "correction.old", "corrects already"),
    ({"surrogate": "decoupled_ppo"}, "correction.kind", "ratio of old to rollout policy"),
]


@pytest.mark.parametrize(("fields", "path", "words"), REFUSED, ids=lambda one: str(one)[:60])
def test_a_combination_without_meaning_is_the_one_problem_reported(
    fields: dict[str, Any], path: str, words: str
) -> None:
    found = _found(AlgorithmConfig(**fields))
    assert set(found) == {f"a.{path}"}
    assert words in found[f"a.{path}"]


@pytest.mark.parametrize("kind", get_args(CorrectionKind))
def test_every_kind_of_correction_passes_with_its_own_bounds(kind: Any) -> None:
    assert _found(AlgorithmConfig(correction=CorrectionConfig(kind=kind, **CORRECTION_DEFAULTS[kind]))) == {}
    assert _found(AlgorithmConfig(correction=CorrectionConfig(kind=kind))) == {}


def test_engine_log_probs_for_old_ones_pass_without_a_correction() -> None:
    assert _found(AlgorithmConfig(correction=CorrectionConfig(old="rollout"))) == {}


def test_settings_of_published_work_pass() -> None:
    skywork = AlgorithmConfig(
        surrogate="ppo", entropy=EntropyConfig(target=0.2, max_coefficient=0.005, delta=1e-4)
    )
    dr_grpo = AlgorithmConfig(
        surrogate="grpo", advantage="group_mean", aggregate="token_sum_norm", loss_length=3000
    )
    released_klear = AlgorithmConfig(
        advantage_std="unbiased", dual_clip=10.0, normaliser="micro_batch", sft_on_positives=0.1
    )
    rloo = AlgorithmConfig(advantage="leave_one_out", kl=KlConfig(coefficient=0.05, where="reward"))
    assert [_found(one) for one in (skywork, dr_grpo, released_klear, rloo)] == [{}] * 4


def test_defaults_are_those_of_the_sources() -> None:
    def numbers(surrogate: Any, *names: str) -> list[float | None]:
        return [option(AlgorithmConfig(surrogate=surrogate), name) for name in names]

    assert numbers("gppo", "clip_low", "clip_high", "beta_low", "beta_high", "dual_clip") == [
        0.2,
        0.28,
        1,
        1,
        None,
    ]
    assert numbers("ce_gppo", "clip_low", "clip_high", "beta_low", "beta_high") == [0.2, 0.2, 0.75, 1.0]
    assert numbers("gspo", "clip_low", "clip_high") == [3e-4, 4e-4]
    assert numbers("gmpo", "clip_low", "clip_high") == [0.4, 0.4]
    assert numbers("sapo", "tau_positive", "tau_negative") == [1.0, 1.05]
    assert numbers("cispo", "clip_low", "clip_high") == [1.0, 4.0]
    assert numbers("ppo", "clip_low", "clip_high") == [0.2, 0.2]
    assert numbers("grpo", "clip_high") == [None]
    assert dict(CORRECTION_DEFAULTS["icepop"]) == {"low": 0.5, "high": 5.0}
    assert dict(CORRECTION_DEFAULTS["geometric_mask"]) == {"low": 0.999, "high": 1.002}
    assert dict(CORRECTION_DEFAULTS["token_tis"]) == {"high": 2.0}
    assert kl_estimator(KL) == "k3_unbiased" and kl_estimator(replace(KL, where="reward")) == "k1"


def test_the_guide_names_everything_that_can_be_chosen() -> None:
    guide = (ROOT / "megatron_rl" / "algo" / "README.md").read_text()
    names = [
        *get_args(SurrogateName),
        *get_args(AdvantageName),
        *get_args(AggregateName),
        *get_args(KlEstimatorName),
        *get_args(CorrectionKind),
    ]
    assert [name for name in names if f"`{name}`" not in guide] == []

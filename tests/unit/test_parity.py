"""The parity report measures the gap and names its likely cause."""

import pytest

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.verify import parity_report

TRAINER = [-1.0, -2.0, -0.5, -3.0]


def test_report_has_mean_p99_max_and_worst_position():
    report = parity_report(TRAINER, [-1.0, -2.00002, -0.5, -3.00004], 1e-4)
    assert report == pytest.approx({"mean": 1.5e-5, "p99": 4e-5, "max": 4e-5, "worst": 3}, abs=1e-9)


@pytest.mark.parametrize(
    ("engine", "match"),
    [
        ([-1.5, -1.0, -0.7, -2.0], "weights from before the last update"),
        ([-1.2, -2.2, -0.7, -3.2], "the normaliser differs"),
        ([-1.0, -2.0, -0.5, -7.0], "3 of 4 positions agree"),
        ([-1.2, -2.9, -0.6, -3.5], "temperature or top-p"),
        ([-2.0, -1.0, -3.0, -0.1], "no simple pattern"),
        ([-1.0, float("nan"), -0.5, -3.0], "position 1 is nan"),
        ([-1.0], "4 trainer and 1 engine"),
    ],
)
def test_each_gap_is_diagnosed(engine, match):
    with pytest.raises(ReshardError, match=match):
        parity_report(TRAINER, engine, 1e-4, previous_logprobs=[-1.5, -1.0, -0.7, -2.0])

"""Our time formulas against what other systems published, and the README's table of it."""

from pathlib import Path

import pytest

from megatron_rl import estimate
from tests.helpers.published_cases import CASES, machines, table

README = Path(estimate.__file__).parent / "README.md"
KNOWN = machines()


@pytest.mark.parametrize("case", [c for c in CASES if not c.misses], ids=lambda c: f"{c.name}, {c.unit}")
def test_ours_is_within_30_percent_of_what_was_published(case):
    assert 0.7 <= case.compute(KNOWN) / case.published <= 1.3


@pytest.mark.parametrize("case", [c for c in CASES if c.misses], ids=lambda c: f"{c.name}, {c.unit}")
def test_a_case_that_is_said_to_miss_does(case):
    assert not 0.7 <= case.compute(KNOWN) / case.published <= 1.3


def test_few_rows_were_fitted_and_most_were_held_out():
    fitted = [case for case in CASES if case.fitted]
    assert len(fitted) == 4 and len({case.fitted for case in fitted}) == 3
    assert len(CASES) - len(fitted) >= 15


def test_machine_types_share_what_software_reaches():
    shares = [
        (
            h.matmul_frac,
            h.attention_frac,
            h.expert_frac,
            h.hbm_frac,
            h.link_frac,
            h.network_frac,
            h.hidden_frac,
        )
        for h in KNOWN.values()
    ]
    assert len(set(shares)) == 1


def test_the_table_of_the_readme_is_current():
    assert table(KNOWN) in README.read_text()

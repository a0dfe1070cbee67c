"""Seeds depend on what is drawn and on nothing else."""

from __future__ import annotations

from megatron_rl.data.seeds import derive_seed


def test_every_sample_of_every_iteration_has_its_own_seed() -> None:
    seeds = {derive_seed(1, 0, i, f"prompt {p}", s) for i in range(10) for p in range(50) for s in range(8)}
    assert len(seeds) == 10 * 50 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    # written down once: a change here changes every rollout of every resumed run
    assert derive_seed(1, 0, 3, "chains-17", 2) == 1670329041


def test_parts_do_not_run_into_each_other() -> None:
    assert derive_seed(1, 23) != derive_seed(12, 3)

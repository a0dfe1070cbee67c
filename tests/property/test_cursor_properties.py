"""The cursor draws every prompt exactly once per epoch and resumes exactly, wherever it is cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.cursor import CursorState, PromptCursor, permutation

_takes = st.lists(st.integers(0, 25), max_size=12)
_sizes = st.integers(1, 20)


@given(_sizes, st.integers(0, 2**40), st.integers(0, 5))
def test_permutation_holds_every_index_once(size, seed, epoch):
    assert sorted(permutation(size, seed=seed, epoch=epoch)) == list(range(size))


@given(_sizes, st.integers(0, 9), _takes)
def test_every_prompt_is_drawn_exactly_once_per_epoch(size, seed, takes):
    cursor = PromptCursor(size, seed=seed)
    drawn = [index for count in takes for index in cursor.take(count)]
    assert len(drawn) == sum(takes)
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start : start + size]) == list(range(size))
    rest = drawn[len(drawn) // size * size :]
    assert len(set(rest)) == len(rest)


@given(_sizes, st.integers(0, 9), _takes)
def test_no_prompt_comes_twice_in_one_take_that_the_pool_can_serve(size, seed, takes):
    cursor = PromptCursor(size, seed=seed)
    for count in takes:
        taken = cursor.take(count)
        if count <= size:
            assert len(set(taken)) == count


@given(_sizes, st.integers(0, 9), _takes, st.lists(_takes, max_size=5))
def test_takes_that_belong_together_draw_no_prompt_twice_and_each_still_once_per_epoch(
    size, seed, before, together
):
    cursor = PromptCursor(size, seed=seed)
    drawn = [index for count in before for index in cursor.take(count)]
    for takes in together:
        taken: list[int] = []
        for count in takes:
            if len(taken) + count <= size:
                taken += cursor.take(count, after=taken)
        assert len(set(taken)) == len(taken)
        drawn += taken
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start : start + size]) == list(range(size))


@given(_sizes, st.integers(0, 9), _takes, _takes)
def test_restored_cursor_continues_exactly(size, seed, before, after):
    cursor = PromptCursor(size, seed=seed)
    for count in before:
        cursor.take(count)
    saved = json.dumps(cursor.state.to_dict())
    restored = PromptCursor(size, seed=seed)
    restored.restore(CursorState.from_dict(json.loads(saved)))
    assert [restored.take(n) for n in after] == [cursor.take(n) for n in after]
    assert restored.state == cursor.state


def test_order_is_pinned_so_that_old_checkpoints_resume():
    assert permutation(8, seed=1, epoch=0) == (1, 4, 2, 6, 5, 7, 3, 0)
    assert permutation(8, seed=1, epoch=1) == (1, 6, 0, 3, 4, 7, 2, 5)

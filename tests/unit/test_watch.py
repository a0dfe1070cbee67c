"""A step that waits is given up on every rank as soon as rank 0 knows that it must fail."""

import threading
import time
from concurrent.futures import Future

import pytest

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.transports import LOOPBACK, Membership, open_store
from megatron_rl.rollout.watch import Board, GivenUp, run_watched, watch_engines


@pytest.fixture
def store():
    return open_store(LOOPBACK, 0, timeout_s=10.0)


@pytest.fixture
def board(store):
    """board(): a new connection, as another rank has it."""
    return lambda: Board(
        Membership(rank=0, num_trainers=2, num_workers=1, host=LOOPBACK, port=store.port, timeout_s=10.0)
    )


def test_a_step_gives_its_result_at_once_or_raises_its_own_error():
    began = time.monotonic()
    for _ in range(50):
        assert run_watched(lambda: 7, lambda: "never asked") == 7
    # each far below the time between two questions
    assert time.monotonic() - began < 5.0
    with pytest.raises(ZeroDivisionError):
        run_watched(lambda: 1 // 0, lambda: None)


def test_a_step_that_waits_is_given_up_on_every_rank(board):
    never, engines, seen = threading.Event(), Future(), []

    def other_rank(own):
        with pytest.raises(GivenUp) as caught:
            watch_engines(never.wait, None, own)
        seen.append(str(caught.value))

    other = threading.Thread(target=other_rank, args=(board(),))
    other.start()
    threading.Timer(0.3, engines.set_exception, [ReshardError("engine replica 1 died")]).start()
    began = time.monotonic()
    with pytest.raises(GivenUp, match="engine replica 1 died"):
        watch_engines(never.wait, engines, board())
    other.join(10)
    assert seen == ["engine replica 1 died"]
    assert time.monotonic() - began < 5.0
    never.set()


def test_engines_that_succeed_let_the_step_take_its_time(board):
    engines = Future()
    engines.set_result(None)
    assert watch_engines(lambda: time.sleep(0.6) or "done", engines, board()) == "done"
    assert board().read() is None


def test_a_rank_whose_store_is_gone_gives_up():
    store = open_store(LOOPBACK, 0, timeout_s=10.0)
    member = Membership(rank=1, num_trainers=2, num_workers=1, host=LOOPBACK, port=store.port, timeout_s=10.0)
    board, never = Board(member), threading.Event()
    del store  # as when the process of trainer rank 0 ends
    with pytest.raises(GivenUp, match="the store of trainer rank 0 is gone"):
        watch_engines(never.wait, None, board)
    board.tell("anything")
    never.set()

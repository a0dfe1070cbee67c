"""The pool of checking processes: deadlines, deaths, threads, and nothing left behind."""

import gc
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl.data.types import Verdict
from megatron_rl.errors import RewardError
from megatron_rl.rewards.pool import WorkerPool

HANG = (r"x", r"\sum_{k=1}^{1000000000} \frac{1}{k^2}")
PACKAGE_PARENT = Path(megatron_rl.__file__).resolve().parent.parent


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def open_descriptors():
    # what other tests left to the garbage collector must not end in the middle of a count
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_an_item_past_its_deadline_is_killed_and_the_next_one_answered():
    pool = WorkerPool(workers=1, timeout_s=4.0)
    pool.check("x+1", "1+x")
    (first,) = pool.pids()
    assert pool.check(*HANG).verdict is Verdict.TIMEOUT
    assert not is_alive(first)
    # it computed: the answer's doing, which gets no second try
    assert pool.num_restarts == 0
    assert pool.check("x+1", "1+x").verdict is Verdict.CORRECT
    pool.close()


def test_a_worker_that_died_while_idle_is_replaced_without_a_trace_in_the_verdict():
    pool = WorkerPool(workers=1, timeout_s=20.0)
    pool.check("x+1", "1+x")
    os.kill(pool.pids()[0], signal.SIGKILL)
    assert pool.check("y+1", "1+y").verdict is Verdict.CORRECT
    assert pool.num_restarts == 1
    pool.close()


def test_a_stopped_worker_is_killed_in_time_and_its_item_judged_by_a_fresh_one():
    with closing(WorkerPool(workers=1, timeout_s=6.0)) as pool:
        pool.check("x+1", "1+x")
        (first,) = pool.pids()
        os.kill(first, signal.SIGSTOP)
        began = time.monotonic()
        assert pool.check("y+1", "1+y").verdict is Verdict.CORRECT
        assert time.monotonic() - began >= 6.0
        assert not is_alive(first)
        assert pool.num_restarts == 1


def test_a_worker_that_dies_twice_on_an_item_is_an_error_verdict():
    pool = WorkerPool(workers=1, timeout_s=30.0, module="tests.helpers.dying_worker")
    verdict = pool.check("x+1", "1+x")
    assert verdict.verdict is Verdict.ERROR
    assert verdict.reason == "worker died: exit code 7 (attempt 2 of 2)"
    pool.close()


def test_many_threads_share_a_pool():
    pool = WorkerPool(workers=2, timeout_s=20.0)
    pairs = [(f"{n}x+1", f"1+{n + n % 2}x") for n in range(1, 41)]
    with ThreadPoolExecutor(4) as executor:
        halves = list(executor.map(pool.check_many, [pairs[:20], pairs[20:]]))
    verdicts = [one.verdict for half in halves for one in half]
    assert verdicts == [Verdict.WRONG if n % 2 else Verdict.CORRECT for n in range(1, 41)]
    pool.close()


def test_close_leaves_no_process_and_no_descriptor():
    before = open_descriptors()
    for _ in range(2):
        pool = WorkerPool(workers=2, timeout_s=20.0)
        pool.check_many([("x+1", "1+x"), ("x+2", "2+x"), ("x", "y")])
        pids = pool.pids()
        assert pids
        pool.close()
        pool.close()
        assert not any(is_alive(pid) for pid in pids)
    assert open_descriptors() == before
    with pytest.raises(RewardError, match="used after close"):
        pool.check_many([("x", "y")])


def test_a_bounded_batch_judges_what_can_be_judged_and_ends_in_time():
    pairs = [HANG, ("x+1", "1+x")]
    with closing(WorkerPool(workers=1, timeout_s=2.5)) as pool:
        found = pool.check_many(pairs, within_s=60.0)
        assert [one.verdict for one in found] == [Verdict.TIMEOUT, Verdict.CORRECT]
        # killed after the short look first, then after all of its time
        assert found[0].seconds >= 2.5
        pool.check("x+1", "1+x")
        began = time.monotonic()
        late = pool.check_many([HANG] * 20, within_s=1.5)
        # however many there are, only the kill of the last one comes on top: short looks at all would take 10 s
        assert time.monotonic() - began < 5 * 1.5
        assert {one.verdict for one in late} <= {Verdict.TIMEOUT, Verdict.ERROR}
        assert late[-1].verdict is Verdict.ERROR
        assert "before it was judged" in late[-1].reason


def test_killed_workers_leave_no_descriptor():
    before = open_descriptors()
    pool = WorkerPool(workers=1, timeout_s=0.3)
    for _ in range(3):
        assert pool.check(*HANG).verdict is Verdict.TIMEOUT
    pool.close()
    assert open_descriptors() == before


def test_a_worker_that_cannot_start_is_an_error_with_its_last_words():
    pool = WorkerPool(workers=1, timeout_s=20.0, module="megatron_rl.rewards.no_such_module")
    with pytest.raises(RewardError, match=r"No module named megatron_rl\.rewards\.no_such_module"):
        pool.check("x", "y")
    pool.close()


def test_workers_end_with_a_parent_that_was_killed_even_stopped_ones():
    code = (
        "from megatron_rl.rewards.pool import WorkerPool\n"
        "pool = WorkerPool(workers=1, timeout_s=20.0)\n"
        "pool.check('x+1', '1+x')\n"
        "print(pool.pids()[0], flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=PACKAGE_PARENT)
    worker = int(parent.stdout.readline())
    # readable once the worker is gone
    descriptor = os.pidfd_open(worker)
    os.kill(worker, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ended, _, _ = select.select([descriptor], [], [], 30)
    os.close(descriptor)
    assert ended


def test_a_worker_loads_no_torch():
    code = (
        "import sys, megatron_rl.rewards.worker, megatron_rl.rewards.symbolic; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE_PARENT)
    assert done.stdout.strip() == "False", done.stderr

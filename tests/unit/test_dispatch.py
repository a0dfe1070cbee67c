"""Requests to replicas and completions back, while others run: what is handed out, kept, asked again, given up."""

import threading
import time

import pytest

from megatron_rl.data.types import Finish
from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.engine import GenerateRequest

GROUP = 4


class Desk:
    """A replica that answers by hand: of what runs it finishes what `finish` picks, at each exchange."""

    def __init__(self, number, finish=lambda running: running):
        self.number, self.finish = number, finish
        self.name = f"engine replica {number} (pid {number})"
        self.running, self.seen, self.most = {}, [], 0
        self.lost = self.refusal = None

    def ask(self, cmd, *, timeout_s, requests, cancel, weight_version, wait_s):
        if self.lost:
            raise LostEngineError(self.lost)
        if self.refusal:
            raise EngineError(self.refusal)
        self.seen += [request["seed"] for request in requests]
        self.running |= {request["ticket"]: request for request in requests}
        self.most = max(self.most, len(self.running))
        answers = [self.answer(ticket, "abort", [7], weight_version) for ticket in cancel if ticket in self.running]
        picked = [ticket for ticket in self.finish(list(self.running)) if ticket in self.running]
        answers += [self.answer(ticket, "stop", [7, 8], weight_version) for ticket in picked]
        if not answers:
            time.sleep(0.001)
        return answers

    def answer(self, ticket, finish, tokens, version):
        seed = self.running.pop(ticket)["seed"]
        logprobs = [-float(seed)] * len(tokens)
        return {
            "ticket": ticket, "token_ids": tokens, "logprobs": logprobs, "finish": finish, "weight_version": version
        }  # fmt: skip

    def give_up(self, reason):
        self.lost = reason
        return LostEngineError(reason)


def nothing(running):
    return []


def requests(count, *, first=0):
    """Groups of `GROUP`; seeds count from `first`, and are what the completions' log-probs show."""
    return [
        GenerateRequest(prompt_token_ids=[i // GROUP], seed=i, max_tokens=10, temperature=1.0)
        for i in range(first, first + count)
    ]


def dispatcher(*desks, at=None, **config):
    """`at` stays the caller's: whoever sits there when something is sent answers."""
    desks = desks if at is None else at
    config = EngineConfig(replicas=len(desks), **{"max_concurrent": 8, "request_timeout_s": 60.0, **config})
    return Dispatcher(config, replica=lambda i: desks[i], weight_version=lambda: 3)


def seeds(completions):
    return [-completion.logprobs[0] for completion in completions.values()]


def all_of(dispatching, tickets):
    return dispatching.wait(tickets, count=None, timeout_s=30.0)


@pytest.mark.parametrize("evenly", [True, False])
def test_every_request_is_answered_once_in_the_order_of_the_tickets(evenly):
    desks = Desk(0), Desk(1), Desk(2)
    dispatching = dispatcher(*desks)
    tickets = dispatching.submit(requests(50), evenly=evenly)
    assert seeds(all_of(dispatching, tickets[::-1])) == list(range(50))[::-1]
    assert sorted(seed for desk in desks for seed in desk.seen) == list(range(50))
    with pytest.raises(EngineError, match=r"ticket \d+ was never given out, or its completion was"):
        all_of(dispatching, tickets)


def test_what_is_finished_is_handed_out_while_others_run_and_new_ones_come():
    desk = Desk(0, finish=lambda running: [ticket for ticket in running if ticket % 2])
    dispatching = dispatcher(desk)
    tickets = dispatching.submit(requests(4), evenly=True)
    first = dispatching.wait(tickets, count=2, timeout_s=30.0)
    assert seeds(first) == [1, 3]
    later = dispatching.submit(requests(2, first=4), evenly=True)
    assert seeds(dispatching.wait(later, count=1, timeout_s=30.0)) == [5]
    assert dispatching.wait(tickets[::2], count=None, timeout_s=0.0) == {}
    desk.finish = lambda running: running
    assert seeds(all_of(dispatching, [tickets[0], later[0], tickets[2]])) == [0, 4, 2]


def test_what_is_cancelled_comes_back_with_what_it_has_and_others_go_on():
    desk = Desk(0, finish=lambda running: [ticket for ticket in running if ticket == 0])
    dispatching = dispatcher(desk, max_concurrent=4)
    tickets = dispatching.submit(requests(12), evenly=False)
    assert seeds(dispatching.wait(tickets, count=1, timeout_s=30.0)) == [0]
    ended = dispatching.cancel([tickets[1], tickets[11]])
    assert [one.finish for one in ended.values()] == [Finish.ABORT, Finish.ABORT]
    # one ran, the other waited for room
    assert [one.token_ids for one in ended.values()] == [[7], []]
    assert {one.weight_version for one in ended.values()} == {3}
    desk.finish = lambda running: running
    assert seeds(all_of(dispatching, tickets[2:11])) == list(range(2, 11))
    assert 11 not in desk.seen and not desk.running


def test_a_finished_completion_that_is_cancelled_is_whole():
    dispatching = dispatcher(Desk(0))
    (ticket,) = dispatching.submit(requests(1), evenly=True)
    dispatching.drain()
    assert [one.finish for one in dispatching.cancel([ticket]).values()] == [Finish.STOP]


def test_a_slow_replica_gets_less():
    """One answers nothing as long as the other has work: it keeps what it took at first, where blocks give it half."""
    fast = Desk(1)
    slow = Desk(0, finish=lambda running: running if len(fast.seen) >= 80 - 8 else [])
    dispatching = dispatcher(slow, fast)
    tickets = dispatching.submit(requests(80), evenly=False)
    assert seeds(all_of(dispatching, tickets)) == list(range(80))
    assert (len(slow.seen), len(fast.seen)) == (8, 72)
    dispatching.take_imbalance()
    slow.finish = fast.finish = lambda running: running
    slow.seen.clear(), fast.seen.clear()
    all_of(dispatching, dispatching.submit(requests(80), evenly=True))
    assert (len(slow.seen), len(fast.seen)) == (40, 40)


def test_groups_stay_together_and_no_replica_gets_more_than_it_decodes_at_once():
    desks = Desk(0, finish=lambda running: running[:1]), Desk(1, finish=lambda running: running[:3])
    dispatching = dispatcher(*desks, max_concurrent=8)
    all_of(dispatching, dispatching.submit(requests(64), evenly=False))
    groups = [{seed // GROUP for seed in desk.seen} for desk in desks]
    assert not groups[0] & groups[1]
    # a group begins where there is room for one of it
    assert max(desk.most for desk in desks) <= 8 + GROUP - 1


@pytest.mark.parametrize("evenly", [True, False])
def test_after_a_loss_only_what_is_missing_is_asked_again(evenly):
    desks = [Desk(0), Desk(1, finish=lambda running: running[:1])]
    desks[1].lost = "engine replica 1: died"
    dispatching = dispatcher(at=desks)
    tickets = dispatching.submit(requests(16), evenly=evenly)
    for _ in range(2 if evenly else 1):  # waiting again does not help, only another engine does
        with pytest.raises(LostEngineError, match="replica 1: died"):
            all_of(dispatching, tickets)
    dispatching.drain()
    answered = list(desks[0].seen)
    desks[1] = Desk(1)
    dispatching.replaced(1)
    assert seeds(all_of(dispatching, tickets)) == list(range(16))
    assert desks[0].seen[: len(answered)] == answered and len(answered) >= 8
    assert sorted(desks[0].seen + desks[1].seen) == list(range(16))
    if evenly:
        assert desks[1].seen == list(range(8, 16))


@pytest.mark.parametrize("evenly", [True, False])
def test_a_loss_between_two_waits_is_told_once_and_not_again_after_the_restart(evenly):
    """Silently given to the others, requests would be done, and the replica stay lost until somebody else needs it."""
    desks = [Desk(0), Desk(1)]
    desks[1].lost = "engine replica 1: died"
    dispatching = dispatcher(at=desks)
    tickets = dispatching.submit(requests(16), evenly=evenly)
    dispatching.drain()
    with pytest.raises(LostEngineError, match="replica 1: died"):
        all_of(dispatching, tickets[:9] if evenly else tickets[:8])
    desks[1] = Desk(1)
    dispatching.replaced(1)
    assert seeds(all_of(dispatching, tickets)) == list(range(16))
    assert sorted(desks[0].seen + desks[1].seen) == list(range(16))


def test_a_loss_of_what_nobody_waited_for_is_not_told_after_the_restart():
    desks = [Desk(0), Desk(1)]
    desks[0].lost, desks[1].lost = "engine replica 0: died", "engine replica 1: died"
    dispatching = dispatcher(at=desks)
    tickets = dispatching.submit(requests(16), evenly=True)
    dispatching.drain()
    with pytest.raises(LostEngineError, match="replica 0: died"):
        all_of(dispatching, tickets)
    for number in range(2):
        desks[number] = Desk(number)
        dispatching.replaced(number)
    assert seeds(all_of(dispatching, tickets)) == list(range(16))


def test_a_block_of_a_lost_replica_is_done_anew_as_a_whole_unless_it_was_handed_out():
    """In the same batches, so that it is the same to the last bit."""
    desks = [Desk(0, finish=lambda running: [t for t in running if t < 2])]
    dispatching = dispatcher(at=desks)
    tickets = dispatching.submit(requests(4), evenly=True)
    assert dispatching.wait(tickets[:1], count=None, timeout_s=30.0).keys() == {0}
    desks[0].lost = "gone"
    with pytest.raises(LostEngineError, match="gone"):
        all_of(dispatching, tickets[1:])
    dispatching.drain()
    desks[0] = Desk(0)
    dispatching.replaced(0)
    assert seeds(all_of(dispatching, tickets[1:])) == [1, 2, 3]
    assert desks[0].seen == [1, 2, 3]


def test_with_every_replica_lost_nothing_waits_for_ever():
    desk = Desk(0)
    desk.lost = "engine replica 0: died"
    dispatching = dispatcher(desk)
    tickets = dispatching.submit(requests(40), evenly=False)
    for _ in range(2):
        with pytest.raises(LostEngineError, match="replica 0: died"):
            all_of(dispatching, tickets)
    assert {len(one.token_ids) for one in dispatching.cancel(tickets).values()} == {0}


def test_requests_that_a_replica_refuses_can_be_asked_again():
    desk = Desk(0)
    desk.refusal = "engine replica 0: weights are stale"
    dispatching = dispatcher(desk)
    tickets = dispatching.submit(requests(2), evenly=True)
    with pytest.raises(EngineError, match="weights are stale"):
        all_of(dispatching, tickets)
    desk.refusal = None
    assert seeds(all_of(dispatching, tickets)) == [0, 1]


def test_a_replica_that_answers_but_finishes_nothing_in_time_is_given_up():
    desk = Desk(0, finish=nothing)
    dispatching = dispatcher(desk, request_timeout_s=0.2)
    tickets = dispatching.submit(requests(2), evenly=True)
    expected = (
        r"engine replica 0 \(pid 0\): did not answer within 0.2 s while generate; raise engine\.request_timeout_s"
    )
    with pytest.raises(LostEngineError, match=expected):
        all_of(dispatching, tickets)
    assert desk.lost


def test_nothing_may_run_where_weights_are_to_change():
    desk = Desk(0, finish=nothing)
    dispatching = dispatcher(desk)
    dispatching.check_idle("weight transfer")
    tickets = dispatching.submit(requests(12), evenly=False)
    with pytest.raises(EngineError, match="weight transfer: 12 requests are still running; wait for them, or cancel"):
        dispatching.check_idle("weight transfer")
    dispatching.cancel(tickets)
    dispatching.check_idle("weight transfer")


def test_whoever_waits_hears_that_the_engine_was_closed():
    dispatching = dispatcher(Desk(0, finish=nothing))
    tickets = dispatching.submit(requests(2), evenly=True)
    threading.Timer(0.05, dispatching.close).start()
    with pytest.raises(EngineError, match="was closed while completions were waited for"):
        all_of(dispatching, tickets)

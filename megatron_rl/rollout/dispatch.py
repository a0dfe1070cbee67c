"""Requests on their way to replicas and completions on their way back, while both go on. Knows nothing of processes.

Each replica that has something to do has a thread here, which exchanges short messages with it: what is new, what is
cancelled, what is finished.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.data.types import Completion, Finish
from megatron_rl.errors import EngineError, LostEngineError
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.rollout.engine import GenerateRequest, Ticket
from megatron_rl.rollout.replicas import Replica
from megatron_rl.rollout.routing import Load, even_blocks, groups_of, imbalance, least_loaded, tokens_of

POLL_S = 0.05  # a replica that has nothing to say yet answers then, and hears what is new


@dataclass(slots=True, eq=False)
class _Flight:
    """One request. `replica` None: whichever takes it first; `is_fixed`: it was given to that replica."""

    request: GenerateRequest
    replica: int | None = None
    is_fixed: bool = False
    completion: Completion | None = None
    error: EngineError | None = None  # why it is with nobody
    is_told: bool = False  # `wait` has raised the error, and sends it again


@dataclass(slots=True, eq=False)
class _Lane:
    """What one replica has to do. Tickets in the order in which they came."""

    unsent: list[Ticket] = field(default_factory=list)
    sent: dict[Ticket, float] = field(default_factory=dict)  # and when each has to be there
    cancelled: list[Ticket] = field(default_factory=list)
    is_open: bool = False  # a thread exchanges messages with the replica
    lost: LostEngineError | None = None
    busy_s: float = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.unsent or self.sent)


class Dispatcher:
    """Tickets are handed out by `submit` and end in `wait` or `cancel`. Safe to use from several threads.

    `replica` gives the one of a number as it is now, `weight_version` the version that requests are for.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        replica: Callable[[int], Replica],
        weight_version: Callable[[], int],
    ) -> None:
        self._config, self._replica, self._weight_version = config, replica, weight_version
        self._lanes = [_Lane() for _ in range(config.replicas)]
        self._flights: dict[Ticket, _Flight] = {}
        self._queue: deque[list[Ticket]] = deque()  # groups that no replica has room for yet
        self._next: Ticket = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def submit(self, requests: Sequence[GenerateRequest], *, evenly: bool) -> list[Ticket]:
        """A ticket for each. `evenly`: in blocks, at once; else group by group to the least loaded replica."""
        with self._changed:
            tickets = list(range(self._next, self._next + len(requests)))
            self._next += len(requests)
            self._flights.update((t, _Flight(r)) for t, r in zip(tickets, requests, strict=True))
            if evenly:
                for number, block in enumerate(even_blocks(len(requests), len(self._lanes))):
                    for position in block:
                        flight = self._flights[tickets[position]]
                        flight.replica, flight.is_fixed = number, True
                self._give(tickets)
            else:
                self._queue.extend([tickets[i] for i in group] for group in groups_of(requests))
            self._move()
            return tickets

    def wait(
        self, tickets: Collection[Ticket], *, count: int | None, timeout_s: float | None
    ) -> dict[Ticket, Completion]:
        """At least `count` (None: all) of `tickets`, in their order; fewer only when `timeout_s` is over.

        Raises what kept a replica from answering one of them, also where that was before the call; called again, it
        asks for those anew.
        """
        wanted = len(tickets) if count is None else min(count, len(tickets))
        with self._changed:
            flights = {ticket: self._flight(ticket) for ticket in tickets}
            self._send_again(flights)

            def is_over() -> bool:
                there = 0
                for flight in flights.values():
                    if flight.error is not None or self._is_closed:
                        return True
                    there += flight.completion is not None
                return there >= wanted

            self._changed.wait_for(is_over, timeout_s)
            for flight in flights.values():
                if flight.error is not None:
                    self._was_told(flight.error)
                    raise flight.error
            if self._is_closed:
                raise EngineError("engine: was closed while completions were waited for")
            done = {t: f.completion for t, f in flights.items() if f.completion is not None}
            for ticket in done:
                del self._flights[ticket]
            return done

    def cancel(self, tickets: Collection[Ticket]) -> dict[Ticket, Completion]:
        """What each has by now, whole or not: nothing for those that no replica began, or whose replica is lost."""
        with self._changed:
            flights = {ticket: self._flight(ticket) for ticket in tickets}
            waiting = {t for t, f in flights.items() if f.completion is None}
            for group in self._queue:
                group[:] = [ticket for ticket in group if ticket not in waiting]
            for lane in self._lanes:
                lane.unsent = [ticket for ticket in lane.unsent if ticket not in waiting]
                lane.cancelled += [ticket for ticket in lane.sent if ticket in waiting]
            running = [flights[t] for lane in self._lanes for t in lane.sent if t in waiting]
            self._changed.wait_for(
                lambda: self._is_closed or all(f.completion or f.error for f in running)
            )
            for ticket in flights:
                del self._flights[ticket]
            nothing = Completion(
                token_ids=[], logprobs=[], finish=Finish.ABORT, weight_version=self._weight_version()
            )
            return {ticket: flight.completion or nothing for ticket, flight in flights.items()}

    def drain(self) -> None:
        """Wait until no replica that lives has anything to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not any(lane.is_open for lane in self._lanes))

    def check_idle(self, what: str) -> None:
        """Raises EngineError while requests run, or wait for a replica."""
        with self._changed:
            busy = sum(len(lane.sent) + len(lane.unsent) for lane in self._lanes) + sum(map(len, self._queue))
        if busy:
            raise EngineError(f"{what}: {busy} requests are still running; wait for them, or cancel them first")

    def replaced(self, number: int) -> None:
        """Another one answers in the place of lost replica `number`."""
        with self._changed:
            lane = self._lanes[number]
            if lane.lost is not None:
                self._was_told(lane.lost)
            lane.lost = None

    def take_imbalance(self) -> float | None:
        """`routing.imbalance` of the seconds since this was last asked."""
        with self._changed:
            busy_s = [lane.busy_s for lane in self._lanes]
            for lane in self._lanes:
                lane.busy_s = 0.0
        return imbalance(busy_s)

    def close(self) -> None:
        """Whoever waits stops waiting; replicas are told nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _flight(self, ticket: Ticket) -> _Flight:
        try:
            return self._flights[ticket]
        except KeyError:
            raise EngineError(f"engine: ticket {ticket} was never given out, or its completion was") from None

    def _send_again(self, flights: Mapping[Ticket, _Flight]) -> None:
        failed = [ticket for ticket, flight in flights.items() if flight.error is not None and flight.is_told]
        for ticket in failed:
            flights[ticket].error, flights[ticket].is_told = None, False
        self._give(ticket for ticket in failed if flights[ticket].is_fixed)
        free = [ticket for ticket in failed if not flights[ticket].is_fixed]
        groups = groups_of([flights[ticket].request for ticket in free])
        self._queue.extendleft([free[i] for i in group] for group in reversed(groups))
        self._move()

    def _was_told(self, error: EngineError) -> None:
        for flight in self._flights.values():
            flight.is_told |= flight.error is error

    def _give(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            number = self._flights[ticket].replica
            assert number is not None
            self._lanes[number].unsent.append(ticket)

    def _move(self) -> None:
        """Give groups to replicas with room, and each replica with something to do a thread."""
        while self._queue:
            group = self._queue[0]
            number = least_loaded(list(map(self._load, self._lanes)), max_concurrent=self._config.max_concurrent)
            if number is None and not all(lane.lost for lane in self._lanes):
                break
            self._queue.popleft()
            for ticket in group:
                if number is None:
                    self._flights[ticket].error = self._lanes[0].lost
                else:
                    self._flights[ticket].replica = number
                    self._lanes[number].unsent.append(ticket)
        for number, lane in enumerate(self._lanes):
            if lane.has_work and not lane.is_open:
                lane.is_open = True
                name = f"engine-{number}"
                threading.Thread(target=self._attend, args=(number, lane), name=name, daemon=True).start()
        self._changed.notify_all()

    def _load(self, lane: _Lane) -> Load | None:
        if lane.lost is not None:
            return None
        outstanding = [*lane.sent, *lane.unsent]
        tokens = sum(tokens_of(self._flights[ticket].request) for ticket in outstanding)
        return Load(requests=len(outstanding), tokens=tokens)

    def _attend(self, number: int, lane: _Lane) -> None:
        """Exchange messages with the replica as long as it has something to do."""
        began, timeout_s = time.monotonic(), self._config.request_timeout_s
        while True:
            with self._changed:
                now = time.monotonic()
                if self._is_closed or not lane.has_work:
                    lane.is_open = False
                    lane.busy_s += now - began
                    self._changed.notify_all()
                    return
                new, lane.unsent = lane.unsent, []
                cancelled, lane.cancelled = lane.cancelled, []
                lane.sent.update((ticket, now + timeout_s) for ticket in new)
                oldest = next(iter(lane.sent.values()))
                requests = [{"ticket": t, **_to_wire(self._flights[t].request)} for t in new]
                version = self._weight_version()
            replica = self._replica(number)
            try:
                answers = replica.ask(
                    "generate", timeout_s=max(1.0, math.ceil(oldest - now)), requests=requests, cancel=cancelled,
                    weight_version=version, wait_s=POLL_S,
                )  # fmt: skip
                self._deliver(lane, answers, replica)
            except EngineError as error:
                self._fail(number, replica, error, new, cancelled)

    def _deliver(self, lane: _Lane, answers: Sequence[Mapping[str, Any]], replica: Replica) -> None:
        with self._changed:
            for answer in answers:
                ticket = answer["ticket"]
                fields = {name: value for name, value in answer.items() if name != "ticket"}
                try:
                    self._flights[ticket].completion = completion_from_wire(fields, replica=replica.name)
                except EngineError as error:
                    self._flights[ticket].error = error
                del lane.sent[ticket]
            if lane.sent and next(iter(lane.sent.values())) < time.monotonic():
                raise replica.give_up(
                    f"{replica.name}: did not answer within {self._config.request_timeout_s:g} s while generate; "
                    f"raise engine.request_timeout_s if it needs longer"
                )
            self._move()

    def _fail(
        self, number: int, replica: Replica, error: EngineError, new: list[Ticket], cancelled: list[Ticket]
    ) -> None:
        """Nobody has these requests any more: the new ones, and if the replica is lost all that it had."""
        lane = self._lanes[number]
        if not new and not isinstance(error, LostEngineError):
            # what runs there cannot be told from what does not
            error = replica.give_up(str(error))
        with self._changed:
            affected = new
            if isinstance(error, LostEngineError):
                lane.lost = error
                had = {*lane.sent, *lane.unsent}
                # what it finished and nobody took is done anew with the rest: in the same batches, to the last bit
                affected = [
                    ticket
                    for ticket, flight in self._flights.items()
                    if ticket in had or (flight.is_fixed and flight.replica == number)
                ]
                lane.unsent.clear()
                lane.cancelled.clear()
            else:
                lane.cancelled += cancelled
            for ticket in affected:
                flight = self._flights[ticket]
                flight.completion, flight.error = None, error
                if not flight.is_fixed:
                    flight.replica = None
                lane.sent.pop(ticket, None)
            self._move()


def completion_from_wire(answer: Mapping[str, Any], *, replica: str) -> Completion:
    """One answer of a worker. Raises EngineError naming `replica` for a finish reason that we do not know."""
    try:
        finish = Finish(answer["finish"])
    except ValueError as error:
        raise EngineError(
            f"{replica}: a completion of {len(answer['token_ids'])} tokens ended with finish reason "
            f"{answer['finish']!r}, known are {', '.join(known.value for known in Finish)}; its log may say why"
        ) from error
    return Completion(**{**answer, "finish": finish})


def _to_wire(request: GenerateRequest) -> dict[str, Any]:
    fields = asdict(request)
    return {
        **fields,
        "prompt_token_ids": list(fields["prompt_token_ids"]),
        "stop_token_ids": list(fields["stop_token_ids"]),
    }

"""`RolloutEngine` over vLLM replicas in their own processes, driven by trainer rank 0; never imports vLLM."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from megatron_rl.data.types import Completion
from megatron_rl.errors import EngineError, LostEngineError, ReshardError
from megatron_rl.model.spec import ModelSpec
from megatron_rl.recipe.stages import EngineConfig
from megatron_rl.reshard.plan import ReshardPlan
from megatron_rl.reshard.tables import check_served, check_target
from megatron_rl.reshard.transports import TransportKind
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.engine import GenerateRequest, Ticket
from megatron_rl.rollout.replicas import Replica, ReplicaPlaces, meeting_host
from megatron_rl.rollout.spans import EngineLane, begin_spans, fetch_spans
from megatron_rl.rollout.start_message import start_message
from megatron_rl.rollout.wire import Message
from megatron_rl.rollout.yarn import Yarn

_ACK_SLACK_S = 30.0  # beyond the transfer's own time-out, for its error to travel back

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call of `generate` that a replica did not answer."""

    requests: Sequence[GenerateRequest]
    evenly: bool
    weight_version: int
    tickets: Sequence[Ticket]

    def serves(self, requests: Sequence[GenerateRequest], evenly: bool, weight_version: int) -> bool:
        """Whether its tickets are those of these."""
        asked = (requests, evenly, weight_version)
        return (self.requests, self.evenly, self.weight_version) == asked


class VllmEngine:
    """Replicas behind one door. Use `start`, and `close` (or a `with` block) whatever happens."""

    def __init__(self, config: EngineConfig, *, spec: ModelSpec, max_model_len: int) -> None:
        self._config, self._spec, self._max_model_len = config, spec, max_model_len
        self._replicas: list[Replica] = []
        self._places: ReplicaPlaces | None = None
        self._start_message: Message = {}
        self._failed_call: _Call | None = None
        self._dispatcher = Dispatcher(
            config, replica=lambda i: self._replicas[i], weight_version=lambda: self._weight_version
        )
        self._threads = ThreadPoolExecutor(max_workers=config.replicas, thread_name_prefix="engine")
        self._weight_version = -1

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        hf_path: str | Path,
        dtype: str,
        spec: ModelSpec,
        max_model_len: int,
        seed: int,
        log_dir: str | Path,
        threads: int = 1,
        yarn: Yarn | None = None,
    ) -> VllmEngine:
        """Start every replica at once and wait until all are ready.

        `dtype` is `float32` or `bfloat16`, `max_model_len` the tokens of prompt plus response, `threads` the
        CPU threads of one worker; `yarn` gives the model more positions. Raises EngineError naming the replica,
        its exit code and the end of its log, the configured port if it is taken, the host that cannot be used,
        or the GPUs that are missing: replicas do not share them. LayoutError if the model does not fit
        `engine.tp`, ModelError if vLLM computes another one.
        """
        check_served(spec)
        check_target(spec, tp=config.tp)
        positions = spec.max_positions if yarn is None else yarn.max_positions
        if max_model_len > positions:
            raise EngineError(
                f"engine: prompts plus responses of {max_model_len} tokens, but the model has "
                f"{positions} "
                f"positions; lower sampling.max_prompt_tokens or sampling.max_response_tokens"
            )
        _check_port_free(config.port)
        engine = cls(config, spec=spec, max_model_len=max_model_len)
        engine._start_message = start_message(
            config,
            hf_path=hf_path,
            dtype=dtype,
            spec=spec,
            max_model_len=max_model_len,
            seed=seed,
            threads=threads,
            yarn=yarn,
        )
        try:
            engine._places = places = ReplicaPlaces(config, hf_path=hf_path, log_dir=log_dir)
            for number in range(config.replicas):
                engine._replicas.append(places.open(number))
            engine._all(engine._start)
        except BaseException:
            engine.close()
            raise
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def weight_version(self) -> int:
        """Version that every replica confirmed last; -1: still the weights of the HF directory."""
        return self._weight_version

    @property
    def pids(self) -> list[int]:
        """Leaders of the replicas' process groups."""
        return [replica.pid for replica in self._replicas]

    def worker_nodes(self) -> tuple[str, ...]:
        """Of each worker of the plan, in order, the machine it runs on (see devices.node_id)."""
        return tuple(replica.node for replica in self._replicas for _ in range(self._config.tp))

    def worker_devices(self) -> tuple[int | None, ...]:
        """Of each worker of the plan, in order, its position among the GPUs of its machine; None without GPUs."""
        none = [None] * self._config.tp
        return tuple(device for replica in self._replicas for device in replica.devices or none)

    def meeting_host(self, host: str) -> str:
        """Where workers reach this machine, which other trainer ranks reach as `host`: see `replicas.meeting_host`."""
        return meeting_host(host, self._replicas)

    def generate(self, requests: Sequence[GenerateRequest], *, evenly: bool = False) -> list[Completion]:
        """Completions in the order of `requests`, see `RolloutEngine.generate`.

        Raises LostEngineError naming the replica that died or timed out, at once: the others go on, and the next
        call takes their completions where it asks for the same. EngineError names a replica that is stale, or the
        request that does not fit.
        """
        call, self._failed_call = self._failed_call, None
        if call is None or not call.serves(requests, evenly, self._weight_version):
            if call is not None:
                self._dispatcher.cancel(call.tickets)
            call = _Call(
                requests=requests,
                evenly=evenly,
                weight_version=self._weight_version,
                tickets=self._submit(requests, evenly=evenly),
            )
        try:
            return list(self._dispatcher.wait(call.tickets, count=None, timeout_s=None).values())
        except EngineError:
            self._failed_call = call
            raise

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Ticket]:
        """See `RolloutEngine.submit`."""
        return self._submit(requests, evenly=False)

    def wait(
        self, tickets: Collection[Ticket], *, count: int | None = None, timeout_s: float | None = None
    ) -> dict[Ticket, Completion]:
        """See `RolloutEngine.wait`; errors name the replica."""
        return self._dispatcher.wait(tickets, count=count, timeout_s=timeout_s)

    def cancel(self, tickets: Collection[Ticket]) -> dict[Ticket, Completion]:
        """See `RolloutEngine.cancel`."""
        return self._dispatcher.cancel(tickets)

    def load_metrics(self) -> dict[str, float]:
        """See `RolloutEngine.load_metrics`."""
        found = self._dispatcher.take_imbalance()
        return {} if found is None else {"engine/imbalance": found}

    def _submit(self, requests: Sequence[GenerateRequest], *, evenly: bool) -> list[Ticket]:
        for i, request in enumerate(requests):
            self._check_fits(f"request {i}", len(request.prompt_token_ids), request.max_tokens)
        return self._dispatcher.submit(requests, evenly=evenly or self._config.routing == "even")

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Log-probabilities of `token_ids[1:]` at `temperature` by replica 0; [L - 1].

        A temperature other than 1 fetches whole rows of the vocabulary: keep it to short probes.
        """
        return self._score_on(self._replicas[0], [token_ids], temperature)[0]

    def score_all(self, prompts: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probabilities of every prompt's tokens from the second on, at temperature 1, by each replica."""
        return self._all(lambda replica: self._score_on(replica, prompts, 1.0))

    def _score_on(
        self, replica: Replica, prompts: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        for number, ids in enumerate(prompts):
            self._check_fits(f"score: prompt {number}", len(ids), 1)
        scores: list[list[float]] = replica.ask(
            "score",
            timeout_s=self._config.request_timeout_s,
            prompts=[list(ids) for ids in prompts],
            temperature=temperature,
            weight_version=self._weight_version,
        )
        return scores

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. A replica that is lost is left to that transfer."""
        self._dispatcher.check_idle("sleep")

        def sleep(replica: Replica) -> None:
            with suppress(LostEngineError):
                replica.ask("sleep", timeout_s=self._config.request_timeout_s)

        self._all(sleep)

    def find_lost(self) -> dict[int, str]:
        """Replicas that died or no longer answer, and why. Waits until the others are done with what they do."""
        self._dispatcher.drain()

        def look(replica: Replica) -> None:
            # what a living one is busy with has its own time-out
            with suppress(EngineError, ReshardError):
                replica.ask("status", timeout_s=self._config.request_timeout_s + 2 * _ACK_SLACK_S)

        self._all(look)
        return {replica.replica: replica.lost for replica in self._replicas if replica.lost is not None}

    def restart(self, replicas: Sequence[int]) -> None:
        """Start these anew in the place of lost ones; all replicas need a weight transfer then.

        Raises EngineError, as `start`; a replica that did not start is lost.
        """
        starting = [self._threads.submit(self._restart, number) for number in replicas]
        wait(starting)
        self._together(starting)

    def status(self) -> list[dict[str, Any]]:
        """Of each replica: `weight_version` and `stale` (None, or why it refuses to generate)."""
        return self._all(lambda replica: replica.ask("status", timeout_s=self._config.request_timeout_s))

    def begin_spans(self) -> None:
        """Every replica keeps what it does when, for `fetch_spans`."""
        self._all(lambda replica: begin_spans(replica, timeout_s=self._config.request_timeout_s))

    def fetch_spans(self) -> list[EngineLane]:
        """What every replica did since `begin_spans`; none keeps anything from now on."""
        return self._all(lambda replica: fetch_spans(replica, timeout_s=self._config.request_timeout_s))

    def begin_join(
        self,
        plan: ReshardPlan,
        *,
        host: str,
        port: int,
        timeout_s: float,
        canary: bool,
        transport: TransportKind = "auto",
    ) -> Future[Any]:
        """Ask every worker to join the transfer group; trainer ranks join while the future is pending."""

        def join(replica: Replica) -> None:
            replica.ask(
                "init_transfer",
                timeout_s=timeout_s + _ACK_SLACK_S,
                init_info={
                    "host": host,
                    "port": port,
                    "timeout_s": timeout_s,
                    "first_worker": replica.replica * self._config.tp,
                    "plan": plan.inputs(),
                    "plan_digest": plan.digest(),
                    "transport": transport,
                    "canary": canary,
                },
            )

        return self._in_background(join)

    def begin_update(self, version: int, *, timeout_s: float) -> Future[Any]:
        """Ask every worker to receive and load; the future ends when all have. Until `finish_update` all are stale.

        The future fails with EngineError while requests run.
        """

        def receive(replica: Replica) -> None:
            self._dispatcher.check_idle("weight transfer")
            replica.ask("receive", timeout_s=timeout_s + _ACK_SLACK_S, weight_version=version)

        return self._in_background(receive)

    def finish_update(self, version: int) -> None:
        """All of all engines arrived: let them generate with it. Afterwards `weight_version` is `version`."""
        self._all(
            lambda replica: replica.ask(
                "commit", timeout_s=self._config.request_timeout_s, weight_version=version
            )
        )
        self._weight_version = version

    def close(self) -> None:
        """Stop every process of every replica within seconds; safe to call twice."""
        self._dispatcher.close()
        if self._replicas:
            # at once, and not on the pool: a busy replica takes seconds to stop and holds a thread of it
            with ThreadPoolExecutor(max_workers=len(self._replicas)) as closing:
                list(closing.map(lambda replica: replica.close(), self._replicas))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_fits(self, what: str, prompt_tokens: int, max_tokens: int) -> None:
        if not 0 < prompt_tokens <= self._max_model_len - max_tokens:
            raise EngineError(
                f"engine: {what} has {prompt_tokens} prompt tokens and may add {max_tokens}; a prompt "
                f"needs at least "
                f"one, and both together at most {self._max_model_len}"
            )

    def _start(self, replica: Replica) -> None:
        replica.start(self._start_message, timeout_s=self._config.start_timeout_s)

    def _restart(self, number: int) -> None:
        assert self._places is not None
        # its devices, memory and, on another host, its place have to be free
        self._replicas[number].close()
        self._replicas[number] = fresh = self._places.open(number)
        self._start(fresh)
        self._dispatcher.replaced(number)

    def _all(self, step: Callable[[Replica], T]) -> list[T]:
        return self._together([self._threads.submit(step, replica) for replica in self._replicas])

    def _in_background(self, step: Callable[[Replica], None]) -> Future[Any]:
        """One future for all replicas, on a thread of its own: it waits for the pool's."""
        outer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-wait")
        try:
            return outer.submit(self._all, step)
        finally:
            outer.shutdown(wait=False)

    def _together(self, futures: list[Future[T]]) -> list[T]:
        """Results in order; the first failure is raised without waiting for the replicas that still work."""
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done() and (error := future.exception()):
                raise error
        return [future.result() for future in futures]


def _check_port_free(port: int) -> None:
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise EngineError(
                f"engine.port: port {port} cannot be used ({error}); free it, or set engine.port to 0"
            ) from error

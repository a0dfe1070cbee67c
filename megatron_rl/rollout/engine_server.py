"""What an engine process does with the commands of its owner; `rollout.vllm_worker` starts it."""

from __future__ import annotations

import select
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import EngineError, ReshardError
from megatron_rl.rollout.sleep import Sleeper
from megatron_rl.rollout.spans import EngineSpans
from megatron_rl.rollout.stepper import Stepper
from megatron_rl.rollout.wire import Message, WireClosed, recv_message, send_message

# finished completions are gathered for so long: a message about each would cost more than it is worth
_GATHER_S = 0.05


class EngineServer:
    """Answers one command at a time and goes on generating between them. `version` -1: the weights of the HF
    directory, where it has any."""

    def __init__(self, llm: Any, *, has_weights: bool, has_sleep_mode: bool = False) -> None:
        self._llm = llm
        self._sleeper = Sleeper(llm, has_sleep_mode=has_sleep_mode)
        self._stepper = Stepper(llm) if llm is not None else None
        self._version = -1
        self._stale = None if has_weights else "none were transferred yet, and the model directory holds none"
        self._failure: Exception | None = None
        self._spans = EngineSpans()
        self._answered = time.monotonic()
        self._commands: dict[str, Callable[[Message], Any]] = {
            "generate": self._generate,
            "score": self._score,
            "spans": lambda message: self._spans.answer(message),
            "status": self._status,
            "sleep": self._sleep,
            "init_transfer": self._init_transfer,
            "receive": self._receive,
            "commit": self._commit,
        }

    def serve(self, sock: socket.socket) -> None:
        """Until a `shutdown` command or the end of the stream."""
        waiting = select.poll()
        waiting.register(sock, select.POLLIN)
        while True:
            while self._is_busy() and not waiting.poll(0):
                self._step()
            message = recv_message(sock)
            if message["cmd"] == "shutdown":
                send_message(sock, {"result": None})
                return
            try:
                with self._spans.command(message["cmd"], self._is_busy):
                    answer = {"result": self._commands[message["cmd"]](message)}
            except ReshardError as error:
                answer = {"error": {"kind": "reshard", "message": str(error)}}
            except Exception as error:  # the owner decides what a failed command means
                traceback.print_exc()
                # of a request that cannot be served we know what it did to us: nothing
                is_refusal = (
                    isinstance(error, EngineError | ValueError | TypeError) and error is not self._failure
                )
                kind = "engine" if is_refusal else "crash"
                answer = {"error": {"kind": kind, "message": one_line(error)}}
            try:
                send_message(sock, answer)
            except WireClosed:
                raise
            except EngineError as error:  # an answer too large to send; the owner waits for one all the same
                send_message(sock, {"error": {"kind": "engine", "message": one_line(error)}})

    def _is_busy(self) -> bool:
        return self._stepper is not None and self._stepper.is_busy and self._failure is None

    def _step(self) -> None:
        assert self._stepper is not None
        try:
            self._spans.step(self._stepper.step, self._llm, self._is_busy)
        except Exception as error:  # told with the next command: nobody waits for an answer now
            self._failure = error

    def _status(self, message: Message) -> Message:
        return {"weight_version": self._version, "stale": self._stale}

    def _check_fresh(self, expected: int) -> None:
        if self._stale is not None:
            raise EngineError(f"weights are stale ({self._stale}); send all weights again before generating")
        if self._version != expected:
            raise EngineError(f"weights are version {self._version}, the request expects {expected}")
        self._sleeper.check_awake()

    def _check_idle(self, what: str) -> None:
        if self._is_busy():
            raise EngineError(f"{what}: requests are still running; wait for them, or cancel them first")

    def _generate(self, message: Message) -> list[Message]:
        """Take up `requests`, end those in `cancel`, and answer with what is finished: at once after a cancel, else
        when there is something, at the latest after `wait_s`."""
        if self._stepper is not None:
            self._stepper.cancel(message["cancel"])
        if message["requests"]:
            self._check_fresh(message["weight_version"])
        assert self._stepper is not None
        if message["requests"]:
            if not self._stepper.is_busy:
                # a cached block was computed in another batch: its last bits must not depend on what was asked before
                self._forget_prefixes()
            self._stepper.add(message["requests"], weight_version=self._version)
        deadline = time.monotonic() + (0.0 if message["cancel"] else message["wait_s"])
        while self._is_busy() and (now := time.monotonic()) < deadline:
            if self._stepper.has_finished and now > self._answered + _GATHER_S:
                break
            self._step()
        if self._failure is not None:
            raise self._failure
        self._answered = time.monotonic()
        return self._stepper.take()

    def _score(self, message: Message) -> list[list[float]]:
        self._check_fresh(message["weight_version"])
        assert self._stepper is not None
        prompts, temperature = message["prompts"], message["temperature"]
        # prompt log-probs are always those of temperature 1: at another one every logit of the row is needed
        rows = self._stepper.score(prompts, num_logprobs=0 if temperature == 1.0 else -1)
        return [
            _prompt_scores(of_prompt, ids[1:], temperature)
            for of_prompt, ids in zip(rows, prompts, strict=True)
        ]

    def _sleep(self, message: Message) -> None:
        """Give memory back; the next transfer wakes. Stale from here on until its `commit`."""
        self._check_idle("sleep")
        self._stale = "the engine sleeps: its memory was given back after the last rollouts"
        self._sleeper.sleep()

    def _init_transfer(self, message: Message) -> None:
        self._llm.init_weight_transfer_engine({"init_info": message["init_info"]})
        self._raise_worker_errors()

    def _receive(self, message: Message) -> None:
        """Load version `weight_version` on every worker as it arrives. Stale from here on until `commit`."""
        self._check_idle("weight transfer")
        version = message["weight_version"]
        self._stale = f"update to version {version} did not finish"
        self._sleeper.wake_weights()
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"version": version}})
        self._llm.finish_weight_update()
        self._raise_worker_errors()
        self._sleeper.check_arrived()

    def _commit(self, message: Message) -> None:
        """What was received is complete on every engine: nothing of the old weights may stay, then generate."""
        version = message["weight_version"]
        self._sleeper.wake_kv_cache()
        self._forget_prefixes()
        # a block is read to its end, and where weights were not finite, what is left there makes others NaN too
        self._llm.collective_rpc(_clear_kv_cache)
        self._llm.update_weight_version(str(version))
        self._version, self._stale = version, None

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("the prefix cache could not be reset: requests are still running")

    def _raise_worker_errors(self) -> None:
        if errors := [error for error in self._llm.collective_rpc(_outcome) if error is not None]:
            raise ReshardError("; ".join(errors))


def _prompt_scores(rows: Any, tokens: list[int], temperature: float) -> list[float]:
    """Log-prob of each token at `temperature`, from vLLM's rows of log-probs at temperature 1."""
    import torch

    if temperature == 1.0:
        return [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
    scores = []
    for row, token in zip(rows, tokens, strict=True):
        values = torch.tensor([entry.logprob for entry in row.values()], dtype=torch.float64) / temperature
        scores.append(row[token].logprob / temperature - values.logsumexp(0).item())
    return scores


def _outcome(worker: Any) -> str | None:
    outcome: str | None = worker.weight_transfer_engine.outcome()
    return outcome


def _clear_kv_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def one_line(error: BaseException) -> str:
    """The first line of an error, with the next two where pydantic says only there what is wrong."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    if " validation error" not in lines[0]:
        return lines[0]
    said = [line.partition(" [type=")[0].strip() for line in lines[1:3] if "errors.pydantic.dev" not in line]
    return ": ".join([lines[0], *said])

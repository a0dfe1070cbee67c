"""vLLM's engine driven step by step inside an engine process: requests come and go while others run.

vLLM is single-threaded here: nothing of it is called while a step runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import EngineError
from megatron_rl.rollout.wire import Message


class Stepper:
    """Requests of `llm` by ticket, a whole number of their owner's. Owns everything that runs in `llm`."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._running: dict[str, _Running] = {}  # by vLLM's external request id
        self._finished: list[Message] = []
        self._num_scored = 0
        self._scored: dict[str, Any] = {}  # prompt log-probs by name

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    @property
    def has_finished(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._finished)

    def add(self, requests: Sequence[Message], *, weight_version: int) -> None:
        """All of them or, when one cannot be served, none; whatever runs goes on."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        added: list[str] = []
        try:
            for request in requests:
                params = SamplingParams(
                    temperature=request["temperature"],
                    top_p=request["top_p"],
                    top_k=request["top_k"],
                    seed=request["seed"],
                    max_tokens=request["max_tokens"],
                    stop_token_ids=request["stop_token_ids"],
                    ignore_eos=True,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,  # nobody else has it
                )
                ticket = int(request["ticket"])
                name = str(ticket)
                internal = self._add(name, request["prompt_token_ids"], params)
                added.append(name)
                self._running[name] = _Running(internal, ticket, weight_version)
        except BaseException:
            self._abort(added)
            raise

    def cancel(self, tickets: Sequence[int]) -> None:
        """What each has so far is finished, as aborted; those that are finished already stay what they are."""
        names = [name for ticket in tickets if (name := str(ticket)) in self._running]
        for name in names:
            running = self._running[name]
            self._finish(running, self._so_far(running.internal))
        self._abort(names)

    def step(self) -> None:
        """One step of all that runs."""
        for output in self._engine.step():
            if output.finished:
                running = self._running.pop(output.request_id)
                if running.ticket is None:
                    self._scored[output.request_id] = output.prompt_logprobs
                else:
                    self._finish(running, output.outputs[0])

    def take(self) -> list[Message]:
        """What is finished and was not taken before."""
        finished, self._finished = self._finished, []
        return finished

    def score(self, prompts: Sequence[Sequence[int]], *, num_logprobs: int) -> list[Any]:
        """vLLM's log-probs of each prompt's tokens from the second on, of the token and of `num_logprobs` others
        (-1: of all). Steps until they are there, and with them whatever runs."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=num_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        names: list[str] = []
        try:
            for ids in prompts:
                name = f"score-{self._num_scored}"
                self._num_scored += 1
                internal = self._add(name, ids, params)
                names.append(name)
                self._running[name] = _Running(internal, None, -1)
            while any(name in self._running for name in names):
                self.step()
        except BaseException:
            self._abort(names)
            raise
        return [self._scored.pop(name)[1:] for name in names]

    def _finish(self, running: _Running, out: Any) -> None:
        completion = {**_to_wire(out), "weight_version": running.weight_version}
        self._finished.append({"ticket": running.ticket, **completion})

    def _add(self, name: str, token_ids: Sequence[int], params: Any) -> str:
        from vllm.inputs import tokens_input

        internal: str = self._engine.add_request(name, tokens_input(list(token_ids)), params)
        return internal

    def _abort(self, names: Sequence[str]) -> None:
        internals = [self._running.pop(name).internal for name in names if name in self._running]
        if internals:
            self._engine.abort_request(internals, internal=True)

    def _so_far(self, internal: str) -> Any:
        """vLLM's output of a request that runs, as if it were aborted now: what it keeps for streaming ones."""
        from vllm.v1.engine import FinishReason

        state = self._engine.output_processor.request_states[internal]
        return state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]


@dataclass(frozen=True, slots=True)
class _Running:
    internal: str  # vLLM's own name of it
    ticket: int | None  # None: it is scored
    weight_version: int


def _to_wire(out: Any) -> Mapping[str, Any]:
    token_ids, flat = list(out.token_ids), out.logprobs
    # at each position the sampled token comes first
    if [flat.token_ids[i] for i in flat.start_indices] != token_ids:
        raise EngineError(f"vLLM gave log-probs of other tokens than it sampled: {len(token_ids)} tokens")
    return {
        "token_ids": token_ids,
        "logprobs": [flat.logprobs[i] for i in flat.start_indices],
        "finish": out.finish_reason,
    }

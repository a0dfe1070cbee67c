"""Groups whose rollouts are not all finished: an engine is asked to go on with them until enough are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from megatron_rl.data.types import Completion, Finish, Prompt
from megatron_rl.errors import EngineError
from megatron_rl.rollout.engine import GenerateRequest, RolloutEngine, Ticket

# group, index of the sample: the request for its beginning
NewRequest = Callable[["OpenGroup", int], GenerateRequest]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenGroup:
    """What each of a prompt's samples has so far. None: nothing; with `Finish.ABORT` tokens to go on from."""

    prompt: Prompt
    prompt_token_ids: Sequence[int]
    parts: Sequence[Completion | None]

    @property
    def unfinished(self) -> list[int]:
        """Indices of the samples that have to go on."""
        return [i for i, part in enumerate(self.parts) if part is None or part.finish is Finish.ABORT]

    @property
    def oldest(self) -> int | None:
        """The oldest weight version of any token; None without tokens."""
        return min((part.weight_version for part in self.parts if part is not None), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples that have to go on."""
        return sum(len(part.token_ids) for i in self.unfinished if (part := self.parts[i]) is not None)


def go_on(
    engine: RolloutEngine,
    groups: Sequence[OpenGroup],
    new_request: NewRequest,
    *,
    needed: int,
    check: Callable[[Sequence[Completion]], None],
) -> list[OpenGroup]:
    """The same groups, `needed` of them whole; what runs then is ended, and what it has is kept.

    `check` sees what the engine gave, piece by piece. A loss ends what the groups did in this call.
    """
    parts = [list(group.parts) for group in groups]
    places = [(g, i) for g, group in enumerate(groups) for i in group.unfinished]
    requests = [_behind(parts[g][i], new_request(groups[g], i)) for g, i in places]
    running: dict[Ticket, tuple[int, int]] = dict(zip(engine.submit(requests), places, strict=True))
    left = [len(group.unfinished) for group in groups]

    def take(done: Mapping[Ticket, Completion]) -> None:
        taken = [(running.pop(ticket), completion) for ticket, completion in done.items()]
        check([completion for _, completion in taken if completion.token_ids])
        for (g, i), completion in taken:
            parts[g][i] = joined(parts[g][i], completion)
            left[g] -= completion.finish is not Finish.ABORT

    try:
        while running and left.count(0) < needed:
            take(engine.wait(list(running), count=1))
    except BaseException:
        with suppress(EngineError):
            engine.cancel(list(running))
        raise
    if running:
        take(engine.cancel(list(running)))
    return [replace(group, parts=tuple(own)) for group, own in zip(groups, parts, strict=True)]


def joined(before: Completion | None, after: Completion) -> Completion | None:
    """One completion of the tokens before and after, each with the version that sampled it; None: still no token."""
    if before is None:
        return after if after.token_ids or after.finish is not Finish.ABORT else None
    if not after.token_ids and after.finish is Finish.ABORT:
        return before
    return Completion(
        token_ids=[*before.token_ids, *after.token_ids],
        logprobs=[*before.logprobs, *after.logprobs],
        finish=after.finish,
        weight_version=before.weight_version,
        version_runs=_merged([*before.runs, *after.runs]),
    )


def _merged(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """With one run for consecutive tokens of one version; empty for one version alone."""
    merged = [
        (sum(tokens for tokens, _ in same), version)
        for version, same in groupby(runs, key=lambda run: run[1])
    ]
    return tuple(merged) if len(merged) > 1 else ()


def _behind(before: Completion | None, request: GenerateRequest) -> GenerateRequest:
    """The request for what follows the tokens that are there."""
    if before is None:
        return request
    return replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *before.token_ids],
        max_tokens=request.max_tokens - len(before.token_ids),
    )

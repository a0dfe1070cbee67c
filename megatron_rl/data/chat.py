"""Conversations to token ids: the one place that knows chat templates and the response mask.

A conversation is rendered by prefixes. The rendering of `messages[:k]` must open the rendering of the whole,
so that what the engine is given in RL is what was trained on in SFT.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.types import Message
from megatron_rl.errors import DataError

_ASSISTANT = "assistant"


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Ids of the conversation so far and the opening of the assistant's turn. BOS only if the template has
    it.

    Raises DataError if the template refuses the messages.
    """
    return tokenizer.encode(_text(tokenizer, messages, add_generation_prompt=True))


def render_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """(token_ids, loss_mask), both [L]. The mask is True on each assistant turn's content and its end token.

    What a template writes after the end token (ChatML: a newline) is context, not trained on.
    Raises DataError if the template refuses the messages, re-writes earlier turns once later ones exist, or
    ends no turn of the assistant with a special token.
    """
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    done = ""
    for position, message in enumerate(messages):
        if message["role"] != _ASSISTANT:
            continue
        opened = _text(tokenizer, messages[:position], add_generation_prompt=True)
        closed = _text(tokenizer, messages[: position + 1], add_generation_prompt=False)
        _check_prefix(done, opened, position)
        _check_prefix(opened, closed, position)
        context = tokenizer.encode(opened[len(done) :])
        turn = _turn_ids(tokenizer, opened[len(done) :], closed[len(done) :], context)
        trained = _trained_length(tokenizer, turn, position)
        token_ids += context + turn
        loss_mask += [False] * len(context) + [True] * trained + [False] * (len(turn) - trained)
        done = closed
    if messages and messages[-1]["role"] != _ASSISTANT:
        whole = _text(tokenizer, messages, add_generation_prompt=False)
        _check_prefix(done, whole, len(messages) - 1)
        rest = tokenizer.encode(whole[len(done) :])
        token_ids += rest
        loss_mask += [False] * len(rest)
    return token_ids, loss_mask


def stop_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's EOS ids, and the token that the template ends a turn with.

    They differ for base models whose template is ChatML; such a model, once trained, would never stop on EOS
    alone.
    """
    probe = [{"role": "user", "content": "1"}, {"role": _ASSISTANT, "content": "1"}]
    token_ids, loss_mask = render_conversation(tokenizer, probe)
    last = max(index for index, trained in enumerate(loss_mask) if trained)
    return tuple(dict.fromkeys([*tokenizer.eos_token_ids, token_ids[last]]))


def _text(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    try:
        return tokenizer.chat_text(messages, add_generation_prompt=add_generation_prompt)
    except DataError:
        raise
    # Templates are programs from the model's files: they raise jinja2 errors and anything Python has.
    except Exception as error:
        roles = ", ".join(message.get("role", "?") for message in messages)
        raise DataError(f"chat template: it refuses the turns [{roles}]: {error}") from error


def _check_prefix(shorter: str, longer: str, position: int) -> None:
    if longer.startswith(shorter):
        return
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    raise DataError(
        f"chat template: adding turn {position} re-writes the text before it: "
        f"{shorter[same : same + 40]!r} becomes {longer[same : same + 40]!r}; "
        "train on single-turn conversations, or use a template that only appends "
        "(templates that strip the thinking of earlier turns, or open the answer with <think>, do not)"
    )


def _turn_ids(tokenizer: Tokenizer, opened: str, closed: str, context: Sequence[int]) -> list[int]:
    """Ids of what `closed` adds to `opened`, such that context + ids is what the model sees."""
    whole = tokenizer.encode(closed)
    if whole[: len(context)] == list(context):
        return whole[len(context) :]
    # A token spans the border (a newline that merges with the content's own). The engine continues after the
    # prompt's ids, so the turn is encoded alone.
    return tokenizer.encode(closed[len(opened) :])


def _trained_length(tokenizer: Tokenizer, turn: Sequence[int], position: int) -> int:
    ends = tokenizer.special_token_ids.union(tokenizer.eos_token_ids)
    last = max((index for index, token_id in enumerate(turn) if token_id in ends), default=None)
    # Anything but white space behind the last special token means that the token was part of the content.
    if last is None or (last + 1 < len(turn) and tokenizer.decode(turn[last + 1 :]).strip()):
        raise DataError(
            f"chat template: it ends the assistant's turn {position} with {tokenizer.decode(turn[-5:])!r}, "
            "without a special token; a model trained on it would never stop, so "
            "add the end token to the template"
        )
    return last + 1

"""The text that each token adds, such that together they are the text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.tokenizer import Tokenizer

_CUT = "\ufffd"  # what half a character is decoded to
_MAX_BYTES = 4  # of a character, a token each at most


class TokenTexts:
    """Remembers the text of every id that it has seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # behind other text, a token that begins a word shows its space
        self._before = tokenizer.encode("a")
        self._prefix = tokenizer.decode(self._before) if self._before else ""
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """A character of several tokens is with the last of them; the others are empty."""
        texts: list[str] = []
        pending: list[int] = []
        for token_id in token_ids:
            pending.append(token_id)
            text = self._single(token_id) if len(pending) == 1 else self._decoded(pending)
            if text.endswith(_CUT) and len(pending) < _MAX_BYTES:
                texts.append("")
                continue
            texts.append(text)
            pending = []
        if pending:
            texts[-1] = self._decoded(pending)
        return texts

    def _single(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._decoded([token_id])
        return self._known[token_id]

    def _decoded(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode([*self._before, *token_ids])
        return text.removeprefix(self._prefix) if text.startswith(self._prefix) else self._tokenizer.decode(token_ids)

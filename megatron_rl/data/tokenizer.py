"""Text to token ids and back, the same for Hugging Face tokenizers and bare SentencePiece files.

Nothing here adds a BOS on its own: `encode` adds no special token, and a conversation gets one only from its
chat template. Reads local files only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.data.types import Message
from megatron_rl.errors import DataError


class Tokenizer(Protocol):
    """What the project asks of a tokenizer. Ids are the contract: text never makes a round trip."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it, added tokens included. The model's vocabulary may be larger (padded)."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response: the tokenizer's own first, then those of `generation_config.json`."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: what plain text does not contain."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja source, if the model came with one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special token is added, those written in the text are recognised."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens kept."""
        ...

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The chat template applied; `data.chat` is the caller. Raises whatever the template raises."""
        ...


def load_tokenizer(hf_path: str | Path) -> Tokenizer:
    """The tokenizer of a local model directory: Hugging Face files if there are any, else `tokenizer.model`.

    Raises DataError for a directory that is missing, holds no tokenizer, or one that cannot be read.
    """
    path = Path(hf_path)
    if not path.is_dir():
        raise DataError(
            f"tokenizer: {path} is not a directory; model.hf_path must name a local model directory"
        )
    is_fast = (path / "tokenizer.json").is_file()
    if not is_fast and (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(path)
    if not is_fast and not (path / "tokenizer_config.json").is_file():
        raise DataError(
            f"tokenizer: {path} holds none of tokenizer.json, tokenizer_config.json, tokenizer.model"
        )
    return HfTokenizer(path)


class HfTokenizer:
    """A tokenizer that transformers loads.

    `tokenizer.json` is taken as it stands. AutoTokenizer would replace its splitting rules by those of the
    class registered for the model type, which gives other ids for models that came with a tokenizer of
    another family.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Any: transformers does not type what it returns.
            self._hf: Any = _loader(path).from_pretrained(path, local_files_only=True)
        # The tokenizers library raises bare Exception for a file that it cannot parse.
        except Exception as error:
            raise DataError(f"tokenizer: transformers cannot load {path}: {error}") from error
        own = [] if self._hf.eos_token_id is None else [int(self._hf.eos_token_id)]
        self.eos_token_ids = _merge_eos(own, path)
        self.vocab_size = len(self._hf)
        # Llama lists <|eot_id|> only among the added tokens, so `all_special_ids` is not all of them.
        added = (i for i, token in self._hf.added_tokens_decoder.items() if token.special)
        self.special_token_ids = frozenset((*self._hf.all_special_ids, *added))
        template = self._hf.chat_template
        # A dict holds several named templates; transformers applies the one called default.
        self.chat_template: str | None = template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str) -> list[int]:
        # The backend directly: the transformers wrapper costs ten times the tokenization of a short text.
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is not None:
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self._hf.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._hf.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        if self.chat_template is None:
            raise DataError(
                "tokenizer: it has no chat template; add `chat_template` to tokenizer_config.json "
                "or chat_template.jinja to the model directory"
            )
        return str(
            self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )


def _loader(path: Path) -> Any:
    """The class of transformers that reads the directory. AutoTokenizer alone imports models and torch's compiler."""
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


# Turns in plain words, since a bare SentencePiece file has no role tokens. Each answer ends with EOS.
DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class SentencePieceTokenizer:
    """A bare `tokenizer.model`.

    Without a chat template beside it (`chat_template.jinja`, or in tokenizer_config.json) conversations read
    `<s>User: ...\\nAssistant: ...</s>`, which is `DEFAULT_TEMPLATE`.
    Control pieces are recognised in text, as Hugging Face tokenizers do; the library itself would spell them
    out.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        file = path / "tokenizer.model"
        try:
            self._sp: Any = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise DataError(f"tokenizer: {file} is not a SentencePiece model: {error}") from error
        self.vocab_size = int(self._sp.vocab_size())
        own = [self._sp.eos_id()] if self._sp.eos_id() >= 0 else []
        self.eos_token_ids = _merge_eos(own, path)
        self._control = {self._sp.id_to_piece(i): i for i in range(self.vocab_size) if self._sp.is_control(i)}
        self.special_token_ids = frozenset(self._control.values())
        self.chat_template = _template_beside(path) or DEFAULT_TEMPLATE
        self._splitter = (
            re.compile("(" + "|".join(map(re.escape, self._control)) + ")") if self._control else None
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._splitter.split(text) if self._splitter else [text]:
            if part in self._control:
                ids.append(self._control[part])
            elif part:
                ids.extend(self._sp.encode(part))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text, run = [], []
        for token_id in token_ids:
            if token_id not in self.special_token_ids:
                run.append(int(token_id))
                continue
            text.append(self._sp.decode(run) + self._sp.id_to_piece(int(token_id)))
            run = []
        return "".join(text) + str(self._sp.decode(run))

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        import jinja2.sandbox

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        return environment.from_string(self.chat_template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._piece(self._sp.bos_id()),
            eos_token=self._piece(self._sp.eos_id()),
        )

    def _piece(self, token_id: int) -> str:
        return str(self._sp.id_to_piece(token_id)) if token_id >= 0 else ""


def _raise_template_error(message: str) -> None:
    raise DataError(f"chat template: {message}")


def _template_beside(path: Path) -> str | None:
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = _read_json(path / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _merge_eos(own: Sequence[int], path: Path) -> tuple[int, ...]:
    listed = _read_json(path / "generation_config.json").get("eos_token_id")
    more = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return tuple(dict.fromkeys([*own, *(int(token_id) for token_id in more)]))


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise DataError(f"{file}: got a JSON {type(data).__name__}, need an object")
    return data

"""What stands behind a value and does not change it: units, counted things, ordinals; and words as answers."""

from __future__ import annotations

from itertools import pairwise

from megatron_rl.rewards.lexicon import (
    CHINESE_UNITS,
    LITTLE_WORDS,
    MULTIPLIERS,
    NOT_LETTER_UNITS,
    NOT_UNITS,
    ORDINALS,
    UNITS,
)

_MAX_UNIT_WORDS = 4


def is_text(found: list[str]) -> bool:
    """Whether these tokens are words rather than mathematics: only string equality can judge them."""
    if any(token.startswith("\\text{") or not (token.isascii() or token == "°") for token in found):
        return True
    if any(
        token in {'"', "`", "'", "@", "#", "?", "\\approx", "\\equiv", "\\pmod"}
        or token.startswith("\\begin")
        for token in found
    ):
        return True
    if any((a[0].isdigit() or a == "%") and b[0].isdigit() for a, b in pairwise(found)):
        # two numerals side by side are no number, and a per cent sign is no remainder
        return True
    words = [token for token in found if token.isalpha()]
    if any(len(word) > 3 and not _is_product(word) and word not in MULTIPLIERS for word in words):
        return True
    has_word = any(len(word) > 2 and not _is_product(word) for word in words)
    return bool(words) and len(words) == len(found) and (has_word or [*map(str.lower, words)] == ["no"])


def is_choice(token: str) -> bool:
    """The letter of a choice."""
    return len(token) == 1 and "A" <= token <= "J"


def _is_product(word: str) -> bool:
    """`abcd`, `bca` or `xyzw`: neighbouring letters of the alphabet, each once, small."""
    codes = set(map(ord, word))
    return word.islower() and len(codes) == len(word) == max(codes) - min(codes) + 1


def closing(found: list[str], start: int) -> int | None:
    """Index of the bracket that closes the one at `start`, of any kind: half-open intervals mix them."""
    depth = 0
    for index in range(start, len(found)):
        if found[index] in {"(", "[", "{", "\\{"}:
            depth += 1
        elif found[index] in {")", "]", "}", "\\}"}:
            depth -= 1
            if depth == 0:
                return index
    return None


def strip_units(found: list[str]) -> list[str]:
    """`found` without a unit at its end (`\\text{ cm}^{2}`, `miles`); percent becomes a `%` token."""
    body = list(found)
    exponent = body[-4:] if len(body) > 4 and body[-4] == "^" and body[-2] in {"2", "3"} else []
    if not exponent and body[-5:-2] == ["^", "{", "-"] and body[-2] in {"1", "2"}:
        exponent = body[-5:]  # \text{ m s}^{-2}
    if exponent:
        body = body[: -len(exponent)]
    if len(body) < 2:
        return found
    if body[-1].removeprefix("\\text{").rstrip("}") in ORDINALS and body[-2].isdigit():
        return body[:-1]
    if body[-4:-2] == ["^", "{"] and body[-2].removeprefix("\\text{").rstrip("}") in ORDINALS:
        return body[:-4]
    if (
        len(body) > 3
        and body[-2] == "/"
        and _is_unit(body[-3])
        and (_is_unit(body[-1]) or body[-1] in {"h", "s"})
    ):
        return strip_units(body[:-3])
    if body[-7:-5] == ["\\frac", "{"] and _is_unit(body[-5]) and _is_unit(body[-2]) and body[:-7]:
        return strip_units(body[:-7])
    num_last = 2 if body[-2] == "\\cdot" else 1
    if (
        len(body) > num_last + 1
        and _is_text_unit(body[-1])
        and body[-1 - num_last].startswith("\\text{")
        and _is_unit(body[-1 - num_last])
    ):
        return strip_units(body[:-num_last])
    if (start := _words_behind(body)) < len(body) - 1:
        return body[:start]
    last = body[-1]
    content = last[6:-1] if last.startswith("\\text{") else last
    if is_text(body[:-1]):
        # 3 m^2 in Chinese, character by character
        return _strip_chinese(found)
    first, *others = content.lower().split() or [""]
    if first[:1] in MULTIPLIERS and first[1:] in CHINESE_UNITS:
        first = first[0]
    if first in MULTIPLIERS and (not others or _is_unit_text(" ".join(others))):
        return [*body[:-1], "\\cdot", MULTIPLIERS[first]]
    if len(body) == 2 and is_choice(body[0]) and any(map(is_choice, content.split())):
        # two letters of choices, not amperes
        return found
    counts = last.isalpha() and len(last) > 3 and last.lower() not in NOT_UNITS and _is_literal(body[:-1])
    if not _is_unit(last) and not (counts and not _is_product(last)):
        return found
    if "percent" in last or "per cent" in last:
        return [*body[:-1], "%"]
    return strip_units(body[:-1])


def _words_behind(found: list[str]) -> int:
    """Where the plain words of a unit begin behind a number: `5 miles per hour`; the end where there are none."""
    start = len(found)
    while start > 0 and found[start - 1].isalpha() and found[start - 1].isascii():
        start -= 1
    words = [word.lower() for word in found[start:]]
    are_units = any(len(word) > 3 or word in UNITS for word in words) and all(
        (len(word) > 2 or word in UNITS or word in LITTLE_WORDS)
        and not (_is_product(word) or word in NOT_UNITS or word in MULTIPLIERS)
        for word in words
    )
    is_percent = any("percent" in word for word in words)
    fits = 1 < len(words) <= _MAX_UNIT_WORDS and are_units and not is_percent and _is_literal(found[:start])
    return start if start and fits else len(found)


def _is_unit(token: str) -> bool:
    content = token[6:-1] if token.startswith("\\text{") else ""
    return token in UNITS or token in CHINESE_UNITS or content in CHINESE_UNITS or _is_unit_text(content)


def _is_text_unit(token: str) -> bool:
    """Whether this is a unit set as text, as those of a product are: `\\text{N}\\cdot\\text{m}`."""
    return token.startswith("\\text{") and _is_unit(token) and token[6:-1].strip() not in MULTIPLIERS


def _strip_chinese(found: list[str]) -> list[str]:
    """`found` without a Chinese unit of several characters behind a number."""
    start = len(found)
    while start > 0 and not found[start - 1].isascii() and len(found[start - 1]) == 1:
        start -= 1
    words = "".join(found[start:])
    if start > 0 and words[:1] in MULTIPLIERS and words[1:] in CHINESE_UNITS and not is_text(found[:start]):
        return [*found[:start], "\\cdot", MULTIPLIERS[words[0]]]
    is_unit = start > 0 and words in CHINESE_UNITS
    return found[:start] if is_unit and not is_text(found[:start]) else found


def _is_literal(found: list[str]) -> bool:
    """A number as digits: what follows it as a word counts something, and multiplies nothing."""
    return all(token[0].isdigit() or token in {"-", "+", "/", "."} for token in found)


def _is_unit_text(content: str) -> bool:
    if content.startswith("(") and content.endswith(")"):
        content = content[1:-1]
    for power in ("^{2}", "^{3}", "^2", "^3"):
        content = content.replace(power, " ")
    words = content.replace(".", " ").replace("/", " ").replace("-", " ").split()
    if len(words) == 1 and words[0] in NOT_LETTER_UNITS:
        return False
    if not 0 < len(words) <= _MAX_UNIT_WORDS:
        return False
    return all(word.isascii() and word.isalpha() and word.lower() not in NOT_UNITS for word in words)

"""One token for one numeral: thousands joined, repeating decimals with a bar, digits of another base beside it."""

from __future__ import annotations

from megatron_rl.rewards.lexicon import NUMBER_WORDS
from megatron_rl.rewards.units import closing

# what may stand behind a numeral that ends there
_ENDS = {"", ",", ";", "%", "°", "and", "or", ")", "]", "}", "\\}"}
_BEGINS = {"", ",", ";", "-", "+", "=", "and", "or", "(", "[", "{", "\\{", "\\approx"}
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def join_thousands(found: list[str]) -> list[str]:
    """`10,000`, `10{,}000`, `10\\,000` and `10 000` as one number; a list such as `0,1` stays a list."""
    joined: list[str] = []
    depth = index = 0
    while index < len(found):
        token = found[index]
        depth += (token in {"(", "[", "\\{"}) - (token in {")", "]", "\\}"})
        index += 1
        if token.isdigit() and len(token) <= 3 and token[0] != "0":
            while (after := _thousands_group(found, index, in_brackets=depth > 0)) is not None:
                token += found[after]
                index = after + 1
        joined.append(token)
    return joined


def _thousands_group(found: list[str], index: int, *, in_brackets: bool) -> int | None:
    """Index of a three-digit group whose separator starts at `index`."""
    for separator in (
        [",", "\\!", " "], ["\\!", " "], ["\\text{,}"],
        ["{", ",", "}"], [",", "\\!"], ["\\!", ","], [","], ["\\,"], ["\\!"], [" "], ["\\ "], ["~"], ["\\;"], ["\\:"],
    ):  # fmt: skip
        after = index + len(separator)
        if found[index:after] != separator or after >= len(found):
            continue
        # inside brackets a bare comma separates elements
        if separator == [","] and in_brackets:
            return None
        digits = found[after].split(".")[0]
        return after if len(digits) == 3 and digits.isdigit() else None
    return None


def repeating(found: list[str]) -> list[str]:
    """`0.\\dot{3}`, `0.\\dot{1}4\\dot{2}`, `0.\\bar{3}` and `0.(3)` with the bar that says the same."""
    out: list[str] = []
    index = 0
    while index < len(found):
        is_decimal = bool(out) and "." in out[-1]
        length, digits = _repeated(found, index) if is_decimal else (0, "")
        if length and (found[index] != "(" or _is_repetition(out, found, index + 3)):
            after = index + length
            middle = found[after] if after < len(found) and found[after].isdigit() else ""
            more, last = _repeated(found, after + bool(middle)) if found[index] == "\\dot" else (0, "")
            out += ["\\overline", "{", digits + middle + last if more else digits, "}"]
            index = after + bool(middle) + more if more else after
            continue
        out.append(found[index])
        index += 1
    return out


def _is_repetition(before: list[str], found: list[str], after: int) -> bool:
    """Whether brackets behind a decimal repeat it: `0.(3)`, and `0.1(6)` as a whole; `0.5(10) = 5` multiplies."""
    if before[-1] == ".":
        return len(before) > 1 and before[-2].isdigit()
    behind = found[after] if after < len(found) else ""
    return (before[-2] if len(before) > 1 else "") in _BEGINS and (
        behind in _ENDS or behind.startswith("\\text{")
    )


def _repeated(found: list[str], index: int) -> tuple[int, str]:
    """Number of tokens and the digits of a `\\dot{3}`, `\\bar3` or `(3)` at `index`; 0 for none."""
    sign, inner = found[index : index + 1], found[index + 1 : index + 4]
    if sign == ["("] and inner[1:2] == [")"] and inner[0].isdigit():
        return 3, inner[0]
    if sign not in (["\\dot"], ["\\bar"]):
        return 0, ""
    if len(inner) == 3 and (inner[0], inner[2]) == ("{", "}") and inner[1].isdigit():
        return 4, inner[1]
    return (2, inner[0]) if inner and inner[0].isdigit() and len(inner[0]) == 1 else (0, "")


def bases(found: list[str]) -> list[str]:
    """`(1011)_{2}`, `01011_{(2)}` and `1011_{\\text{two}}` as `1011`, `_`, `{`, `2`, `}`; the value is not computed."""
    out: list[str] = []
    index = 0
    while index < len(found):
        end = closing(found, index + 1) if found[index : index + 2] == ["_", "{"] else None
        base = _base(found[index + 2 : end]) if end is not None else 0
        length, numeral = _numeral_before(out, base) if base else (0, "")
        if end is None or not length:
            out.append(found[index])
            index += 1
            continue
        out[len(out) - length :] = [numeral, "_", "{", str(base), "}"]
        index = end + 1
    return out


def _base(inside: list[str]) -> int:
    """The base that a subscript names, from 2 to 36; 0 for none."""
    if len(inside) > 2 and (inside[0], inside[-1]) == ("(", ")"):
        inside = inside[1:-1]
    words = " ".join(token[6:-1] if token.startswith("\\text{") else token for token in inside)
    words = words.casefold().removeprefix("base").strip()
    base = int(words) if words.isdigit() and len(words) < 3 else NUMBER_WORDS.get(words, 0)
    return base if 2 <= base <= 36 else 0


def _numeral_before(out: list[str], base: int) -> tuple[int, str]:
    """Number of tokens and the digits of the numeral of that base at the end of `out`; 0 for none."""
    is_bracketed = out[-1:] == [")"]
    end = len(out) - is_bracketed
    start = end
    # 2A3 comes as digits and letters by turns; two numerals side by side are no numeral
    while start > 0 and out[start - 1].isalnum() and out[start - 1].isascii():
        if start < end and out[start - 1].isdigit() == out[start][0].isdigit():
            break
        start -= 1
    while start < end and not out[start].isdigit():
        start += 1
    # small letters are variables: 2a_{16} is twice a term of a sequence
    digits = "".join(out[start:end])
    if is_bracketed and out[start - 1 : start] != ["("]:
        return 0, ""
    if not digits or not all(char in _DIGITS[:base] for char in digits):
        return 0, ""
    return end - start + 2 * is_bracketed, digits.lstrip("0") or "0"

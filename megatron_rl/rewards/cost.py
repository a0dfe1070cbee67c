"""Which answers would take a computer algebra system for ever, told by estimates before anything is computed.

Numbers are estimated by their logarithm, from above. What is refused here never reaches a checking process; what
slips through is killed there by the clock.
"""

from __future__ import annotations

import math

from megatron_rl.rewards.rational import read_number
from megatron_rl.rewards.units import closing

MAX_DIGITS = 100_000  # of a power that is worth computing
MAX_FACTORIAL = 20_000
MAX_TERMS = 100_000  # of a sum or a product
MAX_EXPANSION = 300  # exponent of a sum that holds letters
MAX_EXPANDED_TERMS = 20_000  # of such a sum to such a power
_MAX_DEPTH = 30
_HARD = ("\\sum", "\\prod", "\\int", "\\lim", "!", "\\binom", "^", "\\sin", "\\cos", "\\tan", "\\log", "\\ln")
_LARGE = {"\\sum", "\\prod"}


def expected_cost(text: str) -> tuple[int, int]:
    """A key to judge cheap answers first: signs that make a computer algebra system work, then length."""
    return sum(text.count(sign) for sign in _HARD), len(text)


class _Costly(Exception):
    """The message says what is too large."""


def too_costly(found: list[str]) -> str:
    """What in these tokens is too large to compute, in words; nothing if all can be tried."""
    try:
        _digits(found, 0)
    except _Costly as fault:
        return str(fault)
    return ""


def _digits(found: list[str], depth: int) -> float:
    """log10 of a bound on the value that these tokens spell, were everything in them multiplied; letters count as 1."""
    if depth > _MAX_DEPTH:
        # nothing so deep is read at all
        return 0.0
    total = base = 0.0
    index = 0
    num_summands = 1  # of the last group, if it was a sum with letters
    while index < len(found):
        token, index = found[index], index + 1
        if token in _LARGE:
            index = _skip_limits(found, index, depth)
        elif token == "\\binom":
            top, index = _group(found, index)
            _, index = _group(found, index)
            if _value(top, depth) > MAX_TERMS:
                raise _Costly(f"a binomial coefficient of more than {MAX_TERMS}")
        elif token == "^":
            exponent, index = _group(found, index)
            times = _value(exponent, depth)
            if num_summands > 1 and math.isfinite(times):
                if times > MAX_EXPANSION:
                    raise _Costly(f"a sum to a power above {MAX_EXPANSION}")
                if math.comb(int(times) + num_summands - 1, num_summands - 1) > MAX_EXPANDED_TERMS:
                    raise _Costly(f"a power of a sum with more than {MAX_EXPANDED_TERMS} terms")
            if base * times > MAX_DIGITS:
                raise _Costly(f"a power of more than {MAX_DIGITS} digits")
            total += base * times
            base = base * times
        elif token == "!":
            if base > math.log10(MAX_FACTORIAL):
                raise _Costly(f"a factorial of more than {MAX_FACTORIAL}")
            # ln n! < n ln n
            base = max(base, 10**base * base)
            total += base
        elif token in {"(", "{", "["}:
            inside, index = _group(found, index - 1)
            base = _digits(inside, depth + 1)
            num_summands = 1 + sum(t in {"+", "-"} for t in inside) if any(t.isalpha() for t in inside) else 1
            total += base
        else:
            base = _literal(token)
            num_summands = 1
            total += base
    return total


def _skip_limits(found: list[str], index: int, depth: int) -> int:
    """Index behind the limits of a sum; raises _Costly for too many terms."""
    terms = 0.0
    while index < len(found) and found[index] in {"_", "^"}:
        is_upper = found[index] == "^"
        limit, index = _group(found, index + 1)
        if is_upper and "\\infty" not in limit:
            terms = _value(limit, depth)
    if terms > MAX_TERMS:
        raise _Costly(f"a sum or product of more than {MAX_TERMS} terms")
    return index


def _group(found: list[str], index: int) -> tuple[list[str], int]:
    """Tokens of the bracket or the single token at `index`, and the index behind it."""
    if index >= len(found):
        return [], index
    if found[index] not in {"(", "{", "["}:
        return found[index : index + 1], index + 1
    end = closing(found, index)
    return (found[index + 1 : end], end + 1) if end is not None else (found[index + 1 :], len(found))


def _value(found: list[str], depth: int) -> float:
    """A bound on the size of what these tokens spell; infinite past the range of floats."""
    exact = read_number(found)
    if exact is not None:
        return float(abs(exact)) if abs(exact) < 10**300 else math.inf
    digits = _digits(found, depth + 1)
    return 10**digits if digits < 300 else math.inf


def _literal(token: str) -> float:
    """log10 of a numeral, of its reciprocal if that is larger; 0 for everything else."""
    if not token[0].isdigit() or not token.replace(".", "", 1).isdigit():
        return 0.0
    whole, _, decimals = token.partition(".")
    value = whole.lstrip("0")
    if value:
        return 0.0 if token == "1" else len(value) - 1 + math.log10(float(f"{value[0]}.{value[1:16]}0"))
    return float(len(decimals)) if decimals else 0.0

"""Exact rational numbers out of canonical tokens: no floats, and the size of a result is estimated first."""

from __future__ import annotations

from fractions import Fraction

_MAX_BITS = 4096
_MAX_DEPTH = 24


class _NotANumber(Exception):
    """The tokens are no rational literal, or one too large to be worth computing."""


def read_number(found: list[str]) -> Fraction | None:
    """The exact rational that these tokens spell; None for anything else, and beyond some 1,200 digits.

    Integers, decimals (repeating ones too), fractions, mixed numbers, percent, and + - * / ^ of those.
    """
    reader = _NumberReader(found)
    try:
        value = reader.sum(0)
    except (_NotANumber, ZeroDivisionError):
        return None
    return value if reader.index == len(found) else None


class _NumberReader:
    """Recursive descent over the tokens; `depth` bounds the recursion."""

    def __init__(self, found: list[str]) -> None:
        self.found = found
        self.index = 0

    def peek(self) -> str:
        return self.found[self.index] if self.index < len(self.found) else ""

    def take(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.index += 1
        return True

    def sum(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _NotANumber
        sign = 1
        while self.peek() in {"-", "+"}:
            sign = -sign if self.peek() == "-" else sign
            self.index += 1
        total = sign * self.product(depth)
        while self.peek() in {"+", "-"}:
            sign = 1 if self.peek() == "+" else -1
            self.index += 1
            total = _bounded(total + sign * self.product(depth))
        return total

    def product(self, depth: int) -> Fraction:
        value = self.power(depth)
        divides = False
        while self.peek() in {"\\cdot", "/", "("}:
            if divides and self.peek() == "(":
                # 1/2(5): half of 5, or one tenth
                raise _NotANumber
            divides = self.take("/")
            self.take("\\cdot")
            factor = self.power(depth)
            value = _bounded(value / factor if divides else value * factor)
        return value / 100 if self.take("%") else value

    def power(self, depth: int) -> Fraction:
        base = self.atom(depth)
        if not self.take("^"):
            return base
        exponent = self.group(depth)
        if exponent.denominator != 1 or (base == 0 and exponent <= 0):
            raise _NotANumber
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base not in {0, 1, -1} and bits * abs(exponent) > _MAX_BITS:
            raise _NotANumber
        if abs(exponent) > _MAX_BITS:
            exponent = Fraction(exponent.numerator % 2)  # the base is 0, 1 or -1 here
        return base ** int(exponent)

    def atom(self, depth: int) -> Fraction:
        token = self.peek()
        # not 2A, a numeral of base 16
        if token.replace(".", "", 1).isdigit() or token[:1] == ".":
            self.index += 1
            return self.repeating(token) if "." in token or self.peek() == "." else self.mixed(int(token))
        if self.take("\\frac"):
            return _bounded(self.group(depth) / self.group(depth))
        if self.take("("):
            value = self.sum(depth + 1)
            if self.take(")"):
                return value
        raise _NotANumber

    def group(self, depth: int) -> Fraction:
        if self.take("{"):
            value = self.sum(depth + 1)
            if self.take("}"):
                return value
        raise _NotANumber

    def mixed(self, whole: int) -> Fraction:
        """`2\\frac{1}{2}` is two and a half, if both parts are plain integers and the fraction is proper."""
        part = self.found[self.index : self.index + 7]
        is_fraction = len(part) == 7 and [*part[:2], *part[3:5], part[6]] == ["\\frac", "{", "}", "{", "}"]
        if is_fraction and part[2].isdigit() and part[5].isdigit() and int(part[2]) < int(part[5]):
            self.index += 7
            return whole + Fraction(int(part[2]), int(part[5]))
        # 3 1/4 as plain text
        if (
            len(part) >= 3
            and part[1] == "/"
            and part[0].isdigit()
            and part[2].isdigit()
            and int(part[0]) < int(part[2])
        ):
            self.index += 3
            return whole + Fraction(int(part[0]), int(part[2]))
        return Fraction(whole)

    def repeating(self, decimal: str) -> Fraction:
        """A decimal, with `\\overline{...}` as its repeating tail."""
        if "." not in decimal:
            self.index += 1
            decimal += "."
        value = Fraction("0" + decimal if decimal[0] == "." else decimal.rstrip("."))
        if not self.take("\\overline"):
            return value
        tail = self.found[self.index + 1 : self.index + 2]
        if self.found[self.index : self.index + 3] != ["{", *tail, "}"] or not tail[0].isdigit():
            raise _NotANumber
        self.index += 3
        num_fixed = len(decimal) - decimal.index(".") - 1
        return value + Fraction(int(tail[0]), (10 ** len(tail[0]) - 1) * 10**num_fixed)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise _NotANumber
    return value

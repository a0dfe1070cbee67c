"""Single expressions: read exactly by the LaTeX grammar under Math-Verify, compared by SymPy.

Nothing reaches SymPy's string parser, which evaluates code; no number is compared by its float.
"""

from __future__ import annotations

from fractions import Fraction

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from megatron_rl.rewards.lexicon import GREEK
from megatron_rl.rewards.rational import read_number
from megatron_rl.rewards.spelling import join
from megatron_rl.rewards.units import closing, strip_units

_MAX_NESTING = 30  # the reader's grammar takes exponential time in it
# letters keep their case; the library's own clean-up of LaTeX, which drops what looks like a unit, is not used
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_FACTORS = {
    "(", "[", "{", "|", "\\frac", "\\sqrt", "\\binom", "\\pi", "\\sin", "\\cos", "\\tan", "\\cot", "\\log", "\\ln",
    "\\infty",
}  # fmt: skip
_NO_COMMANDS = {"\\cdot", "\\pi", "\\infty", "\\leq", "\\geq", "\\neq", "\\{", "\\ldots"} | GREEK
# what the grammar takes for the identity matrix, Euler's constant and the gamma function, as plain letters
_LETTERS = {"I": "\\iota_{1001}", "\\gamma": "\\iota_{1002}", "\\Gamma": "\\iota_{1003}"}
_IMAGINARY = sympy.Symbol("i", real=True)


class Unreadable(Exception):
    """An expression that the grammar cannot read."""


class BadGold(Exception):
    """The gold is neither words nor an expression that can be read."""


def gold_expression(found: tuple[str, ...]) -> sympy.Expr:
    try:
        return expression(found)
    except Unreadable as fault:
        raise BadGold(f"gold: {fault}") from None


def expression(found: tuple[str, ...]) -> sympy.Expr:
    """The expression as exact SymPy. Raises Unreadable."""
    value = read_number(list(found))
    if value is not None:
        return sympy.Rational(value.numerator, value.denominator)
    if found[-1:] == ("%",):
        found = ("\\frac", "{", *found[:-1], "}", "{", "100", "}")
    if _nesting(found) > _MAX_NESTING:
        raise Unreadable("nested too deeply")
    latex = join(_exact_decimals(_radians(_explicit(strip_units(list(found))))))
    try:
        read = latex2sympy(latex, is_real=True, normalization_config=None, conversion_config=_CONVERSION)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as fault:
        raise Unreadable(f"cannot be read ({type(fault).__name__})") from None
    if not isinstance(read, sympy.Expr) or read.has(sympy.Float):
        raise Unreadable("cannot be read as an expression")
    return read.subs(_IMAGINARY, sympy.I) if _IMAGINARY in read.free_symbols else read


def _explicit(found: list[str]) -> list[str]:
    """`2(3)` and `(2)\\frac{1}{2}` with the sign of multiplication: the grammar would take them for mixed numbers.

    Raises Unreadable for what says two things: `1/2x` (half of x, or 1 over 2x), `2\\frac{5}{3}`, `{8}7`.
    """
    out: list[str] = []
    groups: list[str] = []  # how the open braces are to be closed
    for index, token in enumerate(found):
        before = out[-1] if out else ""
        is_factor = token in _FACTORS or token.isalpha() or token in GREEK
        if is_factor and out[-2:-1] == ["/"] and before.isdigit() and "".join(out[-3:-2]).isdigit():
            raise Unreadable(f"{join(out[-3:])}{token} can be read in two ways")
        if token == "{":
            # braces that are nobody's argument are brackets
            if before.isdigit() and _holds_number(found, index):
                raise Unreadable("two numerals side by side")
            is_bare = before in _NO_COMMANDS or not (
                before in {"^", "_", "}", "]"} or before.startswith("\\")
            )
            groups.append(")" if is_bare else "}")
            token = "(" if is_bare else token
        elif token == "}" and groups:
            token = groups.pop()
        elif token == "\\frac" and before.isdigit() and _is_improper(found[index : index + 7]):
            raise Unreadable(f"{before} in front of an improper fraction can be read in two ways")
        two_arguments = _two_arguments(out) if before == "}" else ""
        is_bare = before == ")" and found[index - 1] == "}"
        is_power = found[index + 1 : index + 2] == ["^"]
        if token[0].isdigit() and (is_bare or (two_arguments == "\\frac" and not is_power)):
            raise Unreadable("two numerals side by side")
        ends_factor = before == ")" or two_arguments == "\\binom"
        multiplies = (token == "(" and before.isdigit() and not _holds_letters(found, index)) or (
            ends_factor and (token in {"(", "\\frac"} or token[0].isdigit())
        )
        token = _as_letter(token, "".join(found[index + 1 : index + 2]))
        out += ["\\cdot", token] if multiplies else [token]
    return out


def _as_letter(token: str, behind: str) -> str:
    """The token, with a name for each letter that the grammar takes for something else."""
    if behind == "_" or (token == "\\Gamma" and behind == "("):
        return token
    if token.isalpha() and "I" in token:
        return "".join(_LETTERS.get(letter, letter) for letter in token)
    return _LETTERS.get(token, token)


def _two_arguments(out: list[str]) -> str:
    """The command whose second argument the brace at the end closes; nothing for one argument."""
    depth = groups = 0
    for token in reversed(out):
        depth += (token == "}") - (token == "{")
        groups += depth == 0 and token == "{"
        if depth == 0 and token not in {"{", "}"}:
            return token if groups == 2 else ""
    return ""


def _is_improper(part: list[str]) -> bool:
    """`\\frac{5}{3}` out of plain integers."""
    return (
        [*part[:2], *part[3:5], *part[6:]] == ["\\frac", "{", "}", "{", "}"]
        and part[2].isdigit()
        and part[5].isdigit()
        and int(part[2]) >= int(part[5])
    )


def _holds_letters(found: list[str], start: int) -> bool:
    end = closing(found, start)
    return end is None or any(token.isalpha() or token in GREEK for token in found[start:end])


def _holds_number(found: list[str], start: int) -> bool:
    end = closing(found, start)
    return end is not None and read_number(found[start + 1 : end]) is not None


def _nesting(found: tuple[str, ...]) -> int:
    depth = deepest = 0
    for token in found:
        depth += (token in {"(", "[", "{", "\\{"}) - (token in {")", "]", "}", "\\}"})
        deepest = max(deepest, depth)
    return deepest


def _radians(found: list[str]) -> list[str]:
    """`15 °` as `15 \\pi / 180`."""
    out: list[str] = []
    for token in found:
        if token == "°" and out and out[-1][0].isdigit():
            out[-1] = f"{{(\\frac{{{out[-1]}\\pi}}{{180}})}}"
        elif token != "°":
            out.append(token)
    return out


def _exact_decimals(found: list[str]) -> list[str]:
    """`0.25` as a fraction: the library would read a float."""
    out: list[str] = []
    for token in found:
        if "." in token and token.replace(".", "", 1).isdigit():
            value = Fraction("0" + token if token[0] == "." else token)
            token = f"{{(\\frac{{{value.numerator}}}{{{value.denominator}}})}}"
        out.append(token)
    return out


def same_expression(gold: sympy.Basic, answer: sympy.Basic) -> bool:
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return bool(gold == answer)
    if gold.has(sympy.nan, sympy.zoo) or answer.has(sympy.nan, sympy.zoo):
        return False
    if gold == answer:
        return True
    gold, answer = _with_real_roots(gold), _with_real_roots(answer)
    if sympy.oo in (gold, answer) or -sympy.oo in (gold, answer):
        return False
    # read unevaluated: doit brings the order of terms into its canonical form
    difference = (gold - answer).doit()
    if difference.has(sympy.nan, sympy.zoo):
        return False
    if difference == 0:
        return True
    # refutes at once what differs in value; equality needs a proof
    if difference.is_number and _differs_numerically(difference):
        return False
    return bool(sympy.simplify(difference) == 0 or difference.equals(0))


def _with_real_roots(value: sympy.Expr) -> sympy.Expr:
    """The cube root of -8 as -2: an odd root of a negative number is the real one, as schools have it."""
    return value.replace(
        lambda one: (
            one.is_Pow
            and one.exp.is_Rational
            and one.exp.q % 2 == 1
            and one.exp.q > 1
            and one.base.is_negative
        ),
        lambda one: (-1) ** one.exp.p * (-one.base) ** one.exp,
    )


def _differs_numerically(difference: sympy.Expr) -> bool:
    value = sympy.N(difference, 30, maxn=200)
    # precision 1 marks a value that cancelled to nothing: no evidence either way
    return bool(value.is_number and abs(value) > sympy.Float("1e-20") and getattr(value, "_prec", 99) > 1)


def rounds_to(exact: tuple[str, ...], decimal: tuple[str, ...]) -> bool:
    """Whether the plain decimal is that value to its own number of digits, rounded or cut off."""
    digits = [token for token in decimal if token not in {"+", "-"}]
    rounded = read_number(list(decimal))
    if rounded is None or len(digits) != 1 or not digits[0].replace(".", "", 1).isdigit():
        return False
    value = sympy.N(expression(exact).doit(), 30, maxn=200)
    if not value.is_Float and not value.is_Integer:
        return False
    last_digit = Fraction(1, 10 ** len(digits[0].partition(".")[2]))
    return bool(abs(Fraction(str(value)) - rounded) < last_digit)

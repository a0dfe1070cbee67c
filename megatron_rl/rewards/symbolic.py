"""Equality of two answers by structure; single expressions are read by Math-Verify's grammar and decided by SymPy.

Runs only inside a checking process: any call here may take forever, and the parent will kill it. Decisions
are exact: no number is compared by its float. Nothing reaches SymPy's string parser, which evaluates code.
"""

from __future__ import annotations

from fractions import Fraction

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from megatron_rl.rewards.lexicon import GREEK
from megatron_rl.rewards.rational import read_number
from megatron_rl.rewards.shapes import (
    Equation,
    Leaf,
    Matrix,
    Named,
    Ordered,
    Relation,
    Shape,
    Union,
    Unordered,
    read_shape,
    split,
)
from megatron_rl.rewards.spelling import join, spell, tokens, without_label
from megatron_rl.rewards.units import strip_units

_MAX_ITEMS = 64
_TURNED = {">": "<", "\\geq": "\\leq", "<": ">", "\\leq": "\\geq", "\\neq": "\\neq"}
_MAX_NESTING = 30  # the reader's grammar takes exponential time in it
# letters keep their case; the library's own clean-up of LaTeX, which drops what looks like a unit, is not used
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_IMAGINARY = sympy.Symbol("i", real=True)


class _Unreadable(Exception):
    """An expression that the grammar cannot read."""


class _BadGold(Exception):
    """The gold is neither words nor an expression that can be read."""


def compare(gold: str, answer: str) -> tuple[str, str]:
    """(verdict, reason) on two answer strings; verdicts are the values of `data.types.Verdict`."""
    try:
        is_equal = _same(*map(read_shape, without_label(tokens(gold), tokens(answer))))
    except _BadGold as fault:
        return "bad_gold", str(fault)
    except _Unreadable as fault:
        return "wrong", str(fault)
    return ("correct", "") if is_equal else ("wrong", "not equal")


def _same(gold: Shape, answer: Shape) -> bool:
    if isinstance(gold, Named) or isinstance(answer, Named):
        return _same_named(gold, answer)
    if isinstance(gold, Unordered) != isinstance(answer, Unordered) and _same_joined(gold, answer):
        return True
    if isinstance(gold, Unordered) or isinstance(answer, Unordered):
        return _same_unordered(_items(gold), _items(answer))
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        gold_cells, answer_cells = ([cell for row in one.rows for cell in row] for one in (gold, answer))
        return [len(row) for row in gold.rows] == [len(row) for row in answer.rows] and all(
            _same(g, a) for g, a in zip(gold_cells, answer_cells, strict=True)
        )
    if isinstance(gold, Ordered) and isinstance(answer, Ordered):
        is_like = (gold.opening, gold.closing) == (answer.opening, answer.closing)
        return is_like and len(gold.items) == len(answer.items) and all(map(_same, gold.items, answer.items))
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        return _same_equation(gold, answer)
    return _same_region(gold, answer)


def _same_joined(gold: Shape, answer: Shape) -> bool:
    """Conditions listed one by one, or a union, against one region: `x < 1, x \\neq 0`."""
    is_set = [isinstance(one, Union | Relation | Ordered) for one in (gold, answer)]
    if not any(is_set):
        return False
    both = [_intersection(one) or _region(one) for one in (gold, answer)]
    return both[0] is not None and both[1] is not None and _equal_sets(both[0], both[1])


def _intersection(shape: Shape) -> sympy.Set | None:
    """The reals for which all of several comparisons hold."""
    if not isinstance(shape, Unordered):
        return None
    relations = [item for item in shape.items if isinstance(item, Relation)]
    if len(relations) < len(shape.items) or any(_letters(one) != _letters(relations[0]) for one in relations):
        return None
    regions = [_region(item) for item in relations]
    return None if not regions or any(part is None for part in regions) else sympy.Intersection(*regions)


def _equal_sets(one: sympy.Set, other: sympy.Set) -> bool:
    return bool(one == other or (one ^ other) == sympy.S.EmptySet)


def _items(shape: Shape) -> tuple[Shape, ...]:
    return shape.items if isinstance(shape, Unordered) else (shape,)


def _same_unordered(gold: tuple[Shape, ...], answer: tuple[Shape, ...]) -> bool:
    """One-to-one, any order. Equality is transitive, so the first free match is as good as any."""
    if len(gold) != len(answer) or len(gold) > _MAX_ITEMS:
        return False
    free = list(gold)
    for item in answer:
        match = next((index for index, candidate in enumerate(free) if _same(candidate, item)), None)
        if match is None:
            return False
        free.pop(match)
    return True


def _same_named(gold: Shape, answer: Shape) -> bool:
    """`x = 5` equals `5`: a name is spelling, unless the other side gives a different one."""
    if isinstance(gold, Named) and isinstance(answer, Named):
        if gold.name == answer.name:
            return _same(gold.value, answer.value)
        # y = x is x = y; of names that are no variables nothing follows
        is_plain = all(
            len(one.name) == 1 and isinstance(one.value, Leaf) and not one.value.is_text()
            for one in (gold, answer)
        )
        return is_plain and _same_equation(gold.equation, answer.equation)
    if isinstance(gold, Equation) and isinstance(answer, Named):
        return _same_equation(gold, answer.equation)
    if isinstance(gold, Named) and isinstance(answer, Equation):
        return _same_equation(gold.equation, answer)
    return _same(
        gold.value if isinstance(gold, Named) else gold, answer.value if isinstance(answer, Named) else answer
    )


def _same_equation(gold: Equation, answer: Equation) -> bool:
    """Two equations are one if the differences of their sides are proportional."""
    of_gold = _gold_expression(gold.left) - _gold_expression(gold.right)
    of_answer = _expression(answer.left) - _expression(answer.right)
    if of_gold == 0 or of_answer == 0:
        return False
    ratio = sympy.simplify(of_gold / of_answer)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def _same_leaf(gold: Leaf, answer: Leaf) -> bool:
    if spell(list(gold.tokens)) == spell(list(answer.tokens)):
        return bool(gold.tokens)
    if gold.is_text() or answer.is_text() or not gold.tokens or not answer.tokens:
        return False
    of_gold, of_answer = read_number(list(gold.tokens)), read_number(list(answer.tokens))
    if of_gold is not None and of_answer is not None:
        return of_gold == of_answer
    if any(_has_base(leaf.tokens) for leaf in (gold, answer)) or "\\overline" in gold.tokens + answer.tokens:
        return False
    return _same_expression(_gold_expression(gold.tokens), _expression(answer.tokens))


def _same_expression(gold: sympy.Basic, answer: sympy.Basic) -> bool:
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


def _has_base(found: tuple[str, ...]) -> bool:
    """`204_{5}`: a numeral in another base, compared as it is written."""
    return any(token == "_" and found[index - 1].isdigit() for index, token in enumerate(found) if index)


def _same_region(gold: Shape, answer: Shape) -> bool:
    """Intervals, unions and inequalities as sets of reals where both are regions; else two expressions."""
    letters = [{frozenset(_letters(one)) for one in _relations(shape)} for shape in (gold, answer)]
    if max(map(len, letters)) > 1 or (all(letters) and letters[0] != letters[1]):
        return False
    regions = (_region(gold), _region(answer))
    if regions[0] is not None and regions[1] is not None:
        return _equal_sets(regions[0], regions[1])
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _same_leaf(gold, answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_chain(gold, answer)
    return False


def _relations(shape: Shape) -> list[Relation]:
    parts = shape.parts if isinstance(shape, Union) else (shape,)
    return [part for part in parts if isinstance(part, Relation)]


def _letters(relation: Relation) -> set[str]:
    """Variables by their first letters: `x > 5` is not `y > 5`."""
    return {token for token in relation.tokens if token.isalpha()} | (GREEK & set(relation.tokens))


def _same_chain(gold: Relation, answer: Relation) -> bool:
    """Comparisons of several variables, side by side; `a > b` is `b < a`."""
    of_gold, of_answer = (_chain(list(one.tokens)) for one in (gold, answer))
    return of_gold[0] == of_answer[0] and all(
        _same(read_shape(left), read_shape(right))
        for left, right in zip(of_gold[1], of_answer[1], strict=True)
    )


def _chain(found: list[str]) -> tuple[list[str], list[list[str]]]:
    """Signs and sides, turned around where they point down."""
    signs = [token for token in found if token in _TURNED]
    sides = split(found, set(signs))
    if all(sign in {">", "\\geq"} for sign in signs):
        return [_TURNED[sign] for sign in reversed(signs)], sides[::-1]
    return signs, sides


def _region(shape: Shape) -> sympy.Set | None:
    if isinstance(shape, Ordered):
        return _interval(shape)
    if isinstance(shape, Union):
        parts = [_region(part) for part in shape.parts]
        return None if any(part is None for part in parts) else sympy.Union(*parts)
    if isinstance(shape, Unordered):
        values = [_end(item) for item in shape.items]
        return None if any(value is None for value in values) else sympy.FiniteSet(*values)
    if isinstance(shape, Relation):
        return _relation_region(list(shape.tokens))
    if isinstance(shape, Leaf):
        return _named_region(list(shape.tokens))
    return None


def _interval(shape: Ordered) -> sympy.Set | None:
    if len(shape.items) != 2 or shape.opening == ":":
        return None
    low, high = (_end(item) for item in shape.items)
    if low is None or high is None or not (low.is_extended_real and high.is_extended_real):
        return None
    return sympy.Interval(low, high, shape.opening == "(", shape.closing == ")")


def _end(shape: Shape) -> sympy.Expr | None:
    if not isinstance(shape, Leaf) or shape.is_text():
        return None
    if shape.tokens in {("\\infty",), ("+", "\\infty")}:
        return sympy.oo
    if shape.tokens == ("-", "\\infty"):
        return -sympy.oo
    return _expression(shape.tokens).doit()


def _relation_region(found: list[str]) -> sympy.Set | None:
    """The reals that satisfy a chain of comparisons in one variable."""
    signs = [token for token in found if token in {"<", ">", "\\leq", "\\geq", "\\neq"}]
    sides = [_expression(tuple(side)).doit() for side in split(found, set(signs))]
    free = set().union(*(side.free_symbols for side in sides))
    if len(free) != 1 or len(sides) != len(signs) + 1:
        return None
    symbol = free.pop()
    real = sympy.Symbol("x", real=True)
    builders = {"<": sympy.Lt, ">": sympy.Gt, "\\leq": sympy.Le, "\\geq": sympy.Ge, "\\neq": sympy.Ne}
    region: sympy.Set = sympy.S.Reals
    for sign, left, right in zip(signs, sides, sides[1:], strict=False):
        relation = builders[sign](left.subs(symbol, real), right.subs(symbol, real))
        region = region & sympy.solveset(relation, real, sympy.S.Reals)
    return region


def _named_region(found: list[str]) -> sympy.Set | None:
    """`\\mathbb{R}`, `\\emptyset`, and differences such as `\\mathbb{R} \\setminus \\{2\\}`."""
    if found == ["\\mathbb", "{", "R", "}"]:
        return sympy.S.Reals
    if found == ["\\emptyset"]:
        return sympy.S.EmptySet
    parts = split(found, {"\\setminus"})
    if len(parts) != 2:
        return None
    left, right = (_region(read_shape(part)) for part in parts)
    return None if left is None or right is None else left - right


def _gold_expression(found: tuple[str, ...]) -> sympy.Expr:
    try:
        return _expression(found)
    except _Unreadable as fault:
        raise _BadGold(f"gold: {fault}") from None


def _expression(found: tuple[str, ...]) -> sympy.Expr:
    """The expression as exact SymPy. Raises _Unreadable."""
    value = read_number(list(found))
    if value is not None:
        return sympy.Rational(value.numerator, value.denominator)
    if found[-1:] == ("%",):
        found = ("\\frac", "{", *found[:-1], "}", "{", "100", "}")
    if _nesting(found) > _MAX_NESTING:
        raise _Unreadable("nested too deeply")
    latex = join(_exact_decimals(_radians(strip_units(list(found)))))
    try:
        read = latex2sympy(latex, is_real=True, normalization_config=None, conversion_config=_CONVERSION)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as fault:
        raise _Unreadable(f"cannot be read ({type(fault).__name__})") from None
    if not isinstance(read, sympy.Expr) or read.has(sympy.Float):
        raise _Unreadable("cannot be read as an expression")
    return read.subs(_IMAGINARY, sympy.I) if _IMAGINARY in read.free_symbols else read


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

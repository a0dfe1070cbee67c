"""Intervals, unions and comparisons in one variable as sets of reals."""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]

from megatron_rl.rewards.expressions import expression
from megatron_rl.rewards.lexicon import GREEK
from megatron_rl.rewards.rational import read_number
from megatron_rl.rewards.shapes import (
    RELATIONS,
    Leaf,
    Ordered,
    Relation,
    Shape,
    Union,
    Unordered,
    name_of,
    read_shape,
    split,
)


def region(shape: Shape) -> sympy.Set | None:
    """The reals that this shape says; None for what is no set of reals."""
    if isinstance(shape, Ordered):
        return _interval(shape)
    if isinstance(shape, Union):
        parts = [region(part) for part in shape.parts]
        return None if any(part is None for part in parts) else sympy.Union(*parts)
    if isinstance(shape, Unordered):
        values = [_end(item) for item in shape.items]
        return None if any(value is None for value in values) else sympy.FiniteSet(*values)
    if isinstance(shape, Relation):
        return _of_relation(list(shape.tokens))
    if isinstance(shape, Leaf):
        return _of_name(list(shape.tokens))
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
    return expression(shape.tokens).doit()


def _of_relation(found: list[str]) -> sympy.Set | None:
    """The reals that satisfy a chain of comparisons in one variable."""
    signs = [token for token in found if token in {"<", ">", "\\leq", "\\geq", "\\neq"}]
    sides = [expression(tuple(side)).doit() for side in split(found, set(signs))]
    free = set().union(*(side.free_symbols for side in sides))
    if len(free) != 1 or len(sides) != len(signs) + 1:
        return None
    symbol = free.pop()
    real = sympy.Symbol("x", real=True)
    builders = {"<": sympy.Lt, ">": sympy.Gt, "\\leq": sympy.Le, "\\geq": sympy.Ge, "\\neq": sympy.Ne}
    found_set: sympy.Set = sympy.S.Reals
    for sign, left, right in zip(signs, sides, sides[1:], strict=False):
        relation = builders[sign](left.subs(symbol, real), right.subs(symbol, real))
        found_set = found_set & sympy.solveset(relation, real, sympy.S.Reals)
    return found_set


def _of_name(found: list[str]) -> sympy.Set | None:
    """`\\mathbb{R}`, `\\emptyset`, and differences such as `\\mathbb{R} \\setminus \\{2\\}`."""
    if found == ["\\mathbb", "{", "R", "}"]:
        return sympy.S.Reals
    if found == ["\\emptyset"]:
        return sympy.S.EmptySet
    parts = split(found, {"\\setminus"})
    if len(parts) != 2:
        return None
    left, right = (region(read_shape(part)) for part in parts)
    return None if left is None or right is None else left - right


def intersection(shape: Shape) -> sympy.Set | None:
    """The reals for which all of several comparisons hold."""
    if not isinstance(shape, Unordered):
        return None
    relations = [item for item in shape.items if isinstance(item, Relation)]
    if len(relations) < len(shape.items) or any(letters(one) != letters(relations[0]) for one in relations):
        return None
    regions = [region(item) for item in relations]
    return None if not regions or any(part is None for part in regions) else sympy.Intersection(*regions)


def is_solved(shape: Shape) -> bool:
    """Whether each comparison in it has a variable, perhaps with a coefficient, between values.

    `x^2 - 4x + 3 < 0` restates a problem whose answer is `(1, 3)`.
    """
    items = shape.items if isinstance(shape, Unordered) else (shape,)
    for one in (one for item in items for one in relations(item)):
        sides = split(list(one.tokens), RELATIONS)
        if sum(_variable(side) is not None for side in sides) > 1 or not all(map(_is_monomial, sides)):
            return False
    return True


def _variable(side: list[str]) -> int | None:
    """Where the first variable stands."""
    return next(
        (i for i, token in enumerate(side) if token in GREEK or (token.isalpha() and token != "e")), None
    )


def _is_monomial(side: list[str]) -> bool:
    """Digits without a variable, or a number in front of the name of one."""
    start = _variable(side)
    if start is None:
        return "|" not in side or not side
    factor = side[:start]
    is_number = factor in ([], ["-"], ["+"]) or read_number(factor) is not None
    return is_number and bool(name_of(side[start:]))


def equal_sets(one: sympy.Set, other: sympy.Set) -> bool:
    return bool(one == other or (one ^ other) == sympy.S.EmptySet)


def relations(shape: Shape) -> list[Relation]:
    parts = shape.parts if isinstance(shape, Union) else (shape,)
    return [part for part in parts if isinstance(part, Relation)]


def letters(relation: Relation) -> set[str]:
    """Variables by their first letters: `x > 5` is not `y > 5`."""
    return {token for token in relation.tokens if token.isalpha()} | (GREEK & set(relation.tokens))

"""Equality of two answers by structure; single expressions and regions are decided by SymPy.

Runs only inside a checking process: any call here may take forever, and the parent will kill it. Decisions
are exact: no number is compared by its float.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]

from megatron_rl.rewards.expressions import (
    BadGold,
    Unreadable,
    expression,
    gold_expression,
    rounds_to,
    same_expression,
)
from megatron_rl.rewards.labels import without_label
from megatron_rl.rewards.lexicon import GREEK
from megatron_rl.rewards.rational import read_number
from megatron_rl.rewards.regions import equal_sets, intersection, is_solved, letters, region, relations
from megatron_rl.rewards.shapes import (
    Approximate,
    Equation,
    Leaf,
    Matrix,
    Named,
    Ordered,
    Relation,
    Shape,
    Union,
    Unordered,
    name_of,
    read_shape,
    split,
)
from megatron_rl.rewards.spelling import spell, tokens

_MAX_ITEMS = 64
_TURNED = {">": "<", "\\geq": "\\leq", "<": ">", "\\leq": "\\geq", "\\neq": "\\neq"}


def compare(gold: str, answer: str) -> tuple[str, str]:
    """(verdict, reason) on two answer strings; verdicts are the values of `data.types.Verdict`."""
    try:
        is_equal = _same(*map(read_shape, without_label(tokens(gold), tokens(answer))))
    except BadGold as fault:
        return "bad_gold", str(fault)
    except Unreadable as fault:
        return "wrong", str(fault)
    return ("correct", "") if is_equal else ("wrong", "not equal")


def _same(gold: Shape, answer: Shape) -> bool:
    if isinstance(gold, Approximate) or isinstance(answer, Approximate):
        return _same_approximate(gold, answer)
    of_gold = _assignment(gold)
    if of_gold and (of_answer := _assignment(answer)):
        return of_gold.keys() == of_answer.keys() and all(
            _same(of_gold[name], of_answer[name]) for name in of_gold
        )
    if of_gold and isinstance(gold, Unordered) and isinstance(answer, Unordered) and not _are_roots(of_gold):
        # values without names of x = 1, y = 2: in the order of the names
        return len(of_gold) == len(answer.items) and all(map(_same, gold.items, answer.items))
    if isinstance(gold, Named) or isinstance(answer, Named):
        return _same_named(gold, answer)
    if isinstance(gold, Unordered) != isinstance(answer, Unordered) and _same_joined(gold, answer):
        return True
    if isinstance(gold, Unordered) or isinstance(answer, Unordered):
        return _same_unordered(_items(gold), _items(answer))
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        gold_cells, answer_cells = ([cell for row in one.rows for cell in row] for one in (gold, answer))
        sizes = [(one.bars, *map(len, one.rows)) for one in (gold, answer)]
        return sizes[0] == sizes[1] and all(map(_same, gold_cells, answer_cells))
    if isinstance(gold, Ordered) and isinstance(answer, Ordered):
        is_like = (gold.opening, gold.closing) == (answer.opening, answer.closing)
        return is_like and len(gold.items) == len(answer.items) and all(map(_same, gold.items, answer.items))
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        return _same_equation(gold, answer)
    return _same_region(gold, answer)


def _assignment(shape: Shape) -> dict[str, Shape]:
    """The values by name of `(x,y) = (2,5)` and of `x = 2, y = 5`; nothing for another shape, or a name twice."""
    if isinstance(shape, Named) and shape.name[0] == "(" and isinstance(shape.value, Ordered):
        names = shape.name.strip("()").split(",")
        values = shape.value.items if shape.value.opening == "(" and shape.value.closing == ")" else ()
        return dict(zip(names, values, strict=True)) if len(set(names)) == len(values) == len(names) else {}
    items = [item for item in _items(shape) if isinstance(item, Named)]
    names = [item.name for item in items]
    is_plain = 1 < len(set(names)) == len(names) == len(_items(shape)) and not any(
        "," in name for name in names
    )
    return dict(zip(names, [item.value for item in items], strict=True)) if is_plain else {}


def _are_roots(values: dict[str, Shape]) -> bool:
    """Whether the names are `x_{1}`, `x_{2}`, ...: which is which says nothing."""
    return all("_" in name for name in values) and len({name.partition("_")[0] for name in values}) == 1


def _same_approximate(gold: Shape, answer: Shape) -> bool:
    """`A \\approx 7.07` is the gold's own decimal; `5\\sqrt{2} \\approx 7.07` is its exact part, if that rounds so."""
    if isinstance(gold, Approximate) and isinstance(answer, Approximate):
        of_gold, of_answer = _approximated(gold), _approximated(answer)
        if (of_gold is None) != (of_answer is None):
            return False
        if of_gold is None or of_answer is None:
            names = {name_of(list(one.of.tokens)) for one in (gold, answer) if isinstance(one.of, Leaf)} - {
                ""
            }
            return len(names) < 2 and _same_decimal(gold.decimal, Leaf(answer.decimal))
        return _same(of_gold, of_answer) and _rounds(of_answer, answer.decimal)
    if isinstance(gold, Approximate):
        of_gold = _approximated(gold)
        name = name_of(list(gold.of.tokens)) if isinstance(gold.of, Leaf) else ""
        if isinstance(answer, Named) and name and answer.name != name:
            return False
        return _same_decimal(gold.decimal, answer) or (of_gold is not None and _same(of_gold, answer))
    assert isinstance(answer, Approximate)
    exact = _approximated(answer)
    if exact is None:
        # nothing but the gold's own digits says that an approximate value is meant
        name = name_of(list(answer.of.tokens)) if isinstance(answer.of, Leaf) else ""
        return not (isinstance(gold, Named) and name and gold.name != name) and _same_decimal(
            answer.decimal, gold
        )
    return _same(gold, exact) and _rounds(exact, answer.decimal)


def _approximated(shape: Approximate) -> Shape | None:
    """The exact value beside the decimal; None where a name or nothing stands."""
    is_name = isinstance(shape.of, Leaf) and (not shape.of.tokens or bool(name_of(list(shape.of.tokens))))
    return None if is_name else shape.of


def _same_decimal(decimal: tuple[str, ...], other: Shape) -> bool:
    """Whether both are the same decimal, written with a point: `7.07`, not `7`."""
    value = other.value if isinstance(other, Named) else other
    if not isinstance(value, Leaf):
        return False
    both = [[token for token in one if token not in {"+", "-"}] for one in (decimal, value.tokens)]
    has_point = all(len(one) == 1 and "." in one[0] for one in both)
    return has_point and read_number(list(decimal)) == read_number(list(value.tokens)) is not None


def _rounds(exact: Shape, decimal: tuple[str, ...]) -> bool:
    value = exact.value if isinstance(exact, Named) else exact
    return isinstance(value, Leaf) and rounds_to(value.tokens, decimal)


def _same_joined(gold: Shape, answer: Shape) -> bool:
    """Conditions listed one by one, or a union, against one region: `x < 1, x \\neq 0`."""
    is_set = [isinstance(one, Union | Relation | Ordered) for one in (gold, answer)]
    if not any(is_set) or (not is_solved(answer) and is_solved(gold)):
        return False
    both = [intersection(one) or region(one) for one in (gold, answer)]
    return both[0] is not None and both[1] is not None and equal_sets(both[0], both[1])


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
        return not _is_value(answer) and _same_equation(gold, answer.equation)
    if isinstance(gold, Named) and isinstance(answer, Equation):
        # 2x + 3 = 9 restates a problem whose answer is x = 3
        is_term = isinstance(gold.value, Leaf) and not gold.value.is_text() and not _is_value(gold)
        return is_term and _same_equation(gold.equation, answer)
    return _same(
        gold.value if isinstance(gold, Named) else gold, answer.value if isinstance(answer, Named) else answer
    )


def _is_value(named: Named) -> bool:
    """Whether what is named holds no variable."""
    return isinstance(named.value, Leaf) and not (
        any(token.isalpha() and token not in {"e", "i"} for token in named.value.tokens)
        or GREEK & set(named.value.tokens)
    )


def _same_equation(gold: Equation, answer: Equation) -> bool:
    """Two equations are one if the differences of their sides are proportional."""
    of_gold = gold_expression(gold.left) - gold_expression(gold.right)
    of_answer = expression(answer.left) - expression(answer.right)
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
    if _has_base(gold.tokens) and gold.tokens[-4:] == ("_", "{", "10", "}"):
        # a gold that says that it is decimal
        gold = Leaf(gold.tokens[:-4])
        if not _has_base(answer.tokens):
            return _same_leaf(gold, answer)
    if "\\mathbb" in gold.tokens:
        # a set that is named, not an expression
        return False
    if any(_has_base(leaf.tokens) for leaf in (gold, answer)) or "\\overline" in gold.tokens + answer.tokens:
        return False
    return same_expression(gold_expression(gold.tokens), expression(answer.tokens))


def _same_region(gold: Shape, answer: Shape) -> bool:
    """Intervals, unions and inequalities as sets of reals where both are regions; else two expressions."""
    names = [{frozenset(letters(one)) for one in relations(shape)} for shape in (gold, answer)]
    if max(map(len, names)) > 1 or (all(names) and names[0] != names[1]):
        return False
    if not is_solved(answer) and is_solved(gold):
        return False
    regions = (region(gold), region(answer))
    if regions[0] is not None and regions[1] is not None:
        return equal_sets(regions[0], regions[1])
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _same_leaf(gold, answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_chain(gold, answer)
    return False


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


def _has_base(found: tuple[str, ...]) -> bool:
    """`204_{5}`: a numeral in another base, compared as it is written."""
    return any(token == "_" and found[index - 1][0].isdigit() for index, token in enumerate(found) if index)

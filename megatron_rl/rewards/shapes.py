"""The structure of an answer, out of canonical tokens: list, tuple, matrix, equation, relation, expression.

Comma lists, sets and "a or b" are one shape without order; tuples, intervals, ratios, matrices keep theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.rewards.lexicon import GREEK
from megatron_rl.rewards.rational import read_number
from megatron_rl.rewards.spelling import unwrap
from megatron_rl.rewards.units import closing, is_text, strip_units

_MATRICES = {f"{{{kind}matrix}}" for kind in ("", "p", "b", "v", "B", "V", "small")} | {"{array}"}
RELATIONS = {"<", ">", "\\leq", "\\geq", "\\neq"}
_NAME_SIGNS = {"_", "{", "}", "(", ")", ",", "'", "\\overline", "\\overrightarrow", "\\vec", "\\cap"} | GREEK
_FIGURES = {"\\angle", "\\triangle"}
_LINES = {"\\overline", "\\overrightarrow", "\\vec"}
_INVERSE = ["^", "{", "-", "1", "}"]
_OR = {"or", "\\text{or}"}
_WORDS = {"and", "\\text{and}", *_OR}
_COMMAS = {",", ";"}
_NOTHING = "?"  # of words: equal only to itself
_COMPLEX = {"z", "w"}  # letters whose bars make a modulus, where those of x make an equation
_MAX_DEPTH = 12


@dataclass(frozen=True, slots=True)
class Leaf:
    """One expression, or words."""

    tokens: tuple[str, ...]

    def is_text(self) -> bool:
        return is_text(list(self.tokens))


@dataclass(frozen=True, slots=True)
class Relation:
    """An inequality, possibly a chain such as `1 < x \\leq 2`."""

    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unordered:
    items: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """A tuple, an interval, or a ratio (`opening` is then `:`)."""

    opening: str
    closing: str
    items: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """Parts joined by `\\cup`."""

    parts: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Shape, ...], ...]
    bars: str = ""  # `v` for a determinant, `V` for a norm


@dataclass(frozen=True, slots=True)
class Named:
    """`name = value`, with a plain name on the left."""

    name: str
    value: Shape
    equation: Equation


@dataclass(frozen=True, slots=True)
class Approximate:
    """`value \\approx decimal`; without a value, `of` is empty or a name."""

    of: Shape
    decimal: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    left: tuple[str, ...]
    right: tuple[str, ...]


Shape = Leaf | Relation | Unordered | Ordered | Union | Matrix | Named | Approximate | Equation


def read_shape(found: list[str], depth: int = 0) -> Shape:
    """The structure of these tokens; what has none is a `Leaf`."""
    found = strip_units(unwrap(found))
    if depth > _MAX_DEPTH or not found:
        return Leaf(tuple(found))
    matrix = _read_matrix(found, depth)
    if matrix is not None:
        return matrix
    if len(found) > 2 and (found[0], found[-1]) in {("(", ")"), ("[", "]")}:
        matrix = _read_matrix(found[1:-1], depth)
        if matrix is not None:
            return matrix
    multiple = _read_multiple(found, depth)
    if multiple is not None:
        return multiple
    if found[0] == "\\begin{cases}" and found[-1] == "\\end{cases}" and "&" not in found:
        rows = [read_shape(row, depth + 1) for row in split(found[1:-1], {"\\\\"}) if row]
        return Unordered(tuple(rows)) if all(isinstance(row, Named) for row in rows) else Leaf(tuple(found))
    either = [piece for piece in split(found, _OR) if piece]
    if len(either) > 1 and all(_is_relation(piece) for piece in either):
        return Union(tuple(read_shape(piece, depth + 1) for piece in either))
    # a comma may stand before its "and"
    joints = [
        t for t, after in zip(found, [*found[1:], ""], strict=True) if t not in _COMMAS or after not in _WORDS
    ]
    pieces = split(joints, _COMMAS | _WORDS)
    if len(pieces) > 1:
        # where an item is missing, the others are no answer
        return Unordered(_flat(pieces, depth)) if all(pieces) else Leaf((_NOTHING, *found))
    if len(parts := split(found, {"\\cup"})) > 1:
        return Union(tuple(read_shape(part, depth + 1) for part in parts))
    bracketed = _read_bracketed(found, depth)
    if bracketed is not None:
        return bracketed
    return _read_statement(found, depth)


def _is_relation(found: list[str]) -> bool:
    return any(token in RELATIONS for token in found) and not any(t in {",", ";"} for t in found)


def split(found: list[str], separators: set[str]) -> list[list[str]]:
    """`found` cut at the separators outside all brackets."""
    pieces: list[list[str]] = [[]]
    depth = 0
    for token in found:
        opens = token in {"(", "[", "{", "\\{"} or token.startswith("\\begin")
        closes = token in {")", "]", "}", "\\}"} or token.startswith("\\end")
        depth += opens - closes
        if depth == 0 and token in separators:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def _flat(pieces: list[list[str]], depth: int) -> tuple[Shape, ...]:
    """Items with inner `\\pm` pairs spread out: `{1 \\pm a, 2}` has three elements; a set in a set is one."""
    spread: list[Shape] = []
    for piece in filter(None, pieces):
        item = read_shape(piece, depth + 1)
        is_pair = isinstance(item, Unordered) and not {"\\{", "\\emptyset"} & {piece[0]}
        spread.extend(item.items if isinstance(item, Unordered) and is_pair else [item])
    return tuple(spread)


def _read_matrix(found: list[str], depth: int) -> Matrix | None:
    environment = found[0].removeprefix("\\begin")
    if environment not in _MATRICES or found[-1] != "\\end" + environment:
        return None
    body = found[1:-1]
    if found[0] == "\\begin{array}" and body and body[0] == "{":
        body = body[(closing(body, 0) or 0) + 1 :]
    rows = [split(row, {"&"}) for row in split(body, {"\\\\"}) if row]
    bars = environment[1] if environment[1] in "vV" else ""
    return Matrix(tuple(tuple(read_shape(cell, depth + 1) for cell in row) for row in rows), bars)


def _read_multiple(found: list[str], depth: int) -> Matrix | None:
    """A number in front of a matrix, which multiplies each of its elements."""
    start = next((index for index, token in enumerate(found) if token.startswith("\\begin")), 0)
    factor = found[:start]
    if factor[-1:] == ["\\cdot"]:
        factor.pop()
    if factor == ["-"]:
        factor.append("1")
    matrix = (
        _read_matrix(found[start:], depth) if factor and read_number(factor or ["1"]) is not None else None
    )
    if matrix is None or not all(isinstance(cell, Leaf) for row in matrix.rows for cell in row):
        return None
    scaled = [
        [("(", *factor, ")", "\\cdot", "(", *cell.tokens, ")") for cell in row if isinstance(cell, Leaf)]
        for row in matrix.rows
    ]
    return Matrix(tuple(tuple(Leaf(cell) for cell in row) for row in scaled))


def _read_bracketed(found: list[str], depth: int) -> Shape | None:
    if found[0] not in {"(", "[", "\\{"} or closing(found, 0) != len(found) - 1:
        return None
    inside = found[1:-1]
    if found[0] == "\\{":
        builder = split(inside, {"|", ":"})
        if len(builder) == 2:
            left = split(builder[0], {"\\in"})[0]
            condition = read_shape(builder[1], depth + 1)
            # of what is a name, the condition says all; 2n for whole n is another matter
            return condition if name_of(left) else Ordered("{", "}", (Leaf(tuple(builder[0])), condition))
        pieces = split(inside, _COMMAS)
        return Unordered(_flat(pieces, depth))
    pieces = split(inside, _COMMAS)
    signs = [piece for piece in pieces if "\\pm" in piece or "\\mp" in piece]
    if len(pieces) > 1 and signs:
        both = [[_with_sign(token, upper) for token in found] for upper in (True, False)]
        return Unordered(tuple(read_shape(one, depth + 1) for one in both))
    if len(pieces) == 1:
        return read_shape(inside, depth + 1) if (found[0], found[-1]) == ("(", ")") else None
    return Ordered(found[0], found[-1], tuple(read_shape(piece, depth + 1) for piece in pieces))


def _read_statement(found: list[str], depth: int) -> Shape:
    """Membership, equations, inequalities, ratios, plus-minus pairs; else one expression."""
    about = split(found, {"\\approx"})
    if len(about) > 1:
        of = read_shape(about[0], depth + 1)
        return Approximate(of, tuple(strip_units(about[1]))) if len(about) == 2 else Leaf(tuple(found))
    member = split(found, {"\\in"})
    if len(member) == 2 and name_of(member[0]):
        return read_shape(member[1], depth + 1)
    sides = split(found, {"="})
    if len(sides) > 1 and all(sides):
        values = [read_number(side) for side in sides]
        if None not in values and len(set(values)) == 1:
            # 3 * 4 = 12 is a way to say 12
            return Leaf(tuple(sides[-1]))
        known = {value for value in values[1:] if value is not None}
        if len(known) > 1:
            # x = 3 = 4 names several values
            return Unordered(tuple(Leaf(tuple(side)) for side in sides[1:]))
        if len(sides) == 2 and values[0] is not None and name_of(sides[1]):
            # 3 = x
            sides.reverse()
        equation = Equation(tuple(sides[0]), tuple(sides[-1]))
        name = name_of(sides[0])
        return Named(name, read_shape(sides[-1], depth + 1), equation) if name else equation
    if any(token in RELATIONS for token in found):
        return Relation(tuple(found))
    if found == ["\\emptyset"]:
        return Unordered(())
    ratio = split(found, {":"})
    if len(ratio) > 1 and all(ratio):
        parts = [
            Leaf((_NOTHING, *part)) if part[0][:1] == "0" != part[0] else read_shape(part, depth + 1)
            for part in ratio[1:]
        ]
        return Ordered(":", ":", (read_shape(ratio[0], depth + 1), *parts))
    if "\\pm" in found or "\\mp" in found:
        both = [tuple(_with_sign(token, upper) for token in found) for upper in (True, False)]
        return Unordered(tuple(map(Leaf, both)))
    return Leaf(tuple(found))


def _with_sign(token: str, upper: bool) -> str:
    """`\\pm` and `\\mp` as their upper or lower sign."""
    return {"\\pm": "+-", "\\mp": "-+"}[token][not upper] if token in {"\\pm", "\\mp"} else token


def name_of(found: list[str]) -> str:
    """`x`, `a_{37}`, `f(x)`, `|z|`, `\\theta` or `(p,q,r)` as one string; nothing for what has a value."""
    if found and found[0] in _FIGURES:
        found = found[1:]
    if found[1:6] == _INVERSE and found[6:7] == ["("]:
        found = [found[0], *found[6:]]
        return name + "^{-1}" if (name := name_of(found)) else ""
    is_length = len(found) == 3 and found[0] == found[2] == "|" and found[1].isupper() and len(found[1]) == 2
    inner = found[1:-1]
    has_modulus = found[:1] == found[-1:] and (
        (found[:1] == ["|"] and inner[:1] and (inner[0] in _COMPLEX | _LINES)) or found[:1] == ["\\|"]
    )
    if has_modulus:
        return f"|{name}|" if (name := name_of(inner)) else ""
    if is_length or (len(found) == 1 and found[0].startswith("\\text{") and len(found[0]) < 40):
        return "".join(found)
    if not found or not (
        found[0].isalpha() or found[0] in {"(", *GREEK} or (found[0] in _LINES and found[1:2] == ["{"])
    ):
        return ""
    if found[0] == "(":
        # each part of (p,q,r) is a name
        parts = split(found[1:-1], {","}) if closing(found, 0) == len(found) - 1 else [[]]
        return "".join(found) if all(map(name_of, parts)) else ""
    for before, token in zip(["", *found], found, strict=False):
        is_index = token.isdigit() and before in {"{", "("}
        if not (token.isalpha() or is_index or token in _NAME_SIGNS):
            return ""
    # (8) and \overline{8} are values
    return "".join(found) if any(token.isalpha() or token in GREEK for token in found) else ""

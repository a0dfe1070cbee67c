"""The many spellings of one answer: LaTeX and plain text to a canonical list of tokens.

Pure string work on texts of bounded length; values are never computed here.
"""

from __future__ import annotations

import re
from itertools import pairwise

# no alternative of this pattern can match the same text in two ways: it cannot backtrack
_TOKEN = re.compile(
    r"\\(?:begin|end)\{[A-Za-z]+\*?\}|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]+|\s+|.", re.S
)
_TEXT_COMMANDS = {
    "\\text", "\\textbf", "\\textnormal", "\\textrm", "\\textit", "\\textsf", "\\texttt", "\\mbox", "\\hbox",
    "\\mathrm", "\\mathbf", "\\mathit", "\\mathsf",
}  # fmt: skip
_DROPPED = {
    "$", "\\$", "\\(", "\\)", "\\[", "\\]", "\\left", "\\right", "\\displaystyle", "\\limits", "\\big",
    "\\Big", "\\bigl", "\\bigr", "\\Bigl", "\\Bigr", "€", "£", "¥", "\\pounds", "\\bf", "\\rm",
}  # fmt: skip
_SPACES = {"\\,", "\\!", "\\;", "\\:", "\\ ", "~", "\\quad", "\\qquad"}
_SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\times": "\\cdot",
    "*": "\\cdot", "\\div": "/",
    "\\le": "\\leq", "\\leqslant": "\\leq", "\\ge": "\\geq", "\\geqslant": "\\geq", "\\ne": "\\neq",
    "\\lt": "<",
    "\\gt": ">", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\langle": "(", "\\rangle": ")", "\\lvert": "|",
    "\\rvert": "|", "\\vert": "|", "\\mid": "|", "\\dots": "\\ldots", "\\cdots": "\\ldots", "\\%": "%",
    "\\varnothing": "\\emptyset", "\\degree": "°", "\\backslash": "\\setminus", "\\infin": "\\infty",
    "\\lor": "or",
}  # fmt: skip
_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": "\\cdot ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "≤": "\\leq ",  # noqa: RUF001
    "≥": "\\geq ", "≠": "\\neq ", "∞": "\\infty ", "π": "\\pi ", "√": "\\sqrt ", "∪": "\\cup ", "∩": "\\cap ",  # noqa: RUF001
    "∅": "\\emptyset ", "±": "\\pm ", "、": ",", "，": ",", "。": ".", "∈": "\\in ", "ℝ": "\\mathbb{R}",  # noqa: RUF001
    "²": "^{2}", "³": "^{3}", "⁴": "^{4}", "⁵": "^{5}", "⁶": "^{6}", "⁷": "^{7}", "⁸": "^{8}", "⁹": "^{9}",
    "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "θ": "\\theta ", "\u3000": " ", "º": "°",
}  # fmt: skip
_FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_UNICODE_TABLE = str.maketrans(_FULL_WIDTH | _UNICODE)
_UNITS = {
    "cm", "mm", "km", "dm", "ft", "kg", "mg", "lb", "lbs", "oz", "mph", "kph", "sec", "min", "hr", "hrs",
    "cents", "cent", "dollars", "dollar", "euros", "degrees", "degree", "inches", "inch", "feet", "foot",
    "miles", "mile", "meters", "meter", "metres", "metre", "hours", "hour", "minutes", "minute", "seconds",
    "second", "days", "day", "weeks", "week", "months", "month", "years", "year", "people", "units", "unit",
    "square", "cubic", "per", "percent", "grams", "gram", "liters", "liter",
}  # fmt: skip
_TRIGONOMETRIC = {"\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"}
_NOT_UNITS = {"and", "or", "not", "no", "none", "to", "plus", "minus", "times", "over"}
_MAX_UNIT_WORDS = 4


def tokens(text: str) -> list[str]:
    """Canonical tokens of an answer: differences of spelling gone. `\\text{...}` is one token."""
    raw = [_SAME.get(token, token) for token in _TOKEN.findall(text.translate(_UNICODE_TABLE))]
    found = _join_thousands(_gather_texts([token for token in raw if token not in _DROPPED]))
    found = [token for token in found if not token.isspace() and token not in _SPACES]
    found = _brace_arguments(_degrees(found))
    while found and found[-1] in {".", ",", ";"}:
        found.pop()
    return strip_units(unwrap(found))


def spell(found: list[str]) -> str:
    """One string for a list of tokens; two answers with equal strings are the same answer."""
    text = join(found)
    # words do not differ by case; single letters (variables, choices) do
    return text.casefold() if is_text(found) and len(text) > 1 else text


def join(found: list[str]) -> str:
    """The tokens as LaTeX, with spaces only where two tokens would fuse."""
    joined: list[str] = []
    for token in found:
        before = joined[-1] if joined else ""
        if (before.startswith("\\") and before[-1].isalpha() and token[0].isalpha()) or (
            before[-1:].isdigit() and token[0].isdigit()
        ):
            joined.append(" ")
        joined.append(token)
    return "".join(joined)


def is_text(found: list[str]) -> bool:
    """Whether these tokens are words rather than mathematics: only string equality can judge them."""
    if any(token.startswith("\\text{") or not (token.isascii() or token == "°") for token in found):
        return True
    if any(token in {'"', "'", "`", "@", "#", "?"} or token.startswith("\\begin") for token in found):
        return True
    if any(a[0].isdigit() and b[0].isdigit() for a, b in pairwise(found)):
        # two numerals side by side are no number
        return True
    words = [token for token in found if token.isalpha()]
    return bool(words) and len(words) == len(found) and max(map(len, words)) > 2


def unwrap(found: list[str]) -> list[str]:
    """The inside of braces, of parentheses around one token, or of `\\text{...}`, if they are the whole."""
    while True:
        if len(found) == 1 and found[0].startswith("\\text{"):
            inner = [token for token in _TOKEN.findall(found[0][6:-1]) if not token.isspace()]
            if not inner:
                return []
            if inner[-1] == ".":
                inner.pop()
            found = [_SAME.get(token, token) for token in inner]
            continue
        in_braces = len(found) > 2 and found[0] == "{" and closing(found, 0) == len(found) - 1
        in_parentheses = len(found) == 3 and (found[0], found[2]) == ("(", ")")
        if not in_braces and not in_parentheses:
            return found
        found = found[1:-1]


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
    if exponent:
        body = body[:-4]
    if len(body) < 2:
        return found
    last = body[-1]
    is_unit_text = last.startswith("\\text{") and _is_unit_text(last[6:-1])
    if (not is_unit_text and last not in _UNITS) or is_text(body[:-1]):
        return found
    if "percent" in last:
        return [*body[:-1], "%"]
    return strip_units(body[:-1])


def _is_unit_text(content: str) -> bool:
    words = content.replace(".", " ").replace("/", " ").replace("-", " ").split()
    if not 0 < len(words) <= _MAX_UNIT_WORDS:
        return False
    return all(word.isascii() and word.isalpha() and word.lower() not in _NOT_UNITS for word in words)


def _gather_texts(found: list[str]) -> list[str]:
    """`\\textbf`, `{`, ..., `}` as the single token `\\text{...}`."""
    gathered: list[str] = []
    index = 0
    while index < len(found):
        if found[index] in _TEXT_COMMANDS and index + 1 < len(found) and found[index + 1] == "{":
            end = closing(found, index + 1)
            if end is not None:
                content = " ".join(
                    "".join(" " if t in _SPACES else t for t in found[index + 2 : end]).split()
                )
                gathered.append("\\text{" + content + "}")
                index = end + 1
                continue
        gathered.append(found[index])
        index += 1
    return gathered


def _join_thousands(found: list[str]) -> list[str]:
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
    for separator in (["{", ",", "}"], [",", "\\!"], [","], ["\\,"], ["\\!"], [" "], ["\\ "], ["~"]):
        after = index + len(separator)
        if found[index:after] != separator or after >= len(found):
            continue
        # inside brackets a bare comma separates elements
        if separator == [","] and in_brackets:
            return None
        digits = found[after].split(".")[0]
        return after if len(digits) == 3 and digits.isdigit() else None
    return None


def _degrees(found: list[str]) -> list[str]:
    """`^\\circ` and `^{\\circ}` as the token `°`; only the argument of a trigonometric function keeps it."""
    out: list[str] = []
    index = 0
    while index < len(found):
        for spelling in (["^", "{", "\\circ", "}"], ["^", "\\circ"]):
            if found[index : index + len(spelling)] == spelling:
                out.append("°")
                index += len(spelling)
                break
        else:
            out.append(found[index])
            index += 1
    return out if any(token in _TRIGONOMETRIC for token in out) else [token for token in out if token != "°"]


def _brace_arguments(found: list[str]) -> list[str]:
    """`\\frac12`, `\\sqrt2`, `x^2` and `a_1` with the braces that TeX lets one leave out."""
    out: list[str] = []
    pending = list(reversed(found))
    while pending:
        token = pending.pop()
        out.append(token)
        if token == "\\sqrt" and pending and pending[-1] == "[":
            while pending and out[-1] != "]":
                out.append(pending.pop())
        for _ in range({"\\frac": 2, "\\sqrt": 1, "\\binom": 2, "^": 1, "_": 1}.get(token, 0)):
            _brace_one(out, pending, whole_number=token in {"^", "_"} or token == "\\sqrt")
    return out


def _brace_one(out: list[str], pending: list[str], *, whole_number: bool) -> None:
    if not pending:
        return
    token = pending[-1]
    if token == "{":
        # copy the group as it is, with its own arguments braced
        end = closing(list(reversed(pending)), 0)
        group = [pending.pop() for _ in range(end + 1 if end is not None else len(pending))]
        out.extend(["{", *_brace_arguments(group[1:-1]), "}"] if end is not None else group)
        return
    if token in {"(", "["} or token.startswith("\\"):
        return
    pending.pop()
    takes_one_character = token.isalpha() or (token[0].isdigit() and not whole_number)
    if takes_one_character and len(token) > 1:
        pending.append(token[1:])
        token = token[0]
    out.extend(["{", token, "}"])

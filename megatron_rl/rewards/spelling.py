"""The many spellings of one answer: LaTeX and plain text to a canonical list of tokens.

Pure string work on texts of bounded length; values are never computed here.
"""

from __future__ import annotations

import unicodedata

from megatron_rl.rewards.lexicon import (
    CHOICE_WORDS,
    CLOSING,
    CURRENCIES,
    CURRENCY,
    DOTS,
    DROPPED,
    DROPPED_WITH_ARGUMENT,
    E_NOTATION,
    FUNCTIONS,
    GREEK,
    HALF_DAYS,
    INFIXES,
    LENGTH_UNITS,
    LETTER_COMMANDS,
    LOWERED,
    NUM_ARGUMENTS,
    OPENING,
    RAISED,
    RAISED_TABLE,
    SAME,
    SPACES,
    TEXT_COMMANDS,
    TOKEN,
    TRIGONOMETRIC,
    UNICODE_TABLE,
)
from megatron_rl.rewards.numerals import bases, join_thousands, repeating
from megatron_rl.rewards.units import closing, is_choice, is_text, strip_units


def tokens(text: str) -> list[str]:
    """Canonical tokens of an answer: differences of spelling gone. `\\text{...}` is one token."""
    plain = text if text.isascii() else _plain(text)
    plain = DOTS.sub(r"\\ldots ", E_NOTATION.sub(r"\1\\cdot 10^{\2}", plain)).replace("Rs.", "Rs ")
    raw = [SAME.get(token, token) for token in TOKEN.findall(plain)]
    found = join_thousands(_gather_texts(_without_layout(_infix_arguments(raw))))
    found = [FUNCTIONS.get(token, token) for token in found if not token.isspace() and token not in SPACES]
    if CURRENCY.search(plain):
        found = _without_currency(found)
    if "mod" in plain:
        found = _moduli(found)
    found = _brace_arguments(_degrees(_bare_colons(found)))
    found = repeating(found) if "." in plain else found
    found = bases(found) if "_" in found else found
    while found and found[-1] in {".", ",", ";", "\\", "\\\\"}:
        found.pop()
    if found[:1] == found[-1:] == ["\\cdot"]:
        # **bold**
        found = found[1:-1]
    return strip_units(_half_days(_facing_brackets(unwrap(found))))


def _plain(text: str) -> str:
    """Without what Unicode has and LaTeX writes in another way."""
    plain = RAISED.sub(lambda run: "^{" + run[0].translate(RAISED_TABLE) + "}", text)
    plain = LOWERED.sub(lambda run: "_{" + run[0].translate(RAISED_TABLE) + "}", plain)
    plain = plain.translate(UNICODE_TABLE)
    if plain.isascii():
        return plain
    return "".join(char if char.isascii() else _ascii_sign(char) for char in plain)


def _infix_arguments(found: list[str]) -> list[str]:
    """`{5 \\choose 2}` as `{\\binom{5}{2}}` and `{1 \\over 2}` as `{\\frac{1}{2}}`."""
    if INFIXES.keys().isdisjoint(found):
        return found
    out: list[str] = []
    starts, signs = [0], [-1]  # of the open groups: where they begin and where their sign stands
    for token in [*found, ""]:
        if (token in CLOSING or not token) and (len(starts) > 1 or not token):
            start, sign = starts.pop(), signs.pop()
            if sign >= 0:
                out[start:] = [INFIXES[out[sign]], "{", *out[start:sign], "}", "{", *out[sign + 1 :], "}"]
        if token in INFIXES and signs[-1] < 0:
            signs[-1] = len(out)
        out.append(token)
        if token in OPENING:
            starts.append(len(out))
            signs.append(-1)
    return out[:-1]


def _half_days(found: list[str]) -> list[str]:
    """`3 PM`, `3:30 pm` and `3\\text{ p.m.}` with the one token `\\text{pm}` at their end."""
    num_tokens = 3 if found[-2:-1] == ["."] else 1
    body, tail = found[:-num_tokens], "".join(found[-num_tokens:])
    half = HALF_DAYS.get(tail.removeprefix("\\text{").rstrip("}").casefold())
    is_sure = not tail.isalpha() or tail.isupper() or ":" in body
    return [*body, f"\\text{{{half}}}"] if half and is_sure and body and body[-1].isdigit() else found


def _facing_brackets(found: list[str]) -> list[str]:
    """`]0, 1[`, the French interval, as `(0, 1)`."""
    if len(found) < 5 or found[0] not in {"[", "]", "("} or found[-1] not in {"[", "]", ")"}:
        return found
    if found[0] != "]" and found[-1] != "[":
        return found
    if any(token in {"[", "]"} for token in found[1:-1]):
        return found
    return ["(" if found[0] == "]" else found[0], *found[1:-1], ")" if found[-1] == "[" else found[-1]]


def _ascii_sign(char: str) -> str:
    """Digits of other scripts and letters of mathematical fonts as ours; a circled digit is a word, not a number."""
    if "\U0001d400" <= char <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", char).translate(UNICODE_TABLE)
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    return f"\\text{{sign{ord(char):x}}}" if char.isdigit() else char


def _without_layout(raw: list[str]) -> list[str]:
    """Tokens without what only sets type; `**` inside is a power, at both ends it is bold."""
    out: list[str] = []
    index = 0
    while index < len(raw):
        token = raw[index]
        index += 1
        if token == "\\\\":
            behind = index + (raw[index : index + 1] != [] and raw[index].isspace())
            index = behind + 4 if _is_length(raw[behind : behind + 4]) else index
            out.append(token)
        elif token in DROPPED_WITH_ARGUMENT and raw[index : index + 1] == ["{"]:
            end = _closing_brace(raw, index)
            index = end + 1 if end is not None else index
        elif token == "\\lg":
            out += ["\\log", "_", "{", "10", "}"]
        elif token == "\\cdot" and raw[index : index + 1] == ["\\cdot"]:
            index += 1
            out.append("^" if out and index < len(raw) else "\\cdot")
        elif token not in DROPPED:
            out.append(token)
    return out


def _is_length(part: list[str]) -> bool:
    """`[4pt]`, which asks for space between two rows."""
    return (
        len(part) == 4
        and (part[0], part[3]) == ("[", "]")
        and part[1][0].isdigit()
        and part[2] in LENGTH_UNITS
    )


def spell(found: list[str]) -> str:
    """One string for a list of tokens; two answers with equal strings are the same answer."""
    if not is_text(found):
        return join(found)
    text = " ".join(token[6:-1] if token.startswith("\\text{") else token for token in found)
    # words do not differ by case; single letters (variables, choices) do
    return text.casefold() if len(text) > 1 else text


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


def unwrap(found: list[str]) -> list[str]:
    """The inside of braces, of parentheses around one token, or of `\\text{...}`, if they are the whole."""
    while True:
        if len(found) == 1 and found[0].startswith("\\text{"):
            inner = [token for token in TOKEN.findall(found[0][6:-1]) if not token.isspace()]
            if not inner:
                return []
            if inner[-1] == ".":
                inner.pop()
            found = [SAME.get(token, token) for token in inner]
            continue
        if len(found) == 2 and found[0] in CHOICE_WORDS and is_choice(found[1]):
            return found[1:]
        if len(found) == 2 and found[1] == ")" and is_choice(found[0]):
            return found[:1]
        in_braces = len(found) > 2 and found[0] == "{" and closing(found, 0) == len(found) - 1
        in_parentheses = len(found) == 3 and (found[0], found[2]) == ("(", ")")
        if not in_braces and not in_parentheses:
            return found
        found = found[1:-1]


def _closing_brace(found: list[str], start: int) -> int | None:
    """Index of the `}` of the `{` at `start`; words hold brackets that close nothing, as in `\\text{A)}`."""
    depth = 0
    for index in range(start, len(found)):
        depth += (found[index] == "{") - (found[index] == "}")
        if depth == 0:
            return index
    return None


def _gather_texts(found: list[str]) -> list[str]:
    """`\\textbf`, `{`, ..., `}` as the single token `\\text{...}`."""
    gathered: list[str] = []
    index = 0
    while index < len(found):
        if found[index] in TEXT_COMMANDS and index + 1 < len(found) and found[index + 1] == "{":
            end = _closing_brace(found, index + 1)
            if end is not None:
                content = " ".join("".join(" " if t in SPACES else t for t in found[index + 2 : end]).split())
                is_letter = found[index] in LETTER_COMMANDS and len(content) == 1
                is_name = found[index] == "\\mathrm" and (content in FUNCTIONS or content in {"e", "i"})
                if is_letter or is_name:
                    gathered.append(FUNCTIONS.get(content, content))
                elif content == "°":
                    gathered.append(content)
                elif content.endswith((" or", " and")):
                    unit, _, joint = content.rpartition(" ")
                    gathered += ["\\text{" + unit.rstrip() + "}", "\\text{" + joint + "}"]
                elif content:
                    gathered.append("\\text{" + content + "}")
                index = end + 1
                continue
        gathered.append(found[index])
        index += 1
    return gathered


def _bare_colons(found: list[str]) -> list[str]:
    """`3{:}30` as `3:30`: TeX's way of asking for less space."""
    out: list[str] = []
    for token in found:
        out.append(token)
        if out[-3:] == ["{", ":", "}"]:
            out[-3:] = [":"]
    return out


def _degrees(found: list[str]) -> list[str]:
    """`^\\circ` and `^{\\circ}` as the token `°`; only the argument of a trigonometric function keeps it."""
    if "°" not in found and "\\circ" not in found and "o" not in found:
        return found
    out: list[str] = []
    index = 0
    while index < len(found):
        for spelling in (["^", "{", "\\circ", "}"], ["^", "\\circ"], ["^", "{", "o", "}"], ["^", "o"]):
            is_sure = "o" not in spelling or "".join(out[-1:]).isdigit()
            if is_sure and found[index : index + len(spelling)] == spelling:
                out.append("°")
                index += len(spelling)
                break
        else:
            out.append(found[index])
            index += 1
    return out if any(token in TRIGONOMETRIC for token in out) else [token for token in out if token != "°"]


def _without_currency(found: list[str]) -> list[str]:
    """`Rs 15`, `\\text{USD }15` and `US\\$15` as `15`."""
    return [
        token
        for before, token, behind in zip(["", *found], found, [*found[1:], ""], strict=False)
        if not behind[:1].isdigit()
        or before.isalnum()
        or token.removeprefix("\\text{").rstrip("}. ") not in CURRENCIES
    ]


def _moduli(found: list[str]) -> list[str]:
    """`(\\text{mod }7)`, `(mod 7)` and `\\text{mod }7` as `\\pmod`, `7`."""
    out: list[str] = []
    pending = list(reversed(found))
    while pending:
        token = pending.pop()
        behind = pending[-1] if pending else ""
        if token == "(" and behind.startswith(("\\pmod", "\\text{mod")):
            end = closing([token, *reversed(pending)], 0)
            if end is not None:
                # the sign brings its own brackets
                del pending[-end]
            continue
        if token.startswith("\\text{mod"):
            pending += [part for part in (token[9:-1].removeprefix("ulo").strip(),) if part]
            token = "\\pmod"
        out.append(token)
    return out


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
        if token == "\\sqrt" and pending and pending[-1] == "(":
            end = closing(list(reversed(pending)), 0)
            if end is not None:
                pending[-1], pending[-1 - end] = "{", "}"
        for _ in range(NUM_ARGUMENTS.get(token, 0)):
            _brace_one(out, pending, whole_number=token in {"^", "_", "\\sqrt", "\\pmod"})
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
    is_argument = token in GREEK or token in {"\\pi", "\\infty"} or token.startswith("\\text{")
    if token in {"(", "["} or (token.startswith("\\") and not is_argument):
        return
    pending.pop()
    takes_one_character = token.isalpha() or (token[0].isdigit() and not whole_number)
    if takes_one_character and len(token) > 1:
        pending.append(token[1:])
        token = token[0]
    out.extend(["{", token, "}"])

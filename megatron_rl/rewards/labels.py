"""What stands beside a value and counts only if the other side has it too: the letter of a choice, half of a day."""

from __future__ import annotations

from megatron_rl.rewards.units import is_choice

_SIGNS = "() .,:"
_BETWEEN = {",", ";", "and", "or"}


def without_label(gold: list[str], answer: list[str]) -> tuple[list[str], list[str]]:
    """`\\textbf{(C)} 12` as `C` where the other side is a letter, else as `12`; `3 pm` as `3` where it says neither.

    Two different letters stay, and so does a letter with another one behind it: that is a list of choices.
    """
    halves = [_half_day(one) for one in (gold, answer)]
    if halves.count("") == 1:
        gold, answer = (one[:-1] if half else one for one, half in zip((gold, answer), halves, strict=True))
    of_gold, of_answer = _label(gold), _label(answer)
    if of_gold[0] and of_answer[0] and of_gold[0] != of_answer[0]:
        return gold, answer
    return _one_of(gold, of_gold, other=answer), _one_of(answer, of_answer, other=gold)


def _half_day(found: list[str]) -> str:
    return (
        found[-1].removeprefix("\\text{").rstrip("}")
        if found[-1:] in (["\\text{am}"], ["\\text{pm}"])
        else ""
    )


def _label(found: list[str]) -> tuple[str, int]:
    """The letter in front of a value and the number of its tokens; nothing where no value or another letter follows."""
    label, length = "", 1
    if len(found) > 3 and (found[0], found[2]) == ("(", ")"):
        label, length = found[1], 3
    elif len(found) > 1 and found[0].startswith("\\text{"):
        content = found[0][6:-1]
        letter = content.strip("() .")
        label = letter if content in {f"({letter})", f"({letter}).", f"{letter}.", f"{letter})"} else ""
    return (label, length) if is_choice(label) and not _names_choice(found[length:]) else ("", 0)


def _names_choice(found: list[str]) -> bool:
    """Whether a letter of a choice stands among these tokens for itself."""
    for index, token in enumerate(found):
        if token.startswith("\\text{"):
            words = token[6:-1].split()
            # "a square" begins with an article, not with a choice
            if any(is_choice(word.strip(_SIGNS)) for word in words[len(words) > 1 and words[0] == "A" :]):
                return True
            continue
        before, behind = "".join(found[max(index - 1, 0) : index]), "".join(found[index + 1 : index + 2])
        is_alone = before in {"", *_BETWEEN} and behind in {"", ".", ")", *_BETWEEN}
        if is_choice(token) and (is_alone or (before, behind) == ("(", ")")):
            return True
    return False


def _one_of(found: list[str], label: tuple[str, int], *, other: list[str]) -> list[str]:
    letter, length = label
    if not letter:
        return found
    return [letter] if len(other) == 1 and is_choice(other[0]) else found[length:]

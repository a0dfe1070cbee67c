"""Where the answer stands in a response: after the reasoning, in the last box, braces balanced.

Plain scanning, each function one pass over the text: nothing here can backtrack on what a policy wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ANSWER_CHARS = 500  # beyond it an answer is compared as a string and never parsed

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_GAP = " \\quad "  # joins no numerals
_BOX_NAMES = ("\\boxed", "\\fbox")


def extract_answer(text: str) -> str | None:
    """Content of the last `\\boxed{...}` or `\\fbox{...}` after the reasoning; None where there is no answer.

    No answer: reasoning that never closes, no box, or a last box that never closes (an earlier box does not
    stand in for it). Boxes inside the box are opened: `\\boxed{\\boxed{5}}` gives `5`.
    """
    final = after_reasoning(text)
    if final is None:
        return None
    box = _last_box(final)
    if box is None or box.end is None:
        return None
    return _open_boxes(final[box.content : box.end]).strip()


def after_reasoning(text: str) -> str | None:
    """What follows the last `</think>`; the whole text without any tag; None if reasoning never closed."""
    close = text.rfind(THINK_CLOSE)
    if close >= 0:
        return text[close + len(THINK_CLOSE) :]
    return None if THINK_OPEN in text else text


@dataclass(slots=True)
class _Box:
    start: int  # of the backslash
    content: int  # first character after the opening brace
    end: int | None = None  # of the closing brace; None while open
    outer: _Box | None = None


def _last_box(text: str) -> _Box | None:
    """The box that opens last; where closed boxes enclose it, the outermost of those."""
    boxes = _scan_boxes(text)
    if not boxes:
        return None
    last = boxes[-1]
    while last.end is not None and last.outer is not None and last.outer.end is not None:
        last = last.outer
    return last


def _scan_boxes(text: str) -> list[_Box]:
    boxes: list[_Box] = []
    open_braces: list[_Box | None] = []  # None: a plain brace
    innermost: _Box | None = None  # open box around the current position
    position = 0
    while position < len(text):
        char = text[position]
        if char == "\\":
            content = _box_content(text, position)
            if content is None:
                # an escaped character (\{ and \} among them) opens and closes nothing
                position += 2
                continue
            box = _Box(start=position, content=content, outer=innermost)
            boxes.append(box)
            open_braces.append(box)
            innermost = box
            position = content
            continue
        if char == "{":
            open_braces.append(None)
        elif char == "}" and open_braces:
            closed = open_braces.pop()
            if closed is not None:
                closed.end = position
                innermost = closed.outer
        position += 1
    return boxes


def _box_content(text: str, backslash: int) -> int | None:
    """Where the content of a box begins whose command starts at `backslash`; None if no box starts there.

    A box command that the text ends on was cut off: it counts as a box that never closes.
    """
    for name in _BOX_NAMES:
        if text.startswith(name, backslash):
            position = backslash + len(name)
            while position < len(text) and text[position].isspace():
                position += 1
            if position == len(text):
                return position
            return position + 1 if text[position] == "{" else None
    return None


def _open_boxes(content: str) -> str:
    """`content` with the commands and braces of its inner boxes taken away; what they held apart stays apart."""
    drop: set[int] = set()
    for box in _scan_boxes(content):
        if box.end is not None:
            drop.update(range(box.start, box.content))
            drop.add(box.end)
    kept: list[str] = []
    before, is_behind_border = "", False
    for position, char in enumerate(content):
        if position in drop:
            is_behind_border = True
        elif char.isspace():
            kept.append(char)
        else:
            kept += [_GAP, char] if is_behind_border and before.isalnum() and char.isalnum() else [char]
            before, is_behind_border = char, False
    return "".join(kept)

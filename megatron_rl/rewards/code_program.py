"""Where the program stands in a response: the last fenced block after the reasoning."""

from __future__ import annotations

from megatron_rl.rewards.extract import after_reasoning

_TICKS = "```"


def extract_program(text: str) -> str | None:
    """Content of the last fenced block after the last `</think>`; None without one.

    A fence counts at the start of a line. It closes at a line of at least as many backticks and nothing else; a last
    block that never closes was cut off and is no program (an earlier one does not stand in for it).
    """
    final = after_reasoning(text)
    if final is None:
        return None
    found: str | None = None
    block: list[str] = []
    ticks = 0  # of the fence that is open, 0 outside of blocks
    for line in final.split("\n"):
        count = len(line) - len(line.lstrip("`"))
        if ticks == 0:
            # an opening fence may name a language, but holds no other backtick: that would be code in a sentence
            if count >= len(_TICKS) and "`" not in line[count:]:
                ticks, block, found = count, [], None
        elif count >= ticks and not line[count:].strip():
            found, ticks = "\n".join(block) + "\n", 0
        else:
            block.append(line.removesuffix("\r"))
    return found

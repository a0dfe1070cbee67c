"""Which part of a response is the program."""

import pytest

from megatron_rl.rewards.code_program import extract_program

FENCE = "```"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"so\n{FENCE}python\na\n{FENCE}\n", "a\n"),
        (f"{FENCE}\na\n{FENCE}", "a\n"),
        (f"{FENCE}py\na\n{FENCE}\nno, rather\n{FENCE}Python3\nb\n{FENCE}\ndone", "b\n"),
        (f"{FENCE}python\r\na\r\nb\r\n{FENCE}\r\n", "a\nb\n"),
        (f"`{FENCE}python\n{FENCE}\na\n`{FENCE}", f"{FENCE}\na\n"),
        (f"<think>{FENCE}\na\n{FENCE}\n</think>\n{FENCE}\nb\n{FENCE}", "b\n"),
        (f"<think>x</think>y</think>\n{FENCE}\nb\n{FENCE}", "b\n"),
        (f"{FENCE}python\nprint('{FENCE}')\n{FENCE}\n", f"print('{FENCE}')\n"),
        (f"{FENCE}python\n  {FENCE}\na\n{FENCE}\n", f"  {FENCE}\na\n"),
        (f"{FENCE}\n{FENCE}", "\n"),
        (f"{FENCE}print(1){FENCE} is code in a sentence\n{FENCE}\na\n{FENCE}", "a\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_after_the_reasoning(text, program):
    assert extract_program(text) == program


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print(1)",
        f"<think>{FENCE}\na\n{FENCE}",
        f"<think>{FENCE}\na\n{FENCE}</think> sorry",
        f"{FENCE}python\na\n",
        f"{FENCE}\na\n{FENCE}\nbetter:\n{FENCE}\nb\n",
        f"so {FENCE}python\na\n",
        f"  {FENCE}\na\n  {FENCE}",
        f"> {FENCE}\n> a\n> {FENCE}",
        "``\na\n``",
    ],
)
def test_without_a_closed_block_there_is_no_program(text):
    assert extract_program(text) is None

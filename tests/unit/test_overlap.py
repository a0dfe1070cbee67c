"""Problems that are the same but for looks, and runs of words shared with evaluation problems."""

from __future__ import annotations

import pytest

from megatron_rl.data.overlap import EvaluationIndex, normalised, words

HELD_OUT = "A tram leaves the depot at noon with twelve riders and nobody else boards it."


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x + 1$.", "find  x+1"),
        (r"Is \left( \dfrac{1}{2} \right) odd?", r"Is (\frac{1}{2}) odd"),
        (r"A\,B\quad C", "abc"),
        (r"$\tfrac12$", r"\frac12"),
    ],
)
def test_looks_do_not_count(one, other):
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("3+4", "3-4"), ("x^2", "x2"), (r"\leftarrow", "arrow"), (r"\frac12", r"\frac13"), ("(0,1)", "[0,1]")],
)
def test_signs_count(one, other):
    assert normalised(one) != normalised(other)


def test_words_are_runs_of_letters_or_digits_and_single_ideographs():
    assert words(r"Let $\frac{12}{x_1}$ be 7th.") == ["let", "frac", "12", "x", "1", "be", "7th"]
    assert words("求12个") == ["求", "12", "个"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HELD_OUT, True),
        ("Yesterday: " + HELD_OUT.upper().replace(" ", "  "), True),
        ("The depot at noon, with twelve riders and nobody else: boards!", True),
        ("Twelve riders and nobody else boards it.", False),
        ("A bus leaves the depot at noon with twelve riders.", False),
    ],
    ids=["whole", "other_looks", "nine_words", "seven_words", "eight_words"],
)
def test_nine_shared_words_in_a_row_are_found_and_fewer_are_not(text, found):
    index = EvaluationIndex(9)
    index.add(HELD_OUT, name="eval.jsonl", problem_id="e1")
    assert index.find(text) == ("eval.jsonl: e1" if found else None)
    assert index.hits["eval.jsonl"] == found


def test_an_evaluation_problem_of_few_words_is_found_as_a_whole_only():
    index = EvaluationIndex(9)
    index.add("What is 2 + 2?", name="e", problem_id="1")
    assert index.find("what is 2+2") == "e: 1"
    assert index.find("What is 2 + 2 + 2?") is None

"""Write the data of the small twins of the shipped recipes (`recipes/*/*_tiny.yaml`).

Problems that a model of a million parameters can learn, in the schemas of the public sets: chains of one-digit sums
with worked traces, and programs that compute a formula given in the prompt, with tests. Rows of real problem files
can be mixed in: they go the same way, though so small a model hardly ever solves one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prepare_math_data import Chain, answer, chain, num_chains, prompt_row, trace, write_rows

from megatron_rl.arguments import positive_int
from megatron_rl.data.prompts import prompts_from_rows
from megatron_rl.data.rows import read_rows
from megatron_rl.errors import DataError

TERMS = (2, 3, 4, 5)
TEST_INPUTS = (0, 1, 3, 4, 6, 9, 12, 20)
CURRICULUM = 192  # chains of the file for staged curricula
# bytes of a real problem; a tiny model reads bytes, and its context is short
MAX_REAL_BYTES = 240
# how GSM8K marks the sums inside a worked solution
_CALCULATOR = re.compile(r"<<[^>]*>>")


class Formula(NamedTuple):
    """`first` below `bound`, `second` from there on; without `second` it is `first` everywhere."""

    first: str
    bound: int = 0
    second: str = ""

    @property
    def expression(self) -> str:
        return f"{self.first} if n<{self.bound} else {self.second}" if self.second else self.first

    @property
    def prompt(self) -> str:
        return f"Read n, print {self.expression}"

    @property
    def program(self) -> str:
        return f"n=int(input())\nprint({self.expression})"

    @property
    def response(self) -> str:
        return f"<think>{self.expression}</think>```python\n{self.program}\n```".replace(
            "</think>```", "</think>\n```"
        )

    def value(self, n: int) -> int:
        linear = self.second if self.second and n >= self.bound else self.first
        factor, sign, offset = re.fullmatch(r"(\d)\*n([+-])(\d)", linear).groups()  # type: ignore[union-attr]
        return int(factor) * n + (int(offset) if sign == "+" else -int(offset))


def formulas(seed: int, count: int) -> list[Formula]:
    """Distinct formulas, half with two branches: a program that gets one branch wrong passes a part of its tests."""
    rng = random.Random(seed)
    found: dict[Formula, None] = {}
    while len(found) < count:
        one = Formula(_linear(rng))
        if rng.random() < 0.5:
            one = Formula(one.first, rng.choice((2, 5, 8)), _linear(rng))
        if one.first != one.second:
            found[one] = None
    return list(found)


def _linear(rng: random.Random) -> str:
    return f"{rng.randint(2, 9)}*n{rng.choice('+-')}{rng.randint(1, 9)}"


def code_row(formula: Formula, *, index: int, source: str) -> dict[str, Any]:
    """A row in the schema of Klear's CodeSub-15K: the gold is JSON text with the tests."""
    tests = {
        "inputs": [f"{n}\n" for n in TEST_INPUTS],
        "outputs": [f"{formula.value(n)}\n" for n in TEST_INPUTS],
    }
    return {
        "hash": f"{source}-{index}",
        "ability": "code",
        "data_source": source,
        "prompt": [{"role": "user", "content": formula.prompt}],
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
        "extra_info": {"index": index, "difficulty": 2 if formula.second else 1},
    }


def chains(seed: int, count: int) -> list[Chain]:
    """Distinct chains, equally many of each length as far as there are."""
    rng = random.Random(seed)
    found: dict[Chain, None] = {}
    while len(found) < count:
        terms = rng.choice(TERMS)
        found[Chain(terms, chain(rng.randrange(num_chains(terms)), terms))] = None
    return list(found)


def real_rows(files: Sequence[Path], *, limit: int, seed: int) -> list[dict[str, Any]]:
    """`limit` short problems of the files: problem, answer, difficulty and, where there is one, the solution.

    Raises DataError when none is short enough.
    """
    rows = [row for file in files for row in read_rows(file)]
    solutions = {row.get("problem"): row.get("solution") for row in rows}
    prompts, _, _ = prompts_from_rows(rows)
    short = [
        {
            "problem": text,
            "answer": prompt.answer,
            "difficulty": prompt.difficulty,
            "solution": solutions.get(text),
        }
        for prompt in prompts
        if len((text := prompt.messages[-1]["content"]).encode()) <= MAX_REAL_BYTES
    ]
    if files and not short:
        raise DataError(
            f"--real: no problem of at most {MAX_REAL_BYTES} bytes in {', '.join(map(str, files))}"
        )
    random.Random(seed).shuffle(short)
    return short[:limit]


def write_twins(out: Path, *, seed: int, size: int, real: Sequence[dict[str, Any]]) -> None:
    """Write every file below `out`; no problem of an evaluation set stands in another file."""
    # a program is learnt from fewer examples than a sum, and RL is to have something left
    sums, codes = chains(seed, size + 64), formulas(seed, size // 4 + 32)
    held_sums, sums = sums[:64], sums[64:]
    held_codes, codes = codes[:32], codes[32:]
    write_rows(out / "sft.jsonl", _shuffled(list(_sft_rows(sums, codes, real)), seed))
    math = [_chain_row(one, index, "math_longcot_math_verify") for index, one in enumerate(sums)]
    real_math = [
        prompt_row(
            [{"role": "user", "content": row["problem"]}],
            row["answer"],
            index=len(math) + index,
            source="math_longcot_math_verify",
            # of its own scale: beyond what a window of the chains holds
            difficulty=10 + (row["difficulty"] or 0),
        )
        for index, row in enumerate(real)
    ]
    write_rows(out / "math.jsonl", _shuffled([*math, *real_math], seed))
    # few enough to be scored again at the start of every stage
    write_rows(out / "curriculum.jsonl", _shuffled([*math[:CURRICULUM], *real_math], seed))
    write_rows(out / "heldout_math.jsonl", (_chain_row(one, i, "heldout") for i, one in enumerate(held_sums)))
    for name, some, source in (
        ("code", codes, "coder1_longcot"),
        ("heldout_code", held_codes, "heldout_code"),
    ):
        write_rows(
            out / f"{name}.jsonl", (code_row(one, index=i, source=source) for i, one in enumerate(some))
        )


def _sft_rows(
    sums: Sequence[Chain], codes: Sequence[Formula], real: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for one in sums:
        yield _conversation(one.problem, trace(one.problem))
    for formula in codes:
        yield _conversation(formula.prompt, formula.response)
    for row in real:
        if row["solution"]:
            worked = _CALCULATOR.sub("", row["solution"]).split("\n####")[0]
            yield _conversation(row["problem"], f"<think>{worked}</think>\\boxed{{{row['answer']}}}")


def _conversation(problem: str, response: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": problem}, {"role": "assistant", "content": response}],
    }


def _chain_row(one: Chain, index: int, source: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": one.problem}]
    return prompt_row(messages, answer(one.problem), index=index, source=source, difficulty=one.terms)


def _shuffled(rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    random.Random(seed).shuffle(rows)
    return rows


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  make_twin_data.py --out data/twins --real gsm8k_train.jsonl",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write to, made if missing")
    parser.add_argument(
        "--size", type=positive_int, default=2000, help="chains; a quarter as many programs (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="same seed, same files (default: 1)")
    parser.add_argument(
        "--real", type=Path, nargs="*", default=[], metavar="FILE", help="problem files to take short rows of"
    )
    parser.add_argument(
        "--real-rows", type=positive_int, default=64, metavar="N", help="rows of those (default: 64)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        real = real_rows(args.real, limit=args.real_rows, seed=args.seed)
        write_twins(args.out, seed=args.seed, size=args.size, real=real)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}: {args.size} chains, {args.size // 4} programs, {len(real)} real problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())

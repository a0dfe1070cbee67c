"""Prepare prompt files for RL and supervised files for SFT.

Without --from it generates chains of one-digit additions and subtractions, such as `4+7-1`: 30,000 distinct
training problems, a held-out set that shares none with them, and worked traces for SFT. With --from it makes one
clean set of data sets: see `prepare_sources.py`. Both write the row schema of Klear's public MathSub-30K.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import prepare_sources

from megatron_rl.arguments import positive_int
from megatron_rl.errors import DataError, MegatronRLError

DIFFICULTIES = (2, 3, 4, 5, 6, 7)
HELDOUT_DIFFICULTIES = (3, 4, 5, 6, 7)

Row = dict[str, Any]
Message = Mapping[str, str]


class Chain(NamedTuple):
    """One problem; its number of terms is its difficulty."""

    terms: int
    problem: str


def num_chains(terms: int) -> int:
    """Distinct chains of `terms` one-digit numbers: 10 ** terms digits, 2 ** (terms - 1) signs."""
    return 10 * 20 ** (terms - 1)


def chain(number: int, terms: int) -> str:
    """The chain with this number, 0 to num_chains(terms) - 1; different numbers give different chains."""
    number, digit = divmod(number, 10)
    text = str(digit)
    for _ in range(terms - 1):
        number, term = divmod(number, 20)
        text += ("+" if term < 10 else "-") + str(term % 10)
    return text


def steps(problem: str) -> list[str]:
    """Worked additions from left to right: `4+7-1` gives `4+7=11` and `11-1=10`."""
    total, worked = int(problem[0]), []
    for sign, digit in zip(problem[1::2], problem[2::2], strict=True):
        before = total
        total += int(digit) if sign == "+" else -int(digit)
        worked.append(f"{before}{sign}{digit}={total}")
    return worked


def answer(problem: str) -> str:
    return steps(problem)[-1].split("=")[1]


def trace(problem: str) -> str:
    """The response that SFT teaches: `<think>4+7=11,11-1=10</think>\\boxed{10}`."""
    return f"<think>{','.join(steps(problem))}</think>\\boxed{{{answer(problem)}}}"


def shares(total: int, capacities: Mapping[int, int]) -> dict[int, int]:
    """`total` over the keys, no key above its capacity and the others within one of each other."""
    given: dict[int, int] = {}
    by_capacity = sorted(capacities, key=lambda key: (capacities[key], -key))
    for place, key in enumerate(by_capacity):
        open_keys = len(by_capacity) - place
        given[key] = min(capacities[key], (total - sum(given.values())) // open_keys)
    return {key: given[key] for key in sorted(given)}


def draw(seed: int, *, train: int, heldout: int, sft: int) -> dict[str, list[Chain]]:
    """The chains of each file: distinct within it, and no held-out one in another file.

    Raises DataError when a file asks for more chains than exist.
    """
    held = shares(heldout, {terms: num_chains(terms) // 2 for terms in HELDOUT_DIFFICULTIES})
    free = {terms: num_chains(terms) - held.get(terms, 0) for terms in DIFFICULTIES}
    trained, taught = shares(train, free), shares(sft, free)
    for name, asked, got in (("train", train, trained), ("heldout", heldout, held), ("sft", sft, taught)):
        if sum(got.values()) < asked:
            raise DataError(
                f"--{name}: got {asked}, but there are only {sum(got.values())} distinct chains for it"
            )
    files: dict[str, list[Chain]] = {"train": [], "heldout": [], "sft": []}
    for terms in DIFFICULTIES:
        rng = random.Random(seed * 100 + terms)
        num_held = held.get(terms, 0)
        numbers = rng.sample(range(num_chains(terms)), num_held + trained[terms])
        reserved = set(numbers[:num_held])
        # SFT may show chains that RL trains on later, never held-out ones.
        drawn = rng.sample(range(num_chains(terms)), taught[terms] + num_held)
        shown = [number for number in drawn if number not in reserved][: taught[terms]]
        files["heldout"] += [Chain(terms, chain(number, terms)) for number in numbers[:num_held]]
        files["train"] += [Chain(terms, chain(number, terms)) for number in numbers[num_held:]]
        files["sft"] += [Chain(terms, chain(number, terms)) for number in shown]
    for place, chains in enumerate(files.values()):
        random.Random(seed * 100 + 50 + place).shuffle(chains)
    return files


def prompt_row(
    messages: Sequence[Message], gold: Any, *, index: int, source: str, difficulty: float | None
) -> Row:
    """One row in the schema of Klear's MathSub-30K."""
    extra: Row = {"index": index}
    if difficulty is not None:
        extra["difficulty"] = difficulty
    return {
        "data_source": source,
        "prompt": [dict(message) for message in messages],
        "ability": "math",
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": extra,
    }


def chain_row(one: Chain, *, index: int, source: str) -> Row:
    messages = [{"role": "user", "content": one.problem}]
    return prompt_row(messages, answer(one.problem), index=index, source=source, difficulty=one.terms)


def sft_row(one: Chain, *, index: int) -> Row:
    messages = [
        {"role": "user", "content": one.problem},
        {"role": "assistant", "content": trace(one.problem)},
    ]
    return {
        "id": f"chains-sft-{index}",
        "data_source": "chains",
        "difficulty": one.terms,
        "messages": messages,
    }


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSONL through a temporary file beside it: `file` is whole or as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def generate(out: Path, *, seed: int, train: int, heldout: int, sft: int) -> None:
    """Write train.jsonl, heldout.jsonl and sft.jsonl, and print the chains of each difficulty."""
    files = draw(seed, train=train, heldout=heldout, sft=sft)
    # The source is part of a prompt's id: a held-out record is never mistaken for a training one.
    for name, source in (("train", "chains"), ("heldout", "chains_heldout")):
        rows = (chain_row(one, index=index, source=source) for index, one in enumerate(files[name]))
        write_rows(out / f"{name}.jsonl", rows)
    write_rows(out / "sft.jsonl", (sft_row(one, index=index) for index, one in enumerate(files["sft"])))
    print(table(files))
    print(f"wrote {', '.join(str(out / f'{name}.jsonl') for name in files)}")


def table(files: Mapping[str, Sequence[Chain]]) -> str:
    """Chains of each difficulty in each file, and how many exist."""
    counts = {name: Counter(one.terms for one in chains) for name, chains in files.items()}
    lines = [f"{'difficulty':>10}{'exist':>12}" + "".join(f"{name:>9}" for name in files)]
    for terms in DIFFICULTIES:
        cells = "".join(f"{count[terms]:>9,}" for count in counts.values())
        lines.append(f"{terms:>10}{num_chains(terms):>12,}{cells}")
    return "\n".join(
        [*lines, f"{'all':>10}{'':>12}" + "".join(f"{len(chains):>9,}" for chains in files.values())]
    )


TASKS = {"chains": generate}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  prepare_math_data.py --out data\n" + prepare_sources.EXAMPLES.removeprefix("\n"),
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write to, made if missing")
    parser.add_argument(
        "--task", choices=sorted(TASKS), default="chains", help="what to generate (default: chains)"
    )
    parser.add_argument("--seed", type=int, default=1, help="same seed, same files (default: 1)")
    parser.add_argument(
        "--train", type=positive_int, default=30_000, help="training problems (default: 30000)"
    )
    parser.add_argument(
        "--heldout",
        type=positive_int,
        default=255,
        help="held-out problems, equally of 3 to 7 terms (default: 255)",
    )
    parser.add_argument("--sft", type=positive_int, default=20_000, help="worked traces (default: 20000)")
    prepare_sources.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.sources is not None:
            prepare_sources.run(args)
        else:
            TASKS[args.task](args.out, seed=args.seed, train=args.train, heldout=args.heldout, sft=args.sft)
    except (MegatronRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Floors of the LM head on cards that need not be here: by formula, nothing is measured. Prints a table in Markdown.

Time of products at the datasheet's rate and at the one that a library reaches, and of the bytes that cannot be avoided.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench_kernels_cases import Shape, shapes_of
from bench_kernels_head import head_least


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Dense bfloat16 products per second, and bytes per second of a large copy."""

    name: str
    datasheet_flops: float = 989e12
    # a library product of 8192^3 random numbers on an H200
    reached_flops: float = 790e12
    reached_bytes: float


CARDS = (Card(name="H100", reached_bytes=3.0e12), Card(name="H200", reached_bytes=4.3e12))
SHAPES = (
    "8192x4096x151936,8192x4096x151936/tp4,8192x4096x151936/tp8,8192x2048x151936,16384x8192x151936/tp8,"
    "4096x4096x128256"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Of one shape; seconds of one product at both rates, bytes by how often logits are made."""

    datasheet_s: float
    reached_s: float
    kept_bytes: float  # 3 products: logits or their gradient are kept
    again_bytes: float  # 4 products: logits are made again in backward


def floor(shape: Shape, card: Card) -> Floor:
    least = head_least(shape)
    element = 2
    head = shape.local_vocab * shape.hidden * element
    logits = shape.tokens * shape.local_vocab * element
    # one more product reads the head once more, and saves one passage of the logits
    return Floor(
        datasheet_s=least.gemm_flops / card.datasheet_flops,
        reached_s=least.gemm_flops / card.reached_flops,
        kept_bytes=least.num_bytes[1],
        again_bytes=least.num_bytes[1] + head - logits,
    )


def table(shapes: Sequence[Shape]) -> Iterator[str]:
    yield "| N x H x V | 1 product | 3 products | 4 products | bytes, 3 products | logits in bf16 |"
    yield "|---|---|---|---|---|---|"
    for shape in shapes:
        floors = {card.name: floor(shape, card) for card in CARDS}
        any_card = floors[CARDS[0].name]
        products = " | ".join(
            f"{count * any_card.datasheet_s * 1e3:.1f} / {count * any_card.reached_s * 1e3:.1f} ms"
            for count in (1, 3, 4)
        )
        times = ", ".join(
            f"{floors[card.name].kept_bytes / card.reached_bytes * 1e3:.1f} ms {card.name}" for card in CARDS
        )
        logits = shape.tokens * shape.local_vocab * 2 / 1e9
        yield f"| {shape.name} | {products} | {any_card.kept_bytes / 1e9:.1f} GB: {times} | {logits:.2f} GB |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="comma separated (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        shapes = [
            shape.with_dtype("bfloat16") for name in args.shapes.split(",") for shape in shapes_of(name)
        ]
    except ValueError as error:
        parser.error(str(error))
    print(*table(shapes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

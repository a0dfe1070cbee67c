"""What a GPU and its wires can do, and which share of it programs reach: one YAML file per machine type.

Rates are those of one GPU and one direction. Files of the package: `gpus/*.yaml`, where each figure has its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from megatron_rl.errors import RecipeError
from megatron_rl.recipe.problems import did_you_mean, raise_problems, validation_problems
from megatron_rl.recipe.types import Count, Share, Text
from megatron_rl.recipe.yaml_text import parse_document

_OWN = Path(__file__).parent / "gpus"
# bytes in the place of GiB, or operations in that of 10^12 of them, are outside
Amount = Annotated[
    float,
    Field(strict=True, ge=1e-3, le=1e6, allow_inf_nan=False, description="a number from 0.001 to 1,000,000"),
]

# of a peak: with less than a thousandth nothing is predicted but its own smallness
Reached = Annotated[
    float, Field(strict=True, ge=1e-3, le=1, allow_inf_nan=False, description="a number from 0.001 to 1")
]
Delay = Annotated[
    float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False, description="a number from 0 to 1,000,000")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One type of machine. The first part is physics, `_frac` and below are what software gets out of it."""

    name: Text
    memory_gib: Amount  # of one GPU, as its driver reports it
    bf16_tflops: Amount  # dense peak of its tensor cores, 10^12 operations per second
    fp8_tflops: Amount  # the same for FP8
    hbm_gb_per_s: Amount  # own memory, 10^9 bytes per second
    link_gb_per_s: Amount  # to other GPUs of the node
    network_gb_per_s: Amount  # to other nodes, its share of the node's adapters
    gpus_per_node: Count
    matmul_frac: Reached  # of the peak, in the matrix products of training and of prompts
    attention_frac: Reached  # of the BF16 peak, in causal attention, forward and backward together
    expert_frac: Reached  # of matmul_frac, in the smaller products of experts and what routes tokens to them
    hbm_frac: Reached  # of hbm_gb_per_s, in reading weights and KV cache, and element by element
    link_frac: Reached  # of link_gb_per_s, in collectives inside a node
    network_frac: Reached  # of network_gb_per_s, in collectives between nodes
    hidden_frac: Share  # of the communication of training, behind computing
    collective_us: Delay  # of one small collective: an all-reduce of a decode step
    decode_step_ms: Delay  # of one decode step besides reading memory: scheduling, launching, sampling
    decode_sequence_us: Delay  # and per sequence in it


def known_hardware() -> tuple[str, ...]:
    """Names of the machine types that come with the package."""
    return tuple(sorted(path.stem for path in _OWN.glob("*.yaml")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A machine type of the package by name, or the user's own by the path of its YAML file.

    Raises RecipeError for an unknown name, listing those known, and for a file, listing every key that is wrong.
    """
    text = str(name_or_path)
    own = _OWN / f"{text}.yaml"
    if text in known_hardware():
        return _read(own, text)
    path = Path(text)
    if path.is_file():
        return _read(path, text)
    looks_like_file = path.suffix in {".yaml", ".yml"} or len(path.parts) > 1
    known = known_hardware()
    if looks_like_file:
        raise RecipeError(
            f"--gpu: no file {text}; name one, or one of {', '.join(known)}{did_you_mean(path.stem, known)}"
        )
    raise RecipeError(
        f"--gpu: got {text!r}, must be one of {', '.join(known)} or a YAML file with the keys of "
        f"megatron_rl/estimate/gpus/{known[0]}.yaml{did_you_mean(text, known)}"
    )


def _read(path: Path, source: str) -> Hardware:
    try:
        document = parse_document(path.read_text(encoding="utf-8"), source=source)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--gpu: {path}: cannot be read: {error}") from None
    if not isinstance(document.data, dict):
        raise RecipeError(f"--gpu: {source}: must be a mapping with the keys of a machine type")
    places = {dotted: f"line {line}" for dotted, line in document.lines.items()}
    try:
        return _adapter().validate_python(document.data, extra="forbid")
    except ValidationError as error:
        raise_problems(f"--gpu: {source}", validation_problems(error, document.data, Hardware), places)


@lru_cache
def _adapter() -> TypeAdapter[Hardware]:
    return TypeAdapter(Hardware)

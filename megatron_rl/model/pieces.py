"""An interval of a Hugging Face tensor and where it stands in a parameter: the unit of every table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of one HF tensor held by one parameter of one rank.

    Elements `hf_start : hf_start + length` along `hf_dim` of the HF tensor are elements
    `param_start : param_start + length` along `param_dim` of the parameter. `hf_dim` None: the whole tensor.
    """

    hf_name: str
    hf_dim: int | None
    hf_start: int
    length: int
    chunk: int  # model chunk of this rank (0 without vpp)
    param: str  # parameter name inside the chunk
    param_dim: int | None
    param_start: int


def whole(hf_name: str, chunk: int, param: str) -> Piece:
    """A tensor that one parameter holds as it is."""
    return Piece(hf_name, None, 0, 0, chunk, param, None, 0)

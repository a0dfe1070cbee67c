# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel of `reshard_pack` and `reshard_unpack`: one program per row of a table, words in, words out.

Elements are moved as integers of their width, so every bit pattern arrives, and a cast between float32 and
bfloat16 is integer arithmetic: it rounds to nearest even, where the interpreter's own cast would truncate.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 6


@triton.jit
def copy_kernel(
    table_ptr,  # [programs, 6] int64, read only: address, flat unit, units, first column, width, stride
    flat_ptr,  # [size] of FLAT_WORD, written if PACK, else read
    WORD: tl.constexpr,  # integer type of a tensor's element
    FLAT_WORD: tl.constexpr,  # integer type of the flat buffer's element
    VEC: tl.constexpr,  # elements of a unit: a whole 16 bytes on both sides, or 1
    PACK: tl.constexpr,  # from the tensors into the flat buffer, or back
    BLOCK: tl.constexpr,  # units of a program
):
    row_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 6
    address = tl.load(row_ptr)
    flat_start = tl.load(row_ptr + 1)
    count = tl.load(row_ptr + 2).to(tl.int32)
    first = tl.load(row_ptr + 3).to(tl.int32)
    width = tl.load(row_ptr + 4).to(tl.int32)
    stride = tl.load(row_ptr + 5)
    unit = tl.arange(0, BLOCK)
    # columns are below twice BLOCK here, so the division is one of 32 bits
    row = (first + unit) // width
    column = (first + unit) - row * width
    inside = (unit < count)[:, None]
    part = tl.arange(0, VEC)[None, :]
    tensor_ptr = address.to(tl.pointer_type(WORD))
    tensor_at = tensor_ptr + ((row.to(tl.int64) * stride + column) * VEC)[:, None]
    flat_at = flat_ptr + ((flat_start + unit) * VEC)[:, None]
    if VEC > 1:
        # the address is a number to the compiler: tell it what the table promises
        tensor_at = tl.multiple_of(tensor_at, (16, 16))
        flat_at = tl.multiple_of(flat_at, (16, 16))
    if PACK:
        word = tl.load(tensor_at + part, mask=inside, other=0)
        tl.store(flat_at + part, _as_word(word, FLAT_WORD), mask=inside)
    else:
        word = tl.load(flat_at + part, mask=inside, other=0)
        tl.store(tensor_at + part, _as_word(word, WORD), mask=inside)


@triton.jit
def _as_word(word, TO: tl.constexpr):
    """The same bits, or bfloat16 bits of float32 bits (nearest even, NaN stays NaN), or the other way."""
    # one return: the compiler, unlike the interpreter, also compiles what follows an early one
    if word.dtype == TO:
        out = word
    elif word.dtype == tl.int16:
        out = word.to(tl.int32) << 16
    else:
        bits = word.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # a NaN would carry into infinity or zero: keep its sign and make it quiet
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        out = tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.int16, bitcast=True)
    return out

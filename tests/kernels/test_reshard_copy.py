"""reshard_pack and reshard_unpack: every implementation moves exactly the bits that plain narrowing would."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_rl_kernels.reshard_copy import CopyTable, Slice, reshard_pack, reshard_unpack
from megatron_rl_kernels.reshard_copy.triton_op import _launches

IMPLS = ["reference", "portable", "triton"]
KERNELS = Path(__file__).parents[2] / "kernels"


def _tensor(shape, *, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).to(dtype)


def _cuts(dtype, *, shift=0):
    """(tensor, dim, start, length): whole ones, rows, columns, a middle dimension, runs longer than a program.

    `shift` moves every tensor off 16-byte alignment by that many elements.
    """
    shapes = [(5, 24), (40, 16), (64, 48), (2, 9000), (3, 4, 8, 7), (1,), (9000,), (7, 2080)]
    cuts = [
        (None, 0, 0),
        (0, 8, 16),
        (1, 16, 24),
        (1, 8, 8992),
        (2, 3, 4),
        (0, 0, 1),
        (0, 16, 8400),
        (1, 16, 2048),
    ]
    for seed, (shape, (dim, start, length)) in enumerate(zip(shapes, cuts, strict=True)):
        room = _tensor(shift + torch.Size(shape).numel(), dtype=dtype, seed=seed)
        yield room[shift:].view(shape), dim, start, length


def _plan(cuts, *, gap=0, offset=0):
    """Slices one after the other with `gap` elements between, the narrowed views, and the size of the buffer."""
    slices, views = [], []
    for number, (tensor, dim, start, length) in enumerate(cuts):
        slices.append(
            Slice.along(tensor, dim=dim, start=start, length=length, offset=offset, name=f"t{number}")
        )
        views.append(tensor if dim is None else tensor.narrow(dim, start, length))
        offset += views[-1].numel() + gap
    return slices, views, offset


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gap", [0, 3], ids="gap{}".format)
@pytest.mark.parametrize("shift", [0, 1], ids="shift{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_packing_is_narrowing_and_leaves_the_gaps_alone(impl, gap, shift, dtype):
    slices, views, size = _plan(_cuts(dtype, shift=shift), gap=gap, offset=gap)
    flat = torch.full((size,), 77, dtype=dtype)
    reshard_pack(slices, flat, impl=impl)
    want = torch.full((size,), 77, dtype=dtype)
    for piece, view in zip(slices, views, strict=True):
        want[piece.offset : piece.offset + view.numel()] = view.reshape(-1)
    assert torch.equal(flat, want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gap", [0, 3], ids="gap{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unpacking_restores_the_slices_and_leaves_the_rest_alone(impl, gap, dtype):
    slices, views, size = _plan(_cuts(dtype), gap=gap)
    whole = [piece.tensor.clone() for piece in slices]
    table = CopyTable(slices, flat_size=size, flat_dtype=dtype)
    flat = torch.zeros(size, dtype=dtype)
    reshard_pack(table, flat, impl=impl)
    for view in views:
        view.zero_()
    rest = [piece.tensor.clone() for piece in slices]
    assert any(tensor.any() for tensor in rest) and not any(view.any() for view in views)
    reshard_unpack(flat, table, impl=impl)
    for piece, want in zip(slices, whole, strict=True):
        assert torch.equal(piece.tensor, want), piece.name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [8, 7], ids="w{}".format)
def test_casts_round_to_nearest_even_and_back_exactly(impl, width):
    # halfway cases in both directions, the largest float32 (rounds to infinity), denormals, infinities
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x80008000, 0x7F800000, 0xFF800000]
    special = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    source = torch.cat((special, _tensor(56 * 16 + 8))).view(-1, 16)
    piece = Slice.along(source, dim=1, start=0, length=width, offset=0)
    packed = torch.zeros(source.shape[0] * width, dtype=torch.bfloat16)
    reshard_pack([piece], packed, impl=impl)
    assert torch.equal(packed.view(-1, width), source[:, :width].bfloat16())
    reshard_unpack(packed, [piece], impl=impl)
    assert torch.equal(source[:, :width], packed.view(-1, width).float())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_stays_a_nan_through_a_cast_and_bits_survive_without_one(impl):
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00001] * 4, dtype=torch.int32)
    narrow = torch.zeros(16, dtype=torch.bfloat16)
    reshard_pack([Slice.along(bits.view(torch.float32), dim=None, offset=0)], narrow, impl=impl)
    assert narrow.isnan().all()
    same = torch.zeros(16)
    reshard_pack([Slice.along(bits.view(torch.float32), dim=None, offset=0)], same, impl=impl)
    assert torch.equal(same.view(torch.int32), bits)


@pytest.mark.parametrize("impl", IMPLS)
def test_tensors_of_two_dtypes_share_a_buffer_and_new_values_are_read(impl):
    wide, narrow = _tensor((16, 16)), _tensor((16, 16), dtype=torch.bfloat16, seed=1)
    slices = [
        Slice.along(wide, dim=None, offset=0),
        Slice.along(narrow, dim=0, start=3, length=5, offset=256),
    ]
    flat = torch.zeros(256 + 80, dtype=torch.bfloat16)
    table = CopyTable(slices, flat_size=flat.numel(), flat_dtype=flat.dtype)
    for _ in range(2):
        wide.add_(1)
        reshard_pack(table, flat, impl=impl)
        assert torch.equal(flat, torch.cat((wide.bfloat16().view(-1), narrow[3:8].reshape(-1))))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_buffer_off_alignment_works_with_the_same_table(impl):
    slices, views, size = _plan(_cuts(torch.bfloat16))
    table = CopyTable(slices, flat_size=size, flat_dtype=torch.bfloat16)
    room = torch.zeros(size + 1, dtype=torch.bfloat16)
    for flat in (room[:size], room[1:]):
        reshard_pack(table, flat, impl=impl)
        assert torch.equal(flat, torch.cat([view.reshape(-1) for view in views]))


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_move_moves_nothing(impl):
    flat = torch.ones(4)
    reshard_pack([], flat, impl=impl)
    reshard_pack([Slice.along(torch.zeros(0, 3), dim=None, offset=4)], flat, impl=impl)
    reshard_unpack(torch.ones(0), [], impl=impl)
    assert torch.equal(flat, torch.ones(4))


def test_slices_that_do_not_fit_are_refused_by_name():
    tensor, flat = torch.zeros(4, 6), torch.zeros(24)
    run = {"rows": 1, "width": 4, "stride": 4, "name": "w"}
    with pytest.raises(ValueError, match=r"w: 2 to 5 along dim 0 does not lie in a tensor of shape \[4, 6\]"):
        Slice.along(tensor, dim=0, start=2, length=3, offset=0, name="w")
    with pytest.raises(ValueError, match=r"slice 0 \(w\): reads up to element 26 of a tensor of 24"):
        reshard_pack([Slice(tensor=tensor, start=22, offset=0, **run)], flat)
    with pytest.raises(ValueError, match=r"slice 0 \(w\): ends at element 25 of a flat buffer of 24"):
        reshard_pack([Slice(tensor=tensor, start=0, offset=21, **run)], flat)
    with pytest.raises(ValueError, match=r"slice 0 \(w\): .*stride = 4 not below the width"):
        reshard_pack([Slice(tensor=tensor, start=0, offset=0, **{**run, "rows": 2, "width": 5})], flat)
    with pytest.raises(ValueError, match=r"slice 0 \(w\): start = -1.*may not be negative"):
        reshard_pack([Slice(tensor=tensor, start=-1, offset=0, **run)], flat)
    with pytest.raises(ValueError, match=r"slice 0 \(w\): the tensor \[6, 4\] has stride \(1, 6\)"):
        reshard_pack([Slice(tensor=tensor.T, start=0, offset=0, **run)], flat)
    with pytest.raises(
        TypeError, match=r"slice 0 \(w\): got a tensor of torch.float32 for a flat buffer of torch.int32"
    ):
        reshard_pack([Slice(tensor=tensor, start=0, offset=0, **run)], flat.int())


def test_overlapping_destinations_are_refused_by_name():
    tensor = torch.zeros(8, 6)
    left = Slice.along(tensor, dim=1, start=0, length=3, offset=0, name="left")
    right = Slice.along(tensor, dim=1, start=3, length=3, offset=24, name="right")
    middle = Slice.along(tensor, dim=1, start=2, length=2, offset=48, name="middle")
    with pytest.raises(
        ValueError, match=r"slice 0 \(left\) and slice 1 \(late\) overlap in the flat buffer at element 23"
    ):
        reshard_pack(
            [left, Slice.along(tensor, dim=0, start=0, length=1, offset=23, name="late")], torch.zeros(99)
        )
    flat = torch.zeros(64)
    reshard_pack([left, right, middle], flat)
    # columns of one tensor interleave, and share nothing
    reshard_unpack(flat, [left, right])
    with pytest.raises(
        ValueError, match=r"slice 0 \(left\) and slice 2 \(middle\) share elements of a tensor"
    ):
        reshard_unpack(flat, [left, right, middle])
    # two tensors over one memory are one memory
    alias = Slice.along(tensor.view(-1)[40:], dim=None, offset=48, name="alias")
    with pytest.raises(
        ValueError, match=r"slice 1 \(right\) and slice 2 \(alias\) share|slice 0 \(left\) and slice 2"
    ):
        reshard_unpack(flat, [left, right, alias])


def test_overlaps_behind_a_slice_that_lies_between_runs_are_seen():
    tensor, flat = torch.zeros(100), torch.zeros(40)
    runs = Slice(tensor=tensor, start=0, rows=10, width=2, stride=10, offset=0, name="runs")
    between = Slice(tensor=tensor, start=15, rows=1, width=3, stride=3, offset=20, name="between")
    free = Slice(tensor=tensor, start=52, rows=1, width=4, stride=4, offset=24, name="free")
    reshard_unpack(flat, [runs, between, free])
    late = Slice(tensor=tensor, start=51, rows=1, width=4, stride=4, offset=24, name="late")
    with pytest.raises(ValueError, match=r"slice 0 \(runs\) and slice 2 \(late\) share elements of a tensor"):
        reshard_unpack(flat, [runs, between, late])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_units_of_16_bytes_are_used_where_everything_is_aligned_and_nowhere_else(dtype):
    whole = 16 // dtype.itemsize
    room = torch.zeros(1 + 64 * 64, dtype=dtype)
    aligned, shifted = room[:-1].view(64, 64), room[1:].view(64, 64)
    assert room.data_ptr() % 16 == 0
    for tensor, start, length, offset, unit in (
        (aligned, 0, 64, 0, whole),
        (aligned, whole, 2 * whole, 3 * whole, whole),
        (aligned, 1, whole, 0, 1),
        (aligned, 0, whole + 1, 0, 1),
        (aligned, 0, whole, 1, 1),
        (shifted, 0, whole, 0, 1),
        (shifted[:, :60].contiguous(), 0, whole, 0, whole if 60 % whole == 0 else 1),
    ):
        piece = Slice.along(tensor, dim=1, start=start, length=length, offset=offset)
        table = CopyTable([piece], flat_size=5000, flat_dtype=dtype)
        (launch,) = _launches(table, tensor.device, aligned=True)
        assert launch.vec == unit, (start, length, offset)
        if unit > 1:
            assert not (launch.rows[:, 0] % 16).any()
        assert [each.vec for each in _launches(table, tensor.device, aligned=False)] == [1]


def test_a_buffer_that_is_not_the_one_checked_for_is_refused():
    tensor = torch.zeros(6, 8)
    table = CopyTable(
        [Slice.along(tensor, dim=0, start=0, length=2, offset=0, name="w")],
        flat_size=16,
        flat_dtype=torch.float32,
    )
    with pytest.raises(
        ValueError, match=r"got flat \(17,\) of torch.float32, the slices were checked for \(16,\)"
    ):
        reshard_pack(table, torch.zeros(17))
    with pytest.raises(ValueError, match="has stride"):
        reshard_pack(table, torch.zeros(32)[::2])
    with pytest.raises(ValueError, match=r"flat shares memory with the tensor of slice 0 \(w\)"):
        reshard_pack(table, tensor.view(-1)[32:])
    tensor.data = torch.zeros(6, 8)
    with pytest.raises(ValueError, match=r"the memory of slice 0 \(w\) has moved"):
        reshard_pack(table, torch.zeros(16))


def test_addresses_beyond_two_to_the_31_elements_are_reached():
    """Two columns of rows 2^30 elements apart, in memory that is mapped and hardly touched; a wrap would crash."""
    script = textwrap.dedent(
        """
        import mmap, os
        os.environ["TRITON_INTERPRET"] = "1"
        import torch
        from megatron_rl_kernels.reshard_copy import Slice, reshard_pack, reshard_unpack
        rows, stride = 5, 2**30
        memory = mmap.mmap(-1, rows * stride)
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        tensor[:, :2] = torch.arange(10, dtype=torch.uint8).view(5, 2)
        flat = torch.zeros(10, dtype=torch.uint8)
        piece = Slice.along(tensor, dim=1, start=0, length=2, offset=0)
        reshard_pack([piece], flat, impl="triton")
        assert flat.tolist() == list(range(10)), flat
        reshard_unpack(flat + 1, [piece], impl="triton")
        assert tensor[:, :2].flatten().tolist() == list(range(1, 11))
        print("reached")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(KERNELS)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "reached", done.stderr


@pytest.mark.parametrize("impl", ["reference", "portable", "triton"])
def test_autograd_sees_what_a_copy_overwrites(impl):
    tensor, flat = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    saved_tensor, saved_flat = tensor * 1, flat * 1
    losses = (saved_tensor * saved_tensor).sum(), (saved_flat * saved_flat).sum()
    piece = Slice.along(saved_tensor.detach(), dim=None, offset=0)
    reshard_pack([piece], saved_flat.detach(), impl=impl)
    reshard_unpack(torch.zeros(8), [piece], impl=impl)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_lazy_negation_or_conjugate_is_refused():
    for lazy in (torch._neg_view(torch.ones(4)), torch.full((4,), 1 + 2j).conj()):
        with pytest.raises(ValueError, match="lazy conjugate or negation"):
            reshard_pack([Slice.along(lazy, dim=None, offset=0)], torch.zeros(4, dtype=lazy.dtype))

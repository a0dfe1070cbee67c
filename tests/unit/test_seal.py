"""The seal of a message: what it notices, and that it does not depend on where it is computed."""

import pytest
import torch

from megatron_rl.errors import ReshardError
from megatron_rl.reshard.seal import (
    FAILED,
    check_seal,
    device_digest,
    sealed_bytes,
    write_failure,
    write_seal,
)

KEY, OTHER_KEY = b"k" * 16, b"K" * 16


def sealed(num_bytes, *, key=KEY, version=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(0, 256, (sealed_bytes(num_bytes),), dtype=torch.uint8, generator=generator)
    write_seal(buffer, num_bytes, key=key, version=version)
    return buffer


def check(buffer, num_bytes, *, key=KEY, version=3):
    return check_seal(buffer, num_bytes, key=key, version=version, sender="trainer rank 5")


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 1000, 2**20 + 6])
def test_a_sealed_message_opens_to_its_payload(num_bytes):
    buffer = sealed(num_bytes)
    payload = check(buffer, num_bytes)
    assert payload.numel() == num_bytes
    assert payload.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("position", [0, 500, 999, 1001, 1010, 1020, 1023])
def test_one_wrong_bit_anywhere_is_noticed(position):
    buffer = sealed(1000)
    buffer[position] ^= 64
    with pytest.raises(ReshardError, match="trainer rank 5"):
        check(buffer, 1000)


def test_the_bytes_of_another_plan_or_interval_are_refused():
    with pytest.raises(ReshardError, match="1000 bytes from trainer rank 5 do not match their digest"):
        check(sealed(1000, key=OTHER_KEY), 1000)


def test_another_version_is_named():
    with pytest.raises(ReshardError, match="trainer rank 5 sent version 2, expected 3"):
        check(sealed(1000, version=2), 1000)


def test_a_version_cannot_be_changed_without_notice():
    buffer = sealed(1000, version=2)
    buffer[-24:].view(torch.int64)[0] = 3
    with pytest.raises(ReshardError, match="do not match their digest"):
        check(buffer, 1000)


def test_a_message_without_content_says_so():
    buffer = sealed(1000)
    write_failure(buffer)
    assert buffer[-24:].view(torch.int64)[0] == FAILED
    with pytest.raises(ReshardError, match="trainer rank 5 could not send"):
        check(buffer, 1000)


BLOCK = 2**18  # bytes of one block of the digest that devices compute


@pytest.mark.parametrize("num_bytes", [8, 24, BLOCK - 8, BLOCK, BLOCK + 8, 3 * BLOCK + 16])
@pytest.mark.parametrize("pattern", ["zeros", "random"])
def test_the_digest_of_devices_notices_single_and_double_flips(num_bytes, pattern):
    body = torch.zeros(num_bytes, dtype=torch.uint8)
    if pattern == "random":
        body.random_(0, 256, generator=torch.Generator().manual_seed(1))
    before = device_digest(body)
    seen = {tuple(before.tolist())}
    places = sorted({0, 3, 7, num_bytes // 2, num_bytes - 5, num_bytes - 1})
    for bit in (1, 128):
        for place in places:
            body[place] ^= bit
            seen.add(tuple(device_digest(body).tolist()))
            # two sign bits at once would cancel in a plain weighted sum
            body[(place + 4) % num_bytes] ^= bit
            seen.add(tuple(device_digest(body).tolist()))
            body[(place + 4) % num_bytes] ^= bit
            body[place] ^= bit
    assert len(seen) >= 1 + 2 * len(places) * 2 - 4  # a pair may be listed from both of its ends
    assert torch.equal(device_digest(body), before)


@pytest.mark.parametrize("other", [1, 65], ids=["near", "hashed later"])
def test_the_digest_of_devices_sees_swapped_blocks(other):
    generator = torch.Generator().manual_seed(2)
    body = torch.randint(0, 256, (66 * BLOCK,), dtype=torch.uint8, generator=generator)
    order = list(range(66))
    order[0], order[other] = other, 0
    assert not torch.equal(device_digest(body), device_digest(body.view(66, BLOCK)[order].reshape(-1)))


def test_the_digest_of_devices_is_what_it_says():
    """NH by its formula, in Python's integers, for less than one block."""
    body = torch.arange(64, dtype=torch.uint8)
    words = body.view(torch.int32).tolist()
    for lane in (0, 1):
        generator = torch.Generator().manual_seed(lane)
        keys = torch.randint(-(2**31), 2**31, (2**16,), generator=generator, dtype=torch.int64).tolist()
        padded = words + [0] * (2**16 - len(words))
        keyed = [(w + k + 2**31) % 2**32 - 2**31 for w, k in zip(padded, keys, strict=True)]
        total = sum(a * b for a, b in zip(keyed[0::2], keyed[1::2], strict=True))
        assert int(device_digest(body)[lane]) == (total + 2**63) % 2**64 - 2**63

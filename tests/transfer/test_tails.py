from __future__ import annotations

import random

import pytest

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.tails import BounceTail, EncodedTail, Extent, check_disjoint, decode_tail, plan_scatter

ROOM = Extent(0x1000, 128)
BLOCKS = (Extent(0x8000, 100), Extent(0x9000, 100))


def decoded(tail: BounceTail, room: Extent = ROOM) -> BounceTail:
    return decode_tail(tail.encode(), room, BLOCKS, "peer")


def test_a_tail_has_the_written_bytes() -> None:
    encoded = BounceTail((100, 200), (64, 64), 0x100000).encode()
    assert encoded.dst_addresses == bytes.fromhex("6400000000000000c800000000000000")
    assert encoded.sizes_bytes == bytes.fromhex("40000000000000004000000000000000")


@pytest.mark.parametrize(
    ("addresses", "sizes", "named"),
    [
        (bytes(7), bytes(8), "array of 7 bytes"),
        (bytes(16), bytes(8), "2 addresses, but 1 sizes"),
        (b"\xff" * 8, bytes(8), "-1 in a tail"),
    ],
)
def test_what_are_no_arrays_of_one_length_is_malformed(addresses: bytes, sizes: bytes, named: str) -> None:
    with pytest.raises(MalformedMessageError, match=named):
        decode_tail(EncodedTail(addresses, sizes), ROOM, BLOCKS, "peer")


def test_random_bytes_are_malformed_or_stay_within_the_blocks() -> None:
    rng = random.Random(15618)
    golden = BounceTail((0x8000, 0x9000), (64, 64), 0).encode()
    num_passed = 0
    for _ in range(3000):
        frames = [bytearray(golden.dst_addresses), bytearray(golden.sizes_bytes)]
        for _ in range(rng.randint(1, 4)):
            frame = rng.choice(frames)
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            if rng.random() < 0.2:
                del frame[rng.randint(0, len(frame)) :]
        if rng.random() < 0.1:
            frames = [bytearray(rng.randbytes(rng.randint(0, 40))) for _ in range(2)]
        try:
            tail = decode_tail(EncodedTail(*map(bytes, frames)), ROOM, BLOCKS, "peer")
        except MalformedMessageError:
            continue
        num_passed += 1
        for address, size in zip(tail.dst_addresses.tolist(), tail.sizes_bytes.tolist(), strict=True):
            assert any(block.base <= address and address + size <= block.end for block in BLOCKS)
    assert num_passed < 300


@pytest.mark.parametrize(
    ("addresses", "sizes", "named"),
    [
        ((0x8000,), (64,), "1 pieces from 64 bytes on, 64 together, expected 128"),
        ((), (), "0 pieces from 0 bytes on, 0 together"),
        ((0x8000, 0x9000), (128, 0), "2 pieces from 0 bytes on"),
        ((0x8000,), (257,), "257 together"),
        ((0x8000, (1 << 63) - 1), (64, 64), "outside every reserved block"),
        ((0, 0x8000), (64, 64), "outside every reserved block"),
        ((0x8000 + 37, 0x9000), (64, 64), "outside every reserved block"),
        ((0x7FFF, 0x9000), (64, 64), "outside every reserved block"),
        ((0x8800, 0x9000), (64, 64), "outside every reserved block"),
        ((0x8000, 0x8000 + 63, 0x9000), (64, 36, 28), "overlap"),
    ],
)
def test_a_tail_that_does_not_fit_its_room_or_its_blocks_is_refused(
    addresses: tuple[int, ...], sizes: tuple[int, ...], named: str
) -> None:
    with pytest.raises(MalformedMessageError, match=named):
        decoded(BounceTail(addresses, sizes, 0))


def test_a_tail_that_fits_to_the_byte_passes_and_begins_where_the_room_does() -> None:
    tail = decoded(BounceTail((0x9000, 0x8000, 0x8040), (100, 64, 36), 0), Extent(0x1000, 200))
    assert tail.dst_addresses.tolist() == [0x9000, 0x8000, 0x8040]
    assert (tail.sizes_bytes.tolist(), tail.src_base) == ([100, 64, 36], 0x1000)


def test_sizes_that_do_not_fit_in_64_bits_together_are_not_added_up_to_something_small() -> None:
    tail = BounceTail((0, 0, 0, 0), ((1 << 62), (1 << 62), (1 << 63) - 1, 129), 0)
    with pytest.raises(MalformedMessageError, match=f"{2**64 + 128} together"):
        decoded(tail)


def test_two_senders_must_not_write_the_same_bytes() -> None:
    with pytest.raises(MalformedMessageError, match="overlap"):
        check_disjoint([BounceTail((100,), (64,), 0), BounceTail((163,), (1,), 64)], "peer")
    check_disjoint([BounceTail((100,), (64,), 0), BounceTail((164,), (1,), 64)], "peer")


def test_tails_are_scattered_by_their_place_in_the_region_whoever_reported_first() -> None:
    tails = [BounceTail((300,), (64,), 0x100080), BounceTail((100, 200), (64, 64), 0x100000)]
    assert plan_scatter(tails).tolist() == [[0x100000, 100, 64], [0x100040, 200, 64], [0x100080, 300, 64]]


def test_pieces_that_lack_a_size_are_refused_where_a_tail_is_built() -> None:
    with pytest.raises(InvalidValueError, match="sizes_bytes"):
        BounceTail((1, 2), (3,), 0)

from __future__ import annotations

import random

import pytest

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.results import (
    BounceTail,
    Extent,
    Report,
    Result,
    ResultStatus,
    check_disjoint,
    check_tail,
    decode_report,
    decode_result,
    encode_i64s,
    encode_report,
    encode_result,
    plan_scatter,
)

RESULT = Result(3, 12345, 7, True, ResultStatus.SUCCESS)
GOLDEN = bytes.fromhex("0300000000000000393000000000000007000000000000000100")
REGION = Extent(0x1000, 256)
BLOCKS = (Extent(0x8000, 100), Extent(0x9000, 100))


def test_a_result_has_the_written_bytes() -> None:
    assert encode_result(RESULT) == GOLDEN
    assert len(GOLDEN) == 26
    sized = Result(3, 12345, 7, True, ResultStatus.SUCCESS, 59392)
    assert encode_result(sized) == GOLDEN + bytes.fromhex("00e8000000000000")
    assert decode_result(GOLDEN, "peer") == RESULT
    assert decode_result(encode_result(sized), "peer") == sized


@pytest.mark.parametrize(
    ("status", "end"), [(ResultStatus.SUCCESS, "0100"), (ResultStatus.FAILED, "0101"), (ResultStatus.CANCELLED, "0102")]
)
def test_one_builder_serves_every_status(status: ResultStatus, end: str) -> None:
    frame = encode_result(Result(3, 12345, 7, True, status))
    assert frame == GOLDEN[:-2] + bytes.fromhex(end)
    assert decode_result(frame, "peer").status is status


def test_numbers_of_a_tail_have_the_written_bytes() -> None:
    assert encode_i64s([100, 200]) == bytes.fromhex("6400000000000000c800000000000000")


def test_a_report_is_one_frame_or_four() -> None:
    tail = BounceTail((100, 200), (64, 64), 0x100000)
    assert encode_report(RESULT) == [GOLDEN]
    frames = encode_report(RESULT, tail)
    assert frames == [GOLDEN, encode_i64s([100, 200]), encode_i64s([64, 64]), encode_i64s([0x100000])]
    assert decode_report(frames, "peer") == Report(RESULT, tail)
    assert decode_report([GOLDEN], "peer") == Report(RESULT)
    empty = BounceTail((), (), 0)
    assert decode_report(encode_report(RESULT, empty), "peer").tail == empty


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (b"", "a result of 0 bytes"),
        (GOLDEN[:-1], "a result of 25 bytes"),
        (GOLDEN + b"\0", "a result of 27 bytes"),
        (GOLDEN[:-2] + b"\x02\x00", "is_last is 2"),
        (GOLDEN[:-1] + b"\x03", "status is 3"),
        (b"\xff" * 8 + GOLDEN[8:], "rank is -1"),
        (GOLDEN[:8] + b"\xff" * 8 + GOLDEN[16:], "transfer_id is -1"),
        (GOLDEN[:16] + b"\xff" * 8 + GOLDEN[24:], "slice_id is -1"),
        (GOLDEN + b"\xff" * 8, "size_bytes is -1"),
    ],
)
def test_a_malformed_result_is_refused_by_field(frame: bytes, named: str) -> None:
    with pytest.raises(MalformedMessageError, match=named):
        decode_result(frame, "peer")


@pytest.mark.parametrize(
    ("tail", "named"),
    [
        ([b""], "a tail of 1 frames"),
        ([b"", b"", b"", b""], "a tail of 4 frames"),
        ([bytes(7), bytes(8), bytes(8)], "a tail frame of 7 bytes"),
        ([bytes(16), bytes(8), bytes(8)], "2 addresses, but 1 sizes"),
        ([bytes(8), bytes(8), bytes(16)], "2 bases"),
        ([bytes(8), bytes(8), b""], "0 bases"),
        ([b"\xff" * 8, bytes(8), bytes(8)], "-1 in a tail"),
    ],
)
def test_a_malformed_tail_still_tells_whose_transfer_it_is(tail: list[bytes], named: str) -> None:
    report = decode_report([GOLDEN, *tail], "peer")
    assert report.result == RESULT
    assert report.tail is None
    assert report.defect is not None
    assert named in report.defect


def test_tails_are_equal_when_they_say_the_same() -> None:
    tail = BounceTail((100, 200), (64, 64), 0)
    assert tail == BounceTail([100, 200], [64, 64], 0)
    for other in (
        BounceTail((100, 201), (64, 64), 0),
        BounceTail((100, 200), (64, 63), 0),
        BounceTail((), (), 0),
        None,
    ):
        assert tail != other


def test_a_message_without_frames_is_malformed() -> None:
    with pytest.raises(MalformedMessageError, match="no frames"):
        decode_report([], "peer")


def test_random_bytes_decode_or_are_malformed_and_nothing_else() -> None:
    rng = random.Random(15618)
    golden = encode_report(RESULT, BounceTail((100, 200), (64, 64), 0x100000))
    num_decoded = 0
    for _ in range(3000):
        frames = [bytearray(frame) for frame in golden]
        for _ in range(rng.randint(1, 4)):
            frame = rng.choice(frames)
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            if rng.random() < 0.2:
                del frame[rng.randint(0, len(frame)) :]
        if rng.random() < 0.1:
            frames = [bytearray(rng.randbytes(rng.randint(0, 40))) for _ in range(rng.randint(0, 6))]
        try:
            report = decode_report([bytes(frame) for frame in frames], "peer")
        except MalformedMessageError:
            continue
        num_decoded += 1
        if report.tail is not None and not report.tail.is_empty:
            try:
                check_tail(report.tail, report.result.size_bytes, REGION, BLOCKS, "peer")
            except MalformedMessageError:
                continue
            pytest.fail("a random tail passed")
    assert num_decoded > 500


@pytest.mark.parametrize(
    ("addresses", "sizes", "src_base", "declared", "named"),
    [
        ((0x8000,), (64,), 0x1000, 65, "sizes sum to 64, the result declares 65"),
        ((0x8000,), (64,), 0x1000, None, "the result declares None"),
        ((0x8000, 0x9000), (64, 0), 0x1000, 64, "pieces of 0 to 64 bytes"),
        ((0x8000,), (257,), 0x1000, 257, "do not fit in 256"),
        ((0x8000,), (64,), (1 << 63) - 1, 64, "not within"),
        (((1 << 63) - 1,), (64,), 0x1000, 64, "outside every reserved block"),
        ((0,), (64,), 0x1000, 64, "outside every reserved block"),
        ((0x8000,), (64,), 0xFFF, 64, "not within"),
        ((0x8000,), (64,), 0x1000 + 193, 64, "not within"),
        ((0x8000 + 37,), (64,), 0x1000, 64, "outside every reserved block"),
        ((0x7FFF,), (64,), 0x1000, 64, "outside every reserved block"),
        ((0x8800,), (64,), 0x1000, 64, "outside every reserved block"),
        ((0x8000, 0x8000 + 63), (64, 36), 0x1000, 100, "overlap"),
    ],
)
def test_a_tail_that_does_not_fit_its_region_or_its_blocks_is_refused(
    addresses: tuple[int, ...], sizes: tuple[int, ...], src_base: int, declared: int | None, named: str
) -> None:
    with pytest.raises(MalformedMessageError, match=named):
        check_tail(BounceTail(addresses, sizes, src_base), declared, REGION, BLOCKS, "peer")


def test_a_tail_that_fits_to_the_byte_passes() -> None:
    check_tail(BounceTail((0x9000, 0x8000, 0x8040), (100, 64, 36), 0x1000), 200, REGION, BLOCKS, "peer")
    check_tail(BounceTail((0x8000,), (56,), 0x1000 + 200), 56, REGION, BLOCKS, "peer")


def test_sizes_that_do_not_fit_in_64_bits_together_are_not_added_up_to_something_small() -> None:
    huge = Extent(0, (1 << 63) - 1)
    tail = BounceTail((0, 0, 0), ((1 << 62), (1 << 62), (1 << 63) - 1), 0)
    with pytest.raises(MalformedMessageError, match=f"sizes sum to {2**64 - 1},"):
        check_tail(tail, 64, huge, (huge,), "peer")
    with pytest.raises(MalformedMessageError, match="outside every reserved block"):
        check_tail(BounceTail((0x8000,), (64,), 0x1000), 64, REGION, (), "peer")


def test_two_senders_must_not_write_the_same_bytes() -> None:
    with pytest.raises(MalformedMessageError, match="overlap"):
        check_disjoint([BounceTail((100,), (64,), 0), BounceTail((163,), (1,), 64)], "peer")
    check_disjoint([BounceTail((100,), (64,), 0), BounceTail((164,), (1,), 64)], "peer")


def test_tails_are_scattered_by_their_place_in_the_region_whoever_reported_first() -> None:
    tails = [BounceTail((300,), (64,), 0x100080), BounceTail((100, 200), (64, 64), 0x100000)]
    assert plan_scatter(tails).tolist() == [[0x100000, 100, 64], [0x100040, 200, 64], [0x100080, 300, 64]]


def test_what_cannot_be_said_is_refused_where_it_is_built() -> None:
    with pytest.raises(InvalidValueError, match="sizes_bytes"):
        BounceTail((1, 2), (3,), 0)
    with pytest.raises(InvalidValueError, match="tail"):
        encode_report(RESULT, BounceTail((-1,), (3,), 0))
    with pytest.raises(InvalidValueError, match="size_bytes"):
        encode_result(Result(0, 0, 0, True, ResultStatus.SUCCESS, 1 << 63))

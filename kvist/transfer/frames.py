"""What a sender reports of a write, as bytes: a result of 26 or 34, and a tail that says what a bounced write holds.

    result   i64 rank, i64 transfer, i64 slice, bool is_last, u8 status [, i64 size_bytes]      little-endian, packed
    tail     i64[] destination addresses; i64[] sizes; i64 base of the source                   a frame each

Result and tail are one multi-frame message. Decoding is strict: what is not exactly so is a defect of the sender.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

from kvist.errors import InvalidValueError, MalformedMessageError

_RESULT = struct.Struct("<qqqBB")
_I64 = struct.Struct("<q")
_I64_MAX = (1 << 63) - 1
_NUM_TAIL_FRAMES = 3


class ResultStatus(IntEnum):
    """How a transfer ended at its sender. Whatever it is, none of the sender's writes is under way any more."""

    SUCCESS = 0
    FAILED = 1
    CANCELLED = 2


@dataclass(frozen=True, slots=True)
class Result:
    """One sender's report on one slice; `size_bytes`, what it has written, is said for bounced ones."""

    rank: int
    transfer_id: int
    slice_id: int
    is_last: bool
    status: ResultStatus
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BounceTail:
    """What lies in a written region from `src_base` on, without gaps, and where each piece belongs."""

    dst_addresses: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    src_base: int


@dataclass(frozen=True, slots=True)
class Report:
    """A decoded report; `defect` says what is wrong with its tail, which then is None."""

    result: Result
    tail: BounceTail | None = None
    defect: str | None = None


class Extent(NamedTuple):
    """A piece of memory."""

    base: int
    size_bytes: int

    @property
    def end(self) -> int:
        """Return the address behind the last byte."""
        return self.base + self.size_bytes


class ScatterCopy(NamedTuple):
    """One piece's way out of a region."""

    src_address: int
    dst_address: int
    size_bytes: int


def encode_result(result: Result) -> bytes:
    """Return 26 bytes, or 34 with a size; the one builder for every status. Raises InvalidValueError beyond i64."""
    numbers = (result.rank, result.transfer_id, result.slice_id)
    head = _RESULT.pack(*(_fitting("result", n) for n in numbers), result.is_last, result.status)
    return head if result.size_bytes is None else head + _I64.pack(_fitting("size_bytes", result.size_bytes))


def decode_result(frame: bytes, source: str) -> Result:
    """Return the result in `frame`, checked; raises MalformedMessageError, naming `source` and what is wrong."""
    sized = _RESULT.size + _I64.size
    if len(frame) not in (_RESULT.size, sized):
        raise MalformedMessageError(source, f"a result of {len(frame)} bytes, expected {_RESULT.size} or {sized}")
    rank, transfer_id, slice_id, is_last, status = _RESULT.unpack_from(frame)
    size_bytes = _I64.unpack_from(frame, _RESULT.size)[0] if len(frame) == sized else None
    named = {"rank": rank, "transfer_id": transfer_id, "slice_id": slice_id, "size_bytes": size_bytes or 0}
    for name, number in named.items():
        if number < 0:
            raise MalformedMessageError(source, f"{name} is {number}, expected at least 0")
    if is_last > 1:
        raise MalformedMessageError(source, f"is_last is {is_last}, expected 0 or 1")
    if status > max(ResultStatus):
        raise MalformedMessageError(source, f"status is {status}, expected at most {max(ResultStatus)}")
    return Result(rank, transfer_id, slice_id, bool(is_last), ResultStatus(status), size_bytes)


def encode_report(result: Result, tail: BounceTail | None = None) -> list[bytes]:
    """Return the frames of one message; raises InvalidValueError for a tail whose pieces lack a size or a place."""
    frames = [encode_result(result)]
    if tail is not None:
        if len(tail.dst_addresses) != len(tail.sizes_bytes):
            raise InvalidValueError("sizes_bytes", len(tail.sizes_bytes), f"{len(tail.dst_addresses)} sizes")
        frames += [encode_i64s(tail.dst_addresses), encode_i64s(tail.sizes_bytes), encode_i64s([tail.src_base])]
    return frames


def decode_report(frames: Sequence[bytes], source: str) -> Report:
    """Return the report, the tail's defect in it: who waits for a transfer has to hear that it failed.

    Raises MalformedMessageError only where the result is unreadable, so that nobody can be told.
    """
    if not frames:
        raise MalformedMessageError(source, "no frames, expected a result")
    result = decode_result(frames[0], source)
    if len(frames) == 1:
        return Report(result)
    try:
        return Report(result, _decode_tail(frames[1:], source))
    except MalformedMessageError as error:
        return Report(result, defect=error.reason)


def encode_i64s(numbers: Sequence[int]) -> bytes:
    """Return the numbers as packed little-endian i64; raises InvalidValueError for one that is negative or beyond."""
    return struct.pack(f"<{len(numbers)}q", *(_fitting("tail", n) for n in numbers))


def check_tail(
    tail: BounceTail, declared_bytes: int | None, region: Extent, destinations: Sequence[Extent], source: str
) -> None:
    """Raise MalformedMessageError unless every piece comes out of `region` and goes where a block was reserved.

    `region` is this sender's own part, `destinations` are the reserved blocks, sorted, touching or not, never
    overlapping. The sizes must sum to what the result declares. O(n log n).
    """
    size_bytes = sum(tail.sizes_bytes)
    if size_bytes != declared_bytes:
        raise MalformedMessageError(source, f"sizes sum to {size_bytes}, the result declares {declared_bytes}")
    if min(tail.sizes_bytes, default=1) < 1:
        raise MalformedMessageError(source, f"a piece of {min(tail.sizes_bytes)} bytes, expected at least 1")
    if tail.src_base < region.base or tail.src_base + size_bytes > region.end:
        raise MalformedMessageError(
            source, f"{size_bytes} bytes at {tail.src_base:#x} are not within {region.base:#x}..{region.end:#x}"
        )
    bases = [extent.base for extent in destinations]
    for address, size in zip(tail.dst_addresses, tail.sizes_bytes, strict=True):
        idx = bisect_right(bases, address) - 1
        if idx < 0 or address + size > destinations[idx].end:
            raise MalformedMessageError(source, f"{size} bytes for {address:#x} are outside every reserved block")
    check_disjoint([tail], source)


def check_disjoint(tails: Iterable[BounceTail], source: str) -> None:
    """Raise MalformedMessageError if any two pieces go to the same bytes."""
    pieces = sorted(pair for tail in tails for pair in zip(tail.dst_addresses, tail.sizes_bytes, strict=True))
    for (address, size), (following, _) in pairwise(pieces):
        if address + size > following:
            raise MalformedMessageError(source, f"pieces for {address:#x} and {following:#x} overlap")


def plan_scatter(tails: Iterable[BounceTail]) -> list[ScatterCopy]:
    """Return the copies out of a region that several senders filled, by address in it, whoever reported first."""
    copies: list[ScatterCopy] = []
    for tail in sorted(tails, key=lambda tail: tail.src_base):
        starts = accumulate(tail.sizes_bytes, initial=tail.src_base)
        copies.extend(map(ScatterCopy, starts, tail.dst_addresses, tail.sizes_bytes))
    return copies


def _decode_tail(frames: Sequence[bytes], source: str) -> BounceTail:
    if len(frames) != _NUM_TAIL_FRAMES:
        raise MalformedMessageError(source, f"a tail of {len(frames)} frames, expected {_NUM_TAIL_FRAMES}")
    addresses, sizes, bases = (_decode_i64s(frame, source) for frame in frames)
    if len(addresses) != len(sizes):
        raise MalformedMessageError(source, f"{len(addresses)} addresses, but {len(sizes)} sizes")
    if len(bases) != 1:
        raise MalformedMessageError(source, f"{len(bases)} bases of the source, expected 1")
    return BounceTail(addresses, sizes, bases[0])


def _decode_i64s(frame: bytes, source: str) -> tuple[int, ...]:
    if len(frame) % _I64.size:
        raise MalformedMessageError(source, f"a tail frame of {len(frame)} bytes, expected a multiple of {_I64.size}")
    numbers: tuple[int, ...] = struct.unpack(f"<{len(frame) // _I64.size}q", frame)
    if min(numbers, default=0) < 0:
        raise MalformedMessageError(source, f"{min(numbers)} in a tail, expected at least 0")
    return numbers


def _fitting(field: str, number: int) -> int:
    if not 0 <= number <= _I64_MAX:
        raise InvalidValueError(field, number, f"0 to {_I64_MAX}")
    return number

"""What a sender reports of a write, as bytes: a result of 26 or 34, and a tail that says what a bounced write holds.

    result   i64 rank, i64 transfer, i64 slice, bool is_last, u8 status [, i64 size_bytes]      little-endian, packed
    tail     i64[] destination addresses; i64[] sizes; i64 base of the source                   a frame each

Result and tail are one multi-frame message. Decoding is strict: what is not exactly so is a defect of the sender.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.errors import InvalidValueError, MalformedMessageError

Int64s: TypeAlias = NDArray[np.int64]

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


class BounceTail:
    """What lies in a written region from `src_base` on, without gaps, and where each piece belongs.

    Arrays of int64, not to be changed: there can be a piece a head, layer and block, 131,072 of them in half a GiB.
    """

    __slots__ = ("dst_addresses", "sizes_bytes", "src_base")

    def __init__(self, dst_addresses: ArrayLike, sizes_bytes: ArrayLike, src_base: int) -> None:
        """Raise InvalidValueError for pieces that lack a size or a place."""
        self.dst_addresses: Int64s = np.asarray(dst_addresses, np.int64)
        self.sizes_bytes: Int64s = np.asarray(sizes_bytes, np.int64)
        self.src_base = src_base
        if len(self.dst_addresses) != len(self.sizes_bytes):
            raise InvalidValueError("sizes_bytes", len(self.sizes_bytes), f"{len(self.dst_addresses)} sizes")

    def __eq__(self, other: object) -> bool:
        """Return whether both say the same."""
        return (
            isinstance(other, BounceTail)
            and self.src_base == other.src_base
            and np.array_equal(self.dst_addresses, other.dst_addresses)
            and np.array_equal(self.sizes_bytes, other.sizes_bytes)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was bounced: the sender has written each piece to its place."""
        return len(self.sizes_bytes) == 0


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
    """Return the frames of one message; raises InvalidValueError for numbers that are negative."""
    frames = [encode_result(result)]
    if tail is not None:
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


def encode_i64s(numbers: ArrayLike) -> bytes:
    """Return the numbers as packed little-endian i64; raises InvalidValueError for a negative one."""
    array = np.asarray(numbers, "<i8")
    if array.min(initial=0) < 0:
        raise InvalidValueError("tail", int(array.min()), "at least 0")
    return array.tobytes()


def check_tail(
    tail: BounceTail, declared_bytes: int | None, region: Extent, destinations: ArrayLike, source: str
) -> None:
    """Raise MalformedMessageError unless every piece comes out of `region` and goes where a block was reserved.

    `region` is this sender's own part, `destinations` are the reserved blocks, `[n, 2]` of address and bytes, sorted,
    never overlapping; a piece lies within one of them. The sizes must sum to what the result declares. O(n log n).
    """
    sizes = tail.sizes_bytes
    smallest, largest = int(sizes.min(initial=region.size_bytes)), int(sizes.max(initial=0))
    if smallest < 1 or largest > region.size_bytes or len(sizes) > region.size_bytes:
        raise MalformedMessageError(
            source, f"{len(sizes)} pieces of {smallest} to {largest} bytes do not fit in {region.size_bytes}"
        )
    size_bytes = _sum(sizes)
    if size_bytes != declared_bytes:
        raise MalformedMessageError(source, f"sizes sum to {size_bytes}, the result declares {declared_bytes}")
    if tail.src_base < region.base or tail.src_base + size_bytes > region.end:
        raise MalformedMessageError(
            source, f"{size_bytes} bytes at {tail.src_base:#x} are not within {region.base:#x}..{region.end:#x}"
        )
    blocks = np.asarray(destinations, np.int64).reshape(-1, 2)
    idx = np.searchsorted(blocks[:, 0], tail.dst_addresses, side="right") - 1
    # Distances instead of ends: an address near the largest number must not wrap round into a block.
    is_outside = idx < 0
    if len(blocks):
        is_outside |= tail.dst_addresses - blocks[idx, 0] > blocks[idx, 1] - sizes
    if is_outside.any():
        first = int(is_outside.argmax())
        raise MalformedMessageError(
            source, f"{sizes[first]} bytes for {tail.dst_addresses[first]:#x} are outside every reserved block"
        )
    check_disjoint([tail], source)


def check_disjoint(tails: Sequence[BounceTail], source: str) -> None:
    """Raise MalformedMessageError if any two pieces of tails that fit by themselves go to the same bytes."""
    addresses = np.concatenate([tail.dst_addresses for tail in tails])
    sizes = np.concatenate([tail.sizes_bytes for tail in tails])
    order = np.argsort(addresses, kind="stable")
    ordered = addresses[order]
    is_overlapping = ordered[:-1] + sizes[order][:-1] > ordered[1:]
    if is_overlapping.any():
        first = int(is_overlapping.argmax())
        raise MalformedMessageError(source, f"pieces for {ordered[first]:#x} and {ordered[first + 1]:#x} overlap")


def plan_scatter(tails: Sequence[BounceTail]) -> Int64s:
    """Return the copies `[num_pieces, 3]` out of a region that several senders filled: source, destination, size.

    By address in the region, whoever reported first.
    """
    ordered = sorted(tails, key=lambda tail: tail.src_base)
    starts = [tail.src_base + np.cumsum(tail.sizes_bytes) - tail.sizes_bytes for tail in ordered]
    columns = (starts, [tail.dst_addresses for tail in ordered], [tail.sizes_bytes for tail in ordered])
    return np.stack([np.concatenate(column) for column in columns], axis=1)


def _decode_tail(frames: Sequence[bytes], source: str) -> BounceTail:
    if len(frames) != _NUM_TAIL_FRAMES:
        raise MalformedMessageError(source, f"a tail of {len(frames)} frames, expected {_NUM_TAIL_FRAMES}")
    addresses, sizes, bases = (_decode_i64s(frame, source) for frame in frames)
    if len(addresses) != len(sizes):
        raise MalformedMessageError(source, f"{len(addresses)} addresses, but {len(sizes)} sizes")
    if len(bases) != 1:
        raise MalformedMessageError(source, f"{len(bases)} bases of the source, expected 1")
    return BounceTail(addresses, sizes, int(bases[0]))


def _decode_i64s(frame: bytes, source: str) -> Int64s:
    if len(frame) % _I64.size:
        raise MalformedMessageError(source, f"a tail frame of {len(frame)} bytes, expected a multiple of {_I64.size}")
    numbers = np.frombuffer(frame, "<i8")
    if numbers.min(initial=0) < 0:
        raise MalformedMessageError(source, f"{numbers.min()} in a tail, expected at least 0")
    return numbers


def _sum(sizes: Int64s) -> int:
    """Return the exact sum of sizes, also of hostile ones that do not fit in 64 bits together."""
    halves = (int((sizes >> 32).sum()), int((sizes & 0xFFFF_FFFF).sum()))
    return (halves[0] << 32) + halves[1]


def _fitting(field: str, number: int) -> int:
    if not 0 <= number <= _I64_MAX:
        raise InvalidValueError(field, number, f"0 to {_I64_MAX}")
    return number

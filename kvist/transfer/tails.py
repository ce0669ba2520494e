"""The tail of a bounced write: what lies in the receiver's region, and where each piece of it belongs.

What a sender says is believed only after `decode_tail`: its bytes decide where memory is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.errors import InvalidValueError, MalformedMessageError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Int64s: TypeAlias = NDArray[np.int64]


class Extent(NamedTuple):
    """A piece of memory."""

    base: Count
    size_bytes: Count

    @property
    def end(self) -> int:
        """Return the address behind the last byte."""
        return self.base + self.size_bytes


class EncodedTail(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tail on the wire, as packed little-endian i64."""

    dst_addresses: bytes
    sizes_bytes: bytes


class BounceTail:
    """What lies in a sender's room from `src_base` on, without gaps, and where each piece belongs.

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

    def encode(self) -> EncodedTail:
        """Return it as it is sent."""
        addresses, sizes = (array.astype("<i8").tobytes() for array in (self.dst_addresses, self.sizes_bytes))
        return EncodedTail(addresses, sizes)


def decode_tail(encoded: EncodedTail, room: Extent, destinations: ArrayLike, source: str) -> BounceTail:
    """Return a tail that can be believed; raises MalformedMessageError, naming `source`, for any other.

    Its pieces fill this sender's room, and each goes where a block was reserved: `destinations` are the blocks,
    `[n, 2]` of address and bytes, sorted, never overlapping; a piece lies within one of them. O(n log n).
    """
    addresses, sizes = (_decode_i64s(frame, source) for frame in (encoded.dst_addresses, encoded.sizes_bytes))
    if len(addresses) != len(sizes):
        raise MalformedMessageError(source, f"{len(addresses)} addresses, but {len(sizes)} sizes")
    smallest, size_bytes = int(sizes.min()) if len(sizes) else 0, _sum(sizes)
    if smallest < 1 or size_bytes != room.size_bytes:
        got = f"{len(sizes)} pieces from {smallest} bytes on, {size_bytes} together"
        raise MalformedMessageError(source, f"{got}, expected {room.size_bytes}")
    blocks = np.asarray(destinations, np.int64).reshape(-1, 2)
    idx = np.searchsorted(blocks[:, 0], addresses, side="right") - 1
    # Distances instead of ends: an address near the largest number must not wrap round into a block.
    is_outside = idx < 0
    if len(blocks):
        is_outside |= addresses - blocks[idx, 0] > blocks[idx, 1] - sizes
    if is_outside.any():
        first = int(is_outside.argmax())
        raise MalformedMessageError(
            source, f"{sizes[first]} bytes for {addresses[first]:#x} are outside every reserved block"
        )
    tail = BounceTail(addresses, sizes, room.base)
    check_disjoint([tail], source)
    return tail


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


def _decode_i64s(frame: bytes, source: str) -> Int64s:
    if len(frame) % 8:
        raise MalformedMessageError(source, f"a tail's array of {len(frame)} bytes, expected a multiple of 8")
    numbers = np.frombuffer(frame, "<i8")
    if numbers.min(initial=0) < 0:
        raise MalformedMessageError(source, f"{numbers.min()} in a tail, expected at least 0")
    return numbers


def _sum(sizes: Int64s) -> int:
    """Return the exact sum of sizes, also of hostile ones that do not fit in 64 bits together."""
    halves = (int((sizes >> 32).sum()), int((sizes & 0xFFFF_FFFF).sum()))
    return (halves[0] << 32) + halves[1]

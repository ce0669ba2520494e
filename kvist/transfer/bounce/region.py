"""What is bounced, how large the regions for it are, which sender writes where in them, and which parts are taken."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from kvist.errors import InvalidValueError
from kvist.transfer.results import Extent

MIB = 1 << 20
CHUNK_BYTES = 32 * MIB
ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class BounceConfig:
    """`size_mib` is that of each of two regions, one to send from and one to receive in; 0 turns bouncing off.

    A transfer is bounced whose fragments are many and small. The time of 64 MiB as they are over that of a bounce was,
    in shared memory and over NIXL, 1.5 and 2.5 in fragments of 1 KiB, 1.1 and 1.7 of 2 KiB, 0.9 and 1.3 of 4 KiB, below
    1 of any larger. A bounce costs half a millisecond of hand-overs, which 5,500 fragments of 2 KiB gain back in shared
    memory (two AMD EPYC cores, benchmarks/results/bench_transfer.md, 2026-11-21).
    """

    size_mib: int = 0
    max_fragment_bytes: int = 2048
    min_fragments: int = 8192
    close_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a negative value."""
        if not isinstance(self.size_mib, int) or isinstance(self.size_mib, bool) or self.size_mib < 0:
            raise InvalidValueError("size_mib", self.size_mib, "a whole number of MiB, 0 for off")
        for field in ("max_fragment_bytes", "min_fragments"):
            if getattr(self, field) < 1:
                raise InvalidValueError(field, getattr(self, field), "at least 1")
        if not self.close_timeout_s >= 0:
            raise InvalidValueError("close_timeout_s", self.close_timeout_s, "at least 0")

    def pays_off(self, num_fragments: int, size_bytes: int, num_writers: int = 1) -> bool:
        """Return whether fragments of so many bytes in all, by so many writers at a time, are better bounced."""
        is_many = num_fragments >= self.min_fragments * num_writers
        return is_many and size_bytes <= num_fragments * self.max_fragment_bytes

    def region_bytes(self, free_bytes: int) -> int | None:
        """Return the size of each region, in whole chunks, of which two take at most half of what is free.

        None for off, or too little memory.
        """
        wanted = -(-self.size_mib * MIB // CHUNK_BYTES) * CHUNK_BYTES
        return min(wanted, free_bytes // 4 // CHUNK_BYTES * CHUNK_BYTES) or None


def split_extent(base: int, size_bytes: int, num_writers: int) -> tuple[Extent, ...] | None:
    """Return each writer's equal part, in the order of ranks; None if the size cannot be divided so."""
    if num_writers < 1 or size_bytes < num_writers or size_bytes % num_writers:
        return None
    part = size_bytes // num_writers
    return tuple(Extent(base + writer * part, part) for writer in range(num_writers))


class RegionAllocator:
    """Gives out the first hole that is large enough; O(n) in what is taken, which is one part a transfer.

    Not thread-safe. A part is quarantined where it lies: it stays taken until it is freed like any other.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Raise InvalidValueError for a capacity that is not whole parts."""
        if capacity_bytes < 1 or capacity_bytes % ALIGNMENT_BYTES:
            raise InvalidValueError("capacity_bytes", capacity_bytes, f"a positive multiple of {ALIGNMENT_BYTES}")
        self.capacity_bytes = capacity_bytes
        self._taken: list[tuple[int, int]] = []  # (offset, end), sorted, quarantined ones among them
        self._quarantined: set[int] = set()

    @property
    def used_bytes(self) -> int:
        """Return how much is taken, quarantined parts included."""
        return sum(end - offset for offset, end in self._taken)

    @property
    def quarantined_bytes(self) -> int:
        """Return how much is quarantined."""
        return sum(end - offset for offset, end in self._taken if offset in self._quarantined)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a part, rounded up to the alignment; None if it is empty or no hole holds it."""
        if size_bytes < 1:
            return None
        size_bytes += -size_bytes % ALIGNMENT_BYTES
        offset = 0
        for taken, end in self._taken:
            if taken - offset >= size_bytes:
                break
            offset = end
        if offset + size_bytes > self.capacity_bytes:
            return None
        insort(self._taken, (offset, offset + size_bytes))
        return offset

    def quarantine(self, offset: int) -> None:
        """Mark a taken part as one that a late write could reach; raises InvalidValueError."""
        self._find(offset)
        self._quarantined.add(offset)

    def free(self, offset: int) -> None:
        """Give a taken part back, quarantined or not; raises InvalidValueError for one that is not taken."""
        del self._taken[self._find(offset)]
        self._quarantined.discard(offset)

    def _find(self, offset: int) -> int:
        for idx, (taken, _) in enumerate(self._taken):
            if taken == offset:
                return idx
        raise InvalidValueError("offset", offset, "the offset of a part that is taken")

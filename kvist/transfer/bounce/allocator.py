"""Which parts of a region are taken: first fit, and what a late write could reach is not given out again."""

from __future__ import annotations

from bisect import insort

from kvist.errors import InvalidValueError

ALIGNMENT_BYTES = 512


class RegionAllocator:
    """Gives out the first hole that is large enough; O(n) in what is taken, which is one part a transfer.

    Not thread-safe. A part is quarantined where it lies: it stays taken until it is freed like any other.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        """Raise InvalidValueError for an alignment that is not positive, or a capacity that it does not divide."""
        if alignment_bytes < 1:
            raise InvalidValueError("alignment_bytes", alignment_bytes, "at least 1")
        if capacity_bytes < 1 or capacity_bytes % alignment_bytes:
            raise InvalidValueError("capacity_bytes", capacity_bytes, f"a positive multiple of {alignment_bytes}")
        self.capacity_bytes = capacity_bytes
        self._alignment = alignment_bytes
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
        size_bytes += -size_bytes % self._alignment
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

"""How large bounce regions are, what a transfer takes of one, and which sender writes where."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from kvist.errors import InvalidValueError
from kvist.transfer.frames import Extent

MIB = 1 << 20
CHUNK_BYTES = 32 * MIB


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
        """Return the size of each region where `free_bytes` of memory are free; None for off, or too little memory."""
        return fit_region(region_bytes(self.size_mib), free_bytes) if self.size_mib else None


def region_bytes(size_mib: int) -> int:
    """Return a region's size: whole chunks, at least one."""
    return max(-(-size_mib * MIB // CHUNK_BYTES), 1) * CHUNK_BYTES


def fit_region(wanted_bytes: int, free_bytes: int) -> int | None:
    """Return the size of which two take at most half of what is free, in whole chunks; None if that is none."""
    fitting = min(wanted_bytes, free_bytes // 4 // CHUNK_BYTES * CHUNK_BYTES)
    return fitting if fitting >= CHUNK_BYTES else None


def payload_bytes(num_blocks: Mapping[Hashable, int], slot_bytes: Mapping[Hashable, int]) -> int | None:
    """Return what a transfer of so many blocks of each group takes; None for a group that is unknown."""
    if not num_blocks.keys() <= slot_bytes.keys():
        return None
    return sum(count * slot_bytes[group] for group, count in num_blocks.items())


def split_extent(base: int, size_bytes: int, num_writers: int) -> tuple[Extent, ...] | None:
    """Return each writer's equal part, in the order of ranks; None if the size cannot be divided so."""
    if num_writers < 1 or size_bytes < num_writers or size_bytes % num_writers:
        return None
    part = size_bytes // num_writers
    return tuple(Extent(base + writer * part, part) for writer in range(num_writers))


def fans_in(num_writers: int, *, head_duplication: int, has_even_stages: bool, has_replicated_views: bool) -> bool:
    """Return whether several writers' parts are equal, and no two of them bring the same heads."""
    return num_writers == 1 or (head_duplication == 1 and has_even_stages and not has_replicated_views)

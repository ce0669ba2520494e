"""How large regions are, what is bounced, which writer writes where, and which parts are taken."""

from __future__ import annotations

import random

import pytest
import torch

from kvist.transfer.bounce import ALIGNMENT_BYTES, MIB, BounceRegion, region_bytes


@pytest.mark.parametrize(("size_mib", "expected_mib"), [(1, 32), (50, 64), (384, 384), (32, 32), (33, 64)])
def test_a_region_is_whole_chunks(size_mib: int, expected_mib: int) -> None:
    assert region_bytes(size_mib, 1 << 40) == expected_mib * MIB


@pytest.mark.parametrize(
    ("wanted", "free", "expected"),
    [(4096, 1024, 256), (128, 4096, 128), (64, 32, 0), (64, 127, 0), (64, 128, 32), (64, 0, 0)],
)
def test_two_regions_take_at_most_half_of_what_is_free(wanted: int, free: int, expected: int) -> None:
    assert region_bytes(wanted, free * MIB) == expected * MIB


def test_an_earlier_hole_is_used_again_before_anything_behind_it() -> None:
    room = region_of(4096)
    at = room.address
    assert [room.allocate(512), room.allocate(1000), room.allocate(512)] == [at, at + 512, at + 1536]
    assert room.used_bytes == 512 + 1024 + 512
    room.free(at + 512)
    assert room.allocate(1024) == at + 512
    assert room.allocate(600) == at + 2048
    assert room.allocate(2048) is None
    assert room.allocate(1024) == at + 3072
    assert room.used_bytes == 4096
    assert room.allocate(4097) is None


def test_quarantined_parts_stay_taken_until_they_are_freed() -> None:
    room = region_of(1024)
    at = room.address
    assert room.allocate(512) == at
    room.quarantine(at)
    room.quarantine(at)
    assert (room.used_bytes, room.quarantined_bytes) == (512, 512)
    assert room.allocate(512) == at + 512
    room.free(at)
    assert (room.used_bytes, room.quarantined_bytes) == (512, 0)
    assert room.allocate(512) == at
    assert room.quarantined_bytes == 0


def region_of(size_bytes: int) -> BounceRegion:
    return BounceRegion(torch.empty(size_bytes, dtype=torch.uint8))


class Bitmap:
    """A region, and a map of it that is searched by brute force."""

    NUM_UNITS = 24

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.room = region_of(self.NUM_UNITS * ALIGNMENT_BYTES)
        self.is_taken = [False] * self.NUM_UNITS
        self.parts: dict[int, int] = {}
        self.quarantined: set[int] = set()

    def allocate(self) -> bool:
        """Return whether there is a hole, which is the first that is large enough."""
        size_bytes = self.random.randint(1, self.random.choice((600, 3000, 6400)))
        units = -(-size_bytes // ALIGNMENT_BYTES)
        starts = range(self.NUM_UNITS - units + 1)
        hole = next((start for start in starts if not any(self.is_taken[start : start + units])), None)
        address = self.room.allocate(size_bytes)
        assert address == (None if hole is None else self.room.address + hole * ALIGNMENT_BYTES)
        if hole is not None:
            self.parts[hole] = units
            self.is_taken[hole : hole + units] = [True] * units
        return hole is not None

    def free(self) -> None:
        if self.parts:
            hole = self.random.choice([*self.parts])
            self.room.free(self.room.address + hole * ALIGNMENT_BYTES)
            units = self.parts.pop(hole)
            self.is_taken[hole : hole + units] = [False] * units
            self.quarantined.discard(hole)

    def quarantine(self) -> None:
        if self.parts:
            self.quarantined.add(hole := self.random.choice([*self.parts]))
            self.room.quarantine(self.room.address + hole * ALIGNMENT_BYTES)


def test_every_part_is_in_the_first_hole_of_a_bitmap() -> None:
    given = []
    for seed in range(20):
        bitmap = Bitmap(seed)
        for act in bitmap.random.choices((bitmap.allocate, bitmap.free, bitmap.quarantine), (7, 4, 1), k=200):
            given.append(act())
            assert bitmap.room.used_bytes == sum(bitmap.is_taken) * ALIGNMENT_BYTES
            quarantined = sum(bitmap.parts[hole] for hole in bitmap.quarantined)
            assert bitmap.room.quarantined_bytes == quarantined * ALIGNMENT_BYTES
    assert min(given.count(True), given.count(False)) > 500

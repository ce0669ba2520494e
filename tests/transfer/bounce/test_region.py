"""How large regions are, what is bounced, which writer writes where, and which parts are taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


class AllocatorMachine(RuleBasedStateMachine):
    """Every answer is that of a bitmap that is searched by brute force."""

    NUM_UNITS, UNIT = 24, ALIGNMENT_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.room = region_of(self.NUM_UNITS * self.UNIT)
        self.bitmap = [False] * self.NUM_UNITS
        self.parts: dict[int, int] = {}
        self.quarantined: set[int] = set()

    @rule(size_bytes=st.integers(1, 6400))
    def allocate(self, size_bytes: int) -> None:
        units = -(-size_bytes // self.UNIT)
        fits = [start for start in range(self.NUM_UNITS - units + 1) if not any(self.bitmap[start : start + units])]
        address = self.room.allocate(size_bytes)
        assert address == (self.room.address + fits[0] * self.UNIT if fits else None)
        if address is not None:
            offset = address - self.room.address
            self.parts[offset] = units
            self.mark(offset, is_taken=True)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.parts)))
        self.room.free(self.room.address + offset)
        self.mark(offset, is_taken=False)
        del self.parts[offset]
        self.quarantined.discard(offset)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.parts)))
        self.room.quarantine(self.room.address + offset)
        self.quarantined.add(offset)

    @invariant()
    def counts_agree(self) -> None:
        assert self.room.used_bytes == sum(self.bitmap) * self.UNIT
        assert self.room.quarantined_bytes == sum(self.parts[offset] for offset in self.quarantined) * self.UNIT

    def mark(self, offset: int, *, is_taken: bool) -> None:
        first = offset // self.UNIT
        for unit in range(first, first + self.parts[offset]):
            assert self.bitmap[unit] is not is_taken
            self.bitmap[unit] = is_taken


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

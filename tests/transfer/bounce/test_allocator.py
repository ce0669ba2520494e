"""The allocator of a region against a bitmap that is searched by brute force."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.errors import InvalidValueError
from kvist.transfer.bounce.allocator import RegionAllocator


def test_an_earlier_hole_is_used_again_before_anything_behind_it() -> None:
    room = RegionAllocator(4096)
    assert [room.allocate(512), room.allocate(1000), room.allocate(512)] == [0, 512, 1536]
    assert room.used_bytes == 512 + 1024 + 512
    room.free(512)
    assert room.allocate(1024) == 512
    assert room.allocate(600) == 2048
    assert room.allocate(2048) is None
    assert room.allocate(1024) == 3072
    assert room.used_bytes == 4096
    assert room.allocate(4097) is None
    assert room.allocate(0) is None


def test_quarantined_parts_stay_taken_until_they_are_freed() -> None:
    room = RegionAllocator(1024)
    assert room.allocate(512) == 0
    room.quarantine(0)
    room.quarantine(0)
    assert (room.used_bytes, room.quarantined_bytes) == (512, 512)
    assert room.allocate(512) == 512
    room.free(0)
    assert (room.used_bytes, room.quarantined_bytes) == (512, 0)
    assert room.allocate(512) == 0
    assert room.quarantined_bytes == 0


def test_what_is_not_taken_can_neither_be_freed_nor_quarantined() -> None:
    room = RegionAllocator(1024)
    for method in (room.free, room.quarantine):
        with pytest.raises(InvalidValueError, match="offset: got 0, expected the offset of a part that is taken"):
            method(0)


@pytest.mark.parametrize(("capacity", "alignment"), [(0, 512), (-512, 512), (1000, 512), (512, 0)])
def test_a_capacity_that_the_alignment_does_not_divide_is_refused(capacity: int, alignment: int) -> None:
    with pytest.raises(InvalidValueError):
        RegionAllocator(capacity, alignment)


class AllocatorMachine(RuleBasedStateMachine):
    """Every answer is the bitmap's."""

    NUM_UNITS, UNIT = 24, 8

    def __init__(self) -> None:
        super().__init__()
        self.room = RegionAllocator(self.NUM_UNITS * self.UNIT, self.UNIT)
        self.bitmap = [False] * self.NUM_UNITS
        self.parts: dict[int, int] = {}
        self.quarantined: set[int] = set()

    @rule(size_bytes=st.integers(-1, 100))
    def allocate(self, size_bytes: int) -> None:
        units = -(-size_bytes // self.UNIT)
        fits = [
            start
            for start in range(self.NUM_UNITS - units + 1)
            if size_bytes > 0 and not any(self.bitmap[start : start + units])
        ]
        offset = self.room.allocate(size_bytes)
        assert offset == (fits[0] * self.UNIT if fits else None)
        if offset is not None:
            self.parts[offset] = units
            self.mark(offset, is_taken=True)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.parts)))
        self.room.free(offset)
        self.mark(offset, is_taken=False)
        del self.parts[offset]
        self.quarantined.discard(offset)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.parts)))
        self.room.quarantine(offset)
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

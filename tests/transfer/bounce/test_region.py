"""How large regions are, what is bounced, which writer writes where, and which parts are taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.errors import InvalidValueError
from kvist.transfer.bounce import ALIGNMENT_BYTES, MIB, BounceConfig, RegionAllocator


@pytest.mark.parametrize(("size_mib", "expected_mib"), [(1, 32), (50, 64), (384, 384), (32, 32), (33, 64)])
def test_a_region_is_whole_chunks(size_mib: int, expected_mib: int) -> None:
    assert BounceConfig(size_mib).region_bytes(1 << 40) == expected_mib * MIB


@pytest.mark.parametrize(
    ("wanted", "free", "expected"),
    [(4096, 1024, 256), (128, 4096, 128), (64, 32, None), (64, 127, None), (64, 128, 32), (64, 0, None)],
)
def test_two_regions_take_at_most_half_of_what_is_free(wanted: int, free: int, expected: int | None) -> None:
    assert BounceConfig(wanted).region_bytes(free * MIB) == (None if expected is None else expected * MIB)


def test_bouncing_is_off_by_default_and_sized_in_mib() -> None:
    assert BounceConfig().size_mib == 0
    assert BounceConfig().region_bytes(1 << 40) is None
    assert BounceConfig(size_mib=50).region_bytes(1 << 40) == 64 * MIB
    assert BounceConfig(size_mib=50).region_bytes(128 * MIB) == 32 * MIB
    assert BounceConfig(size_mib=50).region_bytes(127 * MIB) is None


@pytest.mark.parametrize("size_mib", [-1, -384, 1.5, True, "384", None])
def test_a_size_that_is_no_whole_number_of_mib_is_refused(size_mib: object) -> None:
    with pytest.raises(InvalidValueError, match=r"size_mib: got .*, expected a whole number of MiB") as caught:
        BounceConfig(size_mib=size_mib)  # type: ignore[arg-type]
    assert caught.value.value == size_mib


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="close_timeout_s"):
        BounceConfig(close_timeout_s=-0.1)


def test_few_blocks_of_many_bytes_are_bounced_whatever_their_number() -> None:
    """67 blocks of 433 MiB in pieces of a kilobyte: what counts is how many pieces there are, and how small."""
    assert BounceConfig().pays_off(433 * MIB // 1024, 433 * MIB)


def test_only_many_small_fragments_are_bounced() -> None:
    config = BounceConfig()
    assert config.pays_off(8192, 8192 * 2048)
    assert not config.pays_off(8191, 8191 * 1024)
    assert not config.pays_off(8192, 8192 * 2048 + 1)
    assert not config.pays_off(0, 0)


def test_each_of_several_writers_must_have_many_fragments() -> None:
    assert BounceConfig().pays_off(2 * 8192, 2 * 8192 * 1024, num_writers=2)
    assert not BounceConfig().pays_off(2 * 8192 - 2, 2 * 8192 * 1024, num_writers=2)


@pytest.mark.parametrize("field", ["max_fragment_bytes", "min_fragments"])
def test_a_threshold_below_one_is_refused(field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        BounceConfig(**{field: 0})


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


@pytest.mark.parametrize("capacity", [0, -512, 1000])
def test_a_capacity_that_is_not_whole_parts_is_refused(capacity: int) -> None:
    with pytest.raises(InvalidValueError):
        RegionAllocator(capacity)


class AllocatorMachine(RuleBasedStateMachine):
    """Every answer is that of a bitmap that is searched by brute force."""

    NUM_UNITS, UNIT = 24, ALIGNMENT_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.room = RegionAllocator(self.NUM_UNITS * self.UNIT)
        self.bitmap = [False] * self.NUM_UNITS
        self.parts: dict[int, int] = {}
        self.quarantined: set[int] = set()

    @rule(size_bytes=st.integers(-1, 6400))
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

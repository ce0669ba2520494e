"""How large regions are, what a transfer takes, and which writer writes where."""

from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.transfer.bounce import BounceConfig
from kvist.transfer.bounce.region import MIB, fans_in, fit_region, payload_bytes, region_bytes, split_extent


@pytest.mark.parametrize(("size_mib", "expected_mib"), [(1, 32), (50, 64), (384, 384), (32, 32), (33, 64)])
def test_a_region_is_whole_chunks(size_mib: int, expected_mib: int) -> None:
    assert region_bytes(size_mib) == expected_mib * MIB


@pytest.mark.parametrize(
    ("wanted", "free", "expected"),
    [(4096, 1024, 256), (128, 4096, 128), (64, 32, None), (64, 127, None), (64, 128, 32), (64, 0, None)],
)
def test_two_regions_take_at_most_half_of_what_is_free(wanted: int, free: int, expected: int | None) -> None:
    assert fit_region(wanted * MIB, free * MIB) == (None if expected is None else expected * MIB)


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


def test_a_payload_is_the_sum_over_groups_and_divides_among_writers_or_not_at_all() -> None:
    size_bytes = payload_bytes({0: 12, 1: 5}, {0: 4096, 1: 2048})
    assert size_bytes == 59392
    extents = split_extent(0, size_bytes, 4)
    assert extents is not None
    assert [extent.base for extent in extents] == [0, 14848, 29696, 44544]
    assert {extent.size_bytes for extent in extents} == {14848}
    assert size_bytes % 3 == 1
    assert split_extent(0, size_bytes, 3) is None
    assert payload_bytes({2: 1}, {0: 4096}) is None


def test_each_writer_writes_behind_the_one_before_it() -> None:
    extents = split_extent(0x100000, 200, 2)
    assert extents is not None
    assert [extent.base for extent in extents] == [1048576, 1048676]


@pytest.mark.parametrize(("size_bytes", "num_writers"), [(0, 1), (-4, 2), (4, 0), (4, -1)])
def test_nothing_cannot_be_divided(size_bytes: int, num_writers: int) -> None:
    assert split_extent(0, size_bytes, num_writers) is None


def test_several_writers_share_a_region_only_where_their_parts_are_equal_and_distinct() -> None:
    even = {"head_duplication": 1, "has_even_stages": True, "has_replicated_views": False}
    assert fans_in(4, **even)  # type: ignore[arg-type]
    for odd in ({"head_duplication": 2}, {"has_even_stages": False}, {"has_replicated_views": True}):
        assert not fans_in(4, **{**even, **odd})  # type: ignore[arg-type]
        assert fans_in(1, **{**even, **odd})  # type: ignore[arg-type]


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

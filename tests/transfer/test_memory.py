from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import ABSENT, KvDtype, KvGroup, LayerKv, stale_range
from kvist.transfer.memory import KvMemory
from kvist.transfer.messages import PoolPlace, ReceiveRequest
from kvist.transfer.slices import BlockCountMismatchError

B, W = 4, 9
WINDOWS = (FULL, W)
GROUPS = tuple(KvGroup(i, LayerKv(window, 1, 8, KvDtype.FLOAT32), (i,)) for i, window in enumerate(WINDOWS))
OURS = (PoolPlace(10_000, 64, 50), PoolPlace(90_000, 128, 50))
THEIRS = (PoolPlace(500_000, 64, 40), PoolPlace(700_000, 128, 40))
MEMORY = KvMemory(GROUPS, B, OURS)


def request(num_tokens: int, lists: tuple[tuple[int, ...], ...]) -> ReceiveRequest:
    return ReceiveRequest(1, "held", 0, num_tokens, num_tokens, lists)


@given(num_tokens=st.integers(1, 60), num_cached=st.integers(0, 14), random=st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_every_missing_block_arrives_whole_in_its_place(num_tokens: int, num_cached: int, random) -> None:
    total = -(-num_tokens // B)
    num_cached = min(num_cached, num_tokens // B)
    tables, lists, expected = [], [], {}
    for group, ours, theirs in zip(GROUPS, OURS, THEIRS, strict=True):
        first = stale_range(num_tokens, group.window, B).end
        held = random.sample(range(50), total - first)
        tables.append([ABSENT] * first + held)
        wanted = random.sample(range(40), total - max(first, num_cached))
        lists.append(tuple(wanted))
        for source_id, target_id in zip(held[len(held) - len(wanted) :], wanted, strict=True):
            expected[theirs.block(target_id).base] = ours.block(source_id)
    fragments = MEMORY.fragments(tables, num_tokens, request(num_tokens, tuple(lists)), THEIRS)
    got = {}
    for local, remote, size in fragments.tolist():
        step = 64 if remote < THEIRS[1].base_address else 128
        assert size % step == 0
        got |= {remote + offset: (local + offset, step) for offset in range(0, size, step)}
    assert got == {base: (extent.base, extent.size_bytes) for base, extent in expected.items()}
    assert MEMORY.num_bytes(lists) == fragments[:, 2].sum()


def test_blocks_that_are_neighbours_on_both_sides_are_one_piece() -> None:
    fragments = MEMORY.fragments([[3, 4, 5, 9], [ABSENT, 7, 8, 2]], 16, request(16, ((20, 21, 22, 23), (5, 6))), THEIRS)
    expected = [[10_192, 501_280, 192], [10_576, 501_472, 64], [91_024, 700_640, 128], [90_256, 700_768, 128]]
    np.testing.assert_array_equal(fragments, expected)


def test_nothing_to_send_is_no_piece() -> None:
    assert MEMORY.fragments([[3, 4], [5, 6]], 8, request(8, ((), ())), THEIRS).shape == (0, 3)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(12, ((1, 2, 3), (4, 5))), "asked for 12 of 12 tokens, have 16"),
        (request(16, ((1, 2, 3, 4),)), "expected 2 groups"),
        (request(16, ((1, 2, 3, 4, 5), (6,))), "5 blocks"),
        (ReceiveRequest(1, "held", 0, 12, 16, ((1, 2, 3), (4,))), "asked for 12 of 16 tokens"),
    ],
)
def test_a_peer_that_has_counted_differently_is_refused(asked: ReceiveRequest, reason: str) -> None:
    with pytest.raises(BlockCountMismatchError, match=reason):
        MEMORY.fragments([[3, 4, 5, 9], [ABSENT, ABSENT, 8, 2]], 16, asked, THEIRS)


def test_a_block_that_the_peer_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="block_id"):
        MEMORY.fragments([[3, 4], [5, 6]], 8, request(8, ((1, 40), (2, 3))), THEIRS)


def test_extents_are_sorted_and_touching_ones_are_one() -> None:
    extents = MEMORY.extents([[7, 5, 6], [3]])
    assert [tuple(extent) for extent in extents] == [(10_320, 192), (90_384, 128)]

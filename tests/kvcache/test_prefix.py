from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events import FULL, Window
from kvist.kvcache.prefix import reusable_prefix
from kvist.kvcache.stale import num_blocks_for, stale_range


def reuse(num_tokens: int, block_size: int, *groups: tuple[Window, Sequence[int]]) -> int:
    return reusable_prefix(num_tokens, block_size, [(window, cover.__getitem__) for window, cover in groups])


@pytest.mark.parametrize(
    ("num_tokens", "groups", "expected"),
    [
        (127, [(64, [0, 0, 32, 31])], 127),
        (96, [(64, [0, 0, 32, 31])], 0),
        (128, [(FULL, [32] * 4), (64, [0, 0, 32, 32])], 128),
        (120, [(FULL, [32] * 4), (64, [0, 0, 32, 32])], 0),
        (96, [(16, [0, 0, 32])], 96),
        (128, [(FULL, [32, 32, 0, 32])], 64),
        (128, [(FULL, [32] * 3 + [0]), (64, [32] * 4), (32, [0, 0, 32, 0])], 96),
    ],
)
def test_the_written_examples_hold(num_tokens: int, groups: list[tuple[Window, list[int]]], expected: int) -> None:
    assert reuse(num_tokens, 32, *groups) == expected


@given(
    block_size=st.sampled_from([1, 4, 8]),
    covers=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3),
    windows=st.lists(st.one_of(st.just(FULL), st.integers(1, 40)), min_size=3, max_size=3),
    num_blocks=st.integers(0, 12),
)
def test_it_is_the_longest_length_that_every_group_can_serve(
    block_size: int, covers: list[list[bool]], windows: list[Window], num_blocks: int
) -> None:
    groups = list(zip(windows, covers, strict=False))

    def serves(num_tokens: int) -> bool:
        end = num_blocks_for(num_tokens, block_size)
        return all(all(cover[stale_range(num_tokens, window, block_size).end : end]) for window, cover in groups)

    longest = max(n for n in range(0, num_blocks * block_size + 1, block_size) if serves(n))
    tokens = [(window, [block_size * held for held in cover]) for window, cover in groups]
    assert reuse(num_blocks * block_size, block_size, *tokens) == longest

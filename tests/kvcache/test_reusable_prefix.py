from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events import FULL, Window
from kvist.kvcache.stale import num_stale_blocks, reusable_prefix


def reuse(num_blocks: int, block_size: int, *groups: tuple[Window, Sequence[bool]]) -> int:
    return reusable_prefix(num_blocks, block_size, [(window, held.__getitem__) for window, held in groups])


@pytest.mark.parametrize(
    ("num_blocks", "groups", "expected"),
    [
        (4, [(FULL, "1111"), (64, "0011")], 4),
        (3, [(64, "0011")], 0),
        (3, [(16, "001")], 3),
        (4, [(FULL, "1101")], 2),
        (4, [(FULL, "1110"), (64, "1111"), (32, "0010")], 3),
    ],
)
def test_the_written_examples_hold(num_blocks: int, groups: list[tuple[Window, str]], expected: int) -> None:
    assert reuse(num_blocks, 32, *((window, [each == "1" for each in held]) for window, held in groups)) == expected


@given(
    block_size=st.sampled_from([1, 4, 8]),
    held=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3),
    windows=st.lists(st.one_of(st.just(FULL), st.integers(1, 40)), min_size=3, max_size=3),
    num_blocks=st.integers(0, 12),
)
def test_it_is_the_longest_length_that_every_group_can_serve(
    block_size: int, held: list[list[bool]], windows: list[Window], num_blocks: int
) -> None:
    groups = list(zip(windows, held, strict=False))

    def serves(end: int) -> bool:
        return all(all(has[num_stale_blocks(end * block_size, window, block_size) : end]) for window, has in groups)

    assert reuse(num_blocks, block_size, *groups) == max(n for n in range(num_blocks + 1) if serves(n))

from __future__ import annotations

import numpy as np
import pytest

from kvist.events import FULL
from kvist.kvcache.stale import effective_window, num_blocks_for, num_stale_blocks


@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_a_block_is_stale_exactly_when_no_query_from_the_history_on_can_read_it(block_size: int) -> None:
    keys = np.arange(300)
    for window in range(1, 70):
        for history in range(300):
            unreadable = (keys < history) & (history - keys >= window)
            num_full_blocks = history // block_size
            whole = unreadable[: num_full_blocks * block_size].reshape(num_full_blocks, block_size).all(axis=1)
            num_stale = num_stale_blocks(history, window, block_size)
            assert np.flatnonzero(whole).tolist() == list(range(num_stale)), (history, window)


@pytest.mark.parametrize(
    ("history", "window", "block_size", "expected"),
    [
        (0, 64, 32, 0),
        (64, 64, 32, 0),
        (95, 64, 32, 1),
        (96, 64, 32, 1),
        (1024, 128, 32, 28),
        (1022, 128, 32, 27),
        (96, 1, 32, 3),
        (32, 16, 8, 2),
        (127, 64, 32, 2),
    ],
)
def test_the_written_examples_hold(history: int, window: int, block_size: int, expected: int) -> None:
    assert num_stale_blocks(history, window, block_size) == expected


def test_a_step_of_eight_tokens_frees_only_what_its_first_query_cannot_see() -> None:
    history, step, window, block_size = 12, 8, 5, 4
    assert num_stale_blocks(history, window, block_size) == 2
    assert num_stale_blocks(history + step, window, block_size) > 2, "counting the step in would free key 8"


def test_full_attention_has_no_stale_blocks() -> None:
    assert num_stale_blocks(10_000, FULL, 16) == 0


def test_a_window_that_no_sequence_outgrows_is_full_attention() -> None:
    assert effective_window(511, 512) == 511
    assert effective_window(512, 512) is FULL
    assert effective_window(FULL, 512) is FULL


def test_a_begun_block_counts_as_a_block() -> None:
    assert [num_blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]

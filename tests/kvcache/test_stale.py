from __future__ import annotations

import numpy as np
import pytest

from kvist.events import FULL
from kvist.kvcache.stale import effective_window, num_blocks_for, stale_range


@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("sink", [0, 5])
def test_a_block_is_stale_exactly_when_no_query_from_the_history_on_can_read_it(block_size: int, sink: int) -> None:
    keys = np.arange(300)
    for window in range(1, 70):
        for history in range(300):
            unreadable = (keys < history) & (history - keys >= window) & (keys >= sink)
            num_full_blocks = history // block_size
            whole = unreadable[: num_full_blocks * block_size].reshape(num_full_blocks, block_size).all(axis=1)
            stale = stale_range(history, window, block_size, sink)
            assert np.flatnonzero(whole).tolist() == list(range(*stale)), (history, window)


@pytest.mark.parametrize(
    ("history", "window", "block_size", "sink", "expected"),
    [
        (0, 64, 32, 0, (0, 0)),
        (64, 64, 32, 0, (0, 0)),
        (95, 64, 32, 0, (0, 1)),
        (96, 64, 32, 0, (0, 1)),
        (1024, 128, 32, 0, (0, 28)),
        (1022, 128, 32, 0, (0, 27)),
        (512, 128, 32, 32, (1, 12)),
        (96, 1, 32, 0, (0, 3)),
        (32, 16, 8, 0, (0, 2)),
        (127, 64, 32, 0, (0, 2)),
    ],
)
def test_the_written_examples_hold(
    history: int, window: int, block_size: int, sink: int, expected: tuple[int, int]
) -> None:
    assert stale_range(history, window, block_size, sink) == expected


def test_a_step_of_eight_tokens_frees_only_what_its_first_query_cannot_see() -> None:
    history, step, window, block_size = 12, 8, 5, 4
    assert stale_range(history, window, block_size) == (0, 2)
    assert stale_range(history + step, window, block_size).end > 2, "counting the step in would free key 8"


def test_full_attention_has_no_stale_blocks() -> None:
    assert stale_range(10_000, FULL, 16) == (0, 0)


def test_a_window_that_no_sequence_outgrows_is_full_attention() -> None:
    assert effective_window(511, 512) == 511
    assert effective_window(512, 512) is FULL
    assert effective_window(FULL, 512) is FULL


def test_a_begun_block_counts_as_a_block() -> None:
    assert [num_blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]

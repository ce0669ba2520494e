from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL, Window
from kvist.kvcache import ScratchPolicy, num_scratch_slots, scratch_range


@pytest.mark.parametrize(
    ("history", "capacity", "window", "rewind", "sink", "expected"),
    [
        (0, 1024, 128, 0, 0, (0, 28)),
        (0, 1000, 128, 0, 0, (0, 27)),
        (0, 1024, 128, 8, 0, (0, 27)),
        (0, 256, 32, 0, 0, (0, 7)),
        (0, 256, 32, 64, 0, (0, 5)),
        (0, 256, 64, 0, 0, (0, 6)),
        (256, 352, 64, 0, 0, (8, 9)),
        (0, 256, 64, 32, 0, (0, 5)),
        (40, 200, 32, 0, 0, (2, 5)),
        (0, 512, 128, 0, 32, (1, 12)),
    ],
)
def test_the_written_ranges_hold(
    history: int, capacity: int, window: int, rewind: int, sink: int, expected: tuple[int, int]
) -> None:
    assert scratch_range(history, capacity, window, 32, rewind=rewind, sink=sink) == expected


@pytest.mark.parametrize(
    ("history", "capacity", "window", "rewind"),
    [(0, 256, 256, 0), (256, 352, 256, 0), (256, 352, 64, 32), (33, 64, 16, 0), (256, 256, 32, 0), (0, 512, FULL, 0)],
)
def test_a_step_that_outgrows_nothing_of_its_own_has_no_scratch(
    history: int, capacity: int, window: Window, rewind: int
) -> None:
    assert scratch_range(history, capacity, window, 32, rewind=rewind).num_blocks == 0


@pytest.mark.parametrize("capacity", [993, 1000, 1022])
def test_twenty_seven_scratch_blocks_are_those_of_shorter_prompts_or_of_a_rewind(capacity: int) -> None:
    assert scratch_range(0, capacity, 128, 32) == (0, 27)
    assert scratch_range(0, capacity + 1, 128, 32).num_blocks == (28 if capacity == 1022 else 27)


@pytest.mark.parametrize(("rewind", "expected"), [(1, 28), (2, 27), (33, 27), (34, 26)])
def test_a_rewind_of_two_to_thirty_three_tokens_costs_a_block_at_1024(rewind: int, expected: int) -> None:
    assert scratch_range(0, 1024, 128, 32, rewind=rewind).num_blocks == expected


@pytest.mark.parametrize("sink", [0, 5])
@pytest.mark.parametrize("rewind", [0, 3])
def test_scratch_is_what_the_step_begins_and_no_later_query_sees(sink: int, rewind: int) -> None:
    block_size = 4
    for window in range(1, 20):
        for history in range(40):
            for capacity in range(history, history + 30):
                blocks = range(*scratch_range(history, capacity, window, block_size, rewind=rewind, sink=sink))
                oldest_next_query = max(0, capacity - rewind)
                expected = [
                    ordinal
                    for ordinal in range(capacity // block_size)
                    if ordinal * block_size >= max(history, sink)
                    and oldest_next_query - (ordinal * block_size + block_size - 1) >= window
                ]
                assert list(blocks) == expected, (window, history, capacity)


@pytest.mark.parametrize(
    ("num_blocks", "scale", "buffers_per_layer", "expected"),
    [(0, 64, 2, 0), (1, 64, 2, 1), (27, 64, 2, 1), (32, 64, 2, 1), (33, 64, 2, 2), (10, 5, 2, 5), (6, 1, 1, 6)],
)
def test_scratch_blocks_take_the_written_number_of_slots(
    num_blocks: int, scale: int, buffers_per_layer: int, expected: int
) -> None:
    assert num_scratch_slots(num_blocks, scale, buffers_per_layer) == expected


def test_a_negative_rewind_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="max_rewind_tokens: got -1, expected at least 0"):
        ScratchPolicy(-1)

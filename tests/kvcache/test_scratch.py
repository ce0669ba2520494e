from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL, Window
from kvist.kvcache import ScratchPolicy
from kvist.kvcache.scratch import need_of_step, scratch_range


@pytest.mark.parametrize(
    ("history", "capacity", "window", "rewind", "expected"),
    [
        (0, 1024, 128, 0, (0, 28)),
        (0, 1000, 128, 0, (0, 27)),
        (0, 1024, 128, 8, (0, 27)),
        (0, 256, 32, 0, (0, 7)),
        (0, 256, 32, 64, (0, 5)),
        (0, 256, 64, 0, (0, 6)),
        (256, 352, 64, 0, (8, 9)),
        (0, 256, 64, 32, (0, 5)),
        (40, 200, 32, 0, (2, 5)),
    ],
)
def test_the_written_ranges_hold(
    history: int, capacity: int, window: int, rewind: int, expected: tuple[int, int]
) -> None:
    assert scratch_range(history, capacity, window, 32, rewind) == range(*expected)


@pytest.mark.parametrize(
    ("history", "capacity", "window", "rewind"),
    [(0, 256, 256, 0), (256, 352, 256, 0), (256, 352, 64, 32), (33, 64, 16, 0), (256, 256, 32, 0), (0, 512, FULL, 0)],
)
def test_a_step_that_outgrows_nothing_of_its_own_has_no_scratch(
    history: int, capacity: int, window: Window, rewind: int
) -> None:
    assert not scratch_range(history, capacity, window, 32, rewind=rewind)


@pytest.mark.parametrize("capacity", [993, 1000, 1022])
def test_twenty_seven_scratch_blocks_are_those_of_shorter_prompts_or_of_a_rewind(capacity: int) -> None:
    assert scratch_range(0, capacity, 128, 32) == range(27)
    assert len(scratch_range(0, capacity + 1, 128, 32)) == (28 if capacity == 1022 else 27)


@pytest.mark.parametrize(("rewind", "expected"), [(1, 28), (2, 27), (33, 27), (34, 26)])
def test_a_rewind_of_two_to_thirty_three_tokens_costs_a_block_at_1024(rewind: int, expected: int) -> None:
    assert len(scratch_range(0, 1024, 128, 32, rewind=rewind)) == expected


@pytest.mark.parametrize("rewind", [0, 3])
def test_scratch_is_what_the_step_begins_and_no_later_query_sees(rewind: int) -> None:
    block_size = 4
    for window in range(1, 20):
        for history in range(40):
            for capacity in range(history, history + 30):
                blocks = scratch_range(history, capacity, window, block_size, rewind)
                oldest_next_query = max(0, capacity - rewind)
                expected = [
                    ordinal
                    for ordinal in range(capacity // block_size)
                    if ordinal * block_size >= history
                    and oldest_next_query - (ordinal * block_size + block_size - 1) >= window
                ]
                assert list(blocks) == expected, (window, history, capacity)


@pytest.mark.parametrize(
    ("history", "capacity", "window", "num_layers", "rewind", "expected"),
    [
        (0, 1024, 128, 32, 0, 5),
        (0, 1000, 128, 32, 0, 6),
        (0, 1024, 128, 32, 8, 6),
        (0, 256, 32, 8, 0, 2),
        (0, 256, 32, 8, 64, 4),
        (0, 256, 64, 8, 0, 3),
        (256, 352, 64, 8, 0, 5),
        (256, 352, 64, 8, 32, 5),
        (0, 256, 256, 8, 0, 8),
        (256, 352, 256, 8, 0, 11),
    ],
)
def test_one_prompt_takes_the_written_number_of_slots(
    history: int, capacity: int, window: int, num_layers: int, rewind: int, expected: int
) -> None:
    assert num_slots(history, capacity, window, 32, num_layers, ScratchPolicy(rewind)) == expected


def num_slots(
    history: int, capacity: int, window: int, block_size: int, num_layers: int, scratch: ScratchPolicy | None
) -> int:
    need = need_of_step(history, capacity, window, block_size, num_layers, scratch)
    return need.num_blocks - need.num_stale - len(need.scratch) + need.num_scratch_slots


def test_scratch_never_costs_a_slot() -> None:
    for window in (1, 5, 16):
        for history in range(30):
            for capacity in range(history + 1, history + 30):
                for num_layers in (1, 2, 5):
                    step = (history, capacity, window, 4, num_layers)
                    assert num_slots(*step, ScratchPolicy()) <= num_slots(*step, None)


@pytest.mark.parametrize(("num_blocks", "num_layers", "expected"), [(0, 32, 0), (1, 32, 1), (32, 32, 1), (33, 32, 2)])
def test_scratch_blocks_take_the_written_number_of_slots(num_blocks: int, num_layers: int, expected: int) -> None:
    need = need_of_step(0, (num_blocks + 1) * 4, 4, 4, num_layers, ScratchPolicy())
    assert (len(need.scratch), need.num_scratch_slots) == (num_blocks, expected)


def test_a_negative_rewind_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="max_rewind_tokens: got -1, expected at least 0"):
        ScratchPolicy(-1)

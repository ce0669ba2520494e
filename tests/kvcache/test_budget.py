from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import KvGroup, LayerKv, block_bytes, check_sequence_fits, num_blocks_for_memory, peak_num_blocks
from kvist.kvcache.stale import num_blocks_for, stale_range

SLIDING = KvGroup(0, LayerKv(1024, 8, 256), tuple(range(25)))
WHOLE = KvGroup(1, LayerKv(FULL, 2, 512), tuple(range(5)))


def test_a_block_costs_keys_and_values_of_all_layers_of_its_group() -> None:
    assert block_bytes(SLIDING, 1, 2) == 204_800
    assert block_bytes(WHOLE, 1, 2) == 20_480


def test_every_group_gets_the_same_number_of_blocks() -> None:
    per_block = 32 * (204_800 + 20_480)
    assert num_blocks_for_memory([SLIDING, WHOLE], 32, 2, 10 * per_block + 5) == 10


@pytest.mark.parametrize("step", [1, 3, 8])
def test_a_windowed_sequence_never_holds_more_than_its_peak(step: int, make_groups: Callable[..., tuple]) -> None:
    for window in range(1, 30):
        (group,) = make_groups(window)
        held = max(
            num_blocks_for(history + step, 4) - stale_range(history, window, 4).end for history in range(100 - step)
        )
        assert held <= peak_num_blocks(group, 4, 100, step) <= held + 1


def test_a_pool_too_small_for_one_sequence_is_refused_with_both_numbers() -> None:
    check_sequence_fits([WHOLE], [256], 32, 8192, 512)
    with pytest.raises(InvalidValueError, match="got 255, expected at least 256"):
        check_sequence_fits([WHOLE], [255], 32, 8192, 512)

from __future__ import annotations

import pytest

from kvist.kvcache import num_blocks_for
from kvist.kvcache.scratch import ScratchBlocks


def page_of(ordinal: int, layer: int, num_layers: int, scratch: ScratchBlocks) -> int:
    """Return a layer's page of one scratch block."""
    return int(scratch.pages(num_layers)[layer, ordinal - scratch.block_range.start])


@pytest.mark.parametrize(
    ("scratch", "ordinal", "layer", "expected"),
    [
        (ScratchBlocks(range(28), (7,)), 5, 3, 232),
        (ScratchBlocks(range(28), (7,)), 27, 31, 250),
        (ScratchBlocks(range(40), (7, 9)), 33, 0, 289),
    ],
)
def test_scratch_blocks_have_the_written_pages(scratch: ScratchBlocks, ordinal: int, layer: int, expected: int) -> None:
    assert page_of(ordinal, layer, 32, scratch) == expected


@pytest.mark.parametrize("num_layers", [1, 3, 5, 25])
def test_no_two_blocks_of_a_step_meet_in_a_page_of_any_layer(num_layers: int) -> None:
    for num_blocks in (1, num_layers, num_layers + 1, 3 * num_layers - 1):
        slot_ids = tuple(range(1, 1 + num_blocks_for(num_blocks, num_layers)))
        scratch = ScratchBlocks(range(4, 4 + num_blocks), slot_ids)
        for layer in range(num_layers):
            pages = [page_of(ordinal, layer, num_layers, scratch) for ordinal in range(4, 4 + num_blocks)]
            assert len(pages) == len(set(pages))
            assert all(page // num_layers in slot_ids for page in pages)

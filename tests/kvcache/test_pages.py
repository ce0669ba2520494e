from __future__ import annotations

import numpy as np
import pytest

from kvist.kvcache import BlockRange, ScratchBlocks, num_scratch_slots
from kvist.kvcache.pages import scratch_page_index, scratch_place


def page_of(ordinal: int, offset: int, scale: int, buffers_per_layer: int, scratch: ScratchBlocks) -> int:
    """Return a layer's page of one scratch block."""
    slot_idx, shift = scratch_place(ordinal - scratch.block_range.start, scale, buffers_per_layer)
    return scratch_page_index(scratch.slot_ids[slot_idx], shift, offset, scale)


@pytest.mark.parametrize(
    ("scratch", "ordinal", "offset", "expected"),
    [
        (ScratchBlocks(BlockRange(0, 28), (7,)), 5, 6, 464),
        (ScratchBlocks(BlockRange(0, 28), (7,)), 27, 63, 501),
        (ScratchBlocks(BlockRange(0, 40), (7, 9)), 33, 0, 578),
    ],
)
def test_scratch_blocks_have_the_written_pages(
    scratch: ScratchBlocks, ordinal: int, offset: int, expected: int
) -> None:
    assert page_of(ordinal, offset, 64, 2, scratch) == expected


@pytest.mark.parametrize(("num_layers", "buffers_per_layer"), [(1, 1), (5, 1), (25, 1), (3, 2), (32, 2), (4, 3)])
def test_no_two_blocks_of_a_step_meet_in_a_page_of_any_layer(num_layers: int, buffers_per_layer: int) -> None:
    scale = num_layers * buffers_per_layer
    for num_blocks in (1, num_layers, num_layers + 1, 3 * num_layers - 1):
        num_slots = num_scratch_slots(num_blocks, scale, buffers_per_layer)
        scratch = ScratchBlocks(BlockRange(4, 4 + num_blocks), tuple(range(1, 1 + num_slots)))
        for layer in range(num_layers):
            pages = [
                page_of(ordinal, layer * buffers_per_layer + buffer, scale, buffers_per_layer, scratch)
                for ordinal in range(4, 4 + num_blocks)
                for buffer in range(buffers_per_layer)
            ]
            assert len(pages) == len(set(pages))
            assert all(page // scale in scratch.slot_ids for page in pages)


def straddling_page(block: int, offset: int, scale: int, buffers_per_layer: int) -> int:
    """Return what the rule gives that packs buffers without regard to slots and layers."""
    flat = block * buffers_per_layer
    return flat // scale * scale + (flat % scale + offset) % scale


def test_two_blocks_would_meet_if_a_layers_keys_and_values_lay_apart() -> None:
    keys, values = 0, 32
    assert straddling_page(16, keys, 64, 2) == straddling_page(0, values, 64, 2)


def test_a_block_never_lies_in_two_slots_because_it_would_meet_another_there() -> None:
    assert straddling_page(2, 1, 5, 2) == straddling_page(0, 0, 5, 2)
    scratch = ScratchBlocks(BlockRange(0, 10), (0, 1, 2, 3, 4))
    pages = [page_of(i, offset, 5, 2, scratch) for i in range(10) for offset in (0, 1)]
    assert len(set(pages)) == 20


def test_the_rule_is_the_same_for_arrays() -> None:
    scratch = ScratchBlocks(BlockRange(0, 40), (7, 9))
    slot_idx, shift = scratch_place(np.arange(40), 64, 2)
    for offset in range(64):
        pages = scratch_page_index(np.array(scratch.slot_ids)[slot_idx], shift, np.array(offset), 64)
        one_by_one = [page_of(i, offset, 64, 2, scratch) for i in range(40)]
        assert pages.tolist() == one_by_one

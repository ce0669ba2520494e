from __future__ import annotations

import numpy as np
import pytest

from kvist.errors import InvalidValueError
from kvist.kvcache import ABSENT, BlockRange, PageIndexMode, ScratchBlocks, SlotLayout, num_scratch_slots
from kvist.kvcache.pages import scratch_page_index, scratch_place, sub_pages

LAYOUT = SlotLayout(num_slots=10, scale=64, buffers_per_layer=2)
PER_LAYER, SHARED = PageIndexMode.PER_LAYER, PageIndexMode.SHARED


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
    assert LAYOUT.page(ordinal, ABSENT, offset, scratch=scratch, mode=PER_LAYER) == expected


def test_ordinary_blocks_have_the_written_pages() -> None:
    assert LAYOUT.page(0, 4, 6, mode=PER_LAYER) == 262
    assert LAYOUT.page(0, 4, 6, mode=SHARED) == LAYOUT.page(0, 4, 6) == 256
    assert LAYOUT.page(0, ABSENT, 6) == LAYOUT.page(0, ABSENT, 6, mode=PER_LAYER) == ABSENT
    assert sub_pages(262, 2) == [524, 525]
    assert sub_pages(ABSENT, 2) == [-1, -1]


@pytest.mark.parametrize("mode", [None, SHARED])
def test_layers_cannot_share_page_numbers_while_scratch_slots_are_held(mode: PageIndexMode | None) -> None:
    with pytest.raises(InvalidValueError, match="expected PER_LAYER"):
        LAYOUT.page(30, 4, 6, scratch=ScratchBlocks(BlockRange(0, 28), (7,)), mode=mode)


@pytest.mark.parametrize("slot_id", [10, -2])
def test_a_slot_out_of_the_pool_is_refused(slot_id: int) -> None:
    with pytest.raises(InvalidValueError, match=f"slot_id: got {slot_id}, expected a slot of the pool, below 10"):
        LAYOUT.page(0, slot_id, 6, mode=PER_LAYER)
    with pytest.raises(InvalidValueError, match="slot_id"):
        LAYOUT.page(0, ABSENT, 6, scratch=ScratchBlocks(BlockRange(0, 28), (slot_id,)), mode=PER_LAYER)


@pytest.mark.parametrize(("num_layers", "buffers_per_layer"), [(1, 1), (5, 1), (25, 1), (3, 2), (32, 2), (4, 3)])
def test_no_two_blocks_of_a_step_meet_in_a_page_of_any_layer(num_layers: int, buffers_per_layer: int) -> None:
    scale = num_layers * buffers_per_layer
    for num_blocks in (1, num_layers, num_layers + 1, 3 * num_layers - 1):
        num_slots = num_scratch_slots(num_blocks, scale, buffers_per_layer)
        scratch = ScratchBlocks(BlockRange(4, 4 + num_blocks), tuple(range(1, 1 + num_slots)))
        layout = SlotLayout(2 + num_slots, scale, buffers_per_layer)
        for layer in range(num_layers):
            pages = [
                layout.page(ordinal, slot_id, layer * buffers_per_layer + buffer, scratch=scratch, mode=PER_LAYER)
                for ordinal, slot_id in enumerate([0] + [ABSENT] * (3 + num_blocks))
                for buffer in range(buffers_per_layer)
            ]
            taken = [page for page in pages if page != ABSENT]
            assert len(taken) == len(set(taken)) == (1 + num_blocks) * buffers_per_layer
            assert all(page // scale in scratch.slot_ids for page in taken[buffers_per_layer:])


def straddling_page(block: int, offset: int, scale: int, buffers_per_layer: int) -> int:
    """Return what the rule gives that packs buffers without regard to slots and layers."""
    flat = block * buffers_per_layer
    return flat // scale * scale + (flat % scale + offset) % scale


def test_a_layer_whose_keys_and_values_lie_apart_is_refused_because_blocks_would_meet() -> None:
    keys, values = 0, 32
    assert straddling_page(16, keys, 64, 2) == straddling_page(0, values, 64, 2)
    with pytest.raises(InvalidValueError, match=r"pages of layer 0: got \(0, 32\), expected 2 pages in a row"):
        SlotLayout.of_layers(10, [(layer, 32 + layer) for layer in range(32)])
    with pytest.raises(InvalidValueError, match="pages of layer 1"):
        SlotLayout.of_layers(10, [(0, 1), (2,)])
    assert SlotLayout.of_layers(10, [(2 * layer, 2 * layer + 1) for layer in range(32)]) == LAYOUT


def test_a_block_never_lies_in_two_slots_because_it_would_meet_another_there() -> None:
    assert straddling_page(2, 1, 5, 2) == straddling_page(0, 0, 5, 2)
    layout, scratch = SlotLayout(5, 5, 2), ScratchBlocks(BlockRange(0, 10), (0, 1, 2, 3, 4))
    pages = [layout.page(i, ABSENT, offset, scratch=scratch, mode=PER_LAYER) for i in range(10) for offset in (0, 1)]
    assert len(set(pages)) == 20


def test_the_rule_is_the_same_for_arrays() -> None:
    scratch = ScratchBlocks(BlockRange(0, 40), (7, 9))
    slot_idx, shift = scratch_place(np.arange(40), 64, 2)
    for offset in range(64):
        pages = scratch_page_index(np.array(scratch.slot_ids)[slot_idx], shift, np.array(offset), 64)
        one_by_one = [LAYOUT.page(i, ABSENT, offset, scratch=scratch, mode=PER_LAYER) for i in range(40)]
        assert pages.tolist() == one_by_one

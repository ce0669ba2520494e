"""From a block to the page where a layer keeps its keys and values.

A pool is an array of pages, `scale` a slot. Ordinary blocks lie across their slot, one layer beside the other; scratch
blocks lie along it, each shifted by as many pages as a layer has, round the slot's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError
from kvist.kvcache.scratch import ScratchBlocks
from kvist.kvcache.tables import ABSENT

Index = TypeVar("Index", int, npt.NDArray[np.int64])


class PageIndexMode(Enum):
    """Where page 0 is: PER_LAYER at the pool's start, SHARED at the layer's first page, so that all layers agree."""

    PER_LAYER = "per_layer"
    SHARED = "shared"


def scratch_place(scratch_idx: Index, scale: int, buffers_per_layer: int = 1) -> tuple[Index, Index]:
    """Return, for the scratch block with this index (0 is the first), which slot it is in and its shift there."""
    num_per_slot = scale // buffers_per_layer
    return scratch_idx // num_per_slot, scratch_idx % num_per_slot * buffers_per_layer


def scratch_page_index(slot_id: Index, shift: Index, offset: Index, scale: int) -> Index:
    """Return the page of a layer's scratch block, `offset` being the layer's page in ordinary slots.

    Blocks with different shifts have different pages in one layer, whichever layer it is.
    """
    return slot_id * scale + (shift + offset) % scale


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A pool of `num_slots` slots with `scale` pages each, of which every layer has `buffers_per_layer` in a row."""

    num_slots: int
    scale: int
    buffers_per_layer: int = 1

    @classmethod
    def of_layers(cls, num_slots: int, layers: Sequence[Sequence[int]]) -> SlotLayout:
        """Return the layout in which layer i has the pages `layers[i]` of each slot.

        Raises InvalidValueError where a layer's pages are not in a row, or layers differ in their number: shifted by
        that number, two blocks could then meet in one page.
        """
        num_each = len(layers[0])
        for layer_idx, pages in enumerate(layers):
            if not pages or list(pages) != list(range(pages[0], pages[0] + num_each)):
                expected = f"{num_each} pages in a row: layers share scratch slots"
                raise InvalidValueError(f"pages of layer {layer_idx}", tuple(pages), expected)
        return cls(num_slots, sum(map(len, layers)), num_each)

    def page(
        self,
        ordinal: int,
        slot_id: int,
        offset: int,
        *,
        scratch: ScratchBlocks | None = None,
        mode: PageIndexMode | None = None,
    ) -> int:
        """Return the page of the block at `ordinal`, whose entry in the table is `slot_id`; ABSENT if it has none.

        Without a mode it is SHARED, which raises InvalidValueError while the sequence has scratch slots: their pages
        differ by layer. So does a slot out of the pool.
        """
        mode = mode or PageIndexMode.SHARED
        if scratch is not None and mode is PageIndexMode.SHARED:
            raise InvalidValueError("mode", mode, f"PER_LAYER: blocks {scratch.block_range} are in scratch slots")
        if scratch is not None and scratch.block_range.start <= ordinal < scratch.block_range.end:
            scratch_idx = ordinal - scratch.block_range.start
            slot_idx, shift = scratch_place(scratch_idx, self.scale, self.buffers_per_layer)
            return scratch_page_index(self._checked(scratch.slot_ids[slot_idx]), shift, offset, self.scale)
        if slot_id == ABSENT:
            return ABSENT
        return self._checked(slot_id) * self.scale + (offset if mode is PageIndexMode.PER_LAYER else 0)

    def _checked(self, slot_id: int) -> int:
        if not 0 <= slot_id < self.num_slots:
            raise InvalidValueError("slot_id", slot_id, f"a slot of the pool, below {self.num_slots}")
        return slot_id


def sub_pages(page: int, count: int) -> list[int]:
    """Return the pages of a kernel that cuts each page into `count`; ABSENT stays ABSENT."""
    return [ABSENT] * count if page == ABSENT else list(range(page * count, (page + 1) * count))

"""Scratch slots: blocks that a step writes and reads but nobody wants after it share memory layer by layer.

A long step over a sliding window fills blocks that its own end makes stale. Each layer needs them only while it
computes, so their keys and values of one layer after the other can go to the same bytes: a slot, which otherwise holds
one block of all the group's layers, then holds many blocks of the layer at work. What was in them is lost at the end of
the step, and with it the chance to reuse it.

Words: a *buffer* is an equal part of a slot and a layer has `buffers_per_layer` of them side by side, `scale` in all
the slot. In the bundled engine a layer's keys and values are one buffer, and `scale` is the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError
from kvist.events.windows import KnownWindow
from kvist.kvcache.stale import BlockRange, num_blocks_for, stale_range

Index = TypeVar("Index", int, npt.NDArray[np.int64])


class PageIndexMode(Enum):
    """How an index finds a layer's page: PER_LAYER counts all pages of the pool, SHARED only those of the layer."""

    PER_LAYER = "per_layer"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class ScratchPolicy:
    """Steps may use scratch slots; after any of them its last `max_rewind_tokens` tokens may be taken back."""

    max_rewind_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a negative number."""
        if self.max_rewind_tokens < 0:
            raise InvalidValueError("max_rewind_tokens", self.max_rewind_tokens, "at least 0")


@dataclass(frozen=True, slots=True)
class ScratchBlocks:
    """The blocks of a sequence's step that live in scratch slots: `slot_ids` hold those at ordinals `block_range`."""

    block_range: BlockRange
    slot_ids: tuple[int, ...]


def scratch_range(
    history: int, capacity: int, window: KnownWindow, block_size: int, *, rewind: int = 0, sink: int = 0
) -> BlockRange:
    """Return the blocks that a step from `history` to `capacity` tokens begins and also makes stale; may be empty.

    They are stale even when the last `rewind` tokens are taken back after the step. A block that history has begun, or
    that holds a sink, is never among them. O(1).
    """
    stale = stale_range(max(0, capacity - rewind), window, block_size, sink)
    start = max(stale.start, num_blocks_for(history, block_size))
    return BlockRange(start, max(start, min(stale.end, num_blocks_for(capacity, block_size))))


def num_scratch_slots(num_blocks: int, scale: int, buffers_per_layer: int = 1) -> int:
    """Return how many slots `num_blocks` scratch blocks take; a block never lies in two slots."""
    return num_blocks_for(num_blocks, scale // buffers_per_layer)


def scratch_place(scratch_idx: Index, scale: int, buffers_per_layer: int = 1) -> tuple[Index, Index]:
    """Return, for the scratch block with this index (0 is the first), which slot it is in and its shift there."""
    num_per_slot = scale // buffers_per_layer
    return scratch_idx // num_per_slot, scratch_idx % num_per_slot * buffers_per_layer


def scratch_page_index(slot_id: Index, shift: Index, offset: Index, scale: int) -> Index:
    """Return the page of a layer's scratch block, `offset` being the layer's first buffer in ordinary slots.

    Blocks with different shifts have different pages in one layer, whichever layer it is.
    """
    return slot_id * scale + (shift + offset) % scale

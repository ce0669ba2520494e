"""Scratch slots: blocks that a step writes and reads but nobody wants after it share memory layer by layer.

A long step over a sliding window fills blocks that its own end makes stale. Each layer needs them only while it
computes, so a slot, which otherwise holds one block of all the group's layers, holds many blocks of the layer at work.
What was in them is lost at the end of the step (docs/windowed-kv.md).

A pool is an array of pages, one a layer in each slot. Ordinary blocks lie across their slot, one layer beside the
other; scratch blocks lie along it, each shifted by one page more, round the slot's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.errors import InvalidValueError
from kvist.events.engine_events import KnownWindow
from kvist.kvcache.stale import num_blocks_for, num_stale_blocks


@dataclass(frozen=True, slots=True)
class ScratchPolicy:
    """Steps may use scratch slots; after any of them its last `max_rewind_tokens` tokens may be taken back."""

    max_rewind_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_rewind_tokens < 0:
            raise InvalidValueError("max_rewind_tokens", self.max_rewind_tokens, "at least 0")


@dataclass(frozen=True, slots=True)
class ScratchBlocks:
    """The blocks of a sequence's step that live in scratch slots: `slot_ids` hold those at ordinals `block_range`."""

    block_range: range
    slot_ids: tuple[int, ...]

    def pages(self, num_layers: int) -> npt.NDArray[np.int64]:
        """Return each layer's page of each block, `[num_layers, num_blocks]`; no two of a layer's are the same."""
        block_idxs, layers = np.arange(len(self.block_range)), np.arange(num_layers)[:, None]
        slots = np.array(self.slot_ids, np.int64)[block_idxs // num_layers]
        return slots * num_layers + (block_idxs % num_layers + layers) % num_layers


class StepNeed(NamedTuple):
    """One sequence's step in one group: `num_blocks` ordinals, but the stale ones, and `scratch` in fewer slots."""

    num_blocks: int
    num_stale: int
    scratch: range
    num_scratch_slots: int


def need_of_step(
    history: int, capacity: int, window: KnownWindow, block_size: int, num_layers: int, scratch: ScratchPolicy | None
) -> StepNeed:
    """Return what a step from `history` to `capacity` tokens needs in a group; scratch slots need a policy. O(1)."""
    begun = num_blocks_for(history, block_size)
    blocks = range(begun, begun)
    if scratch is not None:
        blocks = scratch_range(history, capacity, window, block_size, scratch.max_rewind_tokens)
    return StepNeed(
        num_blocks_for(capacity, block_size),
        num_stale_blocks(history, window, block_size),
        blocks,
        num_blocks_for(len(blocks), num_layers),
    )


def scratch_range(history: int, capacity: int, window: KnownWindow, block_size: int, rewind: int = 0) -> range:
    """Return the blocks that a step from `history` to `capacity` tokens begins and also makes stale; may be empty.

    They are stale even when the last `rewind` tokens are taken back after the step. A block that history has begun is
    never among them. O(1).
    """
    num_stale = num_stale_blocks(max(0, capacity - rewind), window, block_size)
    start = num_blocks_for(history, block_size)
    return range(start, max(start, min(num_stale, num_blocks_for(capacity, block_size))))

"""Scratch slots: blocks that a step both fills and makes stale share memory between the layers.

A long step over a sliding window fills blocks that no query needs after it. Each layer needs them only while it is
computed, so a slot, which otherwise holds one block of every layer of the group, holds many blocks of the layer that
is being computed. Their content is lost at the end of the step (docs/windowed-kv.md).

A pool is an array of pages, and a slot has one page for each layer. An ordinary block takes a whole slot, layer i in
page i. Scratch block j of a slot takes one page: in layer i that is page i + j, modulo the number of layers.
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
    """Lets steps use scratch slots, and lets `rewind` remove up to `max_rewind_tokens` tokens of the last step."""

    max_rewind_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_rewind_tokens < 0:
            raise InvalidValueError("max_rewind_tokens", self.max_rewind_tokens, "at least 0")


@dataclass(frozen=True, slots=True)
class ScratchBlocks:
    """The blocks of a sequence's step that are in scratch slots: those at ordinals `block_range`, in `slot_ids`."""

    block_range: range
    slot_ids: tuple[int, ...]

    def pages(self, num_layers: int) -> npt.NDArray[np.int64]:
        """Return each layer's page of each block, `[num_layers, num_blocks]`; no two of a layer's are the same."""
        block_idxs, layers = np.arange(len(self.block_range)), np.arange(num_layers)[:, None]
        slots = np.array(self.slot_ids, np.int64)[block_idxs // num_layers]
        return slots * num_layers + (block_idxs % num_layers + layers) % num_layers


class StepNeed(NamedTuple):
    """What one sequence's step needs in one group.

    The table has `num_blocks` ordinals then, of which the first `num_stale` are dropped; those in the range `scratch`
    share `num_scratch_slots` slots.
    """

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
    """Return the range of blocks that a step from `history` to `capacity` tokens both begins and makes stale.

    They stay stale if a `rewind` of so many tokens follows. A block that was begun before the step is not in it. O(1).
    """
    num_stale = num_stale_blocks(max(0, capacity - rewind), window, block_size)
    start = num_blocks_for(history, block_size)
    return range(start, max(start, min(num_stale, num_blocks_for(capacity, block_size))))

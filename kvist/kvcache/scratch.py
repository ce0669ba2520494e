"""Scratch slots: blocks that a step writes and reads but nobody wants after it share memory layer by layer.

A long step over a sliding window fills blocks that its own end makes stale. Each layer needs them only while it
computes, so their keys and values of one layer after the other can go to the same bytes: a slot, which otherwise holds
one block of all the group's layers, then holds many blocks of the layer at work. What was in them is lost at the end of
the step, and with it the chance to reuse it.

A *buffer* is an equal part of a slot: a layer has `buffers_per_layer` of them side by side, a slot has `scale`. In the
bundled engine a layer's keys and values are one buffer, and `scale` is the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import InvalidValueError
from kvist.events.windows import KnownWindow
from kvist.kvcache.stale import BlockRange, num_blocks_for, stale_range


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

"""How many slots a step needs, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvist.events.windows import KnownWindow
from kvist.kvcache.scratch import ScratchPolicy, num_scratch_slots, scratch_range
from kvist.kvcache.stale import BlockRange, num_blocks_for, stale_range

MAX_UTILISATION_TO_RESUME = 0.97


class StepNeed(NamedTuple):
    """One sequence's step in one group: `num_blocks` ordinals, but the `stale` ones, and `scratch` in fewer slots."""

    num_blocks: int
    stale: BlockRange
    scratch: BlockRange
    num_scratch_slots: int

    @property
    def num_slots(self) -> int:
        """Return how many slots the sequence holds during the step."""
        return self.num_blocks - self.stale.num_blocks - self.scratch.num_blocks + self.num_scratch_slots


class SequenceStep(NamedTuple):
    """A sequence with `history` tokens in the cache that a step takes to `capacity`."""

    history: int
    capacity: int


def need_of_step(
    step: SequenceStep,
    window: KnownWindow,
    block_size: int,
    scale: int,
    scratch: ScratchPolicy | None,
    *,
    buffers_per_layer: int = 1,
    sink: int = 0,
) -> StepNeed:
    """Return what the step needs in a group of this window, with scratch slots only if there is a policy. O(1)."""
    history, capacity = step
    begun = num_blocks_for(history, block_size)
    blocks = BlockRange(begun, begun)
    if scratch is not None:
        rewind = scratch.max_rewind_tokens
        blocks = scratch_range(history, capacity, window, block_size, rewind=rewind, sink=sink)
    return StepNeed(
        num_blocks_for(capacity, block_size),
        stale_range(history, window, block_size, sink),
        blocks,
        num_scratch_slots(blocks.num_blocks, scale, buffers_per_layer),
    )


def slots_for_batch(
    steps: Sequence[SequenceStep],
    window: KnownWindow,
    block_size: int,
    scale: int,
    scratch: ScratchPolicy | None = None,
    *,
    buffers_per_layer: int = 1,
    sink: int = 0,
    num_shared_tokens: int = 0,
) -> int:
    """Return how many slots of a group all these sequences hold during one step, at least 1.

    The full blocks of their first `num_shared_tokens` tokens are one and the same for all, and held while any of them
    needs them. O(sequences).
    """
    shared = BlockRange(0, num_shared_tokens // block_size)
    needs = [
        need_of_step(step, window, block_size, scale, scratch, buffers_per_layer=buffers_per_layer, sink=sink)
        for step in steps
    ]
    num_slots = 0
    for need in needs:
        own = BlockRange(min(shared.end, need.num_blocks), need.num_blocks)
        in_scratch = _common(own, need.scratch)
        num_slots += own.num_blocks - _common(own, need.stale) - in_scratch
        num_slots += num_scratch_slots(in_scratch, scale, buffers_per_layer)
    if needs:
        stale_for_all = BlockRange(max(need.stale.start for need in needs), min(need.stale.end for need in needs))
        num_slots += shared.num_blocks - _common(shared, stale_for_all)
    return max(1, num_slots)


def can_resume(num_used: int, num_new: int, num_slots: int) -> bool:
    """Return whether a pool with `num_used` slots in use can take a preempted sequence back with `num_new` more.

    It leaves room for the others to grow; resumed into the last slots, a sequence would be preempted at once again.
    """
    return num_used + num_new <= MAX_UTILISATION_TO_RESUME * num_slots


def _common(one: BlockRange, other: BlockRange) -> int:
    """Return how many blocks are in both."""
    return max(0, min(one.end, other.end) - max(one.start, other.start))

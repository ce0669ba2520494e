"""What a running sequence holds: a block table a group."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvist.kvcache.chain import BlockHashChain
from kvist.kvcache.scratch import ScratchBlocks

ABSENT = -1  # what kernels read at ordinals whose block is stale, in scratch slots, or was never needed


@dataclass(slots=True)
class BlockTable:
    """One group's blocks of a sequence by absolute ordinal, int32; ABSENT below `first_held`.

    The blocks at the ordinals `adopted` are another's with the same content: the coming step must not write to them.
    Those in `scratch` slots are ABSENT too, and nowhere once the step is done.
    """

    block_ids: array[int]
    first_held: int
    adopted: list[int] = field(default_factory=list)
    scratch: ScratchBlocks | None = None

    def held(self) -> list[int]:
        """Return the blocks the sequence holds, oldest first; scratch slots are not among them."""
        return [block_id for block_id in self.block_ids[self.first_held :] if block_id != ABSENT]


@dataclass(slots=True)
class SequenceBlocks:
    """A running sequence's hold on the memory: a table a group, with slots for `num_tokens` tokens.

    Only the first `num_final_tokens` of them are sure to stay, and can be found by others. Only the manager changes it.
    """

    tables: tuple[BlockTable, ...]
    chain: BlockHashChain
    num_tokens: int
    num_final_tokens: int
    is_scratch_allowed: bool

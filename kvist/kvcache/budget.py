"""How many blocks the memory holds, and how many one sequence can need."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.errors import InvalidValueError
from kvist.events.windows import FULL
from kvist.kvcache.groups import KvGroup
from kvist.kvcache.stale import num_blocks_for

NUM_KV = 2  # a key and a value a token


def block_bytes(group: KvGroup, block_size: int, itemsize_bytes: int) -> int:
    """Return the bytes of one block over all layers of the group."""
    layer = group.layer
    return len(group.layer_indices) * NUM_KV * layer.num_kv_heads * layer.head_dim * block_size * itemsize_bytes


def num_blocks_for_memory(groups: Sequence[KvGroup], block_size: int, itemsize_bytes: int, memory_bytes: int) -> int:
    """Return the number of blocks every group gets when each gets the same and all fit into `memory_bytes`."""
    return memory_bytes // sum(block_bytes(group, block_size, itemsize_bytes) for group in groups)


def peak_num_blocks(group: KvGroup, block_size: int, max_model_len: int, max_step_tokens: int) -> int:
    """Return the most blocks one sequence ever holds in the group.

    A windowed sequence holds what its oldest query of a step sees and the step's own tokens; their ends may both cut
    through a block, hence the one more.
    """
    whole = num_blocks_for(max_model_len, block_size)
    if group.window is FULL:
        return whole
    return min(whole, num_blocks_for(group.window - 1 + max_step_tokens, block_size) + 1)


def check_sequence_fits(
    groups: Sequence[KvGroup], num_blocks: Sequence[int], block_size: int, max_model_len: int, max_step_tokens: int
) -> None:
    """Raise InvalidValueError unless one sequence of `max_model_len` tokens fits every pool.

    With this checked at the start, preemption always ends: the oldest sequence can have every block.
    """
    for group, have in zip(groups, num_blocks, strict=True):
        need = peak_num_blocks(group, block_size, max_model_len, max_step_tokens)
        if have < need:
            raise InvalidValueError(
                f"num_blocks of group {group.group_id}",
                have,
                f"at least {need}: one sequence of max_model_len={max_model_len} with blocks of {block_size} tokens",
            )

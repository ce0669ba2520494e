"""KV memory: which sequence holds which block, which blocks are cached, and which are evicted.

Layers with the same sizes and window form a group; each group has a pool of slots with a prefix cache. A sequence has
one block table a group, by absolute ordinal. Blocks that slide out of the window leave the sequence when the step is
done, but stay cached until their slot is needed; those that a step both fills and makes stale can share scratch slots.
Everything here is plain Python except `tensors`, which is not imported here. See docs/windowed-kv.md.
"""

from kvist.kvcache.budget import block_bytes, can_resume, check_sequence_fits, peak_num_blocks, split_memory
from kvist.kvcache.manager import KvCacheManager, KvCacheStatistics, PrefixHit
from kvist.kvcache.plan import KvDtype, KvGroup, LayerKv, SharedKv, WindowPlan, plan_windows
from kvist.kvcache.scratch import ScratchPolicy
from kvist.kvcache.sequences import ABSENT, BlockHashChain, BlockTable, SequenceBlocks
from kvist.kvcache.stale import num_blocks_for, num_stale_blocks

__all__ = [
    "ABSENT",
    "BlockHashChain",
    "BlockTable",
    "KvCacheManager",
    "KvCacheStatistics",
    "KvDtype",
    "KvGroup",
    "LayerKv",
    "PrefixHit",
    "ScratchPolicy",
    "SequenceBlocks",
    "SharedKv",
    "WindowPlan",
    "block_bytes",
    "can_resume",
    "check_sequence_fits",
    "num_blocks_for",
    "num_stale_blocks",
    "peak_num_blocks",
    "plan_windows",
    "split_memory",
]

"""KV memory: who holds which block, what is cached, and what may go.

Layers with equal windows form a group; each group has a pool of blocks with a prefix cache in it. A sequence holds one
block table a group, by absolute ordinal. Blocks that slide out of the window leave the sequence at once, but stay
cached until their slot is needed. Everything here is plain Python except `tensors`, which is not imported from here.
"""

from kvist.kvcache.budget import (
    BudgetPolicy,
    block_bytes,
    check_sequence_fits,
    max_concurrent_sequences,
    num_blocks_for_memory,
    peak_num_blocks,
    split_memory,
)
from kvist.kvcache.chain import BlockHashChain
from kvist.kvcache.dtypes import KvDtype
from kvist.kvcache.groups import KvGroup, LayerKv, SharedKv
from kvist.kvcache.manager import KvCacheManager, KvCacheStatistics, PrefixHit, SequenceBlocks
from kvist.kvcache.plan import LayerPlace, WindowPlan, group_layers, plan_windows
from kvist.kvcache.pool import BlockPool, PoolStatistics
from kvist.kvcache.prefix import reusable_prefix
from kvist.kvcache.stale import BlockRange, stale_range

__all__ = [
    "BlockHashChain",
    "BlockPool",
    "BlockRange",
    "BudgetPolicy",
    "KvCacheManager",
    "KvCacheStatistics",
    "KvDtype",
    "KvGroup",
    "LayerKv",
    "LayerPlace",
    "PoolStatistics",
    "PrefixHit",
    "SequenceBlocks",
    "SharedKv",
    "WindowPlan",
    "block_bytes",
    "check_sequence_fits",
    "group_layers",
    "max_concurrent_sequences",
    "num_blocks_for_memory",
    "peak_num_blocks",
    "plan_windows",
    "reusable_prefix",
    "split_memory",
    "stale_range",
]

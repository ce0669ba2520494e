"""KV memory: who holds which block, what is cached, and what may go.

Layers with equal windows form a group; each group has a pool of blocks with a prefix cache in it. A sequence holds one
block table a group, by absolute ordinal. Blocks that slide out of the window leave the sequence at once, but stay
cached until their slot is needed. Everything here is plain Python except `tensors`, which is not imported from here.
"""

from kvist.kvcache.budget import block_bytes, check_sequence_fits, num_blocks_for_memory, peak_num_blocks
from kvist.kvcache.chain import BlockHashChain
from kvist.kvcache.groups import KvGroup, LayerKv, group_layers
from kvist.kvcache.manager import KvCacheManager, KvCacheStatistics, PrefixHit, SequenceBlocks
from kvist.kvcache.pool import BlockPool, PoolStatistics
from kvist.kvcache.prefix import reusable_prefix
from kvist.kvcache.stale import BlockRange, stale_range

__all__ = [
    "BlockHashChain",
    "BlockPool",
    "BlockRange",
    "KvCacheManager",
    "KvCacheStatistics",
    "KvGroup",
    "LayerKv",
    "PoolStatistics",
    "PrefixHit",
    "SequenceBlocks",
    "block_bytes",
    "check_sequence_fits",
    "group_layers",
    "num_blocks_for_memory",
    "peak_num_blocks",
    "reusable_prefix",
    "stale_range",
]

"""KV memory: who holds which block, what is cached, and what may go.

Layers that store alike and see equally far form a group; each group has a pool of slots with a prefix cache in it. A
sequence holds one block table a group, by absolute ordinal. Blocks that slide out of the window leave the sequence when
the step is done, but stay cached until their slot is needed; those that a step itself makes stale can share scratch
slots. Everything here is plain Python except `tensors`, which is not imported from here. See docs/windowed-kv.md.
"""

from kvist.kvcache.budget import (
    BudgetPolicy,
    block_bytes,
    check_sequence_fits,
    longest_sequence,
    max_concurrent_sequences,
    peak_num_blocks,
    split_memory,
)
from kvist.kvcache.chain import BlockHashChain
from kvist.kvcache.dtypes import KvDtype
from kvist.kvcache.groups import KvGroup, LayerKv, SharedKv
from kvist.kvcache.manager import KvCacheManager, KvCacheStatistics, PrefixHit
from kvist.kvcache.pages import PageIndexMode, SlotLayout, scratch_page_index, scratch_place
from kvist.kvcache.plan import LayerPlace, WindowPlan, plan_windows
from kvist.kvcache.planner import SequenceStep, can_resume, slots_for_batch
from kvist.kvcache.pool import BlockPool, PoolStatistics
from kvist.kvcache.prefix import reusable_prefix
from kvist.kvcache.scratch import ScratchBlocks, ScratchPolicy, num_scratch_slots, scratch_range
from kvist.kvcache.stale import BlockRange, stale_range
from kvist.kvcache.tables import ABSENT, BlockTable, SequenceBlocks

__all__ = [
    "ABSENT",
    "BlockHashChain",
    "BlockPool",
    "BlockRange",
    "BlockTable",
    "BudgetPolicy",
    "KvCacheManager",
    "KvCacheStatistics",
    "KvDtype",
    "KvGroup",
    "LayerKv",
    "LayerPlace",
    "PageIndexMode",
    "PoolStatistics",
    "PrefixHit",
    "ScratchBlocks",
    "ScratchPolicy",
    "SequenceBlocks",
    "SequenceStep",
    "SharedKv",
    "SlotLayout",
    "WindowPlan",
    "block_bytes",
    "can_resume",
    "check_sequence_fits",
    "longest_sequence",
    "max_concurrent_sequences",
    "num_scratch_slots",
    "peak_num_blocks",
    "plan_windows",
    "reusable_prefix",
    "scratch_page_index",
    "scratch_place",
    "scratch_range",
    "slots_for_batch",
    "split_memory",
    "stale_range",
]

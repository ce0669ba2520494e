"""The layout of the index in memory, for those who compile it and those who own the memory. Sizes are in bytes.

Bucket, 64: one cache line with room for five rows, of blocks that somebody holds, in no order.
    0  u64 x 5 key     hash times a secret odd number, modulo 2**64
    40 u32 x 5 set id  who holds it; 0 where there is no row, and then the key means nothing
    60 u32 passed      rows that begin their search here, or before, and lie in a later bucket
A row is known by the address of its set id. Its search begins at its home, the key's place in the key range scaled to
the capacity, and ends at the first bucket that no row has passed; the last bucket never is, so no bounds are checked.

Segment: the keys that share their top bits. Its buckets, then for each row
    u64 parent         hash of the block before it; its own hash at a root (no block is its own parent)
Entry in the segment directory, 24:
    0  i64 address  8  u32 capacity (range of homes)  12 u32 buckets (with padding)  16 u32 count  20 u32 captured
Loose row, 20, as snapshots and rebuilding take them out: 0 u64 key  8 u64 parent  16 u32 set id

Set id, u32: who holds a block, in which tiers. A *member* is `slot << 4 | tiers`: a slot stands for one rank of one
worker, `tiers` has bit t set if it holds the block in tier t.
    0                  nobody
    1 << 31 | member   one slot, told by the id itself
    slab << 13 | record                      several slots; equal sets have equal ids, and a record counts its rows
Record: 0 u32 references  4 u32 stamp (unique among living records; 0 = free)  8 u32 hash (sum over members)
    12 u32 next in bucket or free list  16 u32 number of members  20 u32 number of words, 0 if sparse  24 payload
    sparse payload: u32 members, ascending       dense payload: u64 words of 16 slots, four tier bits each
    Dense exactly if that is smaller, or larger by no more than 128 bytes, so that equal sets are equal bytes.
Slab, 40: 0 i64 address  8 u32 record bytes  12 u32 capacity  16 u32 used  20 u32 fresh (never used from here on)
    24 u32 free list (index + 1)  28 u32 previous  32 u32 next slab with room  36 u32 class
Class, 8: 0 u32 record bytes  4 u32 first slab with room (0 = none; slab 0 is never used)
Bucket: u32 set id, head of a chain. Pages of 4,096 buckets; linear hashing adds or merges one page at a time.
Transition, 20: (set id, operation) -> set id, valid while the stamps match. 0 u32 set  4 u32 operation
    8 u32 stamp of set  12 u32 result  16 u32 stamp of result
Snapshot, 56: 0 i64 directory  8 segment and  16 row of the cursor  24 stack  32 its depth  40 output, of loose rows
    48 1 while the ancestors of the top of the stack are still to be looked for
    Its directory, 24 an entry: 0 i64 address of a copy (0: the segment is as it was)  8 u32 capacity  12 u32 buckets
    16 i64 address of one byte a row: 1 once the row was put on the stack
Slot, 32: 0 i64 number of (block, tier) held  8 u64 digest of them  16 u32 state
"""

from __future__ import annotations

# The control block: 64-bit fields, by byte offset.
MULTIPLIER, INVERSE, SEGMENT_BITS, SEGMENTS, SLABS, CLASSES, BUCKETS, NUM_BUCKETS = range(0, 64, 8)
TRANSITIONS, SLOTS, MEMBERS, WORDS, ACTIVE, DEPTHS, OUTPUT, SELF = range(64, 128, 8)
INPUT, OPERATIONS, NUM_ROWS, NUM_SETS, NEXT_STAMP, NUM_EMPTY_SLABS, NUM_RETIRED, RETIRE_EPOCH = range(128, 192, 8)
NEED_KIND, NEED_ARG, RESUME, RESUME_OPERATION, NUM_CONFLICTS, IS_CAPTURING = range(192, 240, 8)
NUM_APPLIED, NUM_NOT_FOUND, NUM_ORPHANS, NUM_INVALID = range(240, 272, 8)
PIPELINE, CONTROL_BYTES = 512, 2048  # the rest is scratch for the homes of the hashes looked up ahead

SNAPSHOT_BYTES, SNAPSHOT_ENTRY_BYTES = 56, 24
BUCKET_BYTES, BUCKET_ROWS, BUCKET_SETS, BUCKET_PASSED = 64, 5, 40, 60
LOOSE_ROW_BYTES, SEGMENT_BYTES, SLAB_BYTES, CLASS_BYTES, TRANSITION_BYTES, SLOT_BYTES = 20, 24, 40, 8, 20, 32
OPERATION_BYTES = 32  # u64 kind, tier, parent hash, number of hashes
STORE_ROOT, STORE_CHILD, REMOVE, CLEAR = 0, 1, 2, 3
RECORD_HEADER_BYTES, RECORD_BITS, BUCKETS_PER_PAGE = 24, 13, 4096
NUM_TRANSITIONS = 4096
INLINE = 1 << 31
NEED_SEGMENT, NEED_SLAB, NEED_CAPTURE = 1, 2, 3
LIVE, RETIRED = 1, 2
# Results of a store, beside the number of newly held residencies; of a batch; and of reading one.
NEEDS_HELP, ORPHAN, INVALID, NEEDS_CLEAR, UNREADABLE = -1, -2, -3, -4, -5

"""The layout of the index in memory, for those who compile it and those who own the memory. Sizes are in bytes.

Bucket, 64: one cache line with room for five rows, in no order. In the index a row is a block that somebody holds.
    0  u64 x 5 key     hash times a secret odd number, modulo 2**64
    40 u32 x 5 value   in the index the id of the set that holds it; 0 where there is no row, whatever the key says
    60 u32 passed      rows that begin their search here, or before, and lie in a later bucket
A row is known by the address of its value. Its search begins at its home, the place of its prefix (the upper 32 bits of
the key) scaled to the capacity, so rows of one prefix have one home. It ends at the first bucket that no row has
passed; the last bucket never is, so no bounds are checked.

Segment: the keys that share their top bits. Its buckets; then, in a table that has them, a side word for each row
    u32 side           bits 0-17 depth: how many blocks come before it, at most MAX_DEPTH  18-29 epoch of the last use
        30 secondary: there was another row of its prefix when it was put in, so at most one that is not  31 irregular:
        what is known of the block is more than a map of prefixes can tell (the index itself does not set it)
    Where there is no row it means nothing.
Entry in the segment directory, 24:
    0  i64 address  8  u32 capacity (range of homes)  12 u32 buckets (with padding)  16 u32 count  20 u32 captured
Home word of a segment, u64, in an array beside the directory: address >> 12 << 28 | capacity, so that one load tells
    where the homes of its keys are
Loose row, 16, as snapshots and rebuilding take them out: 0 u64 key  8 u32 side  12 u32 value

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
Step, 32, behind the transitions: what a match need not compute again: by which slots, held in the fastest tier, one
    set exceeds another. Valid while the stamps match. 0 u32 set
    4 u32 other  8 u32 stamp of set  12 u32 stamp of other  16 u32 number of slots  20 u32 x 3 slots
Snapshot, 72: 0 i64 next segment  8 first depth collected and  16 the one after the last, 0 while depths are counted
    24 collected rows, loose  32 place of the next row of each depth, u32, or 0: in the order they are found
    40 how many, if in that order  48 number of rows of each depth, u32  56 greatest depth
    64 where rows of each depth go in a copy, u32; all 0 between captures
Eviction, 56: 0 i64 next segment and  8 bucket  16 epoch of its beginning  24 priority above which rows go  32 how many
    go with just that one  40 number of rows of each priority, u32 (age times DEPTH_CLASSES, and class of depth)
    48 highest priority of a row
Slot, 32: 0 i64 number of (block, tier) held  8 u64 digest of them  16 u32 state  20 u32 1 once blocks were evicted
"""

from __future__ import annotations

# The control block: 64-bit fields, by byte offset. Every table has the first ones, the index all of them.
MULTIPLIER, SEGMENT_BITS, SEGMENTS, NUM_ROWS, NEED_KIND, NEED_ARG, IS_CAPTURING, SELF = range(0, 64, 8)
SIDE_BYTES, FULLEST_128THS, HOMES = range(64, 88, 8)  # side words, 0 or 4 a row; how full a segment may be
TABLE_BYTES = 88
INVERSE, SLABS, CLASSES, BUCKETS, NUM_BUCKETS, TRANSITIONS, SLOTS, MEMBERS, WORDS = range(88, 160, 8)
ACTIVE, DEPTHS, OUTPUT, INPUT, OPERATIONS, NUM_SETS, NEXT_STAMP, NUM_EMPTY_SLABS = range(160, 224, 8)
NUM_RETIRED, RETIRE_EPOCH, RESUME, RESUME_OPERATION = range(224, 256, 8)
NUM_APPLIED, NUM_NOT_FOUND, NUM_ORPHANS, NUM_INVALID = range(256, 288, 8)
IS_CAPPED, EPOCH, NUM_STAMPED, NUM_EVICTED = range(288, 320, 8)  # the epoch as it stands in a side word
# Of a match: where its rows go beside their slots; how many there are, and will be; how many words, or members of a
# list, are active; the set they are exactly, or -1; whether steps were taken since that left them behind.
OUTPUT_DEPTHS, NUM_OUT, NUM_BEGUN, NUM_WORDS, NUM_ACTIVE, EXACT_SET, IS_BEHIND = range(320, 376, 8)
PIPELINE, CONTROL_BYTES = 512, 4096  # the rest is scratch for the hashes that are being looked up

MAX_DEPTH, EPOCH_SHIFT, EPOCHS, SECONDARY, IRREGULAR = (1 << 18) - 1, 18, 1 << 12, 1 << 30, 1 << 31
OLDEST, DEPTH_CLASSES = 1 << 11, 128  # age in epochs beyond which rows are as old; what an eviction tells apart
SNAPSHOT_BYTES, EVICTION_BYTES = 72, 56
BUCKET_BYTES, BUCKET_ROWS, BUCKET_SETS, BUCKET_PASSED = 64, 5, 40, 60
LOOSE_ROW_BYTES, SEGMENT_BYTES, SLAB_BYTES, CLASS_BYTES, TRANSITION_BYTES, SLOT_BYTES = 16, 24, 40, 8, 20, 32
OPERATION_BYTES = 32  # u64 kind, tier, parent hash, number of hashes
STORE_ROOT, STORE_CHILD, REMOVE, CLEAR = 0, 1, 2, 3
RECORD_HEADER_BYTES, RECORD_BITS, BUCKETS_PER_PAGE = 24, 13, 4096
NUM_TRANSITIONS, NUM_STEPS, STEP_BYTES, STEP_SLOTS = 4096, 4096, 32, 3
INLINE = 1 << 31
NEED_SEGMENT, NEED_SLAB, NEED_CAPTURE = 1, 2, 3
LIVE, RETIRED = 1, 2
# Results of a store, beside the number of newly held residencies; of a batch; and of reading one.
NEEDS_HELP, ORPHAN, INVALID, NEEDS_CLEAR, UNREADABLE = -1, -2, -3, -4, -5

"""The memory layout of an index: two arrays of records.

`core`, one record, has all but the rows; `segments` has the rows. Both are reserved at their greatest size and take
memory as they fill: nothing ever moves, so they can lie in a buffer that other processes map, too. Compiled code takes
the two arrays, and passes on the record of the core and the array of segments; only this folder reads their fields.

A *slot* stands for one rank of one worker. A *member* is `slot << 4 | tiers`: `tiers` has bit t set where the slot
holds a block in tier t. A *set id* says who holds a block:
    0                  nobody
    INLINE | member    one slot, which is in the id itself
    anything else      the number of a record in `sets`: two members or more; equal sets have equal ids
"""

from __future__ import annotations

import mmap
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


def integers(names: str) -> list[tuple[str, str]]:
    """Return fields of a record that are integers of 64 bits."""
    return [(name, "i8") for name in names.split()]


Records = NDArray[np.void]
Words = NDArray[np.uint64]
Record = Any
"""One record of an array: Numba passes a pointer to it, NumPy returns a view."""

# --- A table: its head and its segments, which grow one at a time -----------------------------------------------------
SEGMENT_SHIFT = 19
SEGMENT_ROWS = 1 << SEGMENT_SHIFT
MAX_SEGMENTS = 1 << 12
"""Rows reserved for a segment. A row's number is `segment << SEGMENT_SHIFT | place`."""
FULLEST_128THS = 92
"""How full a segment may be before it grows. It then takes 16 bytes / 0.77, and at most 1.2 times that."""
ROW = np.dtype(
    {
        "names": ["hash", "value", "set_id", "marks"],  # vacant where the value is 0; in an index the value is in two
        "formats": ["u8", "u8", "u4", "u4"],
        "offsets": [0, 8, 8, 12],
    },
    align=True,
)
SEGMENT = np.dtype(
    {
        "names": ["room", "count", "is_captured", "num_copied", "rows", "copies"],
        "formats": ["i8"] * 4 + [(ROW, (SEGMENT_ROWS,))] * 2,
        "offsets": [*range(0, 32, 8), 64, 64 + ROW.itemsize * SEGMENT_ROWS],
        "itemsize": mmap.PAGESIZE + 2 * ROW.itemsize * SEGMENT_ROWS,
    },
    align=True,
)
"""The first `room` of `rows` are in use as a table. `copies` are the rows that an open snapshot has yet to read."""
HEAD = np.dtype(
    [
        ("multiplier", "u8"),  # odd and secret, so that nobody can choose where hashes land
        ("bits", "i8"),  # there are 2**bits segments
        ("num_rows", "i8"),
        ("rooms", "u4", (MAX_SEGMENTS,)),  # of each: to read it in the segment would cost a cache miss
    ]
)
MAX_DEPTH, EPOCH_SHIFT, NUM_EPOCHS, MARKED = (1 << 18) - 1, 18, 1 << 12, 1 << 31
"""Marks: how many blocks come before it, at most MAX_DEPTH; the epoch of its last use; a flag that is the caller's."""

# --- The core -------------------------------------------------------------------------------------------------------
INLINE = 1 << 31
MAX_SLOTS, MAX_SETS, MAX_WORDS, NUM_BUCKETS, NUM_MEMOS, NUM_RUN_SIZES = 1 << 20, 1 << 24, 1 << 27, 1 << 16, 1 << 12, 64
LIVE, RETIRED = 1, 2
SLOT = np.dtype(
    [("num_held", "i8"), ("digest", "u8"), ("state", "u4"), ("has_lost", "u4"), ("clearing", "i8")], align=True
)
"""`clearing` is a number that no other rank's slot, and no earlier one of this rank, has or had; 0: it is nobody's."""
NUM_KINDS = 4
GROUPED, COMPANION = 1, 2
RULE = np.dtype(
    [
        ("role", "u4"),  # GROUPED, COMPANION, or 0
        ("companion", "u4"),
        ("step", "u4"),  # hits end at multiples of so many blocks
        ("needed", "u4", (1 + NUM_KINDS,)),  # blocks at the end of a hit; 0: of the first group all, of others none
        ("stride", "u4", (1 + NUM_KINDS,)),  # a block of the group is so many of ours, and has the name of the last
        ("ahead", "u4", (1 + NUM_KINDS,)),  # so many of ours behind the hit are needed, too
    ],
    align=True,
)
"""What besides a chain of blocks a rank's hits need: blocks of its other groups, which a *companion* slot holds.

A companion's tier t stands for the t-th kind of them. A slot without a role has one group.
"""
SET = np.dtype(
    [
        ("start", "u4"),  # in `words`
        ("num_members", "u4"),
        ("num_words", "u4"),  # sixteen slots a word, four tier bits each; 0: members, two a word, ascending by slot
        ("references", "u4"),  # rows that have this id
        ("hash", "u4"),
        ("next", "u4"),  # in its bucket, or on the list of free records
        ("stamp", "i8"),  # which no other set ever has; 0 for a free record
    ],
    align=True,
)
MEMO = np.dtype(
    [("set_id", "u4"), ("result", "u4"), ("operation", "i8"), ("stamp", "i8"), ("result_stamp", "i8")], align=True
)
CORE = np.dtype(
    [
        ("generation", "i8"),  # odd while somebody writes; see `RadixIndex.writing`
        ("table", HEAD),
        ("max_blocks", "i8"),  # beyond which some are evicted; 0: there is no cap
        ("epoch", "i8"),  # as it stands in marks
        ("num_used", "i8"),  # blocks used since the epoch began
        *integers("hand_segment hand_place"),  # which row to look at next for what to evict
        ("num_evicted", "i8"),
        ("num_retired", "i8"),  # slots whose rank is gone, and which sets may still have
        ("retirement", "i8"),  # a number for the last time that a slot was retired
        ("captured_stamp", "i8"),  # sets up to this stamp are kept, for an open snapshot may refer to them; 0: none is
        ("num_sets", "i8"),
        ("last_stamp", "i8"),
        ("end_of_sets", "i8"),  # records from here on were never used
        ("free_set", "i8"),  # first of a list, 0 for none
        ("end_of_words", "i8"),
        ("num_grouped", "i8"),  # slots with a rule
        ("num_companions", "i8"),
        ("grouped", "u4", (MAX_SLOTS,)),
        ("slots", SLOT, (MAX_SLOTS,)),
        ("rules", RULE, (MAX_SLOTS,)),
        ("sets", SET, (MAX_SETS,)),
        ("words", "u8", (MAX_WORDS,)),
        # Only the writer uses these. Heads of lists of sets; the first free run of words of each size, as its start
        # plus one, in which lies that of the next; what an operation made of a set; and scratch.
        ("buckets", "u4", (NUM_BUCKETS,)),
        ("free_runs", "i8", (NUM_RUN_SIZES,)),
        ("memos", MEMO, (NUM_MEMOS,)),
        ("members", "u4", (MAX_SLOTS + 2,)),
        ("draft", "u8", (MAX_SLOTS // 2 + 2,)),
    ],
    align=True,
)
QUERY = np.dtype(
    [
        ("num_words", "i8"),
        ("num_left", "i8"),  # slots that hold all blocks so far
        ("num_holders", "i8"),  # slots in the answer
        ("active", "u8", (MAX_SLOTS // 16,)),
        ("spread", "u8", (MAX_SLOTS // 16,)),
        ("depths", "u4", (MAX_SLOTS, 4)),
        ("holder_ids", "u4", (MAX_SLOTS,)),
        ("holder_depths", "u4", (MAX_SLOTS, 4)),
    ],
    align=True,
)
"""Scratch of a match, and its answer."""

# --- What callers pass ----------------------------------------------------------------------------------------------
OPERATION = np.dtype([("kind", "u8"), ("tier", "u8"), ("parent", "u8"), ("num_hashes", "u8")], align=True)
STORE_ROOT, STORE_CHILD, REMOVE = range(3)

_typeof: Any = numba.typeof
HEAD_TYPE, CORE_TYPE, SEGMENTS_TYPE, ROWS_TYPE = (_typeof(np.empty(0, dtype)) for dtype in (HEAD, CORE, SEGMENT, ROW))
INDEX_TYPES, TABLE_TYPES = (CORE_TYPE, SEGMENTS_TYPE), (HEAD_TYPE, SEGMENTS_TYPE)
QUERY_TYPE, OPERATIONS_TYPE = _typeof(np.empty(0, QUERY)), _typeof(np.frombuffer(bytes(OPERATION.itemsize), OPERATION))
HASHES_TYPE: Any = numba.types.Array(numba.types.uint64, 1, "C", readonly=True)

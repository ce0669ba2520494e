"""The layout of what the engines' fast path keeps in memory, for those who compile it and those who own it. In bytes.

Source: one engine's stream; 64-bit fields, named below.
Scratch: what the checking pass makes of one message: events, the engine's hashes as u64, token ids as u32; with room
    for whatever a message of SCRATCH_BYTES can hold.
Event, 80: 0 i64 kind, one of those below  8 i64 where it starts in the payload  16 i64 tier
    24 i64 what the window filter's verdict depends on: bit 0 set for a removal; from bit 1 on the group plus one, 0
           where it is not said; from bit 32 on the window, 0 where it is UNKNOWN
    32 i64 address of the hashes  40 i64 their number  48 i64 address of the tokens  56 i64 their number
    64 i64 block size  72 i64 address of the parent's hash, 0 for none
Rank: one rank of a source; 64-bit fields, then verdicts of 16: i64 what it depends on, plus one  8 i64 the verdict
Engine map: a table as `kvist.radix.tables` has them; a row's key is an engine hash times a secret odd number, its value
    the upper 32 bits of the key of the block's row in the index, or IRREGULAR.
"""

from __future__ import annotations

# Source: what it is told, and told again when memory moves.
INDEX, BLOCK_SIZE, FIELD_ORDER, RANKS, FINGERPRINTS, SEQUENCES, RING_MASK = range(0, 56, 8)
EVENTS, HASHES, TOKENS, SCRATCH_BYTES, CHAIN, OUTLOOKS, HAS_BLOCK_SIZE = range(56, 112, 8)
# Where it stands: the message, whether it is checked, the event, of that the block; hash and depth of the one before.
MESSAGE_IDX, IS_CHECKED, EVENT_IDX, BLOCK_IDX, LAST_BLOCK, LAST_DEPTH = range(112, 160, 8)
# What it counts: batches, events, events that are never indexed, events with blocks of our size; and the last time.
NUM_BATCHES, NUM_EVENTS, NUM_IGNORED, NUM_SIZED, LAST_TIMESTAMP = range(160, 200, 8)
# Where it stopped, if for some events: the end of them, and their bytes. What it may still do in this call.
STOP_EVENT_END, STOP_START, STOP_END, BUDGET = range(200, 232, 8)
# The message that was checked; the map of the rank before, which is likely that of the next.
NUM_CHECKED, CHECKED_RANK, CHECKED_END, NEXT_HASH, NEXT_TOKEN, LIKELY_MAP = range(232, 280, 8)
# The event being checked: fields seen, by bit, and what they say.
SEEN, EVENT_TYPE, KIND, WINDOW, GROUP, LOCALITY = range(280, 328, 8)
DEFAULT_RANK = 328  # told once: the rank of a batch that names none
SOURCE_BYTES = 512

RANK_SLOT, RANK_MAP, RANK_VERDICTS = 0, 8, 16
VERDICT_BYTES, NUM_VERDICTS = 16, 32
RANK_BYTES = RANK_VERDICTS + VERDICT_BYTES * NUM_VERDICTS

EVENT_BYTES, MIN_EVENT_BYTES, MAX_FIELDS = 80, 8, 16
EVENT_KIND, EVENT_START, EVENT_TIER, EVENT_VERDICT, EVENT_HASHES, EVENT_NUM_HASHES = range(0, 48, 8)
EVENT_TOKENS, EVENT_NUM_TOKENS, EVENT_BLOCK_SIZE, EVENT_PARENT = range(48, 80, 8)

STORED, REMOVED, IGNORED, UNUSUAL = 1, 2, 3, 4
FULL_WINDOW, MAX_GROUP = (1 << 31) - 1, 1 << 20
PASSES, DROPPED = 1, 2
IRREGULAR = 1
SLICE_BLOCKS = 256

# Why a call stopped.
DONE, PAUSED, NOT_NEXT, WHOLE_MESSAGE, SOME_EVENTS, INDEX_NEEDS_HELP, MAP_NEEDS_HELP, SCRATCH_NEEDS_HELP = range(8)

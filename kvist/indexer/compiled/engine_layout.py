"""What the engines' fast path keeps in memory, for those who compile it and those who own it.

A *verdict* is what the window filter says of all events that have the same key: bit 0 set for a removal; from bit 1 on
the group plus one, 0 where it is not said; from bit 32 on the window, 0 where it is UNKNOWN. It passes, or is of one of
the rank's other groups (the verdict is then OTHER_GROUPS plus its number), or does not count.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from kvist.radix.compiled.layout import integers

MAX_FIELDS, MAX_GROUP, FULL_WINDOW = 17, 1 << 20, (1 << 31) - 1
STATE_WINDOW = FULL_WINDOW - 1
OTHER_GROUPS, MAX_OTHER_GROUPS = 2, 32
SLICE_BLOCKS, NUM_VERDICTS, MIN_EVENT_BYTES = 256, 128, 8

STREAM = np.dtype(
    [
        ("block_size", "i8"),
        ("default_rank", "i8"),  # of a batch that names none
        ("has_block_size", "i8"),  # whether any event had blocks of ours
        ("field_order", "u1", (2, MAX_FIELDS)),  # of events that are arrays: stored, removed
        # Where it stands: the message, whether it is checked, the event, and of that the block.
        *integers("message_idx is_checked event_idx block_idx"),
        ("last_block", "u8"),  # hash and depth of the block before
        ("last_depth", "i8"),
        ("budget", "i8"),  # what it may still do in this call
        # What it counts in a call: batches, events, events that are never indexed, events with blocks of our size.
        *integers("num_batches num_events num_ignored num_sized"),
        ("timestamp_s", "f8"),  # of the last message
        *integers("stop_start stop_end"),  # the bytes of the event before which it stopped, if for one
        # The message that was checked: its events, hashes and tokens stand in the scratch.
        *integers("num_checked num_hashes num_tokens checked_rank checked_end"),
        ("chain", "u8", SLICE_BLOCKS),  # the canonical hashes of a slice's blocks
    ],
    align=True,
)
"""One engine's stream."""

EVENT = np.dtype(
    [
        ("kind", "i8"),
        ("start", "i8"),  # in the payload
        ("tier", "i8"),
        ("key", "i8"),  # of its verdict
        *integers("first_hash num_hashes first_token num_tokens block_size"),
        ("has_lookahead", "i8"),  # whether a token more follows, that of the last block's name
        ("has_parent", "i8"),
        ("parent", "u8"),
        # While it is read: the fields seen, by bit, and what they say.
        *integers("seen type spec_kind window group locality"),
    ],
    align=True,
)
"""An event of the message that was checked."""

RANK = np.dtype(
    [
        ("number", "i8"),
        ("slot", "i8"),  # -1 of a rank that nobody knows
        ("companion", "i8"),  # slot that holds what all other groups of a kind do; see `kvist.radix.compiled.layout`
        ("is_offloading", "i8"),  # whether it ever stored anything beside the GPU
        ("counts_copies", "i8"),  # whether what is held and stored again has one more copy
        ("num_groups", "i8"),  # others
        ("num_kinds", "i8"),
        ("kinds", "i8", MAX_OTHER_GROUPS),  # of each group
        ("believed", "i8", MAX_OTHER_GROUPS),  # so many blocks at the end of a report that need not be of new ones
        ("num_verdicts", "i8"),
        ("keys", "i8", NUM_VERDICTS),
        ("passes", "u1", NUM_VERDICTS),
    ],
    align=True,
)
"""A rank of a stream, and the verdicts that its filter, as it is, has given."""

STORED, REMOVED, IGNORED, UNUSUAL = 1, 2, 3, 4
DONE, PAUSED, NOT_NEXT, WHOLE_MESSAGE, ANOTHER_WAY, OTHER_RANK, TOO_LARGE = range(7)
"""Why a call stopped."""

_typeof: Any = numba.typeof
STREAM_TYPE, EVENTS_TYPE, RANK_TYPE = (_typeof(np.empty(0, dtype)) for dtype in (STREAM, EVENT, RANK))

"""The memory layout of the engines' fast lane, for the compiled code and for the Python code that owns the memory.

A *verdict* is what the window filter decides for all events that have the same key: 1 if they pass, OTHER_GROUPS plus
a number if they are of one of the rank's other groups, 0 if they are dropped. A key has bit 0 set for a removal; from
bit 1 on the group plus one, 0 for none; from bit 32 on the window, 0 for UNKNOWN.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from kvist.radix.compiled.layout import integers

MAX_FIELDS, MAX_GROUP, FULL_WINDOW = 17, 1 << 20, (1 << 31) - 1
STATE_WINDOW = FULL_WINDOW - 1
OTHER_GROUPS, MAX_OTHER_GROUPS = 2, 32
NUM_VERDICTS, MIN_EVENT_BYTES = 128, 8

STREAM = np.dtype(
    [
        ("block_size", "i8"),
        ("default_rank", "i8"),  # of batches that name none
        ("has_block_size", "i8"),  # whether any event had blocks of our size
        ("field_order", "u1", (2, MAX_FIELDS)),  # of events that are arrays: stored, removed
        *integers("message_idx is_checked event_idx"),  # the position: the message, whether it is checked, the event
        # Counted in a call: batches, events, events that are never indexed.
        *integers("num_batches num_events num_ignored"),
        ("timestamp_s", "f8"),  # of the last message
        *integers("stop_start stop_end"),  # the bytes of the event at which the call stopped, if UNUSUAL_EVENT
        # The message that was checked: its events, hashes and tokens are in the scratch memory.
        *integers("num_checked num_hashes num_tokens checked_rank checked_end"),
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
        ("has_lookahead", "i8"),  # whether one more token follows, which the last block's hash includes
        ("has_parent", "i8"),
        ("parent", "u8"),
        # While the event is read: the fields seen, one bit each, and their values.
        *integers("seen type spec_kind window group locality"),
    ],
    align=True,
)
"""An event of the message that was checked."""

RANK = np.dtype(
    [
        ("number", "i8"),
        ("slot", "i8"),  # in the index
        ("companion", "i8"),  # slot that holds what all other groups of a kind do; see `kvist.radix.compiled.layout`
        ("is_offloading", "i8"),  # whether it ever stored a block in another tier than the GPU
        ("counts_copies", "i8"),  # whether a block that is stored again is one more copy
        ("num_groups", "i8"),  # beside the published one
        ("num_kinds", "i8"),
        ("kinds", "i8", MAX_OTHER_GROUPS),  # of each group
        ("num_trusted", "i8", MAX_OTHER_GROUPS),  # by group: blocks at the end of a store that count if copies do not
        ("strides", "i8", MAX_OTHER_GROUPS),  # published blocks in one of each group's
        ("num_verdicts", "i8"),
        ("keys", "i8", NUM_VERDICTS),
        ("passes", "u1", NUM_VERDICTS),
    ],
    align=True,
)
"""A rank of a stream, and the verdicts of its filter in the present state."""

STORED, REMOVED, IGNORED, UNUSUAL = 1, 2, 3, 4
DONE, NOT_NEXT, UNUSUAL_MESSAGE, UNUSUAL_EVENT, OTHER_RANK = range(5)
"""Why a call stopped."""

_typeof: Any = numba.typeof
STREAM_TYPE, EVENTS_TYPE, RANK_TYPE = (_typeof(np.empty(0, dtype)) for dtype in (STREAM, EVENT, RANK))

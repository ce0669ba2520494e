"""The words of engines' events, found by a perfect hash: keys, event types, media and kinds of cache.

Each word has a number. A key is a field, and an engine sends fields in any order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvist.events.dialects.block_events import FULL_KINDS, NEVER_INDEXED_KINDS, REPORT_SESSION, TIER_OF_MEDIUM
from kvist.indexer.compiled.words import Bytes, word_at
from kvist.radix.compiled.jit import helper, inlined, signed

# Fields; 0 is a field that is not read.
TYPE, BLOCK_HASHES, PARENT, TOKEN_IDS, BLOCK_SIZE, LORA_ID, LORA_NAME, CACHE_SALT = range(1, 9)
EXTRA_KEYS, GROUP, KIND, WINDOW, MEDIUM, LOCALITY, LOOKAHEAD, SESSION = range(9, 17)
# Values: event types, tiers from `TIERS` on, kinds of cache by their window, localities.
BLOCK_STORED, BLOCK_REMOVED = 32, 33
TIERS = 36
FULL_KIND, OTHER_KIND, STATE_KIND, NEVER_INDEXED = 40, 41, 42, 43
LOCAL, REMOTE, REPORT = 44, 45, 46

_FIELD_NAMES = (
    "type block_hashes parent_block_hash token_ids block_size lora_id lora_name cache_salt extra_keys group_idx"
    " kv_cache_spec_kind kv_cache_spec_sliding_window medium locality lookahead_token_ids session_id"
)
FIELDS = {name: number for number, name in enumerate(_FIELD_NAMES.split(), TYPE)}
_VALUES = {
    "BlockStored": BLOCK_STORED,
    "BlockRemoved": BLOCK_REMOVED,
    **{medium: TIERS + tier for medium, tier in TIER_OF_MEDIUM.items() if medium is not None},
    **dict.fromkeys(FULL_KINDS, FULL_KIND),
    **dict.fromkeys(("sliding_window", "sliding_window_mla", "chunked_local_attention", "unknown"), OTHER_KIND),
    "mamba": STATE_KIND,
    **dict.fromkeys(NEVER_INDEXED_KINDS, NEVER_INDEXED),
    "LOCAL": LOCAL,
    "REMOTE": REMOTE,
    REPORT_SESSION: REPORT,
}
_LONGEST = 31
_MULTIPLIER = np.uint64(0xF009_464A_225F_623B)  # found by trial: it sends these words to 64 places of their own
_U58, _U64_MAX = np.uint64(58), np.uint64((1 << 64) - 1)


def _words() -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the words by place, each as four times eight bytes, and their lengths and numbers."""
    texts, lengths, numbers = np.zeros((64, 4), np.uint64), np.zeros(64, np.int64), np.zeros(64, np.int64)
    for word, number in (FIELDS | _VALUES).items():
        text = np.frombuffer(word.encode().ljust(32, b"\0"), np.uint64)
        place = int((text[0] + np.uint64(len(word))) * _MULTIPLIER >> _U58)
        assert not lengths[place], f"the multiplier is no good any more: {word}"
        texts[place], lengths[place], numbers[place] = text, len(word), number
    return texts, lengths, numbers


with np.errstate(over="ignore"):
    _TEXTS, _LENGTHS, _NUMBERS = _words()


@inlined
def _first_bytes(num_bytes: int) -> np.uint64:
    """Return a mask of the first 1 to 8 bytes of a word."""
    return _U64_MAX >> np.uint64(64 - 8 * num_bytes)


@helper
def number_of(data: Bytes, at: int, length: int) -> int:
    """Return the number of a word of the engines, 0 for any other."""
    if length < 1 or length > _LONGEST:
        return 0
    first = word_at(data, at) & _first_bytes(min(length, 8))
    place = ((first + np.uint64(length)) * _MULTIPLIER) >> _U58
    if _LENGTHS[place] != length or first != _TEXTS[place, 0]:
        return 0
    for offset in range(8, length, 8):
        word = word_at(data, at + offset) & _first_bytes(min(length - offset, 8))
        if word != _TEXTS[place, np.uint64(offset >> 3)]:
            return 0
    return signed(_NUMBERS[place])

"""Scores who holds a prefix: looks its hashes up one by one, and intersects sets of holders only where the set changes.

Who has held all blocks so far, the active ones, is kept as words of sixteen slots, four tier bits each, of which a bit
is set if the slot has held all of them in that tier or in a faster one.

Another process may be writing meanwhile: then the answer is wrong, which its generation tells, but what is read stays
within bounds and comes to an end.
"""

# mypy: disable-error-code="no-any-return"
# To mypy, what a record has is Any.
from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.radix.compiled import layout
from kvist.radix.compiled.blocks import find, row_at, stamp
from kvist.radix.compiled.jit import helper, jit, signed
from kvist.radix.compiled.layout import Record, Records, Words
from kvist.radix.compiled.sets import is_retired, member_at, tiers_in
from kvist.radix.compiled.table import locate, segment_of

_0: Any = np.int64(0)
_U0, _U1, _U2, _U4, _NIBBLE = (np.uint64(n) for n in (0, 1, 2, 4, 15))
_ABOVE_1, _ABOVE_2 = (np.uint64(n * 0x1111_1111_1111_1111) for n in (0xE, 0xC))


@helper
def _closed(word: np.uint64) -> np.uint64:
    """Return the tiers at or above the fastest one held, of each slot: what makes the scores cumulative."""
    word |= (word << _U1) & _ABOVE_1
    return word | ((word << _U2) & _ABOVE_2)


@helper
def _spread(index: Record, set_id: int, words: Words, num_words: int) -> int:
    """Write a set's words up to a number of them; return how many they are, up to that."""
    if set_id & layout.INLINE:
        member = set_id & (layout.INLINE - 1)
        end = min(num_words, (member >> 8) + 1)
        for place in range(end):
            words[place] = _U0
        if member >> 8 < end:
            words[member >> 8] = np.uint64(member & 15) << np.uint64((member >> 4 & 15) * 4)
        return end
    record = index.sets[set_id]
    start, count = signed(record.start), signed(record.num_members)
    if record.num_words:
        end = min(num_words, signed(record.num_words))
        for place in range(end):
            words[place] = index.words[start + place]
        return end
    end = min(num_words, (member_at(index.words, start, count - 1) >> 8) + 1) if set_id else 0
    for place in range(end):
        words[place] = _U0
    for number in range(count if set_id else 0):
        member = member_at(index.words, start, number)
        if member >> 8 < end:
            words[member >> 8] |= np.uint64(member & 15) << np.uint64((member >> 4 & 15) * 4)
    return end


@helper
def _begin(index: Record, query: Record, set_id: int) -> None:
    """Make the living members of the first block's set the active ones."""
    active, count = query.active, 0
    query.num_words = _spread(index, set_id, active, len(active))
    for place in range(query.num_words):
        active[place] = _closed(active[place])
        word, slot = active[place], place * 16
        while word != _U0:
            if word & _NIBBLE:
                if index.num_retired and is_retired(index, slot):
                    active[place] &= ~(_NIBBLE << np.uint64((slot & 15) * 4))
                else:
                    count += 1
                    if word & _U1 == _U0:
                        for tier in range(4):
                            query.depths[slot, tier] = 0
            word >>= _U4
            slot += 1
    query.num_left, query.num_holders = count, 0


@helper
def _drop(query: Record, place: int, lost: np.uint64, left: np.uint64, depth: int) -> None:
    """Note how far slots of a word got in the tiers that they lose; those that have none left are answers."""
    slot = place * 16
    while lost != _U0:
        tiers = lost & _NIBBLE
        if tiers:
            if tiers != _NIBBLE:
                for tier in range(4):
                    if signed(tiers) >> tier & 1:
                        query.depths[slot, tier] = depth
            if left & _NIBBLE == _U0:
                number = query.num_holders
                query.holder_ids[number] = slot
                for tier in range(4):
                    query.holder_depths[number, tier] = depth if tiers == _NIBBLE else query.depths[slot, tier]
                query.num_holders += 1
                query.num_left -= 1
        lost, left = lost >> _U4, left >> _U4
        slot += 1


@helper
def _narrow(index: Record, query: Record, set_id: int, depth: int) -> None:
    """Leave those active who are in a set, too."""
    active, held, num_words = query.active, query.spread, query.num_words
    num_held = _spread(index, set_id, held, num_words)
    for place in range(num_held):
        kept = active[place] & _closed(held[place])
        if kept != active[place]:
            lost, active[place] = active[place] ^ kept, kept
            _drop(query, place, lost, kept, depth)
    for place in range(num_held, num_words):
        if active[place] != _U0:
            _drop(query, place, active[place], _U0, depth)
    query.num_words = num_held


@helper
def _hit(
    index: Record, rule: Record, slot: int, set_ids: NDArray[np.uint32], longest: int, limit: int, num_usable: int
) -> int:
    """Return the longest hit of a rank of several groups: at its end, each has what it needs of those up to a limit.

    A block that is missing ends all hits that need it, which are those up to its group's window behind it.
    """
    step, num_ahead = signed(rule.step), 0
    for group in range(1 + layout.NUM_KINDS):
        num_ahead = max(num_ahead, signed(rule.ahead[group]))
    end = max(min(longest - signed(rule.ahead[0]), limit - num_ahead, num_usable), 0) // step * step
    while end > 0:
        missing = -1
        for group in range(1 + layout.NUM_KINDS):
            holder, tier = (slot, 0) if group == 0 else (signed(rule.companion), group - 1)
            ahead = signed(rule.ahead[group])
            place, first = end + ahead - 1, end + ahead - signed(rule.needed[group]) * signed(rule.stride[group])
            while len(set_ids) > place >= max(first, 0) and missing < 0:
                if tiers_in(index, signed(set_ids[place]), holder) >> tier & 1 == 0:
                    missing, num_ahead = place, ahead
                place -= max(signed(rule.stride[group]), 1)
        if missing < 0:
            return end
        while missing > 0 and set_ids[missing - 1] == set_ids[missing]:
            missing -= 1
        end = max(missing - num_ahead, 0) // step * step
    return 0


@helper
def _answer_again(query: Record, number: int, slot: int, depth: int) -> None:
    """Write an answer, at its place among those up to a number, which ascend."""
    while number > 0 and query.holder_depths[number - 1, 3] > depth:
        query.holder_ids[number] = query.holder_ids[number - 1]
        for tier in range(4):
            query.holder_depths[number, tier] = query.holder_depths[number - 1, tier]
        number -= 1
    query.holder_ids[number] = slot
    for tier in range(4):
        query.holder_depths[number, tier] = depth


@helper
def _keep_to_rules(index: Record, segments: Records, query: Record, hashes: Words, num_usable: int) -> int:
    """Let ranks of several groups have what all of these agree on; return how many answers there are.

    Beyond what is usable, engines look for blocks ahead of a hit only if they have more than one group.
    """
    num_kept, num_looked_at = 0, 0
    for place in range(index.num_grouped):
        query.depths[index.grouped[place], 0] = 0
    for number in range(query.num_holders):
        slot = query.holder_ids[number]
        role = index.rules[slot].role
        if role == layout.GROUPED:
            query.depths[slot, 0] = query.holder_depths[number, 0]
        elif role != layout.COMPANION:
            query.holder_ids[num_kept] = slot
            for tier in range(4):
                query.holder_depths[num_kept, tier] = query.holder_depths[number, tier]
            num_kept += 1
    set_ids = np.zeros(len(hashes), np.uint32)
    for place in range(index.num_grouped):
        slot = signed(index.grouped[place])
        rule = index.rules[slot]
        limit = len(hashes) if rule.needed[1] else num_usable
        longest = limit if rule.needed[0] else signed(query.depths[slot, 0])
        num_needed = min(longest + signed(rule.step) + len(hashes) - num_usable, len(hashes))
        for number in range(num_looked_at, num_needed):
            row = find(index, segments, hashes[number])
            set_ids[number] = row_at(segments, row).set_id if row >= 0 else 0
        num_looked_at = max(num_looked_at, num_needed)
        while num_usable <= longest < limit and tiers_in(index, signed(set_ids[longest]), slot) & 1:
            longest += 1
        depth = _hit(index, rule, slot, set_ids, longest, limit, num_usable)
        if depth:
            _answer_again(query, num_kept, slot, depth)
            num_kept += 1
    return num_kept


@jit((*layout.INDEX_TYPES, layout.QUERY_TYPE, layout.HASHES_TYPE, int64))
def match(core: Records, segments: Records, queries: Records, hashes: Words, num_usable: int) -> int:
    """Write, for each slot that holds the first block, its cumulative depth in each tier; return how many they are.

    Only the first `num_usable` count, which are not more than there are; the others are looked at. Answers ascend by
    the depth in any tier. Of a rank of several groups it is the engine's hit, in all tiers.
    """
    index, query, last = core[0], queries[0], -1
    query.num_left = query.num_holders = query.num_words = 0
    for depth in range(num_usable):
        number = segment_of(index.table, hashes[depth])
        place = locate(index.table, segments, number, hashes[depth])
        set_id = signed(segments[number].rows[place].set_id) if place >= 0 else 0
        if set_id == last:
            continue
        if last < 0:
            _begin(index, query, set_id)
        else:
            _narrow(index, query, set_id, depth)
        if query.num_left == 0:
            break
        last = set_id
    if query.num_left:
        _narrow(index, query, _0, num_usable)
    has_groups = index.num_grouped + index.num_companions > 0
    return _keep_to_rules(index, segments, query, hashes, num_usable) if has_groups else query.num_holders


@jit((*layout.INDEX_TYPES, layout.HASHES_TYPE))
def touch(core: Records, segments: Records, hashes: Words) -> None:
    """Note that blocks are in use now, up to the first that nobody holds."""
    index = core[0]
    for block_hash in hashes:
        number = segment_of(index.table, block_hash)
        place = locate(index.table, segments, number, block_hash)
        if place < 0:
            break
        stamp(index, segments[number].rows[place])

"""Scores who holds a prefix: looks its hashes up one by one, and intersects sets of holders only where the set changes.

The active slots, which hold all blocks so far, are kept as words of sixteen slots with four tier bits each. A bit is
set if the slot holds all of them in that tier or in faster ones.

Another process may be writing meanwhile: then the answer is wrong, which the generation shows, but all reads stay
within bounds, and the match comes to an end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.radix.compiled import layout
from kvist.radix.compiled.blocks import find, holders_of, mark_used, row_at
from kvist.radix.compiled.jit import helper, jit, signed
from kvist.radix.compiled.layout import Record, Records, Words
from kvist.radix.compiled.sets import is_retired, member_at, tiers_in

_0: Any = np.int64(0)
_U0, _U1, _U2, _U4, _NIBBLE = (np.uint64(n) for n in (0, 1, 2, 4, 15))
_ABOVE_1, _ABOVE_2 = (np.uint64(n * 0x1111_1111_1111_1111) for n in (0xE, 0xC))


@helper
def _cumulative(word: np.uint64) -> np.uint64:
    """Return a word with each slot's fastest tier and all slower ones: what makes the scores cumulative."""
    word |= (word << _U1) & _ABOVE_1
    return word | ((word << _U2) & _ABOVE_2)


@helper
def _write_words(index: Record, set_id: int, words: Words, num_words: int) -> int:
    """Write a set as words of sixteen slots, at most `num_words` of them; return how many it has, up to that."""
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
def _start(index: Record, query: Record, set_id: int) -> None:
    """Make the members of the first block's set the active slots, without those whose rank is gone."""
    active, count = query.active, 0
    query.num_words = _write_words(index, set_id, active, len(active))
    for place in range(query.num_words):
        active[place] = _cumulative(active[place])
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
def _record_losses(query: Record, place: int, lost: np.uint64, left: np.uint64, depth: int) -> None:
    """Record the depth that a word's slots have in the tiers that they lose; those with no tier left are answers."""
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
def _intersect(index: Record, query: Record, set_id: int, depth: int) -> None:
    """Keep only those slots active that are in a set, too."""
    active, held, num_words = query.active, query.spread, query.num_words
    num_held = _write_words(index, set_id, held, num_words)
    for place in range(num_held):
        kept = active[place] & _cumulative(held[place])
        if kept != active[place]:
            lost, active[place] = active[place] ^ kept, kept
            _record_losses(query, place, lost, kept, depth)
    for place in range(num_held, num_words):
        if active[place] != _U0:
            _record_losses(query, place, active[place], _U0, depth)
    query.num_words = num_held


@helper
def _longest_hit(
    index: Record, rule: Record, slot: int, set_ids: NDArray[np.uint32], longest: int, limit: int, num_usable: int
) -> int:
    """Return the longest hit of a rank with several groups: at its end each group holds what its rule needs.

    A missing block rules out all hits that need it: those that end within its group's window behind it.
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
def _insert_answer(query: Record, number: int, slot: int, depth: int) -> None:
    """Insert an answer among the first `number`, which ascend by depth."""
    while number > 0 and query.holder_depths[number - 1, 3] > depth:
        query.holder_ids[number] = query.holder_ids[number - 1]
        for tier in range(4):
            query.holder_depths[number, tier] = query.holder_depths[number - 1, tier]
        number -= 1
    query.holder_ids[number] = slot
    for tier in range(4):
        query.holder_depths[number, tier] = depth


@helper
def _apply_rules(index: Record, segments: Records, query: Record, hashes: Words, num_usable: int) -> int:
    """Replace the answers of ranks with several groups by their longest hits; return how many answers there are.

    Engines look for blocks behind the usable ones only if they have more than one group.
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
            set_ids[number] = holders_of(index, segments, hashes[number])
        num_looked_at = max(num_looked_at, num_needed)
        while num_usable <= longest < limit and tiers_in(index, signed(set_ids[longest]), slot) & 1:
            longest += 1
        depth = _longest_hit(index, rule, slot, set_ids, longest, limit, num_usable)
        if depth:
            _insert_answer(query, num_kept, slot, depth)
            num_kept += 1
    return num_kept


@jit((*layout.INDEX_TYPES, layout.QUERY_TYPE, layout.HASHES_TYPE, int64))
def match(core: Records, segments: Records, queries: Records, hashes: Words, num_usable: int) -> int:
    """Write, for each slot that holds the first block, its cumulative depth in each tier; return how many they are.

    Only the first `num_usable` blocks count, at most all; those behind may be needed ahead of a hit. Answers ascend by
    the depth in any tier. A rank with several groups has the engine's hit as its depth in all tiers.
    """
    index, query, last = core[0], queries[0], -1
    query.num_left = query.num_holders = query.num_words = 0
    for depth in range(num_usable):
        set_id = holders_of(index, segments, hashes[depth])
        if set_id == last:
            continue
        if last < 0:
            _start(index, query, set_id)
        else:
            _intersect(index, query, set_id, depth)
        if query.num_left == 0:
            break
        last = set_id
    if query.num_left:
        _intersect(index, query, _0, num_usable)
    has_groups = index.num_grouped + index.num_companions > 0
    return _apply_rules(index, segments, query, hashes, num_usable) if has_groups else query.num_holders


@jit((*layout.INDEX_TYPES, layout.HASHES_TYPE))
def touch(core: Records, segments: Records, hashes: Words) -> None:
    """Record that blocks are used now, up to the first that nobody holds."""
    index = core[0]
    for block_hash in hashes:
        row = find(index, segments, block_hash)
        if row < 0:
            break
        mark_used(index, row_at(segments, row))

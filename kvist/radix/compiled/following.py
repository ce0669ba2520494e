"""Follows who holds a prefix from set to set, and writes how far each one got.

Those who are followed, the active ones, are kept as a set is: as words of sixteen slots, four tier bits each, or as a
list of members where the first set was sparse. In both, a tier's bit is set if the slot holds the prefix in it or in a
faster one.
"""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np
from numba import types

from kvist.radix.compiled.intrinsics import (
    clear,
    get32,
    get64,
    getu64,
    intersect_words,
    lowest_bit,
    move,
    put32,
    put64,
    put_next_16,
    put_same_4,
    put_same_16,
    putu64,
)
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    ACTIVE,
    DEPTHS,
    EXACT_SET,
    INLINE,
    IS_BEHIND,
    MEMBERS,
    NUM_ACTIVE,
    NUM_BEGUN,
    NUM_OUT,
    NUM_RETIRED,
    NUM_WORDS,
    OUTPUT,
    OUTPUT_DEPTHS,
    RECORD_HEADER_BYTES,
    STEP_SLOTS,
    WORDS,
)
from kvist.radix.compiled.sets import NIBBLE, is_retired, list_members, record_of, step_of, tiers_of

_FEW_WORDS = 16  # to intersect them is as fast as to intersect a short list
_ABOVE_1, _ABOVE_2, _LOWEST = (np.uint64(n * 0x1111_1111_1111_1111) for n in (0xE, 0xC, 1))
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_U0, _U1, _U2, _U3, _U4 = (np.uint64(n) for n in range(5))


@jit("i8(i8)")
def _closed(tiers):
    """Tiers at or above the fastest one held: what makes the scores cumulative."""
    tiers |= tiers << 1
    return (tiers | tiers << 2) & 15


@jit("u8(u8)")
def _closed_word(word):
    word |= (word << _U1) & _ABOVE_1
    return word | ((word << _U2) & _ABOVE_2)


# --- Results --------------------------------------------------------------------------------------------------------


@jit("void(i8,i8,i8,i8,i8)")
def _drop(control, slot, dropped, remaining, depth):
    """Note that a slot's lead in some tiers ends at a depth; write its result once none is left."""
    at = get64(control + DEPTHS) + slot * 16
    for tier in range(4):
        if dropped >> tier & 1:
            put32(at + tier * 4, depth)
    if remaining == 0:
        row = get64(control + NUM_OUT)
        put64(control + NUM_OUT, row + 1)
        put32(get64(control + OUTPUT) + row * 4, slot)
        move(get64(control + OUTPUT_DEPTHS) + row * 16, at, 16)


@jit("void(i8,i8,u8,i8)", is_inlined=True)
def _drop_wholly(control, first, ended, depth):
    """Write the results of slots that are dropped in all tiers, with the lowest bits of their nibbles."""
    slots, depths, row = get64(control + OUTPUT), get64(control + OUTPUT_DEPTHS), get64(control + NUM_OUT)
    if ended == _LOWEST:
        put_next_16(slots + row * 4, first)
        for offset in range(0, 256, 64):
            put_same_16(depths + row * 16 + offset, depth)
        row += 16
    else:
        while ended != _U0:
            put32(slots + row * 4, first + (lowest_bit(ended) >> 2))
            put_same_4(depths + row * 16, depth)
            row += 1
            ended &= ended - _U1
    put64(control + NUM_OUT, row)


@jit("b1(i8,i8,u8,u8,i8)", is_inlined=True)
def _drop_from_word(control, first, dropped, left, depth):
    """Note what sixteen slots, from the first on, are dropped from; return whether each is from all tiers at once."""
    ended = dropped & _LOWEST
    if dropped == (ended << _U4) - ended:
        _drop_wholly(control, first, ended, depth)
        return True
    while dropped != _U0:
        shift = lowest_bit(dropped) & 60
        tiers = np.int64((dropped >> np.uint64(shift)) & NIBBLE)
        remaining = np.int64((left >> np.uint64(shift)) & NIBBLE)
        _drop(control, first + (shift >> 2), tiers, remaining, depth)
        dropped &= ~(NIBBLE << np.uint64(shift))
    return False


@jit("void(i8,i8,i8,b1,b1)")
def _settle(control, last, set_id, is_exact, is_whole):
    """Note whether the active ones are now exactly a set, and the step to it if they were exactly the last one.

    They are if no member of the set has a tier that they lack (`is_exact`), and none is missing. A step is remembered
    if slots were dropped in all tiers (`is_whole`), and few of them: they are the last rows.
    """
    num_out = get64(control + NUM_OUT)
    if not is_exact or get64(control + NUM_BEGUN) - num_out != get32(record_of(control, set_id) + 16):
        put64(control + EXACT_SET, -1)
        return
    if get64(control + EXACT_SET) == last:
        before, now = record_of(control, last), record_of(control, set_id)
        count = get32(before + 16) - get32(now + 16)
        if is_whole and count <= STEP_SLOTS:
            step = step_of(control, last)
            put32(step, last)
            put32(step + 4, set_id)
            put32(step + 8, get32(before + 4))
            put32(step + 12, get32(now + 4))
            put32(step + 16, count)
            move(step + 20, get64(control + OUTPUT) + (num_out - count) * 4, count * 4)
    put64(control + EXACT_SET, set_id)


# --- Active list ----------------------------------------------------------------------------------------------------


@jit("i8(i8,i8)")
def _words_to_list(control, num_words):
    """Turn the active words into the active list; return how many are active."""
    active, members, count = get64(control + ACTIVE), get64(control + MEMBERS), 0
    for index in range(num_words):
        word = getu64(active + index * 8)
        while word != _U0:
            slot = lowest_bit(word) >> 2
            nibble = (word >> np.uint64(slot * 4)) & NIBBLE
            word &= ~(NIBBLE << np.uint64(slot * 4))
            put32(members + count * 4, (index * 16 + slot) << 4 | np.int64(nibble))
            count += 1
    move(active, members, count * 4)
    return count


@jit("void(i8,i8,i8,i8)")
def _narrow_list(control, last, set_id, depth):
    """Drop from the active list who is not in a set."""
    active, kept, is_whole, is_exact = get64(control + ACTIVE), 0, True, False
    is_sparse, payload, num_members, at = False, 0, 0, 0
    if set_id != 0 and not set_id & INLINE:
        record = record_of(control, set_id)
        is_sparse, payload, num_members = get32(record + 20) == 0, record + RECORD_HEADER_BYTES, get32(record + 16)
        is_exact = True
    for index in range(get64(control + NUM_ACTIVE)):
        before = get32(active + index * 4)
        slot, tiers = before >> 4, 0
        if is_sparse:
            while at < num_members and get32(payload + at * 4) >> 4 < slot:
                at += 1
            if at < num_members and get32(payload + at * 4) >> 4 == slot:
                tiers = get32(payload + at * 4) & 15
        else:
            tiers = tiers_of(control, set_id, slot)
        held = _closed(tiers)
        after = before & held
        is_exact &= after == held
        if after:
            put32(active + kept * 4, slot << 4 | after)
            kept += 1
        if after != before & 15:
            is_whole &= before & 15 == 15 and after == 0
            _drop(control, slot, before & 15 & ~after, after, depth)
    put64(control + NUM_ACTIVE, kept)
    _settle(control, last, set_id, is_exact, is_whole)


# --- Active words ---------------------------------------------------------------------------------------------------


@jit(types.UniTuple(types.boolean, 2)(*[types.int64] * 5))
def _intersect_words(control, num_words, payload, num_held, depth):
    """Drop from the active words who is not in the words of a set.

    Return whether no member of the set has a tier that its slot lacks here, and whether all slots that lost a tier had
    all tiers and lost them all. Active words come in eights, with zeros at the end; what is read there beyond a record
    does not matter.
    """
    active, gone, surplus, is_whole = get64(control + ACTIVE), get64(control + WORDS), _U0, True
    for base in range(0, num_words, 64):
        # All words first, then those that changed: which of them did is random, and a jump on it would be mispredicted.
        changed = _U0
        for first in range(base, min(num_words, base + 64), 8):
            held = payload + first * 8 if first < num_held else active  # beyond a record there may be no memory
            num_left = min(num_held, num_words) - first
            lost, others = intersect_words(active + first * 8, held, num_left, gone + first * 8)
            changed |= lost << np.uint64(first - base)
            surplus |= others
        while changed != _U0:
            index = base + lowest_bit(changed)
            changed &= changed - _U1
            dropped, left = getu64(gone + index * 8), getu64(active + index * 8)
            is_whole &= _drop_from_word(control, index * 16, dropped, left, depth)
    return surplus == _U0, is_whole


@jit("void(i8,i8,i8)", is_inlined=True)
def _add_to_words(words, num_words, member):
    """Put a member into its word, unless that is beyond the last."""
    if member >> 8 < num_words:
        word = words + (member >> 8) * 8
        putu64(word, getu64(word) | np.uint64(member & 15) << np.uint64((member >> 4 & 15) * 4))


@jit("i8(i8,i8,i8)")
def _spread(control, set_id, num_words):
    """Write a set that is not dense as words, to the scratch list; return their address."""
    words = get64(control + MEMBERS)
    clear(words, num_words * 8)
    if set_id & INLINE:
        _add_to_words(words, num_words, set_id & (INLINE - 1))
    else:
        members = record_of(control, set_id) + RECORD_HEADER_BYTES
        for at in range(members, members + get32(members - RECORD_HEADER_BYTES + 16) * 4, 4):
            _add_to_words(words, num_words, get32(at))
    return words


@jit("void(i8,i8,i8,i8)")
def _narrow_words(control, last, set_id, depth):
    """Take from the active words who is not in a set; go on with a list if those who are left are few."""
    num_words = get64(control + NUM_WORDS)
    record = 0 if set_id & INLINE else record_of(control, set_id)
    num_held = get32(record + 20) if record else 0
    if num_held:
        is_exact, is_whole = _intersect_words(control, num_words, record + RECORD_HEADER_BYTES, num_held, depth)
    else:
        payload = _spread(control, set_id, num_words)
        is_exact, is_whole = _intersect_words(control, num_words, payload, num_words, depth)
    _settle(control, last, set_id, is_exact and record != 0, is_whole)
    active = get64(control + ACTIVE)
    while num_words and getu64(active + (num_words - 1) * 8) == _U0:
        num_words -= 1
    if num_held == 0 and num_words > _FEW_WORDS:
        put64(control + NUM_ACTIVE, _words_to_list(control, num_words))
        num_words = 0
    put64(control + NUM_WORDS, num_words)


# --- From the first set to the last ---------------------------------------------------------------------------------


@jit("i8(i8,i8)")
def _begin_list(control, set_id):
    """Make a set's living members the active list; return how many."""
    members, active, depths = get64(control + MEMBERS), get64(control + ACTIVE), get64(control + DEPTHS)
    has_retired, num_active = get64(control + NUM_RETIRED) > 0, 0
    for index in range(list_members(control, set_id)):
        member = get32(members + index * 4)
        if has_retired and is_retired(control, member >> 4):
            continue
        put_same_4(depths + (member >> 4) * 16, 0)
        put32(active + num_active * 4, (member >> 4) << 4 | _closed(member & 15))
        num_active += 1
    put64(control + NUM_ACTIVE, num_active)
    return num_active


@jit("i8(i8,i8)")
def _begin_words(control, record):
    """Make a dense set's living members the active words; return how many."""
    active, depths, num_words = get64(control + ACTIVE), get64(control + DEPTHS), get32(record + 20)
    has_retired, num_active = get64(control + NUM_RETIRED) > 0, get32(record + 16)
    for index in range(num_words):
        word = _closed_word(getu64(record + RECORD_HEADER_BYTES + index * 8))
        slower = (word >> _U3) & ~word & _LOWEST  # held, but not in tier 0
        while slower != _U0:
            put_same_4(depths + (index * 16 + (lowest_bit(slower) >> 2)) * 16, 0)
            slower &= slower - _U1
        if has_retired:
            held = (word >> _U3) & _LOWEST
            while held != _U0:
                bit = lowest_bit(held)
                if is_retired(control, index * 16 + (bit >> 2)):
                    word &= ~(NIBBLE << np.uint64(bit))
                    num_active -= 1
                held &= held - _U1
        putu64(active + index * 8, word)
    for index in range(num_words, num_words + 7):
        putu64(active + index * 8, _U0)
    put64(control + NUM_WORDS, num_words)
    return num_active


@jit("void(i8,i8)")
def _catch_up(control, last):
    """Make the active ones those of the last set, if steps have left them behind."""
    if get64(control + IS_BEHIND) == 0:
        return
    put64(control + IS_BEHIND, 0)
    active, num_words = get64(control + ACTIVE), get64(control + NUM_WORDS)
    if num_words == 0:
        num_active = list_members(control, last)
        for index in range(num_active):
            member = get32(get64(control + MEMBERS) + index * 4)
            put32(active + index * 4, member & ~15 | _closed(member & 15))
        put64(control + NUM_ACTIVE, num_active)
        return
    record = record_of(control, last)
    num_held, payload = get32(record + 20), record + RECORD_HEADER_BYTES
    if num_held == 0:
        num_held, payload = num_words, _spread(control, last, num_words)
    for index in range(num_words):
        word = getu64(payload + index * 8) if index < num_held else _U0
        putu64(active + index * 8, _closed_word(word))


@jit("void(i8,i8)")
def begin(control, set_id):
    """Follow the living members of the first block's set, if it has one."""
    for field in (NUM_WORDS, NUM_ACTIVE, NUM_BEGUN, IS_BEHIND):
        put64(control + field, 0)
    put64(control + EXACT_SET, -1)
    if set_id == 0:
        return
    record = 0 if set_id & INLINE else record_of(control, set_id)
    is_dense = record != 0 and get32(record + 20) != 0
    put64(control + NUM_BEGUN, _begin_words(control, record) if is_dense else _begin_list(control, set_id))
    if record and get64(control + NUM_RETIRED) == 0:
        put64(control + EXACT_SET, set_id)


@jit("void(i8,i8,i8,i8)")
def narrow(control, last, set_id, depth):
    """Follow only those who are in a set, too."""
    _catch_up(control, last)
    if get64(control + NUM_WORDS):
        _narrow_words(control, last, set_id, depth)
    else:
        _narrow_list(control, last, set_id, depth)


@jit("void(i8,i8,i8)")
def end(control, last, depth):
    """Write the results of those who are left."""
    _catch_up(control, last)
    num_words = get64(control + NUM_WORDS)
    if num_words:
        _intersect_words(control, num_words, 0, 0, depth)
    else:
        _narrow_list(control, last, 0, depth)

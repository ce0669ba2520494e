"""Interned sets of slots: who holds a block, in which tiers, by one id; `layout` says what an id is.

A set's record counts the rows that refer to it, and is freed with the last of them; while a snapshot is open, sets that
its copies may refer to are kept. The words of sets lie in runs of one big array; free runs are listed by size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvist.radix.compiled.jit import helper, signed
from kvist.radix.compiled.layout import INLINE, MAX_SETS, MAX_WORDS, NUM_BUCKETS, RETIRED, Record, Words

ADD: Any = np.int64(0)  # typed: Numba compiles a function again for each literal
DISCARD: Any = np.int64(1)
PURGE: Any = np.int64(2)
"""Operations on a set: add a member's tier, discard it, remove all retired slots."""
_U0, _U52, _NIBBLE, _MEMBER = (np.uint64(n) for n in (0, 52, 15, (1 << 32) - 1))
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_LOW = INLINE - 1


@helper
def is_retired(index: Record, slot: int) -> bool:
    return index.slots[slot].state == RETIRED


@helper
def member_at(words: Words, start: int, number: int) -> int:
    """Return a member of a set that has its members listed."""
    return signed((words[start + (number >> 1)] >> np.uint64((number & 1) * 32)) & _MEMBER)


@helper
def tiers_in(index: Record, set_id: int, slot: int) -> int:
    """Return the tiers, as four bits, in which a slot belongs to a set."""
    if set_id & INLINE:
        return set_id & 15 if (set_id & _LOW) >> 4 == slot else 0
    if set_id == 0:
        return 0
    record, words = index.sets[set_id], index.words
    start, num_words = signed(record.start), signed(record.num_words)
    if num_words:
        if slot >> 4 >= num_words:
            return 0
        return signed((words[start + (slot >> 4)] >> np.uint64((slot & 15) * 4)) & _NIBBLE)
    low, high = 0, signed(record.num_members)
    while low < high:
        middle = (low + high) >> 1
        if member_at(words, start, middle) >> 4 < slot:
            low = middle + 1
        else:
            high = middle
    if low < record.num_members and member_at(words, start, low) >> 4 == slot:
        return member_at(words, start, low) & 15
    return 0


@helper
def list_members(index: Record, set_id: int) -> int:
    """Write a set's members, ascending, to `members`; return how many they are."""
    members, count = index.members, 0
    if set_id & INLINE:
        members[count] = set_id & _LOW
        return count + 1
    record, words = index.sets[set_id], index.words
    start, num_words = signed(record.start), signed(record.num_words)
    if num_words == 0:
        for number in range(record.num_members if set_id else 0):
            members[count] = member_at(words, start, number)
            count += 1
    for place in range(num_words):
        word = words[start + place]
        slot = place * 16
        while word != _U0:
            if word & _NIBBLE:
                members[count] = slot << 4 | signed(word & _NIBBLE)
                count += 1
            word >>= np.uint64(4)
            slot += 1
    return count


@helper
def _draft(index: Record, count: int) -> int:
    """Write the words of a set of the first `count` of `members`, which ascend; return how many are bits, or 0."""
    members, draft = index.members, index.draft
    num_words = (signed(members[count - 1]) >> 8) + 1
    is_listed = count <= 2 * num_words - min(num_words, 32)  # bits match faster, but may take more memory
    for place in range((count + 1) >> 1 if is_listed else num_words):
        draft[place] = _U0
    for number in range(count):
        member = signed(members[number])
        if is_listed:
            draft[number >> 1] |= np.uint64(member) << np.uint64((number & 1) * 32)
        else:
            draft[member >> 8] |= np.uint64(member & 15) << np.uint64((member >> 4 & 15) * 4)
    return 0 if is_listed else num_words


@helper
def _run_size(num_words: int) -> tuple[int, int]:
    """Return the size class and the length of the shortest runs with so many words: 1, 2, 3, 4, 6, 8, 12, ..."""
    size, length = 0, 1
    while length < num_words:
        length = 2 if size == 0 else length * 3 >> 1 if size & 1 else length * 4 // 3
        size += 1
    return size, length


@helper
def _allocate_run(index: Record, num_words: int) -> int:
    """Return the start of a run for so many words. Raises MemoryError."""
    size, length = _run_size(num_words)
    start = index.free_runs[size] - 1
    if start >= 0:
        index.free_runs[size] = signed(index.words[start])
        return start
    start = index.end_of_words
    if start + length > MAX_WORDS:
        raise MemoryError("an index has no room for more sets of holders")
    index.end_of_words += length
    return start


@helper
def _add_set(index: Record, count: int, num_words: int, content: int) -> int:
    """Add a set with the words of `draft`, to which nothing refers yet; return its id. Raises MemoryError."""
    length = num_words if num_words else (count + 1) >> 1
    set_id = index.free_set if index.free_set else index.end_of_sets
    if set_id == MAX_SETS:
        raise MemoryError("an index has no room for more sets of holders")
    start = _allocate_run(index, length)
    if set_id == index.end_of_sets:
        index.end_of_sets += 1
    else:
        index.free_set = signed(index.sets[set_id].next)
    for place in range(length):
        index.words[start + place] = index.draft[place]
    index.num_sets += 1
    index.last_stamp += 1
    bucket, record = content % NUM_BUCKETS, index.sets[set_id]
    record.start, record.num_members, record.num_words, record.references = start, count, num_words, 0
    record.hash, record.next, record.stamp = content, index.buckets[bucket], index.last_stamp
    index.buckets[bucket] = set_id
    return set_id


@helper
def _intern(index: Record, count: int) -> int:
    """Return the id of the set of the first `count` of `members`, which ascend; equal sets have equal ids."""
    if count == 0:
        return 0
    if count == 1:
        return INLINE | signed(index.members[0])
    num_words = _draft(index, count)
    length, mixed = num_words if num_words else (count + 1) >> 1, np.uint64(count)
    for place in range(length):
        mixed = (mixed ^ index.draft[place]) * _MIX_1
        mixed ^= mixed >> np.uint64(29)
    content = signed((mixed * _MIX_2) >> np.uint64(32))
    set_id = signed(index.buckets[content % NUM_BUCKETS])
    while set_id:
        record = index.sets[set_id]
        if record.hash == content and record.num_members == count and record.num_words == num_words:
            start, place = signed(record.start), 0
            while place < length and index.words[start + place] == index.draft[place]:
                place += 1
            if place == length:
                return set_id
        set_id = signed(record.next)
    return _add_set(index, count, num_words, content)


@helper
def free_set(index: Record, set_id: int) -> None:
    record = index.sets[set_id]
    bucket = signed(record.hash) % NUM_BUCKETS
    if index.buckets[bucket] == set_id:
        index.buckets[bucket] = record.next
    else:
        before = signed(index.buckets[bucket])
        while index.sets[before].next != set_id:
            before = signed(index.sets[before].next)
        index.sets[before].next = record.next
    size, _ = _run_size(signed(record.num_words) if record.num_words else (signed(record.num_members) + 1) >> 1)
    index.words[record.start] = np.uint64(index.free_runs[size])
    index.free_runs[size] = signed(record.start) + 1
    record.stamp, record.next = 0, index.free_set
    index.free_set = set_id
    index.num_sets -= 1


@helper
def count_reference(index: Record, set_id: int, before: int) -> None:
    """Count that a row refers to one set instead of another, and free that one if no row does any more."""
    if set_id and not set_id & INLINE:
        index.sets[set_id].references += np.uint32(1)
    if before and not before & INLINE:
        record = index.sets[before]
        record.references -= np.uint32(1)
        if record.references == 0 and record.stamp > index.captured_stamp:  # else an open snapshot may have its id
            free_set(index, before)


@helper
def _change_members(index: Record, set_id: int, operation: int, slot: int, tier: int) -> int:
    """Write a set's members after an operation to `members`; return how many they are, -1 if nothing changes."""
    members = index.members
    count = list_members(index, set_id)
    kept = 0
    if operation == PURGE:
        for number in range(count):
            if not is_retired(index, signed(members[number]) >> 4):
                members[kept] = members[number]
                kept += 1
        return kept if kept < count else -1
    place = 0
    while place < count and signed(members[place]) >> 4 < slot:
        place += 1
    before = signed(members[place]) & 15 if place < count and signed(members[place]) >> 4 == slot else 0
    after = before | 1 << tier if operation == ADD else before & ~(1 << tier)
    if after == before:
        return -1
    if before and not after:
        for number in range(place, count - 1):
            members[number] = members[number + 1]
        return count - 1
    if not before:
        for number in range(count, place, -1):
            members[number] = members[number - 1]
        count += 1
    members[place] = slot << 4 | after
    return count


@helper
def _stamp_of(index: Record, set_id: int) -> int:
    """Return what distinguishes a set from later ones with its id; 0 for ids that contain their members."""
    return 0 if set_id == 0 or set_id & INLINE else index.sets[set_id].stamp


@helper
def change_set(index: Record, set_id: int, operation: int, slot: int, tier: int) -> int:
    """Return the id of a set after an operation; the same id if nothing changes. Raises MemoryError.

    Results are remembered in `memos`. The slot of PURGE is the number of the last retirement.
    """
    if set_id == 0 and operation == ADD:
        return INLINE | slot << 4 | 1 << tier
    what = slot << 4 | tier << 2 | operation
    mixed = (np.uint64(set_id) * _MIX_1) ^ (np.uint64(what) * _MIX_2)
    memo, stamp = index.memos[signed(mixed >> _U52)], _stamp_of(index, set_id)
    if memo.set_id == set_id and memo.operation == what and memo.stamp == stamp:
        result = signed(memo.result)
        if memo.result_stamp == _stamp_of(index, result):
            return result
    count = _change_members(index, set_id, operation, slot, tier)
    result = set_id if count < 0 else _intern(index, count)
    memo.set_id, memo.operation, memo.result = set_id, what, result
    memo.stamp, memo.result_stamp = stamp, _stamp_of(index, result)
    return result

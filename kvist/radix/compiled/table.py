"""A table of u64 hashes and u64 values: open addressing in segments that grow one at a time.

The top bits of a hash's key (the hash times a secret odd number) are its segment. The bits that follow, scaled to the
segment's room, are the place where the search for it begins: so a segment can have any size, and its rows stay about in
order when it is resized. A search goes on from place to place up to a vacant row, and from the last place of a segment
to its first.
"""

from __future__ import annotations

import mmap

import numpy as np
from numba import int64

from kvist.radix.compiled import layout
from kvist.radix.compiled.jit import helper, jit, signed
from kvist.radix.compiled.layout import Record, Records

_U0, _U1, _U32 = (np.uint64(n) for n in (0, 1, 32))
_PAGE_ROWS = mmap.PAGESIZE // layout.ROW.itemsize
_LEAST_STEP = 1024
"""Rows by which a segment grows, unless it only doubles."""


@helper
def segment_of(head: Record, block_hash: np.uint64) -> int:
    key = block_hash * head.multiplier
    return signed((key >> _U1) >> np.uint64(63 - head.bits))  # by 64 would be undefined


@helper
def home_of(head: Record, room: int, block_hash: np.uint64) -> int:
    """Return the place where the search for a hash begins in its segment, of so much room."""
    fraction = signed((block_hash * head.multiplier) << np.uint64(head.bits) >> _U32)
    return (fraction * room) >> 32


@helper
def locate(head: Record, segments: Records, number: int, block_hash: np.uint64) -> int:
    """Return the place of a hash in its segment, or `-1 - place` of the vacant one where the search for it ended."""
    rows, room = segments[number].rows, signed(head.rooms[number])
    place = home_of(head, room, block_hash)
    while rows[place].value != _U0:
        if rows[place].hash == block_hash:
            return place
        place += 1
        if place == room:
            place = 0
    return -1 - place


@helper
def resize_segment(head: Record, segments: Records, number: int, room: int) -> None:
    """Move a segment's rows into so much room, which must be more than their number."""
    segment, count = segments[number], 0
    rows = segment.rows
    hashes, values = np.empty(segment.count, np.uint64), np.empty(segment.count, np.uint64)
    for place in range(segment.room):
        if rows[place].value != _U0:
            hashes[count], values[count] = rows[place].hash, rows[place].value
            rows[place].value = _U0
            count += 1
    segment.room = head.rooms[number] = room
    for moved in range(count):
        place = home_of(head, room, hashes[moved])
        while rows[place].value != _U0:
            place += 1
            if place == room:
                place = 0
        rows[place].hash, rows[place].value = hashes[moved], values[moved]


@helper
def grown_room(room: int, number: int) -> int:
    """Return the next room of a segment.

    Segments fill evenly; they grow by different shares, a tenth to a fifth, so that large ones do not all grow at once,
    nor are all half empty after it.
    """
    wanted = room + max(min(room, _LEAST_STEP), room * (5 + number % 3 * 2) // 48)
    # Whole pages, but for the fields before the rows.
    return min(layout.SEGMENT_ROWS, wanted // _PAGE_ROWS * _PAGE_ROWS + _PAGE_ROWS - 4)


@helper
def insert(head: Record, segments: Records, number: int, place: int, block_hash: np.uint64, value: np.uint64) -> int:
    """Put a row where `locate` ended in a segment, which may grow; return its place. Raises MemoryError."""
    segment = segments[number]
    if segment.count * 128 >= segment.room * layout.FULLEST_128THS:
        if segment.room == layout.SEGMENT_ROWS:
            raise MemoryError("a table has no room for more rows")
        resize_segment(head, segments, number, grown_room(segment.room, number))
        place = -1 - locate(head, segments, number, block_hash)
    segment.rows[place].hash, segment.rows[place].value = block_hash, value
    segment.count += 1
    head.num_rows += 1
    return place


@helper
def delete(head: Record, segment: Record, place: int) -> None:
    """Take a row out of a segment. Rows behind it move up, so that its place may be another one's now."""
    rows, room, vacant = segment.rows, segment.room, place
    while True:
        place += 1
        if place == room:
            place = 0
        if rows[place].value == _U0:
            break
        home = home_of(head, room, rows[place].hash)
        if (place - home + room) % room >= (place - vacant + room) % room:  # its search passes the vacant place
            rows[vacant].hash, rows[vacant].value = rows[place].hash, rows[place].value
            vacant = place
    rows[vacant].value = _U0
    segment.count -= 1
    head.num_rows -= 1


@jit((*layout.TABLE_TYPES, int64, int64))
def resize(heads: Records, segments: Records, number: int, room: int) -> None:
    """Move a segment's rows into so much room, which must be more than their number, or 0 if there are none."""
    resize_segment(heads[0], segments, number, room)

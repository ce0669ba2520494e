"""The index's rows by block hash or by prefix, and their side words: depth, last use, secondary, irregular."""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.radix.compiled.intrinsics import equal_prefixes, get32, get64, getu64, held_rows, lowest_bit, put32, put64
from kvist.radix.compiled.jit import jit
from kvist.radix.compiled.layout import (
    BUCKET_BYTES,
    BUCKET_PASSED,
    BUCKET_SETS,
    EPOCH,
    EPOCH_SHIFT,
    EPOCHS,
    MAX_DEPTH,
    MULTIPLIER,
    NUM_STAMPED,
    SECONDARY,
)
from kvist.radix.compiled.table import find, home_of, segment_of, side_of

_EPOCH = (EPOCHS - 1) << EPOCH_SHIFT
_U1, _U32 = (np.uint64(n) for n in (1, 32))


@jit("i8(i8,u8)")
def find_row(control, block_hash):
    """A block's row, or 0 if nobody holds it."""
    key = block_hash * getu64(control + MULTIPLIER)
    return find(home_of(control, segment_of(control, key), key), key)


@jit("i8(i8,u8)")
def find_primary(control, prefix):
    """The one row of a prefix, the upper 32 bits of a key, that is not secondary; 0 if there is none."""
    segment = segment_of(control, prefix << _U32)
    bucket = home_of(control, segment, prefix << _U32)
    while True:
        hits = equal_prefixes(bucket, np.int64(prefix))
        while hits != np.uint64(0):
            row = bucket + BUCKET_SETS + lowest_bit(hits) * 4
            if get32(row) != 0 and get32(side_of(segment, row)) & SECONDARY == 0:
                return row
            hits &= hits - _U1
        if get32(bucket + BUCKET_PASSED) == 0:
            return 0
        bucket += BUCKET_BYTES


@jit("b1(i8,u8)")
def has_prefix(bucket, key):
    """Whether a row from this home bucket on has a key's prefix."""
    while True:
        hits = equal_prefixes(bucket, np.int64(key >> _U32)) & held_rows(bucket)
        if hits != np.uint64(0):
            return True
        if get32(bucket + BUCKET_PASSED) == 0:
            return False
        bucket += BUCKET_BYTES


@jit("i8(i8,i8)")
def depth_of(segment, row):
    """How many blocks come before a row's block."""
    return get32(side_of(segment, row)) & MAX_DEPTH


@jit("i8(i8,u8)")
def depth_below(control, parent):
    """Depth of the children of a block; 0 if nobody holds that."""
    key = parent * getu64(control + MULTIPLIER)
    segment = segment_of(control, key)
    row = find(home_of(control, segment, key), key)
    return min(depth_of(segment, row) + 1, MAX_DEPTH) if row else 0


@jit("void(i8,i8)")
def stamp(control, side):
    """Note at a side word that its block is in use now."""
    before, epoch = get32(side), get64(control + EPOCH)
    if before & _EPOCH != epoch:
        put32(side, before & ~_EPOCH | epoch)
        put64(control + NUM_STAMPED, get64(control + NUM_STAMPED) + 1)

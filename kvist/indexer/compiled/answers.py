"""Who holds a prompt, as the text that `/query` answers with.

`kvist.indexer.service.answers` says what the text is. Holders are put in the order of their names, so that the streams
of an instance stand together, and two that tell of the same rank count as one.
"""

# mypy: ignore-errors
# The signature of each function is its type.
from __future__ import annotations

import numpy as np
from numba import types

from kvist.indexer.compiled.intrinsics import text_writer, trailing_zeros
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import get32, get64, getu64, put32, putu64

NAME_BYTES, NAME_RANK, NAME_IS_LEFT_OUT = 16, 8, 12
"""What a slot's name is: its instance as u64, its rank and whether it is left out as u32."""
MAX_FIXED_BYTES, MAX_RANK_BYTES = 128, 320
"""Room that an answer takes at most, for whatever is in it and for each holder."""

_DEPTHS_BYTES = 16
_GPU, _CPU, _LONGEST = 0, 4, 12
_GAPS = (301, 132, 57, 23, 10, 4, 1)
_U1, _U8, _U16, _U32, _U56 = (np.uint64(n) for n in (1, 8, 16, 32, 56))
_TEN, _HUNDRED, _MYRIAD, _E8 = (np.uint64(10**n) for n in (1, 2, 4, 8))
_TENTH, _HUNDREDTH = np.uint64(103), np.uint64(10486)  # of 2**10 and of 2**20
_U10, _U20 = np.uint64(10), np.uint64(20)
_IN_PAIRS, _IN_QUADS = np.uint64(0x000F_000F_000F_000F), np.uint64(0x0000_007F_0000_007F)
_ZEROS = np.uint64(0x30 * 0x0101_0101_0101_0101)

_put_begin = text_writer("begin", b'{"scores":{')
_put_instances = text_writer("instances", b'},"frequencies":[],"instances":{')
_put_longest = text_writer("longest", b'"longest_matched":')
_put_gpu = text_writer("gpu", b',"gpu":')
_put_dp = text_writer("dp", b',"dp":{')
_put_cpu = text_writer("cpu", b'},"cpu":')
_put_disk = text_writer("disk", b',"disk":')
_put_quote = text_writer("quote", b'"')
_put_name_end = text_writer("name_end", b'":')
_put_object = text_writer("object", b'":{')
_put_close = text_writer("close", b"}")
_put_comma = text_writer("comma", b",")
_put_end = text_writer("end", b"}}")


@jit("u8(u8)", is_inlined=True)
def _eight_digits(value):
    """The digits of a number below 10**8, a byte each, the first one lowest: halves, quarters, eighths."""
    high = value // _MYRIAD
    halves = high | (value - high * _MYRIAD) << _U32
    high = (halves * _HUNDREDTH >> _U20) & _IN_QUADS
    quarters = high | (halves - high * _HUNDRED) << _U16
    high = (quarters * _TENTH >> _U10) & _IN_PAIRS
    return high | (quarters - high * _TEN) << _U8


@jit("i8(i8,u8)", is_inlined=True)
def _put_short(at, value):
    """Write a number below 10**8; return its end. Eight bytes are written in any case."""
    digits = _eight_digits(value)
    num_zeros = trailing_zeros(digits | _U1 << _U56) >> 3
    putu64(at, (digits | _ZEROS) >> np.uint64(num_zeros * 8))
    return at + 8 - num_zeros


@jit("i8(i8,u8)")
def put_number(at, value):
    """Write a number; return its end. What follows may be overwritten, 28 bytes in all at most."""
    if value < _E8:
        return _put_short(at, value)
    high = value // _E8
    if high < _E8:
        at = _put_short(at, high)
    else:
        at = _put_short(at, high // _E8)
        putu64(at, _eight_digits(high % _E8) | _ZEROS)
        at += 8
    putu64(at, _eight_digits(value % _E8) | _ZEROS)
    return at + 8


@jit("b1(i8,i8)", is_inlined=True)
def _is_before(left, right):
    """Whether a name comes before another."""
    if getu64(left) != getu64(right):
        return getu64(left) < getu64(right)
    return get32(left + NAME_RANK) < get32(right + NAME_RANK)


@jit("i8(i8,i8,i8,i8,i8)")
def _list_holders(slots, depths, num_rows, names, holders):
    """List the rows of a match that are not left out; return how many. A holder: the addresses of name and depths."""
    count = 0
    for row in range(num_rows):
        name = names + get32(slots + row * 4) * NAME_BYTES
        if get32(name + NAME_IS_LEFT_OUT) == 0:
            putu64(holders + count * 16, np.uint64(name))
            putu64(holders + count * 16 + 8, np.uint64(depths + row * _DEPTHS_BYTES))
            count += 1
    return count


@jit("void(i8,i8)")
def _sort(holders, count):
    """Put holders in the order of their names: Shell's sort, with Ciura's gaps."""
    for gap in _GAPS:
        for index in range(gap, count):
            name, depths = getu64(holders + index * 16), getu64(holders + index * 16 + 8)
            place = index
            while place >= gap and _is_before(np.int64(name), get64(holders + (place - gap) * 16)):
                putu64(holders + place * 16, getu64(holders + (place - gap) * 16))
                putu64(holders + place * 16 + 8, getu64(holders + (place - gap) * 16 + 8))
                place -= gap
            putu64(holders + place * 16, name)
            putu64(holders + place * 16 + 8, depths)


@jit("i8(i8,i8)")
def _merge(holders, count):
    """Leave one holder for each name, with the most that any has in each tier, in the first one's depths; how many."""
    num_left = 0
    for index in range(count):
        name, own = get64(holders + index * 16), get64(holders + index * 16 + 8)
        last = holders + (num_left - 1) * 16
        if num_left > 0 and not _is_before(get64(last), name):
            kept = get64(last + 8)
            for tier in range(0, _DEPTHS_BYTES, 4):
                put32(kept + tier, max(get32(kept + tier), get32(own + tier)))
        else:
            putu64(last + 16, np.uint64(name))
            putu64(last + 24, np.uint64(own))
            num_left += 1
    return num_left


@jit("i8(i8,i8,i8)")
def _group_end(holders, index, count):
    """Where the holders of the instance that begins here end."""
    instance = getu64(get64(holders + index * 16))
    while index < count and getu64(get64(holders + index * 16)) == instance:
        index += 1
    return index


@jit("i8(i8,i8,i8,i8)")
def _most(holders, index, end, tier):
    """The most that a group's holders have in a tier."""
    most = 0
    for each in range(index, end):
        most = max(most, get32(get64(holders + each * 16 + 8) + tier))
    return most


@jit("i8(i8,i8,i8,i8,i8,b1)")
def _put_ranks(at, holders, index, end, block_size, is_score):
    """Write each rank's tokens on the GPU, the scores without those that have none."""
    has_any = False
    for each in range(index, end):
        name, depth = get64(holders + each * 16), get32(get64(holders + each * 16 + 8) + _GPU)
        if depth == 0 and is_score:
            continue
        if has_any:
            at = _put_comma(at)
        has_any = True
        at = _put_name_end(put_number(_put_quote(at), np.uint64(get32(name + NAME_RANK))))
        at = put_number(at, np.uint64(depth * block_size))
    return at


@jit("i8(i8,i8,i8,i8)")
def _put_scores(at, holders, count, block_size):
    """Write what is on the GPUs, by instance and rank."""
    index, has_any = 0, False
    while index < count:
        end = _group_end(holders, index, count)
        if _most(holders, index, end, _GPU) > 0:
            if has_any:
                at = _put_comma(at)
            has_any = True
            at = _put_object(put_number(_put_quote(at), getu64(get64(holders + index * 16))))
            at = _put_close(_put_ranks(at, holders, index, end, block_size, True))
        index = end
    return at


@jit("i8(i8,i8,i8,i8)")
def _put_each_instance(at, holders, count, block_size):
    """Write what each instance has, in all tiers."""
    index = 0
    while index < count:
        end = _group_end(holders, index, count)
        if index > 0:
            at = _put_comma(at)
        longest = np.uint64(_most(holders, index, end, _LONGEST) * block_size)
        at = _put_object(put_number(_put_quote(at), getu64(get64(holders + index * 16))))
        at = put_number(_put_longest(at), longest)
        at = put_number(_put_gpu(at), np.uint64(_most(holders, index, end, _GPU) * block_size))
        at = _put_ranks(_put_dp(at), holders, index, end, block_size, False)
        at = put_number(_put_cpu(at), np.uint64(_most(holders, index, end, _CPU) * block_size))
        at = _put_close(put_number(_put_disk(at), longest))
        index = end
    return at


_SLOTS, _DEPTHS = types.Array(types.uint32, 1, "C"), types.Array(types.uint32, 2, "C")


@jit(types.int64(_SLOTS, _DEPTHS, types.int64, types.int64, types.int64, types.int64), is_entry=True)
def write_answer(slots, depths, block_size, names, holders, output):
    """Write the answer that a match's arrays amount to; return its length. The depths may be changed.

    `names` has the name of each slot (see `NAME_BYTES`), `holders` room for 16 bytes a slot, the output room for
    `MAX_FIXED_BYTES` and `MAX_RANK_BYTES` a slot.
    """
    count = _list_holders(slots.ctypes.data, depths.ctypes.data, slots.size, names, holders)
    _sort(holders, count)
    count = _merge(holders, count)
    at = _put_scores(_put_begin(output), holders, count, block_size)
    at = _put_end(_put_each_instance(_put_instances(at), holders, count, block_size))
    return at - output

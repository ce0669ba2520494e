"""Who holds a prompt, as the text that `/query` answers with.

`kvist.indexer.service.scores` says what the text is. Holders, the rows of a match, are put in the order of their
names, so that the streams of an instance stand together, and two that tell of the same rank count as one.
"""

# mypy: disable-error-code="no-untyped-call"
# Numba has few types.
from __future__ import annotations

from typing import Any, TypeAlias

import numba
import numpy as np
from numba import int64, types
from numpy.typing import NDArray

from kvist.indexer.compiled.jit import TEXT, U32S, helper, jit
from kvist.indexer.compiled.words import Bytes, signed

MAX_FIXED_BYTES, MAX_RANK_BYTES = 128, 320
"""Room that an answer takes at most, for whatever is in it and for each holder."""
NAME = np.dtype([("instance", "u8"), ("rank", "u4"), ("is_left_out", "u4")])
"""What a slot stands for, and whether it is not to be named."""

_Names: TypeAlias = NDArray[np.void]
_Counts: TypeAlias = NDArray[np.uint32]
_GPU, _HOST, _LONGEST, _NUM_TIERS = 0, 1, 3, 4
_GAPS = (301, 132, 57, 23, 10, 4, 1)
_U0, _TEN, _ZERO = np.uint64(0), np.uint64(10), np.uint64(ord("0"))


def _text(content: bytes) -> Bytes:
    return np.frombuffer(content, np.uint8)


_BEGIN, _INSTANCES, _END = _text(b'{"scores":{'), _text(b'},"frequencies":[],"instances":{'), _text(b"}}")
_LONGEST_MATCHED, _ON_GPU = _text(b'"longest_matched":'), _text(b',"gpu":')
_BY_RANK, _ON_CPU, _ON_DISK = _text(b',"dp":{'), _text(b',"cpu":'), _text(b',"disk":')
_QUOTE, _NEXT, _NAME_END, _OBJECT, _CLOSE = (_text(text) for text in (b'"', b',"', b'":', b'":{', b"}"))


@helper
def _put(output: Bytes, at: int, text: Bytes) -> int:
    """Write a text; return its end."""
    for index in range(len(text)):
        output[np.uint64(at + index)] = text[np.uint64(index)]
    return at + len(text)


@helper
def _put_number(output: Bytes, at: int, value: np.uint64) -> int:
    """Write a number; return its end."""
    num_digits, rest = 1, value // _TEN
    while rest > _U0:
        num_digits += 1
        rest //= _TEN
    for place in range(at + num_digits - 1, at - 1, -1):
        output[np.uint64(place)] = np.uint8(_ZERO + value % _TEN)
        value //= _TEN
    return at + num_digits


@helper
def _put_tokens(output: Bytes, at: int, key: Bytes, num_tokens: int) -> int:
    return _put_number(output, _put(output, at, key), np.uint64(num_tokens))


@helper
def _is_before(names: _Names, left: int, right: int) -> bool:
    """Whether a slot's name comes before another's."""
    if names[left].instance != names[right].instance:
        return names[left].instance < names[right].instance  # type: ignore[no-any-return]
    return names[left].rank < names[right].rank  # type: ignore[no-any-return]


@helper
def _sort(holders: _Counts, count: int, slots: _Counts, names: _Names) -> None:
    """Put holders in the order of their names: Shell's sort, with Ciura's gaps."""
    for gap in _GAPS:
        for index in range(gap, count):
            holder, place = holders[index], index
            while place >= gap and _is_before(names, slots[holder], slots[holders[place - gap]]):
                holders[place] = holders[place - gap]
                place -= gap
            holders[place] = holder


@helper
def _list_holders(slots: _Counts, depths: _Counts, names: _Names, holders: _Counts) -> int:
    """List one holder for each name that is not left out, with the most that any has in each tier; return how many."""
    count = num_left = 0
    for row in range(len(slots)):
        if names[slots[row]].is_left_out == 0:
            holders[count] = row
            count += 1
    _sort(holders, count, slots, names)
    for index in range(count):
        holder = holders[index]
        if num_left > 0 and not _is_before(names, slots[holders[num_left - 1]], slots[holder]):
            kept = depths[holders[num_left - 1]]
            for tier in range(_NUM_TIERS):
                kept[tier] = max(kept[tier], depths[holder, tier])
        else:
            holders[num_left] = holder
            num_left += 1
    return num_left


@helper
def _most(depths: _Counts, group: _Counts, tier: int) -> int:
    """The most blocks that some holders have in a tier."""
    most = 0
    for holder in group:
        most = max(most, signed(depths[holder, tier]))
    return most


@helper
def _put_ranks(output: Bytes, at: int, group: _Counts, match: Any, block_size: int, least: int) -> int:
    """Write each rank's tokens on the GPU, but for those with fewer blocks than the least."""
    slots, depths, names = match
    num_written = 0
    for holder in group:
        num_blocks = signed(depths[holder, _GPU])
        if num_blocks >= least:
            at = _put(output, at, _QUOTE) if num_written == 0 else _put(output, at, _NEXT)
            at = _put_number(output, at, np.uint64(names[slots[holder]].rank))
            at = _put_tokens(output, at, _NAME_END, num_blocks * block_size)
            num_written += 1
    return _put(output, at, _CLOSE)


@helper
def _put_instances(output: Bytes, at: int, holders: _Counts, match: Any, block_size: int, is_score: int) -> int:
    """Write what each instance has, in all tiers; or what it has on its GPUs alone, and only if that is anything."""
    slots, depths, names = match
    start = num_written = 0
    while start < len(holders):
        instance, end = names[slots[holders[start]]].instance, start + 1
        while end < len(holders) and names[slots[holders[end]]].instance == instance:
            end += 1
        group = holders[start:end]
        start = end
        gpu, longest = _most(depths, group, _GPU) * block_size, _most(depths, group, _LONGEST) * block_size
        if is_score and gpu == 0:
            continue
        at = _put(output, at, _QUOTE) if num_written == 0 else _put(output, at, _NEXT)
        at = _put(output, _put_number(output, at, instance), _OBJECT)
        num_written += 1
        if is_score:
            at = _put_ranks(output, at, group, match, block_size, 1)
            continue
        at = _put_tokens(output, at, _LONGEST_MATCHED, longest)
        at = _put(output, _put_tokens(output, at, _ON_GPU, gpu), _BY_RANK)
        at = _put_ranks(output, at, group, match, block_size, 0)
        at = _put_tokens(output, at, _ON_CPU, _most(depths, group, _HOST) * block_size)
        at = _put(output, _put_tokens(output, at, _ON_DISK, longest), _CLOSE)
    return at


_NAMES: Any = numba.typeof(np.zeros(1, NAME))
_DEPTHS: Any = types.Array(types.uint32, 2, "C")


@jit((U32S, _DEPTHS, int64, _NAMES, U32S, TEXT))
def write_answer(
    slots: _Counts, depths: _Counts, block_size: int, names: _Names, holders: _Counts, output: Bytes
) -> int:
    """Write the answer that a match's arrays amount to; return its length. The depths may be changed.

    `names` has the name of each slot, `holders` room for a number a row, the output room for `MAX_FIXED_BYTES` and
    `MAX_RANK_BYTES` a slot.
    """
    holders = holders[: _list_holders(slots, depths, names, holders)]
    match = slots, depths, names
    at = _put_instances(output, _put(output, 0, _BEGIN), holders, match, block_size, 1)
    at = _put_instances(output, _put(output, at, _INSTANCES), holders, match, block_size, 0)
    return _put(output, at, _END)

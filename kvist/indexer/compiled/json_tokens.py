"""Reading a prompt's token ids out of a JSON object, without a Python object for each of them."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.indexer.compiled.jit import BYTES, U32S, jit
from kvist.indexer.compiled.words import Bytes, byte_at

MARK = secrets.randbits(31)
"""Stands in the place of token ids that were read; a secret, so that no client can send it."""
_SPACES, _COMMA, _ZERO, _OPEN, _CLOSE = tuple(b" \t\r\n"), *b",0[]"
_LAST = 2**32 - 1


@jit((BYTES, int64, int64, U32S))
def read_token_ids(text: Bytes, start: int, end: int, token_ids: NDArray[np.uint32]) -> int:
    """Read what is between the brackets of an array; return how many token ids that is.

    -1 for anything but unsigned integers of 32 bits without fraction, exponent or leading zeros. There must be room for
    one more than half as many as there are bytes.
    """
    count, num_digits, token_id, is_over = 0, 0, 0, False
    for at in range(start, end):
        byte = byte_at(text, at)
        if _ZERO <= byte < _ZERO + 10:
            if is_over or (num_digits > 0 and token_id == 0):
                return -1
            token_id = token_id * 10 + byte - _ZERO
            num_digits += 1
            if token_id > _LAST:
                return -1
        elif byte == _COMMA:
            if num_digits == 0:
                return -1
            token_ids[count] = token_id
            count, num_digits, token_id, is_over = count + 1, 0, 0, False
        elif byte in _SPACES:
            is_over = num_digits > 0
        else:
            return -1
    if num_digits > 0:
        token_ids[count] = token_id
        return count + 1
    return 0 if count == 0 else -1


@jit((BYTES, int64, U32S, U32S))
def read_batch(text: Bytes, start: int, token_ids: NDArray[np.uint32], ends: NDArray[np.uint32]) -> tuple[int, int]:
    """Read an array of arrays of token ids from behind its bracket; return where its last one is, and how many it has.

    Each array's `ends` are those of its ids in `token_ids`. -1 for anything else, also for an array without ids. There
    must be room for half as many of both as there are bytes.
    """
    count, num_arrays, at = 0, 0, start
    while True:
        while at < len(text) and byte_at(text, at) in _SPACES:
            at += 1
        end = at
        while end < len(text) and byte_at(text, end) != _CLOSE:
            end += 1
        if end == len(text) or byte_at(text, at) != _OPEN:
            return -1, 0
        num_ids = read_token_ids(text, at + 1, end, token_ids[count:])
        if num_ids < 1:
            return -1, 0
        count += num_ids
        ends[num_arrays] = count
        num_arrays += 1
        at = end + 1
        while at < len(text) and byte_at(text, at) in _SPACES:
            at += 1
        if at == len(text) or byte_at(text, at) not in (_COMMA, _CLOSE):
            return -1, 0
        if byte_at(text, at) == _CLOSE:
            return at, num_arrays
        at += 1


class Split(NamedTuple):
    """A body without its token ids; `ends` are those of each array of a batch, None where there is one array alone."""

    token_ids: NDArray[np.uint32]
    ends: NDArray[np.uint32] | None
    rest: bytes


def split_token_ids(body: bytes, key: bytes) -> Split | None:
    """Return the token ids under a key of a JSON object, in an array or a batch of them, and `[MARK]` in its place.

    If that, once decoded, has `[MARK]` under the key, the body is valid JSON and the array the key's value. Else the
    key stood elsewhere, or twice: decode the whole body. None where no such array is found.
    """
    found = re.search(rb'"%b"[ \t\r\n]*:[ \t\r\n]*\[(?=[ \t\r\n]*(\[)?)' % key, body)
    end = -1 if found is None else body.find(b"]", found.end())
    if found is None or end < 0:
        return None
    start, text, ends = found.end(), np.frombuffer(body, np.uint8), None
    if found[1] is None:
        token_ids = np.empty((end - start) // 2 + 1, np.uint32)
        count = read_token_ids(text, start, end, token_ids)
    else:
        token_ids, ends = np.empty((2, (len(body) - start) // 2 + 1), np.uint32)
        end, num_arrays = read_batch(text, start, token_ids, ends)
        ends = ends[:num_arrays]
        count = int(ends[-1]) if num_arrays else -1
    return Split(token_ids[:count], ends, b"%b%d%b" % (body[:start], MARK, body[end:])) if count >= 0 else None

"""Reading a prompt's token ids out of a JSON object, without a Python object for each of them."""

from __future__ import annotations

import re
import secrets

import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.indexer.compiled.jit import BYTES, U32S, jit
from kvist.indexer.compiled.words import Bytes, byte_at

MARK = secrets.randbits(31)
"""Stands in the place of token ids that were read; a secret, so that no client can send it."""
_SPACES, _COMMA, _ZERO = tuple(b" \t\r\n"), ord(","), ord("0")
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


def split_token_ids(body: bytes, key: bytes) -> tuple[NDArray[np.uint32], bytes] | None:
    """Return the array of token ids under a key of a JSON object, and the body with `[MARK]` in its place.

    If that, once decoded, has `[MARK]` under the key, the body is valid JSON and the array the key's value. Else the
    key stood elsewhere, or twice: decode the whole body. None where no such array is found.
    """
    found = re.search(rb'"%b"[ \t\r\n]*:[ \t\r\n]*\[' % key, body)
    end = -1 if found is None else body.find(b"]", found.end())
    if found is None or end < 0:
        return None
    start = found.end()
    token_ids = np.empty((end - start) // 2 + 1, np.uint32)
    count = read_token_ids(np.frombuffer(body, np.uint8), start, end, token_ids)
    return (token_ids[:count], b"%b%d%b" % (body[:start], MARK, body[end:])) if count >= 0 else None

"""Splitting ZMTP frames into messages, at a few nanoseconds each; `kvist.events.transports.zmtp.Splitter` says how."""

from __future__ import annotations

import numpy as np
from numba import int64
from numpy.typing import NDArray

from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START, SEQUENCE, TOPIC_BYTES, TOPIC_START, Buffer
from kvist.events.transports.zmtp import SplitResult
from kvist.indexer.compiled.jit import BYTES, TABLE, jit
from kvist.indexer.compiled.words import Bytes, big_word_at, byte_at
from kvist.radix.compiled.jit import helper, signed

_NEED_MORE, _UNUSUAL = -1, -2
_MORE, _LONG = 1, 2
_SHORT_HEADER, _LONG_HEADER, _SEQUENCE_FRAME = 2, 9, 10


@helper
def _body_bytes(data: Bytes, at: int, end: int, flags: int, max_bytes: int) -> int:
    """Return the length of the body of a frame with these flags, _UNUSUAL if it has others or is too long."""
    if at >= end:
        return _NEED_MORE
    num_bytes = -1
    if byte_at(data, at) == flags:
        if at + _SHORT_HEADER > end:
            return _NEED_MORE
        num_bytes = byte_at(data, at + 1)
    elif byte_at(data, at) == flags | _LONG:
        if at + _LONG_HEADER > end:
            return _NEED_MORE
        num_bytes = signed(big_word_at(data, at + 1))
    return num_bytes if 0 <= num_bytes <= max_bytes else _UNUSUAL


@helper
def _header_bytes(data: Bytes, at: int) -> int:
    return _LONG_HEADER if byte_at(data, at) & _LONG else _SHORT_HEADER


@jit((BYTES, int64, int64, TABLE, int64))
def _split(data: Bytes, start: int, end: int, table: NDArray[np.int64], max_message_bytes: int) -> SplitResult:
    """Return what a `Splitter` returns."""
    at = start
    for row in range(len(table)):
        topic_bytes = _body_bytes(data, at, end, _MORE, max_message_bytes)
        if topic_bytes < 0:
            return row, at, topic_bytes == _UNUSUAL
        topic = at + _header_bytes(data, at)
        sequence = topic + topic_bytes
        is_no_more = sequence < end and byte_at(data, sequence) != _MORE
        if is_no_more or (sequence + 1 < end and byte_at(data, sequence + 1) != 8):
            return row, at, True
        payload_frame = sequence + _SEQUENCE_FRAME
        payload_bytes = _body_bytes(data, payload_frame, end, 0, max_message_bytes - topic_bytes)
        if payload_bytes < 0:
            return row, at, payload_bytes == _UNUSUAL
        payload = payload_frame + _header_bytes(data, payload_frame)
        if payload + payload_bytes > end:
            return row, at, False
        found = table[row]
        found[TOPIC_START], found[TOPIC_BYTES] = topic, topic_bytes
        found[SEQUENCE] = signed(big_word_at(data, sequence + 2))
        found[PAYLOAD_START], found[PAYLOAD_BYTES] = payload, payload_bytes
        at = payload + payload_bytes
    return len(table), at, False


def split(buffer: Buffer, start: int, end: int, table: NDArray[np.int64], max_message_bytes: int) -> SplitResult:
    """Find whole ordinary messages, as a `Splitter` does."""
    return _split(np.frombuffer(buffer, np.uint8), start, end, table, max_message_bytes)

"""Splitting ZMTP frames into messages, at a few nanoseconds each; `kvist.events.transports.zmtp.Splitter` says how."""

# mypy: ignore-errors
# The signature string of each function is its type.
from __future__ import annotations

import numpy as np

from kvist.events.transports.block import PAYLOAD_BYTES, PAYLOAD_START, SEQUENCE, TOPIC_BYTES, TOPIC_START
from kvist.events.transports.zmtp import StopReason
from kvist.indexer.compiled.intrinsics import byteswap
from kvist.indexer.compiled.jit import jit
from kvist.radix.compiled.intrinsics import get8, getu64

_NEED_MORE, _TABLE_FULL, _UNUSUAL = int(StopReason.NEED_MORE), int(StopReason.TABLE_FULL), int(StopReason.UNUSUAL)
_MORE, _LONG = 1, 2
_SHORT_HEADER, _LONG_HEADER, _SEQUENCE_FRAME = 2, 9, 10


@jit("i8(i8)", is_inlined=True)
def _big_endian(address):
    """Eight bytes as a two's complement."""
    return np.int64(byteswap(getu64(address)))


@jit("i8(i8,i8,i8,i8)", is_inlined=True)
def _body_bytes(at, end, flags, max_bytes):
    """Length of the body of a frame with these flags, or minus the reason (less one) why it is none or too long."""
    if at >= end:
        return -1 - _NEED_MORE
    num_bytes = -1
    if get8(at) == flags:
        if at + _SHORT_HEADER > end:
            return -1 - _NEED_MORE
        num_bytes = get8(at + 1)
    elif get8(at) == flags | _LONG:
        if at + _LONG_HEADER > end:
            return -1 - _NEED_MORE
        num_bytes = _big_endian(at + 1)
    return num_bytes if 0 <= num_bytes <= max_bytes else -1 - _UNUSUAL


@jit("i8(i8)", is_inlined=True)
def _header_bytes(at):
    return _LONG_HEADER if get8(at) & _LONG else _SHORT_HEADER


@jit("UniTuple(i8,3)(i8,i8,i8,i8[:,::1],i8)", is_entry=True)
def split_frames(address, start, end, table, max_message_bytes):
    """Return what a `Splitter` returns: rows written, position, reason."""
    at, stop = address + start, address + end
    for row in range(len(table)):
        topic_bytes = _body_bytes(at, stop, _MORE, max_message_bytes)
        if topic_bytes < 0:
            return row, at - address, -1 - topic_bytes
        topic = at + _header_bytes(at)
        sequence = topic + topic_bytes
        if (sequence < stop and get8(sequence) != _MORE) or (sequence + 1 < stop and get8(sequence + 1) != 8):
            return row, at - address, _UNUSUAL
        payload_frame = sequence + _SEQUENCE_FRAME
        payload_bytes = _body_bytes(payload_frame, stop, 0, max_message_bytes - topic_bytes)
        if payload_bytes < 0:
            return row, at - address, -1 - payload_bytes
        payload = payload_frame + _header_bytes(payload_frame)
        if payload + payload_bytes > stop:
            return row, at - address, _NEED_MORE
        table[row, TOPIC_START] = topic - address
        table[row, TOPIC_BYTES] = topic_bytes
        table[row, SEQUENCE] = _big_endian(sequence + 2)
        table[row, PAYLOAD_START] = payload - address
        table[row, PAYLOAD_BYTES] = payload_bytes
        at = payload + payload_bytes
    return len(table), at - address, _TABLE_FULL

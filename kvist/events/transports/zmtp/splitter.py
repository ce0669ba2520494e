"""Splitting a stream of ZMTP frames into messages: the contract of a splitter, and one in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.block import Buffer


class StopReason(IntEnum):
    """Why a splitter stopped where it did."""

    NEED_MORE = 0
    """The bytes end here, or within a message that is ordinary so far."""
    TABLE_FULL = 1
    """Every row of the table is taken."""
    UNUSUAL = 2
    """What begins here is no ordinary message, as far as its bytes are there: somebody else must look at it."""


SplitResult: TypeAlias = tuple[int, int, int]
"""How many rows were written, the position after the last of these messages, and a `StopReason`."""

Splitter: TypeAlias = Callable[[Buffer, int, int, NDArray[np.int64], int], SplitResult]
"""Finds whole ordinary messages: `split(buffer, start, end, table, max_message_bytes)`.

The bytes are `buffer[start:end]`, a message beginning at `start`. `table` is C-contiguous int64 [num_rows, 5], num_rows
may be 0; from row 0 on each message found becomes a row topic_start, topic_bytes, sequence, payload_start,
payload_bytes, with starts that count from the buffer's first byte and the eight bytes of the sequence read as a
big-endian two's complement.

An ordinary message is three frames, each a byte of flags, a length, and a body (ZMTP 3.1, RFC 37 of rfc.zeromq.org):

    topic     01 and one byte of length, or 03 and eight bytes of length, big-endian and unsigned
    sequence  01 08, then the eight bytes
    payload   00 and one byte of length, or 02 and eight bytes of length, big-endian and unsigned

where topic and payload together have at most `max_message_bytes`. Anything else is unusual, and known to be so early:
flags are judged as soon as they are there, and a length as soon as it is whole, before any of its body is. What is cut
but ordinary up to there needs more, and so does nothing at all. A full table is reported before looking further.

The returned position is `start` when nothing was found. A splitter never raises, keeps nothing, and does no more work
than is proportional to what it found: it is called again with the same start when more bytes have come.
"""

_SEQUENCE_HEADER = b"\x01\x08"

_Row: TypeAlias = tuple[int, int, int, int, int]


def split(buffer: Buffer, start: int, end: int, table: NDArray[np.int64], max_message_bytes: int) -> SplitResult:
    """Find whole ordinary messages, as `Splitter` says, at about a microsecond each."""
    rows: list[_Row] = []
    max_rows = len(table)
    reason = StopReason.TABLE_FULL
    while len(rows) < max_rows:
        row = _message(buffer, start, end, max_message_bytes)
        if isinstance(row, StopReason):
            reason = row
            break
        rows.append(row)
        start = row[3] + row[4]
    if rows:
        table[: len(rows)] = rows
    return len(rows), start, reason


def _message(buffer: Buffer, start: int, end: int, max_bytes: int) -> _Row | StopReason:
    """Return the row of the message at `start`, or why there is none."""
    topic = _header(buffer, start, end, 1)
    if isinstance(topic, StopReason):
        return topic
    topic_start, topic_bytes = topic
    at = topic_start + topic_bytes
    if topic_bytes > max_bytes:
        return StopReason.UNUSUAL
    header = buffer[at : min(at + 2, end)]
    if header != _SEQUENCE_HEADER:
        return StopReason.NEED_MORE if _SEQUENCE_HEADER.startswith(bytes(header)) else StopReason.UNUSUAL
    payload = _header(buffer, at + 10, end, 0)
    if isinstance(payload, StopReason):
        return payload
    payload_start, payload_bytes = payload
    if topic_bytes + payload_bytes > max_bytes:
        return StopReason.UNUSUAL
    if payload_start + payload_bytes > end:
        return StopReason.NEED_MORE
    return topic_start, topic_bytes, int.from_bytes(buffer[at + 2 : at + 10], "big", signed=True), *payload


def _header(buffer: Buffer, at: int, end: int, flags: int) -> tuple[int, int] | StopReason:
    """Return where a frame's body starts and its length, if its flags are these, with a short length or a long one."""
    if at >= end:
        return StopReason.NEED_MORE
    if buffer[at] == flags:
        return (at + 2, buffer[at + 1]) if at + 2 <= end else StopReason.NEED_MORE
    if buffer[at] == flags | 2:
        return (at + 9, int.from_bytes(buffer[at + 1 : at + 9], "big")) if at + 9 <= end else StopReason.NEED_MORE
    return StopReason.UNUSUAL

"""A splitter of ZMTP frames in plain Python: what compiled ones are compared with."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.block import Buffer
from kvist.events.transports.zmtp import SplitResult, StopReason

_SEQUENCE_HEADER = b"\x01\x08"

_Row: TypeAlias = tuple[int, int, int, int, int]


def split(buffer: Buffer, start: int, end: int, table: NDArray[np.int64], max_message_bytes: int) -> SplitResult:
    """Find whole ordinary messages, as `Splitter` says."""
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

"""A splitter of ZMTP frames in plain Python: what compiled ones are compared with."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.block import Buffer
from kvist.events.transports.zmtp import SplitResult

_SEQUENCE_HEADER = b"\x01\x08"
_NEED_MORE, _UNUSUAL = False, True

_Row: TypeAlias = tuple[int, int, int, int, int]


def split(buffer: Buffer, start: int, end: int, table: NDArray[np.int64], max_message_bytes: int) -> SplitResult:
    """Find whole ordinary messages, as `Splitter` says."""
    rows: list[_Row] = []
    max_rows = len(table)
    is_unusual = False
    while len(rows) < max_rows:
        row = _message(buffer, start, end, max_message_bytes)
        if isinstance(row, bool):
            is_unusual = row
            break
        rows.append(row)
        start = row[3] + row[4]
    if rows:
        table[: len(rows)] = rows
    return len(rows), start, is_unusual


def _message(buffer: Buffer, start: int, end: int, max_bytes: int) -> _Row | bool:
    """Return the row of the message at `start`, or whether it is unusual."""
    topic = _header(buffer, start, end, 1)
    if isinstance(topic, bool):
        return topic
    topic_start, topic_bytes = topic
    at = topic_start + topic_bytes
    if topic_bytes > max_bytes:
        return _UNUSUAL
    header = buffer[at : min(at + 2, end)]
    if header != _SEQUENCE_HEADER:
        return _NEED_MORE if _SEQUENCE_HEADER.startswith(bytes(header)) else _UNUSUAL
    payload = _header(buffer, at + 10, end, 0)
    if isinstance(payload, bool):
        return payload
    payload_start, payload_bytes = payload
    if topic_bytes + payload_bytes > max_bytes:
        return _UNUSUAL
    if payload_start + payload_bytes > end:
        return _NEED_MORE
    return topic_start, topic_bytes, int.from_bytes(buffer[at + 2 : at + 10], "big", signed=True), *payload


def _header(buffer: Buffer, at: int, end: int, flags: int) -> tuple[int, int] | bool:
    """Return where a frame's body starts and its length, if its flags are these, with a short length or a long one."""
    if at >= end:
        return _NEED_MORE
    if buffer[at] == flags:
        return (at + 2, buffer[at + 1]) if at + 2 <= end else _NEED_MORE
    if buffer[at] == flags | 2:
        return (at + 9, int.from_bytes(buffer[at + 1 : at + 9], "big")) if at + 9 <= end else _NEED_MORE
    return _UNUSUAL

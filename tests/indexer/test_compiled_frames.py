"""The compiled splitter of ZMTP frames and the one in plain Python give the same results, whatever the bytes."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmtp_splitter import split as split_in_python

from kvist.events.transports.block import PADDING_BYTES
from kvist.events.transports.zmtp import SplitResult
from kvist.indexer.compiled.frames import split

_MAX_BYTES = 1000


def _frame(flags: int, body: bytes, *, is_long: bool = False) -> bytes:
    if is_long or len(body) > 255:
        return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def _message(topic: bytes, sequence: int, payload: bytes, *, is_long: bool = False) -> bytes:
    frames = [_frame(1, topic, is_long=is_long), _frame(1, struct.pack(">Q", sequence)), _frame(0, payload)]
    return b"".join(frames)


def _both(content: bytes, start: int, end: int, num_rows: int) -> SplitResult:
    """Return what both splitters return; the bytes beyond the end look like a message that goes on."""
    buffer = content + b"\x01\x01\x01\x08" * (PADDING_BYTES // 4)
    tables = [np.full((num_rows, 5), -7, np.int64) for _ in range(2)]
    results = [
        each(buffer, start, end, table, _MAX_BYTES)
        for each, table in zip((split, split_in_python), tables, strict=True)
    ]
    assert results[0] == results[1]
    assert tables[0].tolist() == tables[1].tolist()
    return results[0]


_messages = st.builds(
    _message,
    st.binary(max_size=300),
    st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]),
    st.binary(max_size=600),
    is_long=st.booleans(),
)


@given(messages=st.lists(_messages, max_size=5), before=st.integers(0, 20), num_rows=st.integers(0, 6), data=st.data())
def test_ordinary_messages_are_split_wherever_the_bytes_end(
    messages: list[bytes], before: int, num_rows: int, data: st.DataObject
) -> None:
    content = bytes(before) + b"".join(messages)
    rows, position, is_unusual = _both(content, before, len(content), num_rows)
    if num_rows <= len(messages):
        assert (rows, is_unusual) == (num_rows, False)
    else:
        assert (rows, position, is_unusual) == (len(messages), len(content), False)
    _both(content, before, data.draw(st.integers(before, len(content))), num_rows)


@given(messages=st.lists(_messages, min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_corrupted_bytes_are_judged_alike(messages: list[bytes], seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(b"".join(messages))
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] = rng.choice([0, 1, 2, 3, 4, 5, 8, 0x80, 0xFF, rng.randrange(256)])
    for end in (len(content), rng.randrange(len(content) + 1)):
        _both(bytes(content), 0, end, 4)


@pytest.mark.parametrize("num_bytes", [_MAX_BYTES - 5, _MAX_BYTES - 4, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_message_that_is_too_long_is_told_before_its_body_is_there(num_bytes: int) -> None:
    long = b"\x02" + struct.pack(">Q", num_bytes)
    payload = _frame(1, b"topic") + _frame(1, bytes(8)) + long
    _, _, is_unusual = _both(payload, 0, len(payload), 1)
    assert is_unusual == (num_bytes + 5 > _MAX_BYTES)
    topic = b"\x03" + struct.pack(">Q", num_bytes)
    _both(topic, 0, len(topic), 1)


def test_a_command_between_messages_stops_the_splitter_before_it() -> None:
    first = _message(b"kv", 1, b"payload")
    content = first + _frame(4, b"\x04PING\x00\x10") + first
    assert _both(content, 0, len(content), 9) == (1, len(first), True)

from __future__ import annotations

import numpy as np
import pytest
from zmtp_splitter import split

from kvist.events.transports import Message
from kvist.events.transports.block import PADDING_BYTES, MessageBlock

LIMIT = 1 << 20
MESSAGES = [Message(b"kv/w/0", 5, b"x" * 300), Message(b"", 2**64 - 1, b""), Message(b"t" * 300, 2**63, b"short")]
NEED_MORE, TABLE_FULL, UNUSUAL = False, False, True


class Splitting:
    """A stream in a buffer whose other bytes would all be wrong to read."""

    def __init__(self, stream: bytes, num_rows: int = 10, start: int = 3) -> None:
        self.start, self.end = start, start + len(stream)
        self.buffer = bytearray(b"\xee" * start + stream + b"\xee" * PADDING_BYTES)
        self.table = np.full((num_rows, 5), -1)

    def split(self, limit: int = LIMIT):
        num_messages, end, reason = split(self.buffer, self.start, self.end, self.table, limit)
        block = MessageBlock(self.buffer, self.table[:num_messages])
        assert (self.table[num_messages:] == -1).all()
        return list(block), end - self.start, reason


def test_whole_messages_become_rows_of_the_table(say):
    stream = b"".join(map(say.message, MESSAGES))
    assert Splitting(stream).split() == (MESSAGES, len(stream), NEED_MORE)


def test_it_stops_before_the_message_that_is_cut_wherever_that_is(say):
    first, second = say.message(MESSAGES[0]), say.message(MESSAGES[2])
    for num_bytes in range(len(second)):
        expected = (MESSAGES[:1], len(first), NEED_MORE)
        assert Splitting(first + second[:num_bytes]).split() == expected


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_it_stops_when_the_table_is_full_whatever_follows(say, num_rows):
    stream = b"".join(map(say.message, MESSAGES[:num_rows]))
    for more in (b"", b"\xff", say.message(MESSAGES[2])):
        assert Splitting(stream + more, num_rows).split() == (MESSAGES[:num_rows], len(stream), TABLE_FULL)


def test_nothing_needs_more():
    assert Splitting(b"").split() == ([], 0, NEED_MORE)


@pytest.mark.parametrize(
    "unusual",
    [
        lambda _: b"\x04",
        lambda _: b"\x00",
        lambda _: b"\x02",
        lambda _: b"\x08",
        lambda say: say.frame(b"", flags=1, num_bytes=LIMIT + 1),
        lambda say: say.frame(b"", flags=1, num_bytes=2**64 - 1),
        lambda say: say.frame(b"t", flags=1) + b"\x00",
        lambda say: say.frame(b"t", flags=1) + b"\x03",
        lambda say: say.frame(b"t", flags=1) + b"\x01\x07",
        lambda say: say.frame(b"t", flags=1) + b"\x04",
        lambda say: say.frame(b"t", flags=1) + say.frame(bytes(8), flags=1) + b"\x01",
        lambda say: say.frame(b"t", flags=1) + say.frame(bytes(8), flags=1) + b"\x04",
        lambda say: say.frame(b"t", flags=1) + say.frame(bytes(8), flags=1) + say.frame(b"", num_bytes=LIMIT),
        lambda say: say.frame(b"t", flags=1) + say.frame(bytes(8), flags=1) + say.frame(b"", num_bytes=2**63),
    ],
)
def test_it_stops_before_what_is_unusual_as_soon_as_that_is_known(say, unusual):
    ordinary, stream = say.message(MESSAGES[0]), unusual(say)
    assert Splitting(ordinary + stream).split() == (MESSAGES[:1], len(ordinary), UNUSUAL)
    assert Splitting(ordinary + stream[:-1]).split() == (MESSAGES[:1], len(ordinary), NEED_MORE)


def test_the_limit_counts_topic_and_payload_together(say):
    stream = say.message(Message(b"topic", 0, b"payload"))
    assert Splitting(stream).split(limit=12)[2] == NEED_MORE
    assert Splitting(stream).split(limit=11)[2] == UNUSUAL

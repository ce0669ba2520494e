from __future__ import annotations

import numpy as np
import pytest

from kvist.events.transports import Message
from kvist.events.transports.block import PADDING_BYTES, PAYLOAD_BYTES, PAYLOAD_START, SEQUENCE, MessageBlock

MESSAGES = [
    Message(b"kv/w/0", 0, b"first"),
    Message(b"", 2**64 - 1, b""),
    Message(b"topic", 2**63, bytes(300)),
    Message(b"t", 2**63 - 1, b"last"),
]


def test_a_block_reads_as_the_messages_it_was_made_of():
    block = MessageBlock.of(MESSAGES)
    assert len(block) == 4
    assert list(block) == MESSAGES
    assert [block[idx] for idx in range(-4, 4)] == MESSAGES * 2
    assert list(reversed(block)) == MESSAGES[::-1]
    assert MESSAGES[2] in block
    with pytest.raises(IndexError):
        block[4]


def test_a_slice_is_a_block_in_the_same_buffer():
    block = MessageBlock.of(MESSAGES)
    rest = block[1:]
    assert isinstance(rest, MessageBlock)
    assert rest.buffer is block.buffer
    assert list(rest) == MESSAGES[1:]


def test_no_messages_are_a_block_too():
    assert list(MessageBlock.of([])) == []


def test_a_block_is_its_own_block():
    block = MessageBlock.of(MESSAGES)
    assert MessageBlock.of(block) is block


def test_payloads_lie_at_their_places_with_room_to_read_beyond_the_last():
    block = MessageBlock.of(MESSAGES)
    for row, message in zip(block.table.tolist(), MESSAGES, strict=True):
        assert block.buffer[row[PAYLOAD_START] :][: row[PAYLOAD_BYTES]] == message.payload
    end = block.table[-1, PAYLOAD_START] + block.table[-1, PAYLOAD_BYTES]
    assert len(block.buffer) == end + PADDING_BYTES


def test_a_sequence_is_kept_as_its_bits():
    assert MessageBlock.of(MESSAGES).table[:, SEQUENCE].view(np.uint64).tolist() == [m.sequence for m in MESSAGES]


def test_a_message_that_was_copied_out_outlives_the_buffer():
    buffer = bytearray(b"topicpayload" + bytes(PADDING_BYTES))
    block = MessageBlock(buffer, np.array([[0, 5, 7, 5, 7]]))
    message = block[0]
    buffer[:] = bytes(len(buffer))
    assert message == Message(b"topic", 7, b"payload")

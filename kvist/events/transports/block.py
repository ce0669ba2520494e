"""Many messages in one buffer, so that compiled code takes them without a Python object for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.base import Message

PADDING_BYTES = 512
"""What can be read beyond the last message, so that compiled code may look ahead before it checks a bound."""
TOPIC_START, TOPIC_BYTES, SEQUENCE, PAYLOAD_START, PAYLOAD_BYTES = range(5)
"""The columns of a block's table."""

Buffer: TypeAlias = bytes | bytearray | mmap
"""Where messages lie: an item is a byte's number, a slice a copy."""

_UINT64 = (1 << 64) - 1


class MessageBlock(Sequence[Message]):
    """Messages as places in one buffer, oldest first; an item is a copy, a slice shares the buffer.

    `table` is int64 [num_messages, 5]: topic_start, topic_bytes, sequence, payload_start, payload_bytes, where starts
    count from the buffer's first byte, and a sequence of 2**63 or more appears as its two's complement.
    `PADDING_BYTES` can be read beyond the end of every message. Who hands out a block says how long it is valid.
    """

    __slots__ = ("buffer", "table")

    def __init__(self, buffer: Buffer, table: NDArray[np.int64]) -> None:
        """Wrap what lies in `buffer`; nothing is copied or checked."""
        self.buffer = buffer
        self.table = table

    @classmethod
    def of(cls, messages: Sequence[Message]) -> MessageBlock:
        """Return the messages as a block of their own; a block is returned as it is."""
        if isinstance(messages, MessageBlock):
            return messages
        parts = [part for message in messages for part in (message.topic, message.payload)]
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        starts = np.cumsum(sizes) - sizes
        table = np.empty((len(messages), 5), np.int64)
        table[:, TOPIC_START], table[:, PAYLOAD_START] = starts[::2], starts[1::2]
        table[:, TOPIC_BYTES], table[:, PAYLOAD_BYTES] = sizes[::2], sizes[1::2]
        sequences = np.fromiter((message.sequence for message in messages), np.uint64, len(messages))
        table[:, SEQUENCE] = sequences.view(np.int64)
        parts.append(bytes(PADDING_BYTES))
        return cls(b"".join(parts), table)

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, idx: int) -> Message: ...
    @overload
    def __getitem__(self, idx: slice) -> MessageBlock: ...
    def __getitem__(self, idx: int | slice) -> Message | MessageBlock:
        """Return a copy of one message, or a block of some that shares this one's buffer."""
        if isinstance(idx, slice):
            return MessageBlock(self.buffer, self.table[idx])
        return self._message(*self.table[idx].tolist())

    def __iter__(self) -> Iterator[Message]:
        for row in self.table.tolist():
            yield self._message(*row)

    def _message(
        self, topic_start: int, topic_bytes: int, sequence: int, payload_start: int, payload_bytes: int
    ) -> Message:
        topic = bytes(self.buffer[topic_start : topic_start + topic_bytes])
        payload = bytes(self.buffer[payload_start : payload_start + payload_bytes])
        return Message(topic, sequence & _UINT64, payload)

"""What has arrived and is not taken yet: bounded memory that is read into, split where it lies, and handed out."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.base import MAX_DRAIN
from kvist.events.transports.block import PADDING_BYTES, MessageBlock
from kvist.events.transports.zmtp.wire import PeerError

HALF_BYTES = 256 << 10
"""What is read ahead of the consumer, and half of what a subscription holds; more only while a larger message comes."""
MIN_READ_BYTES = 16 << 10
"""With less room than this a half counts as full: small reads cost as much as large ones."""


class Inbox:
    """Two halves: one is filled and split while the other, handed out by `take`, is with the consumer.

    A half is `[messages in the table | not split yet, from begin to end | room]`. Messages never move once they are in
    the table; what is not split moves to the other half when the messages before it are taken.
    """

    def __init__(self, max_bytes: int) -> None:
        """Hold messages up to almost `max_bytes`, each, commands between their frames included."""
        self._max_bytes = max_bytes
        self.filling = Half(HALF_BYTES)
        """The half that is being filled; another one after each `take`."""
        self._spare = Half(HALF_BYTES)

    @property
    def num_messages(self) -> int:
        return self.filling.num_messages

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here, not even part of a message."""
        return self.filling.end == 0

    @property
    def is_full(self) -> bool:
        """Whether messages must be taken before more can be read."""
        half = self.filling
        return half.num_messages > 0 and (half.num_messages == MAX_DRAIN or half.room < MIN_READ_BYTES)

    def space(self) -> memoryview:
        """Return where to read into, unless it is full; raises PeerError when a message does not fit."""
        half = self.filling
        if half.end == 0:
            return half.whole
        if half.num_messages == 0 and half.begin > 0:
            half.compact()
        if half.room < MIN_READ_BYTES and half.num_messages == 0 and half.capacity < self._max_bytes:
            half = self.filling = half.moved_to(Half(min(half.capacity * 2, self._max_bytes)))
        if half.room == 0:
            raise PeerError(f"a message needs more than {self._max_bytes} bytes")
        return half.view[half.end : half.capacity]

    def take(self) -> MessageBlock:
        """Return the messages that are here; the block is valid until the next call."""
        taken = self.filling
        num_rest_bytes = taken.end - taken.begin
        capacity = HALF_BYTES if num_rest_bytes <= HALF_BYTES // 2 else taken.capacity
        spare = self._spare if self._spare.capacity == capacity else Half(capacity)
        self.filling = taken.moved_to(spare)
        self._spare = taken
        return taken.block()

    def reset(self) -> None:
        """Drop what is not split, and room that only a large message needed: the connection is gone."""
        self.filling.end = self.filling.begin
        if self.filling.capacity > HALF_BYTES:
            self.filling = Half(HALF_BYTES)
        if self._spare.capacity > HALF_BYTES:
            self._spare = Half(HALF_BYTES)

    def close(self) -> None:
        """Give all memory back; a block that is out keeps its own."""
        self.filling = self._spare = Half(0)


class Half:
    """A buffer, and a table of the messages in it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Anonymous memory: a page that no message has reached costs nothing, so a quiet source holds little.
        self.buffer = mmap.mmap(-1, capacity + PADDING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self.buffer)
        self.whole = self.view[:capacity]
        self.begin = 0
        self.end = 0
        self.num_messages = 0
        self._table = np.empty((MAX_DRAIN, 5), np.int64)
        self._one_message = MessageBlock(self.buffer, self._table[:1])

    @property
    def room(self) -> int:
        return self.capacity - self.end

    @property
    def free_rows(self) -> NDArray[np.int64]:
        return self._table[self.num_messages :] if self.num_messages else self._table

    def add(self, num_messages: int, begin: int) -> None:
        """Count messages that were written to `free_rows`, and end at `begin`."""
        self.num_messages += num_messages
        self.begin = begin

    def drop(self) -> None:
        """Forget the messages that are here; a block of them is not valid any more."""
        self.num_messages = 0
        if self.begin == self.end:
            self.begin = self.end = 0

    def compact(self) -> None:
        num_bytes = self.end - self.begin
        if num_bytes:
            self.buffer.move(0, self.begin, num_bytes)
        self.begin, self.end = 0, num_bytes

    def moved_to(self, other: Half) -> Half:
        """Return `other` with what is not split, and nothing else."""
        num_bytes = self.end - self.begin
        other.view[:num_bytes] = self.view[self.begin : self.end]
        other.begin, other.end, other.num_messages = 0, num_bytes, 0
        return other

    def block(self) -> MessageBlock:
        if self.num_messages == 1:
            return self._one_message
        return MessageBlock(self.buffer, self._table[: self.num_messages])

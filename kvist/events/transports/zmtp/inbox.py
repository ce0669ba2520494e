"""What has arrived and is not taken yet: bounded memory that is read into, split where it lies, and handed out."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.base import MAX_DRAIN
from kvist.events.transports.block import PADDING_BYTES, MessageBlock
from kvist.events.transports.zmtp.wire import PeerError

CAPACITY_BYTES = 256 << 10
"""What is read ahead of the consumer, which may hold as much; more only while a larger message comes."""
MIN_READ_BYTES = 16 << 10
"""With less room than this it counts as full: small reads cost as much as large ones."""


class Inbox:
    """A buffer `[messages in the table | not split yet, from begin to end | room]`.

    Messages do not move while they are in the table. Taken, they are copied, and what is not split moves up.
    """

    def __init__(self, max_bytes: int) -> None:
        """Hold messages up to almost `max_bytes`, each, commands between their frames included."""
        self._max_bytes = max_bytes
        self._table = np.empty((MAX_DRAIN, 5), np.int64)
        self.num_messages = self.begin = self.end = 0
        self._use_new_memory(CAPACITY_BYTES)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here, not even part of a message."""
        return self.end == 0

    @property
    def is_full(self) -> bool:
        """Whether messages must be taken before more can be read."""
        has_room = self.num_messages < MAX_DRAIN and self.capacity - self.end >= MIN_READ_BYTES
        return self.num_messages > 0 and not has_room

    @property
    def free_rows(self) -> NDArray[np.int64]:
        return self._table[self.num_messages :] if self.num_messages else self._table

    def space(self) -> memoryview:
        """Return where to read into, unless it is full; raises PeerError when a message does not fit."""
        if self.num_messages == 0:
            num_bytes = self.end - self.begin
            if self.capacity - num_bytes < MIN_READ_BYTES and self.capacity < self._max_bytes:
                self._use_new_memory(min(self.capacity * 2, self._max_bytes), self._view[self.begin : self.end])
            elif self.begin > 0:
                self.buffer.move(0, self.begin, num_bytes)
                self.begin, self.end = 0, num_bytes
        if self.end == self.capacity:
            raise PeerError(f"a message needs more than {self._max_bytes} bytes")
        return self._view[self.end : self.capacity]

    def add(self, num_messages: int, begin: int) -> None:
        """Count messages that were written to `free_rows`, and end at `begin`."""
        self.num_messages += num_messages
        self.begin = begin

    def take(self) -> MessageBlock:
        """Return the messages that are here, which leave."""
        block = MessageBlock(self.buffer[: self.begin + PADDING_BYTES], self._table[: self.num_messages].copy())
        num_rest_bytes = self.end - self.begin
        if self.capacity > CAPACITY_BYTES >= 2 * num_rest_bytes:
            self._use_new_memory(CAPACITY_BYTES, self._view[self.begin : self.end])
        else:
            self.buffer.move(0, self.begin, num_rest_bytes)
            self.num_messages, self.begin, self.end = 0, 0, num_rest_bytes
        return block

    def reset(self) -> None:
        """Drop what is not split, and room that only a large message needed: the connection is gone."""
        self.begin = self.end = 0
        if self.capacity > CAPACITY_BYTES:
            self._use_new_memory(CAPACITY_BYTES)

    def close(self) -> None:
        """Give all memory back."""
        self._use_new_memory(0)

    def _use_new_memory(self, capacity: int, rest: bytes | memoryview = b"") -> None:
        """Go on with nothing but `rest`, in memory of its own."""
        self.capacity = capacity
        # Anonymous memory: a page that no message has reached costs nothing, so a quiet source holds little.
        self.buffer = mmap.mmap(-1, capacity + PADDING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self.buffer)
        self._view[: len(rest)] = rest
        self.num_messages, self.begin, self.end = 0, 0, len(rest)

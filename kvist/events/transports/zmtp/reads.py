"""Reads the sockets of many streams together: waking the event loop takes longer than reading a message."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import deque
from collections.abc import Callable

MAX_DELAY_S = 0.002
"""How long a message may wait for others unless more is allowed; the beats of a process with this delay coincide."""
_AT_ONCE = 32
"""Sockets that are read in one turn of the event loop, a third of a millisecond."""


class Reads:
    """Calls a socket's `read` once it has bytes, which returns whether there may be more.

    While bytes come seldom, for all sockets together, they are read at once. When they come more often than each
    `max_delay_s`, all sockets that have any are read once in so long, and the event loop watches none meanwhile.
    """

    def __init__(self, max_delay_s: float = 0.0) -> None:
        self._max_delay_s = max_delay_s or MAX_DELAY_S
        self._loop = asyncio.get_running_loop()
        self._selector = selectors.DefaultSelector()
        self._unread: deque[selectors.SelectorKey] = deque()
        """Sockets that have bytes and are still to be read."""
        self._has_more = False
        self._is_watching = False
        self._next_read: asyncio.Handle | None = None
        self._last_read_s = -math.inf

    def add(self, descriptor: int, read: Callable[[], bool]) -> None:
        """Read a socket from now on; bytes that are there already in the next turn of the event loop."""
        self._selector.register(descriptor, selectors.EVENT_READ, read)
        self._stop_waiting()
        self._next_read = self._loop.call_soon(self._read)

    def remove(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def close(self) -> None:
        self._stop_waiting()
        self._selector.close()

    def _read(self) -> None:
        was_watching = self._is_watching
        self._stop_waiting()
        if not self._unread:
            self._has_more = False
            self._unread.extend(key for key, _ in self._selector.select(0))
        has_read = bool(self._unread)
        try:
            for _ in range(min(_AT_ONCE, len(self._unread))):
                key = self._unread.popleft()
                if self._selector.get_map().get(key.fd) is key:  # else it was removed since
                    self._has_more |= key.data()
        finally:
            self._wait(has_read, was_watching)

    def _wait(self, has_read: bool, was_watching: bool) -> None:
        """Choose what starts the next read: the next turn of the event loop, the end of the delay, or new bytes."""
        now_s = self._loop.time()
        is_dense = has_read and (not was_watching or now_s - self._last_read_s < self._max_delay_s)
        if has_read:
            self._last_read_s = now_s
        if self._unread or self._has_more:
            self._next_read = self._loop.call_soon(self._read)
        elif is_dense:
            next_beat_s = (now_s // self._max_delay_s + 1) * self._max_delay_s
            self._next_read = self._loop.call_at(next_beat_s, self._read)
        else:
            self._is_watching = True
            self._loop.add_reader(self._selector.fileno(), self._read)

    def _stop_waiting(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._loop.remove_reader(self._selector.fileno())
        if self._next_read is not None:
            self._next_read.cancel()
            self._next_read = None

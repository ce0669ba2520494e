"""Turns: long work on the event loop is done a slice at a time, and all sockets are looked at between two slices."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator

SLICE_S = 0.0002
"""How long one turn is, but for the piece of work that ends it."""


class Turns:
    """Does the work of many, in pieces, without anybody else on the event loop waiting longer than for one turn."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Iterator[None], asyncio.Future[None]]] = deque()
        self._ends_at_s = 0.0
        self._is_over = False

    def begin(self, *, is_small: bool) -> float | None:
        """Return until when work can be done on the spot, None if that must wait for a turn, in `work_off`.

        To be called when a socket was found ready; those who are called after the same look share one turn. What is
        small, less work than handing it over, is done whatever else goes on.
        """
        now_s = time.monotonic()
        if self._is_over or self._queue:
            return now_s + SLICE_S if is_small else None
        if now_s >= self._ends_at_s:
            self._ends_at_s = now_s + SLICE_S
        return self._ends_at_s

    def is_over(self, ends_at_s: float) -> bool:
        """Return whether work on the spot that was to last until then must stop: what is left is to be worked off."""
        if time.monotonic() < ends_at_s:
            return False
        self._is_over = True  # until somebody was served, and so all sockets were looked at
        return True

    async def work_off(self, pieces: Iterator[None]) -> None:
        """Return once all pieces are done, in turns with those of others; an error in one of them is raised."""
        if not (self._is_over or self._queue):  # in what is left of this turn, without waiting for another
            while time.monotonic() < self._ends_at_s:
                try:
                    next(pieces)
                except StopIteration:
                    return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.append((pieces, done))
        if len(self._queue) == 1:
            loop.call_soon(self._serve)
        await done

    def _serve(self) -> None:
        """Do the work that waited longest for a turn, and have the next turn come behind what is ready by then."""
        self._is_over = False
        self._ends_at_s = time.monotonic() + SLICE_S
        while self._queue:
            pieces, done = self._queue[0]
            if done.cancelled() or _is_finished(pieces, done):
                self._queue.popleft()
            if time.monotonic() >= self._ends_at_s:
                break
        if self._queue:
            self._queue.rotate(-1)
            # What the event loop finds ready comes behind what was called for before it looked, and so before this.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._serve)


def _is_finished(pieces: Iterator[None], done: asyncio.Future[None]) -> bool:
    """Do one piece; return whether that was the end, which is told to who still waits for it."""
    try:
        next(pieces)
    except StopIteration:
        if not done.done():
            done.set_result(None)
    except Exception as error:  # noqa: BLE001 - it is raised where it is waited for, if anybody still waits
        if not done.done():
            done.set_exception(error)
    else:
        return False
    return True

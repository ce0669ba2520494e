"""Deadlines that are cheap to move, and that do not expire because our own event loop was late.

A connection has one deadline at a time. Setting a later one leaves the running timer alone; when that fires early, it
is set again for the rest.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

_TICK_S = 0.05
_TOLERATED_S = 0.005
"""A tick that is late by less counts as on time: every loop's timers are that late."""


class LoopClock:
    """A clock that stands still while the event loop is late to run its callbacks.

    So no peer is blamed for what it has sent and a busy loop has not read yet. It measures the lateness while entered
    as a context manager; before, it is the loop's own clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.late_s = 0.0
        """By how much the loop was late, in all."""
        self._tick: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._tick = self.loop.call_later(_TICK_S, self._on_tick)
        return self

    def __exit__(self, *_: object) -> None:
        if self._tick is not None:
            self._tick.cancel()

    def now_s(self) -> float:
        """Return seconds from an arbitrary moment."""
        return self.loop.time() - self.late_s

    @asynccontextmanager
    async def timeout(self, timeout_s: float) -> AsyncIterator[None]:
        """Raises TimeoutError if the block takes longer by this clock."""
        async with asyncio.timeout(None) as timeout:
            deadline = Deadline(self, lambda _: timeout.reschedule(0.0))
            deadline.set("timeout", timeout_s)
            try:
                yield
            finally:
                deadline.close()

    def _on_tick(self) -> None:
        assert self._tick is not None
        late_s = self.loop.time() - self._tick.when()
        if late_s > _TOLERATED_S:
            self.late_s += late_s
        self._tick = self.loop.call_later(_TICK_S, self._on_tick)


class Deadline:
    """Calls `on_expired(phase)` once when the last deadline set has passed; `phase` is None while there is none."""

    __slots__ = ("_armed_at_s", "_clock", "_handle", "_on_expired", "_when_s", "phase")

    def __init__(self, clock: LoopClock, on_expired: Callable[[str], None]) -> None:
        self._clock = clock
        self._on_expired = on_expired
        self._when_s = self._armed_at_s = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self.phase: str | None = None

    def set(self, phase: str, timeout_s: float) -> None:
        """Replaces the deadline by one that is `timeout_s` from now."""
        self.phase = phase
        at_s = self._clock.loop.time() + timeout_s
        self._when_s = at_s - self._clock.late_s
        if self._handle is not None and at_s < self._armed_at_s:
            self._handle.cancel()
            self._handle = None
        if self._handle is None:
            self._arm()

    def clear(self) -> None:
        """Removes the deadline; its timer is left to run out."""
        self.phase = None

    def close(self) -> None:
        """Removes the deadline, its timer and its callback, which would keep the connection in memory."""
        self.phase, self._on_expired = None, _ignore
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        self._armed_at_s = self._when_s + self._clock.late_s
        self._handle = self._clock.loop.call_at(self._armed_at_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        if self.phase is None:
            return
        if self._clock.now_s() < self._when_s:
            self._arm()
            return
        phase, self.phase = self.phase, None
        self._on_expired(phase)


def _ignore(_: str) -> None:
    """Do nothing when a closed deadline has passed."""

"""A connection has one deadline at a time; moving it on costs no timer.

Setting a later deadline leaves the running timer alone; when that fires early it re-arms itself for what remains.
"""

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `on_expired(phase)` once, not before the last deadline set has passed; `None` phase: nothing is awaited."""

    __slots__ = ("_handle", "_loop", "_on_expired", "_when", "phase")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expired: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_expired = on_expired
        self._when = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self.phase: str | None = None

    def set(self, phase: str, timeout_s: float) -> None:
        """Replaces whatever was awaited by `phase`, from now on."""
        self.phase = phase
        self._when = self._loop.time() + timeout_s
        if self._handle is not None and self._when < self._handle.when():
            self._handle.cancel()
            self._handle = None
        if self._handle is None:
            self._handle = self._loop.call_at(self._when, self._fire)

    def clear(self) -> None:
        """Nothing is awaited; the timer is left to run out."""
        self.phase = None

    def close(self) -> None:
        """Nothing is awaited any more, and no timer keeps the connection alive."""
        self.phase = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        if self.phase is None:
            return
        if self._loop.time() < self._when:
            self._handle = self._loop.call_at(self._when, self._fire)
            return
        phase, self.phase = self.phase, None
        self._on_expired(phase)

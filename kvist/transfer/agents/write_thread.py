"""One thread that moves every write of an agent along, a step each in turn, so that no slow peer stops another's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from dataclasses import replace
from time import monotonic
from typing import TypeAlias

from kvist.transfer.agents.base import AgentStatistics, PeerId, Transfer, WriteState

# A step yields whether bytes moved. The end of the generator is the end of the write; WriteFailedError is its failure.
# One that is thrown in asks it to end: it may take some more steps, of its own bound.
Steps: TypeAlias = Generator[bool, None, None]

_IDLE_WAIT_S = 0.0002  # between polls of a library that moves the bytes by itself


class WriteFailedError(Exception):
    """A write has ended early; `is_quiescent` tells whether nothing of it can reach the peer any more."""

    def __init__(self, reason: str, *, is_quiescent: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_quiescent = is_quiescent


class _Write:
    __slots__ = ("deadline_s", "failure", "is_ending", "peer", "steps", "transfer")

    def __init__(self, peer: PeerId, transfer: Transfer, steps: Steps, deadline_s: float) -> None:
        self.peer = peer
        self.transfer = transfer
        self.steps = steps
        self.deadline_s = deadline_s
        self.failure: str | None = None
        self.is_ending = False


class WriteThread:
    """Moves up to `max_pending` writes along; one that is submitted beyond that has failed, and is counted."""

    def __init__(self, name: str, max_pending: int, timeout_s: float) -> None:
        self._max_pending = max_pending
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._new: deque[_Write] = deque()
        self._writes: list[_Write] = []
        self._is_closing = False
        self._statistics = AgentStatistics()
        self._thread = threading.Thread(target=self._run, name=f"writes of {name}", daemon=True)
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        """Return whether writes that cannot end should be left behind."""
        return self._is_closing

    def submit(self, peer: PeerId, transfer: Transfer, steps: Steps) -> Transfer:
        """Begin a write; returns `transfer`, FAILED already if there are too many or the agent is closed."""
        with self._changed:
            num_pending = len(self._new) + len(self._writes)
            if self._is_closing or num_pending >= self._max_pending:
                self._statistics = replace(self._statistics, num_rejected=self._statistics.num_rejected + 1)
                reason = "the agent is closed" if self._is_closing else f"{num_pending} writes are pending already"
                transfer.end(WriteState.FAILED, reason)
                return transfer
            self._new.append(_Write(peer, transfer, steps, monotonic() + self._timeout_s))
            self._changed.notify()
        return transfer

    def fail_peer(self, peer: PeerId, reason: str) -> None:
        """Make every write to a peer that is under way fail at its next step."""
        with self._changed:
            for write in (*self._new, *self._writes):
                if write.peer == peer:
                    write.failure = reason
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Fail what is under way; return whether the thread has ended in time. A second call only waits."""
        with self._changed:
            self._is_closing = True
            for write in (*self._new, *self._writes):
                write.failure = "the agent is closing"
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> AgentStatistics:
        """Return the counters."""
        with self._changed:
            return replace(self._statistics, num_pending=len(self._new) + len(self._writes))

    def _run(self) -> None:
        try:
            self._move_all()
        finally:
            with self._changed:
                self._is_closing = True
                left = [*self._writes, *self._new]
                self._writes.extend(self._new)
                self._new.clear()
            for write in left:  # only after a defect: nobody waits for ever
                self._end(write, WriteState.ABANDONED, "the thread that writes has failed")

    def _move_all(self) -> None:
        has_moved = True
        while True:
            with self._changed:
                if not self._writes and not self._new:
                    if self._is_closing:
                        return
                    self._changed.wait()
                elif not self._new and not has_moved:
                    self._changed.wait(_IDLE_WAIT_S)
                self._writes.extend(self._new)
                self._new.clear()
            has_moved = False
            for write in list(self._writes):
                has_moved |= self._step(write)

    def _step(self, write: _Write) -> bool:
        """Move a write on, or out; return whether anything has happened."""
        failure = write.failure
        if failure is None and monotonic() >= write.deadline_s:
            failure = f"not written within {self._timeout_s} s"
        try:
            if failure is None or write.is_ending:
                return next(write.steps)
            write.is_ending = True
            return write.steps.throw(WriteFailedError(failure))
        except StopIteration:
            self._end(write, WriteState.DONE, None)
        except WriteFailedError as error:
            self._end(write, WriteState.FAILED if error.is_quiescent else WriteState.ABANDONED, error.reason)
        return True

    def _end(self, write: _Write, state: WriteState, reason: str | None) -> None:
        counted = self._statistics
        with self._changed:
            self._writes.remove(write)
            if state is WriteState.DONE:
                self._statistics = replace(
                    counted,
                    num_written=counted.num_written + 1,
                    num_fragments_written=counted.num_fragments_written + write.transfer.num_fragments,
                    bytes_written=counted.bytes_written + write.transfer.size_bytes,
                )
            elif state is WriteState.FAILED:
                self._statistics = replace(counted, num_failed=counted.num_failed + 1)
            else:
                self._statistics = replace(counted, num_abandoned=counted.num_abandoned + 1)
        write.transfer.end(state, reason)

"""Writes under way, and the thread that moves all of an agent's along, a step each, so that none holds up others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from enum import Enum
from time import monotonic
from typing import NewType, TypeAlias

PeerId = NewType("PeerId", str)

# A step yields whether bytes moved. The end of the generator is the end of the write; WriteFailedError is its failure.
# One that is thrown in asks it to end: it may take some more steps, of its own bound.
Steps: TypeAlias = Generator[bool, None, None]

MAX_PENDING_WRITES = 1024
_IDLE_WAIT_S = 0.0002  # between polls of a library that moves the bytes by itself


class WriteState(Enum):
    """How far a write is. Only an abandoned one may still reach the peer's memory after it has ended."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Write:
    """A write under way: `state` is polled and never goes back; DONE means that the peer can read every byte."""

    __slots__ = ("_callbacks", "_ended", "_lock", "num_fragments", "reason", "size_bytes", "state")

    def __init__(self, num_fragments: int, size_bytes: int) -> None:
        self.num_fragments = num_fragments
        self.size_bytes = size_bytes
        self.state = WriteState.PENDING
        self.reason: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def end(self, state: WriteState, reason: str | None = None) -> None:
        """Leave PENDING, once: for the agent alone."""
        with self._lock:
            assert self.state is WriteState.PENDING
            self.reason = reason
            self.state = state
        self._ended.set()
        for callback in self._callbacks:
            callback()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call once it has ended, from the agent's thread, or now if it has: it must neither wait nor raise."""
        with self._lock:
            if self.state is WriteState.PENDING:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, at the latest after `timeout_s`: off the loop."""
        return self._ended.wait(timeout_s)


@dataclass(slots=True)
class AgentStatistics:
    """What an agent has written since it began, and how many writes may still go on though they have ended."""

    num_fragments_written: int = 0
    bytes_written: int = 0
    num_abandoned: int = 0


class WriteFailedError(Exception):
    """A write has ended early; `is_quiescent` tells whether nothing of it can reach the peer any more."""

    def __init__(self, reason: str, *, is_quiescent: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_quiescent = is_quiescent


@dataclass(slots=True, eq=False)
class _Running:
    peer: PeerId
    write: Write
    steps: Steps
    deadline_s: float
    failure: str | None = None
    is_ending: bool = False


class WriteThread:
    """Moves up to `MAX_PENDING_WRITES` along; one that is submitted beyond that has failed."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._writes: list[_Running] = []
        self.is_closing = False
        self._counts = AgentStatistics()
        self._thread = threading.Thread(target=self._run, name=f"writes of {name}", daemon=True)
        self._thread.start()

    def submit(self, peer: PeerId, write: Write, steps: Steps) -> Write:
        """Begin a write; returns `write`, FAILED already if there are too many or the agent is closed."""
        with self._changed:
            if not self.is_closing and len(self._writes) < MAX_PENDING_WRITES:
                self._writes.append(_Running(peer, write, steps, monotonic() + self._timeout_s))
                self._changed.notify()
                return write
            reason = "the agent is closed" if self.is_closing else f"{len(self._writes)} writes are pending already"
        write.end(WriteState.FAILED, reason)
        return write

    def fail_peer(self, peer: PeerId, reason: str) -> None:
        """Make every write to a peer that is under way fail at its next step."""
        with self._changed:
            for running in self._writes:
                if running.peer == peer:
                    running.failure = reason
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Fail what is under way; return whether the thread has ended in time. A second call only waits."""
        with self._changed:
            self.is_closing = True
            for running in self._writes:
                running.failure = "the agent is closing"
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> AgentStatistics:
        with self._changed:
            return replace(self._counts)

    def _run(self) -> None:
        try:
            self._move_all()
        finally:
            with self._changed:
                self.is_closing = True
                left = list(self._writes)
            for running in left:  # only after a defect: nobody waits for ever
                self._end(running, WriteState.ABANDONED, "the thread that writes has failed")

    def _move_all(self) -> None:
        has_moved = True
        while True:
            with self._changed:
                if self._writes and not has_moved:
                    self._changed.wait(_IDLE_WAIT_S)
                while not self._writes:
                    if self.is_closing:
                        return
                    self._changed.wait()
                writes = list(self._writes)
            has_moved = False
            for running in writes:
                has_moved |= self._step(running)

    def _step(self, running: _Running) -> bool:
        """Move a write on, or out; return whether anything has happened."""
        failure = running.failure
        if failure is None and monotonic() >= running.deadline_s:
            failure = f"not written within {self._timeout_s} s"
        try:
            if failure is None or running.is_ending:
                return next(running.steps)
            running.is_ending = True
            return running.steps.throw(WriteFailedError(failure))
        except StopIteration:
            self._end(running, WriteState.DONE, None)
        except WriteFailedError as error:
            self._end(running, WriteState.FAILED if error.is_quiescent else WriteState.ABANDONED, error.reason)
        return True

    def _end(self, running: _Running, state: WriteState, reason: str | None) -> None:
        with self._changed:
            self._writes.remove(running)
            self._counts.num_abandoned += state is WriteState.ABANDONED
            if state is WriteState.DONE:
                self._counts.num_fragments_written += running.write.num_fragments
                self._counts.bytes_written += running.write.size_bytes
        running.write.end(state, reason)

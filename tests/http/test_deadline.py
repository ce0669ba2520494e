"""A deadline fires once, in the phase set last, and moving it on arms no second timer."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvist.http.deadline import Deadline, LoopClock


class Handle:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self._when = when
        self.callback = callback
        self.is_cancelled = False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """A loop of which only the clock and its timers exist."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handles: list[Handle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Handle:
        self.handles.append(Handle(when, callback))
        return self.handles[-1]

    def call_later(self, delay: float, callback: Callable[[], None]) -> Handle:
        return self.call_at(self.now + delay, callback)

    def advance_to(self, now: float) -> None:
        self.now = now
        for handle in [h for h in self.handles if h.when() <= now]:
            self.handles.remove(handle)
            if not handle.is_cancelled:
                handle.callback()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fired() -> list[str]:
    return []


@pytest.fixture
def deadline(clock: Any, fired: list[str]) -> Deadline:
    return Deadline(LoopClock(clock), fired.append)


def test_it_fires_once_when_its_time_has_passed(clock: Clock, deadline: Deadline, fired: list[str]) -> None:
    deadline.set("header", 10)
    clock.advance_to(9.9)
    assert fired == []
    clock.advance_to(10)
    clock.advance_to(100)
    assert fired == ["header"]
    assert deadline.phase is None


def test_a_later_deadline_reuses_the_running_timer(clock: Clock, deadline: Deadline, fired: list[str]) -> None:
    deadline.set("idle", 10)
    clock.advance_to(5)
    deadline.set("body", 10)
    assert len(clock.handles) == 1
    clock.advance_to(10)
    assert fired == []
    clock.advance_to(15)
    assert fired == ["body"]


def test_an_earlier_deadline_replaces_the_running_timer(clock: Clock, deadline: Deadline, fired: list[str]) -> None:
    deadline.set("idle", 75)
    deadline.set("header", 10)
    clock.advance_to(10)
    assert fired == ["header"]
    clock.advance_to(75)
    assert fired == ["header"]


def test_nothing_fires_after_clear_until_the_next_deadline(clock: Clock, deadline: Deadline, fired: list[str]) -> None:
    deadline.set("idle", 10)
    deadline.clear()
    clock.advance_to(10)
    assert fired == []
    deadline.set("header", 5)
    clock.advance_to(15)
    assert fired == ["header"]


def test_nothing_fires_after_close_and_its_callback_is_let_go(clock: Any) -> None:
    class Connection:
        def __init__(self) -> None:
            self.deadline = Deadline(LoopClock(clock), self.on_expired)

        def on_expired(self, _: str) -> None:
            raise AssertionError

    connection = Connection()
    connection.deadline.set("idle", 10)
    connection.deadline.close()
    connection.deadline.set("header", 5)
    clock.advance_to(15)
    left = weakref.ref(connection)
    del connection
    assert left() is None


def test_what_the_loop_is_late_by_does_not_count(clock: Any, fired: list[str]) -> None:
    with LoopClock(clock) as progress:
        deadline = Deadline(progress, fired.append)
        deadline.set("first_byte", 3)
        clock.advance_to(10)
        assert fired == []
        assert progress.late_s == pytest.approx(9.95)
        for tick in range(58):  # each when its timer is due, not a rounding error before it
            clock.advance_to(clock.now + 0.05)
            assert fired == [], tick
        clock.advance_to(clock.now + 0.05)
        clock.advance_to(clock.now + 0.05)
        assert fired == ["first_byte"]
    assert all(handle.is_cancelled for handle in clock.handles)

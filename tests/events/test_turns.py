from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from kvist.events.follow import Turns


@pytest.fixture
def no_time(monkeypatch):
    """Let each turn be over after one piece."""
    monkeypatch.setattr("kvist.events.follow.SLICE_S", 0.0)
    monkeypatch.setattr("kvist.events.follow.SLICE_SHARE", 0.0)


@pytest.fixture
def endless(monkeypatch):
    """Let no turn be over in time."""
    monkeypatch.setattr("kvist.events.follow.SLICE_S", 1000.0)


def work(log: list[str], name: str, num_pieces: int) -> Iterator[None]:
    for number in range(num_pieces):
        log.append(f"{name}{number}")
        yield


@pytest.mark.usefixtures("no_time")
async def test_those_who_have_much_to_do_take_turns():
    turns, log = Turns(), []
    await asyncio.gather(*(turns.run_in_turns(work(log, name, 3)) for name in "abc"))
    assert log == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


@pytest.mark.usefixtures("endless")
async def test_what_fits_into_a_turn_is_done_at_once():
    turns, log = Turns(), []
    await asyncio.gather(*(turns.run_in_turns(work(log, name, 2)) for name in "ab"))
    assert log == ["a0", "a1", "b0", "b1"]


@pytest.mark.usefixtures("no_time")
async def test_between_two_turns_sockets_that_are_ready_are_served():
    """A byte that comes while a turn lasts is read before the next one begins."""
    turns, seen, num_read = Turns(), [], 0
    near, far = socket.socketpair()

    def read() -> None:
        nonlocal num_read
        num_read += len(near.recv(1))

    def pieces() -> Iterator[None]:
        for number in range(10):
            seen.append((number, num_read))
            far.send(b"x")
            yield

    asyncio.get_running_loop().add_reader(near, read)
    await turns.run_in_turns(pieces())
    asyncio.get_running_loop().remove_reader(near)
    near.close()
    far.close()
    assert seen == [(number, number) for number in range(10)]


async def test_a_turn_is_as_long_as_what_others_did_before_it(monkeypatch):
    """Where others take a second in each turn of the event loop, 100 s of work wait for 200 s of theirs, no longer."""
    now_s, num_others = 0.0, 0
    loop, turns = asyncio.get_running_loop(), Turns()
    monkeypatch.setattr("kvist.events.follow.time.monotonic", lambda: now_s)

    def others() -> None:
        nonlocal now_s, num_others, again
        now_s, num_others, again = now_s + 1.0, num_others + 1, loop.call_soon(others)

    def pieces() -> Iterator[None]:
        nonlocal now_s
        for _ in range(1000):
            now_s += 0.1
            yield

    again = loop.call_soon(others)
    await turns.run_in_turns(pieces())
    again.cancel()
    assert 150 <= num_others <= 210


@pytest.mark.usefixtures("no_time")
async def test_work_that_nobody_waits_for_any_more_is_dropped(until):
    turns, log = Turns(), []
    given_up = asyncio.create_task(turns.run_in_turns(work(log, "a", 1000)))
    going_on = asyncio.create_task(turns.run_in_turns(work(log, "b", 2000)))
    await until(lambda: "b1" in log)
    given_up.cancel()
    await asyncio.gather(given_up, going_on, return_exceptions=True)
    assert log[-1] == "b1999"
    assert "a999" not in log


@pytest.mark.usefixtures("no_time")
async def test_an_error_in_a_piece_is_raised_where_it_is_waited_for_and_nowhere_else():
    def broken() -> Iterator[None]:
        yield
        raise ZeroDivisionError

    turns, log = Turns(), []
    results = await asyncio.gather(
        turns.run_in_turns(broken()), turns.run_in_turns(work(log, "a", 3)), return_exceptions=True
    )
    assert isinstance(results[0], ZeroDivisionError)
    assert log == ["a0", "a1", "a2"]


@pytest.mark.usefixtures("no_time")
async def test_work_that_ends_its_own_waiter_leaves_the_turns_to_others():
    turns, log = Turns(), []

    def ending() -> Iterator[None]:
        yield
        waiter.cancel()

    waiter = asyncio.create_task(turns.run_in_turns(ending()))
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await turns.run_in_turns(work(log, "a", 2))
    assert log == ["a0", "a1"]

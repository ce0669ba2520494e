"""A name without an answer holds up nobody else, and what was found before serves while name servers are away."""

import asyncio
import socket
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from kvist.names import Name, look_up

Answer = Callable[[], list[str]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What name servers answer, by name."""
    made: dict[str, Answer] = {}

    def getaddrinfo(host: str, _: None, family: int, kind: int) -> list[Any]:
        return [(family, kind, 6, "", (address, 0)) for address in made[host]()]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return made


def failing(number: int) -> Answer:
    def answer() -> list[str]:
        raise socket.gaierror(number, "no")

    return answer


async def test_an_address_is_its_own() -> None:
    assert await look_up("127.0.0.1") == ["127.0.0.1"]
    assert await look_up("::1") == ["::1"]


async def test_names_are_looked_up_by_the_system() -> None:
    assert "127.0.0.1" in await look_up("localhost", socket.AF_INET)


@pytest.mark.parametrize("host", ["nobody.invalid", "a" * 64 + ".invalid"])
async def test_a_name_without_addresses_is_an_error(host: str) -> None:
    with pytest.raises(OSError, match=r"."):
        await look_up(host)


async def test_names_without_an_answer_hold_up_nobody_else(answers: dict[str, Answer]) -> None:
    is_over = Event()
    answers["a.test"] = lambda: ["10.0.0.1"]
    for number in range(100):
        answers[f"silent-{number}.test"] = lambda: is_over.wait() and []
    asked = [asyncio.create_task(look_up(name)) for name in answers if name != "a.test"]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert await look_up("a.test") == ["10.0.0.1"]
            assert await asyncio.to_thread(lambda: 7) == 7
        assert not any(each.done() for each in asked)
    finally:
        is_over.set()
    assert await asyncio.gather(*asked) == [[]] * 100


async def test_who_asks_for_a_name_at_the_same_time_shares_an_answer(answers: dict[str, Answer]) -> None:
    found, name = [["10.0.0.1"], ["10.0.0.2"]], Name("a.test")
    answers["a.test"] = lambda: found.pop(0)
    assert await asyncio.gather(name.addresses(), name.addresses()) == [["10.0.0.1"]] * 2
    assert await name.addresses() == ["10.0.0.2"]


async def test_what_was_found_before_serves_while_name_servers_are_away(answers: dict[str, Answer]) -> None:
    is_over, name = Event(), Name("a.test")
    answers["a.test"] = failing(socket.EAI_AGAIN)
    with pytest.raises(socket.gaierror):
        await name.addresses()
    answers["a.test"] = lambda: ["10.0.0.1"]
    assert await name.addresses() == ["10.0.0.1"]
    answers["a.test"] = failing(socket.EAI_AGAIN)
    assert await name.addresses() == ["10.0.0.1"]
    answers["a.test"] = lambda: is_over.wait() and ["10.0.0.2"]
    try:
        assert await asyncio.gather(*(name.addresses() for _ in range(3))) == [["10.0.0.1"]] * 3
    finally:
        is_over.set()
    await asyncio.wait([name._look_up])
    assert await name.addresses() == ["10.0.0.2"]


async def test_a_name_that_is_gone_is_used_no_more(answers: dict[str, Answer]) -> None:
    name = Name("a.test")
    answers["a.test"] = lambda: ["10.0.0.1"]
    assert await name.addresses() == ["10.0.0.1"]
    answers["a.test"] = failing(socket.EAI_NONAME)
    with pytest.raises(socket.gaierror):
        await name.addresses()


async def test_nobody_needs_to_wait_for_an_answer(answers: dict[str, Answer]) -> None:
    is_over, name = Event(), Name("a.test")
    answers["a.test"] = lambda: is_over.wait() and ["10.0.0.1"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await name.addresses()
    is_over.set()
    assert await name.addresses() == ["10.0.0.1"]

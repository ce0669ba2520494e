"""A replay in pages: whole or nothing, never more on the way than allowed, and nobody else's."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable
from itertools import count

import msgspec
import pytest

from kvist.events.transports import Message, ReplayRequest, ReplaySource
from kvist.events.transports.base import MESSAGE_BYTES
from kvist.events.transports.broker_replay import (
    MAX_OPEN_QUESTIONS,
    PAGE_BYTES,
    ReplayClient,
    ReplayServer,
)

REQUEST = ReplayRequest(b"kv/w/0", 3, 77)
DEEP = b"\x91" * 300_000 + b"\xc0"


class Source:
    """Answers every request with the same messages, and notes what it was asked."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self.messages = messages
        self.requests: list[ReplayRequest] = []

    def replay(self, request: ReplayRequest) -> Iterable[Message]:
        self.requests.append(request)
        return self.messages


def random_messages(num: int, max_bytes: int) -> list[Message]:
    rng = random.Random(num)
    return [Message(b"kv/w/%d" % (idx % 3), idx, rng.randbytes(rng.randint(0, max_bytes))) for idx in range(num)]


def server_of(source: ReplaySource) -> ReplayServer:
    server = ReplayServer()
    server.source = source
    return server


class Wire:
    """Carries questions to `server` and pages to whoever asks; `change` may lose or repeat pages."""

    def __init__(
        self, server: ReplayServer, change: Callable[[int, bytes], list[bytes]] = lambda _, page: [page]
    ) -> None:
        self.server = server
        self.num_pages = self.num_questions = 0
        self._change = change
        self._asking: dict[str, ReplayClient] = {}

    async def ask(self, request: ReplayRequest = REQUEST, timeout_s: float = 5) -> list[Message] | None:
        asking = ReplayClient(request)
        self._asking[asking.name] = asking
        return await asking.ask(self._send, timeout_s)

    async def _send(self, data: bytes) -> None:
        self.num_questions += 1
        self.server.receive(data, self.deliver)

    async def deliver(self, name: str, page: bytes) -> None:
        for each in self._change(self.num_pages, page):
            if name in self._asking:
                self._asking[name].receive(name, each)
        self.num_pages += 1

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [Message(b"", 0, b"")],
        random_messages(300, 5_000),
        [Message(b"t", 1, bytes(10 * PAGE_BYTES + 17)), Message(b"t", 2, b"x")],
        [Message(b"", idx, bytes(PAGE_BYTES - 16)) for idx in range(3)],  # each record exactly a page
    ],
    ids=["none", "empty", "many", "large", "even"],
)
async def test_an_answer_arrives_whole_and_in_order(messages) -> None:
    source = Source(messages)
    async with Wire(server_of(source)) as wire:
        assert await wire.ask() == messages
        assert source.requests == [REQUEST]
        assert wire.num_pages == wire.num_questions


async def test_pages_are_as_small_as_the_broker_wants_them() -> None:
    server = server_of(Source([Message(b"t", 0, bytes(10_000))]))
    server.page_bytes = 1000
    sizes: list[int] = []

    def note(_: int, page: bytes) -> list[bytes]:
        sizes.append(len(page))
        return [page]

    async with Wire(server, note) as wire:
        assert await wire.ask() == [Message(b"t", 0, bytes(10_000))]
    assert len(sizes) == 11
    assert max(sizes) < 1000 + 256


async def test_a_page_is_sent_once_however_often_it_is_asked_for() -> None:
    server = server_of(Source([Message(b"t", 0, bytes(10 * PAGE_BYTES))]))
    sent: list[bytes] = []
    was_sent = asyncio.Event()

    async def send(_: str, page: bytes) -> None:
        sent.append(page)
        was_sent.set()

    for page_idx in (0, 1):
        was_sent.clear()
        for idx in (page_idx, page_idx + 7, page_idx) if page_idx else (0,):
            server.receive(_question(bytes(16), idx), send)
        await was_sent.wait()
    await server.close()
    assert [msgspec.msgpack.decode(page)[2] for page in sent] == [0, 1]


async def test_a_repeated_page_changes_nothing() -> None:
    messages = random_messages(200, 10_000)
    async with Wire(server_of(Source(messages)), lambda _, page: [page, page]) as wire:
        assert await wire.ask() == messages


async def test_a_lost_page_ends_the_answer() -> None:
    server = server_of(Source(random_messages(200, 10_000)))
    async with Wire(server, lambda idx, page: [] if idx == 2 else [page]) as wire:
        assert await wire.ask(timeout_s=0.05) is None
        assert await wire.ask() == random_messages(200, 10_000)


async def test_silence_is_no_answer() -> None:
    async with Wire(server_of(Source([])), lambda _idx, _page: []) as wire:
        assert await wire.ask(timeout_s=0.01) is None


async def test_two_askers_get_each_their_own() -> None:
    class ByStart:
        def replay(self, request: ReplayRequest) -> list[Message]:
            return [Message(b"t", request.start_sequence, bytes(20_000))] * 50

    async with Wire(server_of(ByStart())) as wire:
        one, other = await asyncio.gather(wire.ask(ReplayRequest(b"t", 1)), wire.ask(ReplayRequest(b"t", 2)))
    assert one == [Message(b"t", 1, bytes(20_000))] * 50
    assert other == [Message(b"t", 2, bytes(20_000))] * 50


async def test_a_range_does_not_wait_for_a_snapshot_that_is_long_in_coming() -> None:
    may_go_on = threading.Event()

    class SlowForEpochs:
        def replay(self, request: ReplayRequest) -> Iterable[Message]:
            if request.epoch is not None:
                may_go_on.wait()
            yield Message(b"t", request.start_sequence, b"")

    async with Wire(server_of(SlowForEpochs())) as wire:
        slow = asyncio.create_task(wire.ask(ReplayRequest(b"t", 1, 5)))
        assert await wire.ask(ReplayRequest(b"t", 2)) == [Message(b"t", 2, b"")]
        may_go_on.set()
        assert await slow == [Message(b"t", 1, b"")]


async def test_signs_of_life_of_a_slow_source_are_not_held_back_until_a_page_is_full(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.broker_replay.MAX_PAGE_S", 0.0)
    async with Wire(server_of(Source(random_messages(5, 10)))) as wire:
        assert await wire.ask() == random_messages(5, 10)
        assert wire.num_pages == 6  # each message when it is there, and the end


def _question(question_id: bytes, page_idx: int = 0, start_sequence: int = 0) -> bytes:
    return msgspec.msgpack.encode(["kvist-ask2", question_id, page_idx, b"t", start_sequence, None])


async def test_what_is_no_question_is_counted_and_skipped(logged) -> None:
    async with Wire(server_of(Source([]))) as wire:
        good = _question(bytes(16))
        malformed = [b"", b"\xc1", good[:-1], _question(bytes(16), 0, -1), _question(b"short id"), b"\x90"]
        for data in (*malformed, b"\x96\xaa" + b"\xff" * 10, b"\x97" + good[1:] + DEEP):
            wire.server.receive(data, wire.deliver)
        assert wire.server.num_malformed == 8
        assert len(logged("kvist.events.transports.broker_replay")) == 1
        assert await wire.ask() == []
        assert wire.num_pages == 1


async def test_open_questions_are_bounded_and_those_of_silent_askers_forgotten(until, monkeypatch) -> None:
    messages = [Message(b"t", 0, bytes(3 * PAGE_BYTES))]

    def open_all(wire: Wire) -> None:
        for number in range(MAX_OPEN_QUESTIONS):
            wire.server.receive(_question(number.to_bytes(16, "big")), wire.deliver)

    async with Wire(server_of(Source(messages))) as wire:
        open_all(wire)
        await until(lambda: wire.num_pages == MAX_OPEN_QUESTIONS)
        assert await wire.ask(timeout_s=0.05) is None
    monkeypatch.setattr("kvist.events.transports.broker_replay.QUESTION_TIMEOUT_S", 0.0)
    async with Wire(server_of(Source(messages))) as wire:
        open_all(wire)
        await until(lambda: not wire.server._requested_pages)
        monkeypatch.undo()
        assert await wire.ask() == messages


def _page(asking: ReplayClient, page_idx: int, is_last: bool, data: bytes) -> bytes:
    return msgspec.msgpack.encode(["kvist-page1", bytes.fromhex(asking.name), page_idx, is_last, data])


@pytest.mark.parametrize(
    "pages",
    [
        lambda _: [b"\xc1"],
        lambda _: [b"\x95\xac" + b"\xff" * 12],
        lambda asking: [b"\x96" + _page(asking, 0, True, b"")[1:] + DEEP],
        lambda asking: [_page(asking, 0, True, b"half a record")],
        lambda asking: [_page(asking, 0, False, b"\xff" * 16), _page(asking, 1, True, b"")],
    ],
    ids=["no page", "no text", "deep", "cut", "lying about its size"],
)
async def test_an_answer_that_is_none_is_given_up(pages) -> None:
    asking = ReplayClient(REQUEST)
    coming = iter(pages(asking))

    async def send(_: bytes) -> None:
        asking.receive("", next(coming))

    assert await asking.ask(send, 5) is None
    assert next(coming, None) is None


async def test_pages_of_other_questions_and_other_numbers_are_ignored() -> None:
    asking, other = ReplayClient(REQUEST), ReplayClient(REQUEST)

    async def send(_: bytes) -> None:
        for page in (_page(other, 0, True, b""), _page(asking, 1, True, b"x"), _page(asking, 0, True, b"")):
            asking.receive("", page)

    assert await asking.ask(send, 5) == []


async def test_an_asker_is_told_at_once_that_nobody_is_there() -> None:
    asking = ReplayClient(REQUEST)

    async def send(_: bytes) -> None:
        asking.receive("", None)

    assert await asking.ask(send, 1e9) is None


async def test_too_long_an_answer_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_BYTES", 3 * PAGE_BYTES)
    async with Wire(server_of(Source([Message(b"t", 0, bytes(4 * PAGE_BYTES))]))) as wire:
        assert await wire.ask() is None


async def test_many_messages_of_no_bytes_are_too_long_an_answer(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_BYTES", 2 * PAGE_BYTES)
    num_messages = 3 * PAGE_BYTES // MESSAGE_BYTES
    async with Wire(server_of(Source([Message(b"", idx, b"") for idx in range(num_messages)]))) as wire:
        wire.server.page_bytes = 1024
        assert await wire.ask() is None


async def test_an_answer_that_never_ends_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_S", 0.2)
    asking = ReplayClient(REQUEST)

    page_idxs = count()

    async def send(_: bytes) -> None:
        await asyncio.sleep(0)
        asking.receive("", _page(asking, next(page_idxs), False, b""))

    async with asyncio.timeout(60):
        assert await asking.ask(send, timeout_s=5) is None

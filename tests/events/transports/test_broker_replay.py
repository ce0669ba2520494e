"""A replay in pages: whole or nothing, never more on the way than allowed, and nobody else's."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import pytest

from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.base import MESSAGE_BYTES
from kvist.events.transports.broker_replay import (
    MAX_OPEN_QUESTIONS,
    PAGE_BYTES,
    QUESTION_TIMEOUT_S,
    WINDOW_PAGES,
    Answers,
    Asking,
    ask,
    serve_answers,
)

REQUEST = ReplayRequest(b"kv/w/0", 3, 77)


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


class Wire:
    """Carries questions to `answers` and pages to whoever asks; `change` may lose or repeat pages."""

    def __init__(self, answers: Answers, change: Callable[[int, bytes], list[bytes]] = lambda _, page: [page]) -> None:
        self.answers = answers
        self.num_pages = 0
        self.max_waiting = 0
        self._change = change
        self._pages: dict[str, asyncio.Queue[bytes | None]] = {}

    async def ask(self, request: ReplayRequest = REQUEST, timeout_s: float = 5) -> list[Message] | None:
        asking = Asking(request)
        pages = self._pages[asking.name] = asyncio.Queue()
        return await ask(asking, self._send, pages, timeout_s)

    async def _send(self, data: bytes) -> None:
        self.answers.received(data)

    async def deliver(self, name: str, page: bytes) -> None:
        for each in self._change(self.num_pages, page):
            self._pages[name].put_nowait(each)
        self.num_pages += 1
        self.max_waiting = max(self.max_waiting, self._pages[name].qsize())

    async def __aenter__(self) -> Wire:
        self._task = asyncio.create_task(serve_answers(self.answers, self.deliver))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


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
    async with Wire(Answers(source)) as wire:
        assert await wire.ask() == messages
        assert source.requests == [REQUEST]
        assert wire.max_waiting <= WINDOW_PAGES


async def test_pages_are_as_small_as_the_broker_wants_them() -> None:
    answers = Answers(Source([Message(b"t", 0, bytes(10_000))]))
    answers.page_bytes = 1000
    sizes: list[int] = []

    def note(_: int, page: bytes) -> list[bytes]:
        sizes.append(len(page))
        return [page]

    async with Wire(answers, note) as wire:
        assert await wire.ask() == [Message(b"t", 0, bytes(10_000))]
    assert len(sizes) == 11
    assert max(sizes) < 1000 + 256


async def test_no_more_pages_are_sent_than_the_asker_allows() -> None:
    answers = Answers(Source([Message(b"t", 0, bytes(100 * PAGE_BYTES))]))
    asking = Asking(REQUEST)
    answers.received(asking.question())
    pages: list[bytes] = []
    all_sent = asyncio.Event()

    async def send(name: str, page: bytes) -> None:
        assert name == asking.name
        pages.append(page)
        if len(pages) == WINDOW_PAGES:
            all_sent.set()

    serving = asyncio.create_task(serve_answers(answers, send))
    await all_sent.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(pages) == WINDOW_PAGES
    grants = [grant for page in pages if (grant := asking.received(page)) is not None]
    assert len(grants) == 2
    serving.cancel()
    await asyncio.wait([serving])


async def test_no_grant_brings_more_than_a_window_of_pages() -> None:
    answers = Answers(Source([Message(b"t", 0, bytes(1 << 20))]))
    answers.page_bytes = 1024

    async def num_sent() -> int:
        num_pages = 0
        while True:
            due = asyncio.create_task(answers.due())
            await asyncio.sleep(0)
            if not due.done():
                due.cancel()
                return num_pages
            due.result().next_page()
            answers.sent(due.result())
            num_pages += 1

    no_bound, question_id = 1 << 63, bytes(16)
    answers.received(msgspec.msgpack.encode(["kvist-ask1", question_id, b"", 0, None, no_bound]))
    assert await num_sent() == WINDOW_PAGES
    answers.received(msgspec.msgpack.encode(["kvist-grant1", question_id, no_bound]))
    assert await num_sent() == WINDOW_PAGES


async def test_a_repeated_page_changes_nothing() -> None:
    messages = random_messages(200, 10_000)
    async with Wire(Answers(Source(messages)), lambda _, page: [page, page]) as wire:
        assert await wire.ask() == messages


async def test_a_lost_page_ends_the_answer_and_leaves_nothing_open() -> None:
    answers = Answers(Source(random_messages(200, 10_000)))
    async with Wire(answers, lambda idx, page: [] if idx == 2 else [page]) as wire:
        assert await wire.ask() is None
        assert answers._open == {}


async def test_silence_is_no_answer() -> None:
    async with Wire(Answers(Source([])), lambda _idx, _page: []) as wire:
        assert await wire.ask(timeout_s=0.01) is None


async def test_two_askers_get_each_their_own() -> None:
    class ByStart:
        def replay(self, request: ReplayRequest) -> list[Message]:
            return [Message(b"t", request.start_sequence, bytes(20_000))] * 50

    async with Wire(Answers(ByStart())) as wire:
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

    async with Wire(Answers(SlowForEpochs())) as wire:
        slow = asyncio.create_task(wire.ask(ReplayRequest(b"t", 1, 5)))
        assert await wire.ask(ReplayRequest(b"t", 2)) == [Message(b"t", 2, b"")]
        may_go_on.set()
        assert await slow == [Message(b"t", 1, b"")]


async def test_signs_of_life_of_a_slow_source_are_not_held_back_until_a_page_is_full(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.broker_replay.MAX_PAGE_S", 0.0)
    async with Wire(Answers(Source(random_messages(5, 10)))) as wire:
        assert await wire.ask() == random_messages(5, 10)
        assert wire.num_pages == 6  # each message when it is there, and the end


def test_what_is_no_question_is_counted_and_skipped(caplog) -> None:
    answers = Answers(Source([]))
    good = Asking(REQUEST).question()
    for data in (b"", b"\xc1", good[:-1], msgspec.msgpack.encode(["kvist-ask1", b"id", b"t", -1, None, 1]), b"\x90"):
        answers.received(data)
    assert answers.num_malformed == 5
    assert len(caplog.records) == 1
    answers.received(msgspec.msgpack.encode(["kvist-ask1", b"short id", b"t", 0, None, 1]))
    answers.received(msgspec.msgpack.encode(["kvist-grant1", b"unknown", 5]))
    assert answers._open == {}


def test_open_questions_are_bounded_and_those_of_silent_askers_forgotten() -> None:
    now_s = 0.0
    answers = Answers(Source([]), clock=lambda: now_s)
    for _ in range(MAX_OPEN_QUESTIONS + 5):
        answers.received(Asking(REQUEST).question())
    assert len(answers._open) == MAX_OPEN_QUESTIONS
    now_s = QUESTION_TIMEOUT_S + 1
    answers.received(Asking(REQUEST).question())
    assert len(answers._open) == 1


def _page(asking: Asking, page_idx: int, is_last: bool, data: bytes) -> bytes:
    return msgspec.msgpack.encode(["kvist-page1", asking.id, page_idx, is_last, data])


@pytest.mark.parametrize(
    "pages",
    [
        lambda _: [b"\xc1"],
        lambda asking: [_page(asking, 1, True, b"")],
        lambda asking: [_page(asking, 0, True, b"half a record")],
        lambda asking: [_page(asking, 0, False, b"\xff" * 16), _page(asking, 1, True, b"")],
    ],
    ids=["no page", "not the first", "cut", "lying about its size"],
)
async def test_an_answer_that_is_none_is_given_up(pages) -> None:
    asking = Asking(REQUEST)
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    for page in pages(asking):
        queue.put_nowait(page)
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    assert await ask(asking, send, queue, 5) is None
    assert sent == [asking.question(), asking.cancellation()]


async def test_another_questions_page_is_ignored() -> None:
    asking, other = Asking(REQUEST), Asking(REQUEST)
    assert asking.received(_page(other, 0, True, b"")) is None
    assert not asking.is_done
    assert asking.received(_page(asking, 0, True, b"")) is None
    assert asking.is_done


async def test_too_long_an_answer_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_BYTES", 3 * PAGE_BYTES)
    async with Wire(Answers(Source([Message(b"t", 0, bytes(4 * PAGE_BYTES))]))) as wire:
        assert await wire.ask() is None


async def test_many_messages_of_no_bytes_are_too_long_an_answer(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_BYTES", 2 * PAGE_BYTES)
    num_messages = 3 * PAGE_BYTES // MESSAGE_BYTES
    async with Wire(Answers(Source([Message(b"", idx, b"") for idx in range(num_messages)]))) as wire:
        wire.answers.page_bytes = 1024
        assert await wire.ask() is None


async def test_an_answer_that_never_ends_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_S", 0.2)
    asking = Asking(REQUEST)

    class Endless(asyncio.Queue[bytes | None]):
        async def get(self) -> bytes:
            await asyncio.sleep(0)
            return _page(asking, asking.num_pages, False, b"")

    async def send(data: bytes) -> None:
        pass

    async with asyncio.timeout(60):
        assert await ask(asking, send, Endless(), timeout_s=5) is None


async def test_a_cancelled_question_is_no_longer_answered() -> None:
    answers = Answers(Source([]))
    sent: list[Callable[[bytes], Awaitable[None]]] = []

    async def send(data: bytes) -> None:
        answers.received(data)

    asking = asyncio.create_task(ask(Asking(REQUEST), send, asyncio.Queue(), 60))
    await asyncio.sleep(0)
    assert len(answers._open) == 1
    asking.cancel()
    await asyncio.wait([asking])
    assert answers._open == {}
    assert not sent

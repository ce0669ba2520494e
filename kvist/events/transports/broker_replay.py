"""Replays over a broker: one question, its answer in pages, no more of them on their way than the asker allowed.

    ask      subscriber -> publisher   id, topic, start sequence, epoch, and up to which page to answer
    grant    subscriber -> publisher   id, and up to which page to go on; it replaces the earlier limit
    cancel   subscriber -> publisher   id
    page     publisher -> subscriber   id, its number from 0, whether it is the last, bytes

The pages' bytes, joined, are the messages: three numbers (bytes of the topic, sequence, bytes of the payload), topic,
payload. They are cut without regard to messages, so that a page fits a broker that takes no larger one.

An answer travels on a subject of its own that follows from the question's id: no other subscriber sees it, a late one
is nobody's, and no asker can name a place where the publisher is to send. A page that is lost ends the answer, as
silence does; a repeated one is ignored. Nothing here does I/O but `serve_answers` and `ask`, which are handed theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, TypeAlias

import msgspec

from kvist.errors import MalformedMessageError
from kvist.events.transports import base
from kvist.events.transports.answers import Collected
from kvist.events.transports.base import Message, ReplayRequest, ReplaySource

_logger = logging.getLogger(__name__)

PAGE_BYTES = 128 << 10
"""Bytes of messages in a page, if the broker takes as much."""
WINDOW_PAGES = 16
"""Pages on their way to one asker: what its client must be able to hold, and the most that one grant brings."""
MAX_PAGE_S = 0.5
"""How long a page is filled: a source that needs seconds gives signs of life meanwhile, which must arrive as such."""
NUM_THREADS = 4
"""Answers made at the same time: a snapshot may be long in coming, and a range should not wait for it."""
MAX_OPEN_QUESTIONS = 64
"""Questions answered side by side; further ones get no answer, and are asked again later."""
QUESTION_TIMEOUT_S = 30.0
"""An asker that grants nothing for so long is gone."""
ID_BYTES = 16

_RECORD = struct.Struct(">IQI")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Ask(msgspec.Struct, tag="kvist-ask1", array_like=True, frozen=True, gc=False):
    id: bytes
    topic: bytes | None
    start_sequence: _Count
    epoch: _Count | None
    until_page: _Count


class _Grant(msgspec.Struct, tag="kvist-grant1", array_like=True, frozen=True, gc=False):
    id: bytes
    until_page: _Count


class _Cancel(msgspec.Struct, tag="kvist-cancel1", array_like=True, frozen=True, gc=False):
    id: bytes


class _Page(msgspec.Struct, tag="kvist-page1", array_like=True, frozen=True, gc=False):
    id: bytes
    page_idx: _Count
    is_last: bool
    data: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(_Ask | _Grant | _Cancel).decode
_decode_page = msgspec.msgpack.Decoder(_Page).decode


class Answer:
    """One question's answer, made page by page. `next_page` may be called in another thread than the rest."""

    def __init__(self, ask: _Ask, source: ReplaySource, page_bytes: int, now_s: float) -> None:
        self.id = ask.id
        self.until_page = min(ask.until_page, WINDOW_PAGES)
        self.page_idx = 0
        self.is_done = False
        self.is_queued = False
        self.heard_at_s = now_s
        self._request = ReplayRequest(ask.topic, ask.start_sequence, ask.epoch)
        self._source = source
        self._page_bytes = page_bytes
        self._records: Iterator[bytes] | None = None
        self._left = bytearray()

    def next_page(self) -> bytes:
        """Return the next page; asks the source and encodes what it returns, so it may take milliseconds."""
        if self._records is None:
            self._records = map(_record, self._source.replay(self._request))
        is_last = False
        send_at_s = time.monotonic() + MAX_PAGE_S
        while len(self._left) <= self._page_bytes and not is_last:
            record = next(self._records, None)
            is_last = record is None
            self._left += record or b""
            if time.monotonic() >= send_at_s:
                break
        page = _Page(self.id, self.page_idx, is_last and len(self._left) <= self._page_bytes, self._cut())
        self.page_idx += 1
        self.is_done = page.is_last
        return _encode(page)

    def _cut(self) -> bytes:
        data = bytes(self._left[: self._page_bytes])
        del self._left[: self._page_bytes]
        return data


class Answers:
    """The publisher's side: the questions that are open, and how far each may be answered."""

    def __init__(self, source: ReplaySource, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_bytes = PAGE_BYTES
        self.num_malformed = 0
        self._source = source
        self._clock = clock
        self._open: dict[bytes, Answer] = {}
        self._due: deque[Answer] = deque()
        self._changed = asyncio.Event()

    def received(self, data: bytes) -> None:
        """Take what an asker sent; what is malformed is counted, logged once and skipped."""
        try:
            message = _decode_question(data)
        except msgspec.DecodeError as error:
            self.num_malformed += 1
            if self.num_malformed == 1:
                _logger.warning("malformed question skipped, further ones are only counted: %s", error)
            return
        if isinstance(message, _Cancel):
            self._open.pop(message.id, None)
        elif isinstance(message, _Grant):
            self._grant(message)
        elif message.id not in self._open and len(message.id) == ID_BYTES:
            self._forget_the_silent()
            if len(self._open) < MAX_OPEN_QUESTIONS:
                self._open[message.id] = answer = Answer(message, self._source, self.page_bytes, self._clock())
                self._queue(answer)

    async def due(self) -> Answer:
        """Wait for an answer whose next page may be sent; those that are take turns."""
        while True:
            while self._due:
                answer = self._due.popleft()
                if self._open.get(answer.id) is answer:
                    return answer
            self._changed.clear()
            await self._changed.wait()

    def sent(self, answer: Answer) -> None:
        """Take note that the page of an answer that was due is on its way."""
        answer.is_queued = False
        if answer.is_done:
            self._open.pop(answer.id, None)
        else:
            self._queue(answer)

    def _grant(self, grant: _Grant) -> None:
        answer = self._open.get(grant.id)
        if answer is not None:
            until_page = min(grant.until_page, answer.page_idx + WINDOW_PAGES)
            answer.until_page = max(answer.until_page, until_page)
            answer.heard_at_s = self._clock()
            self._queue(answer)

    def _queue(self, answer: Answer) -> None:
        if not answer.is_queued and answer.page_idx < answer.until_page:
            answer.is_queued = True
            self._due.append(answer)
            self._changed.set()

    def _forget_the_silent(self) -> None:
        heard_since_s = self._clock() - QUESTION_TIMEOUT_S
        self._open = {id_: answer for id_, answer in self._open.items() if answer.heard_at_s >= heard_since_s}


class Asking:
    """The subscriber's side of one question."""

    def __init__(self, request: ReplayRequest) -> None:
        self.id = os.urandom(ID_BYTES)
        self.is_done = False
        self._request = request
        self._until_page = WINDOW_PAGES
        self.num_pages = 0
        self._left = bytearray()
        self._messages = Collected()

    @property
    def name(self) -> str:
        """Return the token that the answer's subject ends with."""
        return self.id.hex()

    def question(self) -> bytes:
        """Return what to send to the publisher."""
        topic, start_sequence, epoch = self._request
        return _encode(_Ask(self.id, topic, start_sequence, epoch, self._until_page))

    def cancellation(self) -> bytes:
        """Return what to send when the answer is no longer wanted."""
        return _encode(_Cancel(self.id))

    def received(self, data: bytes) -> bytes | None:
        """Take a page, and return what to send to the publisher, if anything.

        Raises MalformedMessageError when the answer cannot be completed any more.
        """
        try:
            page = _decode_page(data)
        except msgspec.DecodeError as error:
            raise MalformedMessageError("a replay", str(error)) from None
        if page.id != self.id or page.page_idx < self.num_pages or self.is_done:
            return None
        if page.page_idx > self.num_pages or not self._messages.grows(len(page.data)):
            raise MalformedMessageError("a replay", f"page {page.page_idx} after {self.num_pages}, or too many bytes")
        self.num_pages += 1
        self._left += page.data
        self._take_messages()
        if page.is_last:
            if self._left:
                raise MalformedMessageError("a replay", f"{len(self._left)} bytes after its last message")
            self.is_done = True
            return None
        if self._until_page - self.num_pages > WINDOW_PAGES // 2:
            return None
        self._until_page = self.num_pages + WINDOW_PAGES
        return _encode(_Grant(self.id, self._until_page))

    def messages(self) -> list[Message]:
        """Return the answer, complete once `is_done`."""
        return self._messages

    def _take_messages(self) -> None:
        start = 0
        while len(self._left) - start >= _RECORD.size:
            topic_bytes, sequence, payload_bytes = _RECORD.unpack_from(self._left, start)
            topic_end = start + _RECORD.size + topic_bytes
            end = topic_end + payload_bytes
            if end > len(self._left):
                break
            topic = bytes(self._left[start + _RECORD.size : topic_end])
            if not self._messages.grows(base.MESSAGE_BYTES):
                raise MalformedMessageError("a replay", "too many messages")
            self._messages.append(Message(topic, sequence, bytes(self._left[topic_end:end])))
            start = end
        del self._left[:start]


async def serve_answers(answers: Answers, send: Callable[[str, bytes], Awaitable[None]]) -> None:
    """Answer until cancelled; `send` is given the name an answer's subject ends with, and a page.

    Pages are made in worker threads: the loop goes on sending events meanwhile.
    """

    async def serve() -> None:
        while True:
            answer = await answers.due()
            page = await asyncio.to_thread(answer.next_page)
            await send(answer.id.hex(), page)
            answers.sent(answer)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_THREADS):
            tasks.create_task(serve(), name="kvist-answers")


async def ask(
    asking: Asking, send: Callable[[bytes], Awaitable[None]], pages: asyncio.Queue[bytes | None], timeout_s: float
) -> list[Message] | None:
    """Ask, and return the answer that comes as `pages`; None for silence of `timeout_s`, or a page that is None.

    The caller has subscribed to the answer's subject before, and leaves it afterwards.
    """
    await send(asking.question())
    try:
        async with asyncio.timeout(base.MAX_ANSWER_S):
            while not asking.is_done:
                async with asyncio.timeout(timeout_s):
                    page = await pages.get()
                if page is None:
                    return None
                reply = asking.received(page)
                if reply is not None:
                    await send(reply)
    except TimeoutError:
        return None
    except MalformedMessageError as error:
        _logger.warning("replay given up: %s", error)
        return None
    finally:
        if not asking.is_done:
            await send(asking.cancellation())
    return asking.messages()


def _record(message: Message) -> bytes:
    return _RECORD.pack(len(message.topic), message.sequence, len(message.payload)) + message.topic + message.payload

"""Replays over a broker: an asker asks for one page after the other, so that none is sent which it cannot hold.

    question   subscriber -> publisher   id, page wanted, topic, start sequence, epoch
    page       publisher -> subscriber   id, its number from 0, whether it is the last, bytes

The pages' bytes, joined, are the messages: three numbers (bytes of the topic, sequence, bytes of the payload), topic,
payload. They are cut without regard to messages, so that a page fits a broker that takes no larger one.

An answer travels on a subject of its own that follows from the question's id: no other subscriber sees it, a late one
is nobody's, and no asker can name a place where the publisher is to send, as NATS' and MQTT 5's own request and reply
would let it. A page that is lost ends the answer, as silence does. Nothing here does I/O: senders are handed in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, TypeAlias

import msgspec

from kvist.errors import MalformedMessageError
from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest, ReplaySource
from kvist.events.transports.received import Collected

_logger = logging.getLogger(__name__)

PAGE_BYTES = 128 << 10
"""Bytes of messages in a page, if the broker takes as much."""
MAX_PAGE_S = 0.5
"""How long a page is filled: a source that needs seconds gives signs of life meanwhile, which must arrive as such."""
NUM_THREADS = 4
"""Pages made at the same time: a snapshot may be long in coming, and a range should not wait for it."""
MAX_OPEN_QUESTIONS = 64
"""Questions answered side by side; further ones get no answer, and are asked again later."""
QUESTION_TIMEOUT_S = 30.0
"""An asker that asks for no further page for so long is gone."""
ID_BYTES = 16
MAX_UNREAD_PAGES = 4
"""More than an asker has asked for: further ones come from a peer gone wrong, and are dropped."""

_RECORD = struct.Struct(">IQI")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Question(msgspec.Struct, tag="kvist-ask2", array_like=True, frozen=True, gc=False):
    id: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    page_idx: _Count
    topic: bytes | None
    start_sequence: _Count
    epoch: _Count | None


class _Page(msgspec.Struct, tag="kvist-page1", array_like=True, frozen=True, gc=False):
    id: bytes
    page_idx: _Count
    is_last: bool
    data: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_page = msgspec.msgpack.Decoder(_Page).decode


class _Answer:
    """One question's answer, made page by page, and by one thread at a time."""

    def __init__(self, question: _Question, source: ReplaySource, now_s: float) -> None:
        self.page_idx = 0
        self.asked_at_s = now_s
        self._id = question.id
        self._request = ReplayRequest(question.topic, question.start_sequence, question.epoch)
        self._source = source
        self._records: Iterator[bytes] | None = None
        self._left = bytearray()

    def next_page(self, page_bytes: int) -> _Page:
        """Return the next page; asks the source and encodes what it returns, so it may take milliseconds."""
        if self._records is None:
            self._records = map(_record, self._source.replay(self._request))
        is_last = False
        send_at_s = time.monotonic() + MAX_PAGE_S
        while len(self._left) <= page_bytes and not is_last:
            record = next(self._records, None)
            is_last = record is None
            self._left += record or b""
            if time.monotonic() >= send_at_s:
                break
        data = bytes(self._left[:page_bytes])
        del self._left[:page_bytes]
        self.page_idx += 1
        return _Page(self._id, self.page_idx - 1, is_last and not self._left, data)


class Answers:
    """The publisher's side: the questions that are open, and how far each was answered."""

    def __init__(
        self,
        source: ReplaySource | None = None,
        page_bytes: int = PAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Answer from `source`; while that is None, which it may be at first, no question is heard."""
        self.source = source
        self.page_bytes = page_bytes
        self.num_malformed = 0
        self._clock = clock
        self._open: dict[bytes, _Answer] = {}
        self._questions: asyncio.Queue[_Question] = asyncio.Queue(MAX_OPEN_QUESTIONS)

    def receive(self, data: bytes) -> None:
        """Take what an asker sent; what is malformed is counted, logged once and skipped."""
        try:
            question = _decode_question(data)
        except DECODE_ERRORS as error:
            self.num_malformed += 1
            if self.num_malformed == 1:
                _logger.warning("malformed question skipped, further ones are only counted: %s", error)
            return
        if self.source is not None and not self._questions.full():
            self._questions.put_nowait(question)

    async def serve(self, send: Callable[[str, bytes], Awaitable[None]]) -> None:
        """Answer until cancelled, in worker threads; `send` gets the name an answer's subject ends with, and a page."""

        async def serve() -> None:
            while True:
                try:
                    async with asyncio.timeout(QUESTION_TIMEOUT_S):
                        question = await self._questions.get()
                except TimeoutError:
                    self._forget_the_silent()
                    continue
                answer = self._claim(question)
                if answer is None:
                    continue
                page = await asyncio.to_thread(answer.next_page, self.page_bytes)
                if not page.is_last:
                    self._open[question.id] = answer
                await send(question.id.hex(), _encode(page))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_THREADS):
                tasks.create_task(serve(), name="kvist-answers")

    def _claim(self, question: _Question) -> _Answer | None:
        """Return the answer whose next page is asked for; nobody else has it until it is open again."""
        now_s = self._clock()
        if question.page_idx == 0:
            self._forget_the_silent()
            assert self.source is not None
            return _Answer(question, self.source, now_s) if len(self._open) < MAX_OPEN_QUESTIONS else None
        answer = self._open.get(question.id)
        if answer is None or answer.page_idx != question.page_idx:
            return None
        answer.asked_at_s = now_s
        return self._open.pop(question.id)

    def _forget_the_silent(self) -> None:
        since_s = self._clock() - QUESTION_TIMEOUT_S
        self._open = {id_: answer for id_, answer in self._open.items() if answer.asked_at_s >= since_s}


class Asking:
    """The subscriber's side of one question."""

    def __init__(self, request: ReplayRequest) -> None:
        self.num_pages = 0
        self.is_done = False
        self._id = os.urandom(ID_BYTES)
        self.name = self._id.hex()
        """The token that the answer's subject ends with."""
        self._request = request
        self._pages: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNREAD_PAGES)
        self._left = bytearray()
        self._messages = Collected()

    def receive(self, page: bytes | None) -> None:
        """Take what came on the answer's subject; None for word that nobody is there to answer."""
        if not self._pages.full():
            self._pages.put_nowait(page)

    async def ask(self, send: Callable[[bytes], Awaitable[object]], timeout_s: float) -> list[Message] | None:
        """Return the answer, to whose subject the caller has subscribed; None for silence of `timeout_s`, or nobody."""
        try:
            async with asyncio.timeout(base.MAX_ANSWER_S):
                while not self.is_done:
                    num_pages = self.num_pages
                    await send(_encode(_Question(self._id, num_pages, *self._request)))
                    async with asyncio.timeout(timeout_s):
                        while self.num_pages == num_pages:
                            page = await self._pages.get()
                            if page is None:
                                return None
                            self._append(page)
        except TimeoutError:
            return None
        except MalformedMessageError as error:
            _logger.warning("replay given up: %s", error)
            return None
        return self._messages

    def _append(self, data: bytes) -> None:
        """Append a page, if it is the next; raises MalformedMessageError when the answer cannot be completed."""
        try:
            page = _decode_page(data)
        except DECODE_ERRORS as error:
            raise MalformedMessageError("a replay", str(error)) from None
        if page.id != self._id or page.page_idx != self.num_pages or self.is_done:
            return
        if not self._messages.reserve(len(page.data)):
            raise MalformedMessageError("a replay", "too many bytes")
        self.num_pages += 1
        self._left += page.data
        self._append_messages()
        if page.is_last and self._left:
            raise MalformedMessageError("a replay", f"{len(self._left)} bytes after its last message")
        self.is_done = page.is_last

    def _append_messages(self) -> None:
        start = 0
        while len(self._left) - start >= _RECORD.size:
            topic_bytes, sequence, payload_bytes = _RECORD.unpack_from(self._left, start)
            topic_end = start + _RECORD.size + topic_bytes
            end = topic_end + payload_bytes
            if end > len(self._left):
                break
            topic = bytes(self._left[start + _RECORD.size : topic_end])
            if not self._messages.reserve(base.MESSAGE_BYTES):
                raise MalformedMessageError("a replay", "too many messages")
            self._messages.append(Message(topic, sequence, bytes(self._left[topic_end:end])))
            start = end
        del self._left[:start]


def _record(message: Message) -> bytes:
    return _RECORD.pack(len(message.topic), message.sequence, len(message.payload)) + message.topic + message.payload

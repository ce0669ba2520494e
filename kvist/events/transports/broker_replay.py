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
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import count
from typing import Annotated, Any, TypeAlias

import msgspec

from kvist.errors import MalformedMessageError
from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest, ReplaySource
from kvist.events.transports.broker_link import end
from kvist.events.transports.received import Collected
from kvist.events.types import NonNegative

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
"""More than an asker has asked for, or asks for: further ones come from a peer gone wrong, and are dropped."""

_RECORD = struct.Struct(">IQI")


class _Question(msgspec.Struct, tag="kvist-ask2", array_like=True, frozen=True, gc=False):
    id: Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    page_idx: NonNegative
    topic: bytes | None
    start_sequence: NonNegative
    epoch: NonNegative | None


class _Page(msgspec.Struct, tag="kvist-page1", array_like=True, frozen=True, gc=False):
    id: bytes
    page_idx: NonNegative
    is_last: bool
    data: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_page = msgspec.msgpack.Decoder(_Page).decode


Send: TypeAlias = Callable[[str, bytes], Coroutine[Any, Any, None]]
"""Sends a page to who asked: gets the question's id, as text, and the page."""


class Answers:
    """The publisher's side: a task for each question that is open, which makes a page when it is asked for."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.source: ReplaySource | None = None
        """Where answers come from; while that is None, as at first, there are none."""
        self.page_bytes = page_bytes
        self.num_malformed = 0
        self._asked: dict[bytes, asyncio.Queue[int]] = {}  # the pages asked for, by question
        self._threads = asyncio.Semaphore(NUM_THREADS)
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, data: bytes, send: Send) -> None:
        """Answer a question by its next page, if there is one."""
        try:
            question = _decode_question(data)
        except DECODE_ERRORS as error:
            self.num_malformed += 1
            if self.num_malformed == 1:
                _logger.warning("malformed question skipped, further ones are only counted: %s", error)
            return
        asked = self._asked.get(question.id)
        if asked is not None:
            if not asked.full():
                asked.put_nowait(question.page_idx)
        elif question.page_idx == 0 and self.source is not None and len(self._asked) < MAX_OPEN_QUESTIONS:
            self._asked[question.id] = asyncio.Queue(MAX_UNREAD_PAGES)
            task = asyncio.create_task(self._answer(question, self.source, send), name="kvist-broker-answer")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Answer nothing more."""
        for task in tuple(self._tasks):
            await end(task)

    async def _answer(self, question: _Question, source: ReplaySource, send: Send) -> None:
        """Send page after page, each once, until the last one or until nobody asks for the next."""
        pages = self._pages(question, source)
        try:
            while True:
                async with self._threads:
                    page = await asyncio.to_thread(next, pages)
                await send(question.id.hex(), _encode(page))
                if page.is_last:
                    return
                async with asyncio.timeout(QUESTION_TIMEOUT_S):
                    while await self._asked[question.id].get() != page.page_idx + 1:
                        pass
        except TimeoutError:
            pass  # the asker is gone
        finally:
            del self._asked[question.id]

    def _pages(self, question: _Question, source: ReplaySource) -> Iterator[_Page]:
        """Yield the answer; it is asked of the source and encoded meanwhile, which may take milliseconds."""
        request = ReplayRequest(question.topic, question.start_sequence, question.epoch)
        records, left, is_last = map(_record, source.replay(request)), bytearray(), False
        for page_idx in count():
            send_at_s = time.monotonic() + MAX_PAGE_S
            while len(left) <= self.page_bytes and not is_last:
                record = next(records, None)
                is_last = record is None
                left += record or b""
                if time.monotonic() >= send_at_s:
                    break
            data = bytes(left[: self.page_bytes])
            del left[: self.page_bytes]
            yield _Page(question.id, page_idx, is_last and not left, data)


class Asking:
    """The subscriber's side of one question."""

    def __init__(self, request: ReplayRequest) -> None:
        self._id = os.urandom(ID_BYTES)
        self.name = self._id.hex()
        """The token that the answer's subject ends with."""
        self._request = request
        self._num_pages = 0
        self._is_done = False
        self._pages: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNREAD_PAGES)
        self._left = bytearray()
        self._messages = Collected()

    def receive(self, _: str, page: bytes | None) -> None:
        """Take what came on the answer's subject; None for word that nobody is there to answer."""
        if not self._pages.full():
            self._pages.put_nowait(page)

    async def ask(self, send: Callable[[bytes], Awaitable[None]], timeout_s: float) -> list[Message] | None:
        """Return the answer, to whose subject the caller listens; None for silence of `timeout_s`, or nobody."""
        try:
            async with asyncio.timeout(base.MAX_ANSWER_S):
                while not self._is_done:
                    num_pages = self._num_pages
                    async with asyncio.timeout(timeout_s):
                        await send(_encode(_Question(self._id, num_pages, *self._request)))
                        while self._num_pages == num_pages:
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
        if page.id != self._id or page.page_idx != self._num_pages:
            return
        if not self._messages.reserve(len(page.data)):
            raise MalformedMessageError("a replay", "too many bytes")
        self._num_pages += 1
        self._is_done = page.is_last
        self._left += page.data
        self._append_messages()
        if page.is_last and self._left:
            raise MalformedMessageError("a replay", f"{len(self._left)} bytes after its last message")

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

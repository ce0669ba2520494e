"""Replays over a broker: the subscriber asks for one page after the other, so it gets no more than it can hold.

    question   subscriber -> publisher   id, page wanted, topic, start sequence, epoch
    page       publisher -> subscriber   id, its number from 0, whether it is the last, bytes

The pages' bytes, joined, are the messages: three numbers (bytes of the topic, sequence, bytes of the payload), topic,
payload. Page boundaries may fall within a message, so that a page fits the broker's size limit.

docs/decisions.md says why each page is asked for, and why the answer has a subject that is made from the question's id.
A lost page ends the answer, as silence does. There is no I/O here: callers pass in the functions that send.
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
from kvist.events.transports.broker_link import cancel_and_wait
from kvist.events.transports.received import ReplayAnswer
from kvist.events.types import NonNegative

_logger = logging.getLogger(__name__)

PAGE_BYTES = 128 << 10
"""Bytes of messages in a page, if the broker's limit allows it."""
MAX_PAGE_S = 0.5
"""How long a page is filled: what a slow source has sent by then must arrive in time to be a sign of life."""
NUM_THREADS = 4
"""Pages made at the same time: a snapshot may take long, and a range should not wait for it."""
MAX_OPEN_QUESTIONS = 64
"""Questions answered at the same time; further ones get no answer, and subscribers ask again later."""
QUESTION_TIMEOUT_S = 30.0
"""A subscriber that asks for no further page for so long is gone."""
ID_BYTES = 16
MAX_UNREAD_PAGES = 4
"""Pages, or questions for one, that wait to be read; a peer that sends more is broken, and the rest is dropped."""

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
"""Sends a page to the subscriber: gets the question's id, as text, and the page."""


class ReplayServer:
    """The publisher's side: each open question has a task, which makes a page when it is asked for."""

    def __init__(self) -> None:
        self.source: ReplaySource | None = None
        """Where answers come from; without one, as at first, questions are ignored."""
        self.page_bytes = PAGE_BYTES
        self.num_malformed = 0
        self._requested_pages: dict[bytes, asyncio.Queue[int]] = {}  # by question
        self._threads = asyncio.Semaphore(NUM_THREADS)
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, data: bytes, send: Send) -> None:
        """Have the page that a question asks for made and sent, if it is the next of its answer."""
        try:
            question = _decode_question(data)
        except DECODE_ERRORS as error:
            self.num_malformed += 1
            if self.num_malformed == 1:
                _logger.warning("malformed question skipped, further ones are only counted: %s", error)
            return
        requested = self._requested_pages.get(question.id)
        if requested is not None:
            if not requested.full():
                requested.put_nowait(question.page_idx)
        elif question.page_idx == 0 and self.source is not None and len(self._requested_pages) < MAX_OPEN_QUESTIONS:
            self._requested_pages[question.id] = asyncio.Queue(MAX_UNREAD_PAGES)
            task = asyncio.create_task(self._answer(question, self.source, send), name="kvist-broker-answer")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            await cancel_and_wait(task)

    async def _answer(self, question: _Question, source: ReplaySource, send: Send) -> None:
        """Send each page once, when it is asked for, until the last one or until the subscriber is gone."""
        pages = self._pages(question, source)
        try:
            while True:
                async with self._threads:
                    page = await asyncio.to_thread(next, pages)
                await send(question.id.hex(), _encode(page))
                if page.is_last:
                    return
                async with asyncio.timeout(QUESTION_TIMEOUT_S):
                    while await self._requested_pages[question.id].get() != page.page_idx + 1:
                        pass
        except TimeoutError:
            pass  # the subscriber is gone
        finally:
            del self._requested_pages[question.id]

    def _pages(self, question: _Question, source: ReplaySource) -> Iterator[_Page]:
        """Yield the answer's pages; reading the source and encoding may take milliseconds each time."""
        request = ReplayRequest(question.topic, question.start_sequence, question.epoch)
        records, unsent, is_last = map(_record, source.replay(request)), bytearray(), False
        for page_idx in count():
            send_at_s = time.monotonic() + MAX_PAGE_S
            while len(unsent) <= self.page_bytes and not is_last:
                record = next(records, None)
                is_last = record is None
                unsent += record or b""
                if time.monotonic() >= send_at_s:
                    break
            data = bytes(unsent[: self.page_bytes])
            del unsent[: self.page_bytes]
            yield _Page(question.id, page_idx, is_last and not unsent, data)


class ReplayClient:
    """The subscriber's side of one question."""

    def __init__(self, request: ReplayRequest) -> None:
        self._id = os.urandom(ID_BYTES)
        self.name = self._id.hex()
        """The token that the answer's subject ends with."""
        self._request = request
        self._received: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNREAD_PAGES)

    def receive(self, _: str, page: bytes | None) -> None:
        """Queue what came on the answer's subject; None when the broker says that no publisher is there."""
        if not self._received.full():
            self._received.put_nowait(page)

    async def ask(self, send: Callable[[bytes], Awaitable[None]], timeout_s: float) -> list[Message] | None:
        """Return the answer, to whose subject the caller subscribes; None without a publisher, or if it is too slow.

        It may take `timeout_s` for each page.
        """
        messages, unread = ReplayAnswer(), bytearray()
        try:
            async with asyncio.timeout(base.MAX_ANSWER_S):
                for page_idx in count():
                    async with asyncio.timeout(timeout_s):
                        await send(_encode(_Question(self._id, page_idx, *self._request)))
                        page = await self._receive_page(page_idx)
                    if page is None:
                        return None
                    if not messages.reserve(len(page.data)):
                        raise MalformedMessageError("a replay", "too many bytes")
                    unread += page.data
                    _move_messages(unread, messages)
                    if page.is_last and unread:
                        raise MalformedMessageError("a replay", f"{len(unread)} bytes after its last message")
                    if page.is_last:
                        return messages
        except TimeoutError:
            pass
        except MalformedMessageError as error:
            _logger.warning("replay given up: %s", error)
        return None

    async def _receive_page(self, page_idx: int) -> _Page | None:
        """Wait for this page; None if no publisher is there. Raises MalformedMessageError for what is no page."""
        while (data := await self._received.get()) is not None:
            try:
                page = _decode_page(data)
            except DECODE_ERRORS as error:
                raise MalformedMessageError("a replay", str(error)) from None
            if page.id == self._id and page.page_idx == page_idx:
                return page
        return None


def _move_messages(unread: bytearray, messages: ReplayAnswer) -> None:
    """Move the whole messages at the beginning of `unread` to `messages`; raises MalformedMessageError if too many."""
    start = 0
    while len(unread) - start >= _RECORD.size:
        topic_bytes, sequence, payload_bytes = _RECORD.unpack_from(unread, start)
        topic_end = start + _RECORD.size + topic_bytes
        end = topic_end + payload_bytes
        if end > len(unread):
            break
        if not messages.reserve(base.MESSAGE_BYTES):
            raise MalformedMessageError("a replay", "too many messages")
        topic = bytes(unread[start + _RECORD.size : topic_end])
        messages.append(Message(topic, sequence, bytes(unread[topic_end:end])))
        start = end
    del unread[:start]


def _record(message: Message) -> bytes:
    return _RECORD.pack(len(message.topic), message.sequence, len(message.payload)) + message.topic + message.payload

"""The two ends of a stream over NATS."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Self

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvist.errors import InvalidValueError
from kvist.events.transports.base import WHO_IS_THERE, Message, ReplayRequest
from kvist.events.transports.broker import ANSWER, ASK, STREAM, BrokerUrl, pack, unpack
from kvist.events.transports.broker_link import end
from kvist.events.transports.broker_publication import BrokerPublication
from kvist.events.transports.broker_replay import PAGE_BYTES, Asking
from kvist.events.transports.nats.history import ensure_stream, read_kept, read_stream
from kvist.events.transports.nats.link import FAILURES, NatsLink, login_options, shared_link
from kvist.events.transports.received import MalformedCounter, MessageQueue

_logger = logging.getLogger(__name__)

_PAGE_OVERHEAD_BYTES = 256
HISTORY_TIMEOUT_S = 60.0
_MAX_KNOWN_PUBLICATIONS = 8


class NatsPublication(BrokerPublication[Client]):
    """Publishes on core subjects, which a JetStream stream may keep.

    Opening raises InvalidValueError for a file of the URL's that cannot be used, and for a stream that has other
    settings; for that the first answer of the server is waited for, though not long.
    """

    def __init__(self, url: BrokerUrl) -> None:
        self.num_too_large = 0
        self._unsent: deque[Message] = deque()
        self._has_stream = False
        super().__init__(url)

    def _new_link(self) -> NatsLink:
        login_options(self._url)
        return NatsLink(self._url, self._prepare)

    async def _prepare(self, client: Client) -> None:
        """Have the stream that keeps what is sent on this connection, and hear questions."""
        if "jetstream" in self._url.options:
            await self._ensure_stream(client)
        self._answers.page_bytes = min(PAGE_BYTES, client.max_payload - _PAGE_OVERHEAD_BYTES)

        async def received(message: Msg) -> None:
            self._answers.receive(message.data)

        await client.subscribe(self._url.name(ASK), cb=received)
        await client.flush()

    async def _ensure_stream(self, client: Client) -> None:
        try:
            await ensure_stream(client, self._url)
        except InvalidValueError as error:
            if not self._has_stream:
                self._loop.fail(error)
                raise
            _logger.error("events are no longer kept: %s", error)
        self._has_stream = True

    async def _send_all(self, client: Client) -> None:
        while True:
            while self._unsent:
                await self._send_event(client, self._unsent[0])
                self._unsent.popleft()
            self._unsent.extend(await self._loop.receive())
            if not self._unsent:
                break
        await client.flush()

    async def _send_event(self, client: Client, message: Message) -> None:
        try:
            await client.publish(self._url.name(STREAM, self._url.token_of(message.topic)), pack(self._id, message))
        except nats.errors.MaxPayloadError:
            if self.num_too_large == 0:
                text = "message larger than the server's max_payload is left to replays, as further ones are"
                _logger.warning("%s size_bytes=%d", text, len(message.payload))
            self.num_too_large += 1

    async def _send_page(self, client: Client, name: str, page: bytes) -> None:
        await client.publish(name, page)


class NatsSubscription:
    """Subscribes over the loop's one connection to the URL's servers.

    A connection counts as one to the publisher, and each publication that is heard of after another as one more.
    """

    is_peer_gone = False
    is_caught_up = True

    def __init__(self, url: BrokerUrl) -> None:
        self.num_connects = 0
        self._url = url
        self._malformed = MalformedCounter(url.public)
        self._queue = MessageQueue(url.public)
        self._publications: deque[int] = deque(maxlen=_MAX_KNOWN_PUBLICATIONS)
        self._problem: str | None = None
        self._next_sequence = 1
        """The first message of the stream that was not read yet, with `deliver=all`."""

    @property
    def num_malformed(self) -> int:
        return self._malformed.num

    @property
    def problem(self) -> str | None:
        return self._link.problem or self._problem

    async def __aenter__(self) -> Self:
        """Connect in the background; raises InvalidValueError for a file of the URL's that cannot be used."""
        self._stack = AsyncExitStack()
        self._link = await self._stack.enter_async_context(shared_link(self._url, self))
        follow = self._read_history if "deliver" in self._url.options else self._listen
        following = asyncio.create_task(self._link.stay(follow), name=f"kvist-nats-{self._url.public}")
        self._stack.push_async_callback(end, following)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def receive(self) -> list[Message]:
        return await self._queue.receive()

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask the publisher, and where none answers, the stream that the URL names, if any."""
        try:
            async with asyncio.timeout(timeout_s):
                client = await self._link.connected()
            messages = await self._ask(client, request, timeout_s)
            # The stream knows what was sent, and not who is there.
            if messages is None and "jetstream" in self._url.options and request != WHO_IS_THERE:
                async with asyncio.timeout(HISTORY_TIMEOUT_S):
                    messages = await read_kept(client, self._url, request)
        except FAILURES:
            return None
        return messages

    async def _ask(self, client: Client, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        asking = Asking(request)
        answer, question = self._url.name(ANSWER, asking.name), self._url.name(ASK)

        async def received(message: Msg) -> None:
            asking.receive(None if message.headers else message.data)  # only the server sends headers

        async def send(data: bytes) -> None:
            # The server answers for a publisher that is not there, so that nobody has to wait for it.
            await client.publish(question, data, answer)

        subscription = await client.subscribe(answer, cb=received)
        try:
            return await asking.ask(send, timeout_s)
        finally:
            with suppress(*FAILURES):
                await subscription.unsubscribe()

    async def _listen(self, client: Client) -> None:
        async def received(message: Msg) -> None:
            self._take(message)

        subscription = await client.subscribe(self._url.name(STREAM, "*"), cb=received)
        try:
            await client.flush()
            # Publications stay known: the first message of one may have come before this.
            self.num_connects += 1
            await asyncio.Event().wait()
        finally:
            with suppress(*FAILURES):
                await subscription.unsubscribe()

    def _take(self, received: Msg) -> None:
        topic = self._url.topic_of(received.subject.rpartition(".")[2])
        unpacked = unpack(topic, received.data, self._malformed)
        if unpacked is None:
            return
        publication_id, message = unpacked
        if publication_id not in self._publications:
            self.num_connects += bool(self._publications)
            self._publications.append(publication_id)
        self._queue.put(message)

    async def _read_history(self, client: Client) -> None:
        """Deliver what the stream has from where an earlier connection was, then what comes; waits if nobody reads."""
        stream = self._url.options["jetstream"]
        try:
            pages = read_stream(client, stream, self._url.name(STREAM, "*"), self._next_sequence, waits=True)
            async with aclosing(pages):
                async for page in pages:
                    if not page:
                        self.num_connects += 1
                        self._problem = None
                    for message in page:
                        await self._queue.wait_for_room()
                        self._take(message)
                        self._next_sequence = message.metadata.sequence.stream + 1
        except FAILURES as error:
            self._problem = f"stream {stream} cannot be read: {error}"
            raise

"""A subscriber's end of a stream over NATS."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

from nats.aio.client import Client
from nats.aio.msg import Msg

from kvist.events.transports.base import MAX_DRAIN, MAX_RECONNECT_S, WHO_IS_THERE, Message, ReplayRequest
from kvist.events.transports.broker import ANSWER, ASK, STREAM, BrokerUrl, unpack
from kvist.events.transports.broker_replay import Asking
from kvist.events.transports.nats.history import HistoryReader, read_kept
from kvist.events.transports.nats.link import FAILURES, end, shared_link
from kvist.events.transports.received import MalformedCounter
from kvist.events.types import MAX_RANKS

RECEIVE_CAPACITY = 10_000
"""Messages kept unread before the newest are lost."""
RECEIVE_CAPACITY_BYTES = 256 << 20
HISTORY_TIMEOUT_S = 60.0
"""How long reading a replay from JetStream may take."""

_MAX_KNOWN_PUBLICATIONS = 8


class NatsSubscription:
    """Subscribes over the loop's one connection to the URL's servers.

    A connection counts as one to the publisher, and each publication that is heard of after another as one more.
    """

    is_peer_gone = False
    is_caught_up = True

    def __init__(self, url: BrokerUrl) -> None:
        self.num_connects = 0
        self.num_lost = 0
        """Messages lost because they were not received in time."""
        self._url = url
        self._malformed = MalformedCounter(url.public)
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._publications: deque[int] = deque(maxlen=_MAX_KNOWN_PUBLICATIONS)
        self._topics: dict[str, bytes] = {}
        self._problem: str | None = None
        self._next_sequence = 1
        """The first message of the stream that was not read yet, with `deliver=all`."""

    @property
    def num_malformed(self) -> int:
        """How many messages were skipped because they are not a publication's."""
        return self._malformed.num

    @property
    def problem(self) -> str | None:
        """Why nothing can be received just now; None while all is well."""
        return self._link.problem or self._problem

    async def __aenter__(self) -> Self:
        """Connect in the background; raises InvalidValueError for a file of the URL's that cannot be used."""
        self._stack = AsyncExitStack()
        self._link = await self._stack.enter_async_context(shared_link(self._url))
        if "deliver" in self._url.options:
            reading = asyncio.create_task(self._follow_history(), name="kvist-nats-history")
            self._stack.push_async_callback(end, reading)
        else:
            leave = self._link.subscribe(self._url.name(STREAM, "*"), self._received, self._connected)
            self._stack.callback(leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unsubscribe; the last subscription of a loop disconnects."""
        await self._stack.aclose()

    async def receive(self) -> list[Message]:
        """Wait for at least one message; return at most `MAX_DRAIN`."""
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        messages = [self._messages.popleft() for _ in range(min(len(self._messages), MAX_DRAIN))]
        self._num_bytes -= sum(len(message.payload) for message in messages)
        self._has_room.set()
        return messages

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

    def _connected(self) -> None:
        # Publications stay known: this may be told behind the first message of one, whose next would be taken for it.
        self.num_connects += 1

    async def _received(self, message: Msg) -> None:
        """Queue a live message, and lose what does not fit."""
        if len(self._messages) >= RECEIVE_CAPACITY or self._num_bytes > RECEIVE_CAPACITY_BYTES:
            self.num_lost += 1
        else:
            self._take(message)

    def _take(self, received: Msg) -> None:
        token = received.subject.rpartition(".")[2]
        topic = self._topics.get(token)
        if topic is None:
            if len(self._topics) == MAX_RANKS:
                self._topics.clear()  # tokens that no publisher of ours sends
            topic = self._topics[token] = self._url.topic_of(token)
        unpacked = unpack(topic, received.data, self._malformed)
        if unpacked is None:
            return
        publication_id, message = unpacked
        if publication_id not in self._publications:
            self.num_connects += bool(self._publications)
            self._publications.append(publication_id)
        self._messages.append(message)
        self._num_bytes += len(message.payload)
        self._arrived.set()

    async def _follow_history(self) -> None:
        """Deliver everything the stream has, and what is added to it, over one connection after another."""
        while True:
            client = await self._link.connected()
            reading = asyncio.create_task(self._read_history(client), name="kvist-nats-reading")
            lost = asyncio.create_task(self._link.lost(), name="kvist-nats-lost")
            try:
                await asyncio.wait([reading, lost], return_when=asyncio.FIRST_COMPLETED)
            finally:
                lost.cancel()
                await end(reading)
            await asyncio.sleep(MAX_RECONNECT_S)

    async def _read_history(self, client: Client) -> None:
        """Read on from where an earlier connection was; waits where nobody receives."""
        stream = self._url.options["jetstream"]
        try:
            async with HistoryReader.open(client, stream, self._url.name(STREAM, "*"), self._next_sequence) as reader:
                self._connected()
                self._problem = None
                while True:
                    message = await reader.wait()
                    while len(self._messages) >= MAX_DRAIN:
                        self._has_room.clear()
                        await self._has_room.wait()
                    self._take(message)
                    self._next_sequence = message.metadata.sequence.stream + 1
        except FAILURES as error:
            self._problem = f"stream {stream} cannot be read: {error}"

"""A subscriber's end of a stream through an MQTT broker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

import aiomqtt

from kvist.errors import MalformedMessageError
from kvist.events.transports.base import MAX_DRAIN, Message, ReplayRequest
from kvist.events.transports.broker import ANSWER, ASK, STREAM, BrokerUrl, unpack
from kvist.events.transports.broker_replay import Asking
from kvist.events.transports.mqtt.connection import Connection, subscribe
from kvist.events.transports.mqtt.publication import decode_announcement
from kvist.events.transports.received import MalformedCounter

_logger = logging.getLogger(__name__)

QUEUE_CAPACITY = 10_000
QUEUE_BYTES = 256 << 20
"""What a subscriber may lag before it loses the newest; the broker's own queue for it is behind that."""
UNSUBSCRIBE_TIMEOUT_S = 1.0


class MqttSubscription:
    """Follows one worker. Its publisher is gone once it said so, or the broker did in its place."""

    is_caught_up = True

    def __init__(self, url: BrokerUrl) -> None:
        """`url` names a worker. Raises InvalidValueError for TLS files that cannot be used."""
        self._url = url.with_worker(None)
        self._place = url.name(STREAM)
        self._answers_place = url.name(ANSWER, "")
        self._connection = Connection(self._url, random.SystemRandom().getrandbits(64))
        self._malformed = MalformedCounter(url.public)
        self._queue: deque[Message] = deque()
        self._num_queued_bytes = 0
        self._num_lost = 0
        self._arrived = asyncio.Event()
        self._client: aiomqtt.Client | None = None
        self._connected = asyncio.Event()
        self._asking: dict[str, Asking] = {}  # by the end of the answer's topic
        self._publication_id: int | None = None
        self._num_connects = 0
        self._is_peer_gone = False
        self._take_directly: Callable[[Sequence[Message]], bool] | None = None
        self._is_awaited = False
        # Whoever waits is to return, though there may be no message.
        self._must_tell = False
        self._tasks = asyncio.TaskGroup()

    @property
    def num_connects(self) -> int:
        """How often a publication was heard that was another than before, or after the broker had been away."""
        return self._num_connects

    @property
    def num_malformed(self) -> int:
        """How many messages were skipped because they are not the transport's."""
        return self._malformed.num

    @property
    def is_peer_gone(self) -> bool:
        """Whether the publication heard last has ended: it said so, or its last will did."""
        return self._is_peer_gone

    @property
    def problem(self) -> str | None:
        """Why the broker sends nothing, None while all is well."""
        return self._connection.problem

    async def __aenter__(self) -> Self:
        """Connect in the background."""
        await self._tasks.__aenter__()
        self._staying = self._tasks.create_task(
            self._connection.stay(self._use, closing=asyncio.Event(), queue_type=partial(_Doorway, self._take)),
            name=f"kvist-mqtt-{self._url.public}",
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect; unread messages are gone."""
        self._staying.cancel()
        # A task group would wrap an error of the body into a group; it has no part in that error.
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        await (self._tasks.__aexit__(kind, error, trace) if is_cancelled else self._tasks.__aexit__(None, None, None))

    def take_with(self, take: Callable[[Sequence[Message]], bool] | None) -> None:
        """Have messages taken where they arrive, while somebody waits for them."""
        self._take_directly = take

    async def receive(self) -> list[Message]:
        """Wait for at least one message, or the publisher's end; return at most `MAX_DRAIN`."""
        while not self._queue and not self._must_tell:
            self._arrived.clear()
            self._is_awaited = True
            try:
                await self._arrived.wait()
            finally:
                self._is_awaited = False
        self._must_tell = False
        messages = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_DRAIN))]
        self._num_queued_bytes -= sum(len(message.payload) for message in messages)
        return messages

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask the publisher, once the broker is there; None at once if the publisher is known to be gone."""
        if self._is_peer_gone:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
            assert self._client is not None
            return await self._ask(self._client, Asking(request), timeout_s)
        except (TimeoutError, aiomqtt.MqttError):
            return None

    async def _ask(self, client: aiomqtt.Client, asking: Asking, timeout_s: float) -> list[Message] | None:
        place = self._url.name(ANSWER, asking.name)
        self._asking[asking.name] = asking
        try:
            await subscribe(client, place)
            return await asking.ask(partial(client.publish, self._url.name(ASK)), timeout_s)
        finally:
            del self._asking[asking.name]
            with suppress(aiomqtt.MqttError):
                await client.unsubscribe(place, timeout=UNSUBSCRIBE_TIMEOUT_S)

    async def _use(self, client: aiomqtt.Client) -> None:
        self._publication_id = None
        await subscribe(client, self._place, f"{self._place}/+")
        self._connection.is_up()
        self._client = client
        self._connected.set()
        try:
            async for _ in client.messages:
                raise AssertionError("messages are taken where they arrive")
        finally:
            self._connected.clear()
            self._client = None
            for asking in self._asking.values():
                asking.receive(None)

    def _take(self, message: aiomqtt.Message) -> None:
        """Take what the broker sends: an announcement, a page of an answer, or a message of the stream."""
        topic = message.topic.value
        data = message.payload if isinstance(message.payload, bytes) else b""
        if topic == self._place:
            self._announced(data)
        elif topic.startswith(self._answers_place):
            asking = self._asking.get(topic.removeprefix(self._answers_place))
            if asking is not None:
                asking.receive(data)
        else:
            unpacked = unpack(self._url.topic_of(topic.removeprefix(f"{self._place}/")), data, self._malformed)
            if unpacked is not None:
                self._heard(unpacked[0])
                self._put(unpacked[1])

    def _announced(self, data: bytes) -> None:
        if not data:
            return  # somebody removed the announcement
        try:
            announcement = decode_announcement(data, self._place)
            publication_id = int(announcement.publication_id, 16)
        except (MalformedMessageError, ValueError):
            self._malformed.skip_message([len(self._place), len(data)])
            return
        if announcement.state == "alive":
            self._heard(publication_id)
            self._is_peer_gone = False
        elif self._publication_id in (None, publication_id):
            self._is_peer_gone = self._must_tell = True
            self._arrived.set()

    def _heard(self, publication_id: int) -> None:
        if publication_id != self._publication_id:
            self._publication_id = publication_id
            self._num_connects += 1
            self._is_peer_gone = False

    def _put(self, message: Message) -> None:
        if self._take_directly is not None and self._is_awaited and not self._arrived.is_set():
            if not self._take_directly((message,)):
                self._must_tell = True
                self._arrived.set()
            return
        num_bytes = self._num_queued_bytes + len(message.payload)
        if self._queue and (len(self._queue) >= QUEUE_CAPACITY or num_bytes > QUEUE_BYTES):
            self._num_lost += 1
            if self._num_lost == 1:
                _logger.warning("messages lost, for they are not read fast enough url=%s", self._url.public)
            return
        self._queue.append(message)
        self._num_queued_bytes = num_bytes
        self._arrived.set()


class _Doorway(asyncio.Queue[aiomqtt.Message]):
    """Hands each message on where it arrives: the client's own queue costs a task for each."""

    def __init__(self, take: Callable[[aiomqtt.Message], None], maxsize: int = 0) -> None:
        super().__init__(maxsize)
        self._hand_on = take

    def put_nowait(self, item: aiomqtt.Message) -> None:
        """Hand the message on."""
        self._hand_on(item)

"""The publisher's end of a stream through an MQTT broker, and what it announces of itself.

That is one retained JSON object for each worker, which people can read as well:

    {"worker":"pod-1","model":"m","state":"alive","publication_id":"00…2a","epoch":7,"block_size":16,"ranks":[0,1]}

`epoch` and `block_size` are those of its latest batches, null before the first and for an engine's own events.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from contextlib import suppress
from itertools import count
from typing import Literal

import aiomqtt
import msgspec

from kvist.errors import MalformedMessageError
from kvist.events.transports.base import Message, ReplaySource
from kvist.events.transports.broker import ANSWER, ASK, STREAM, BrokerUrl, pack
from kvist.events.transports.broker_loop import BrokerLoop
from kvist.events.transports.broker_replay import Answers
from kvist.events.transports.mqtt.connection import QOS, Connection, subscribe

_logger = logging.getLogger(__name__)

WINDOW = 64
"""Messages on their way to the broker that it has not acknowledged; those behind them wait."""
PAGE_BYTES = 64 << 10
"""Bytes in a page of an answer: AWS IoT takes no message above 128 KiB."""
FAREWELL_TIMEOUT_S = 0.5


class Announcement(msgspec.Struct, frozen=True):
    """A publication and what is known of its streams. `publication_id` tells one start of a publisher from the next."""

    worker: str
    model: str
    state: Literal["alive", "gone"]
    publication_id: str
    epoch: int | None = None
    block_size: int | None = None
    ranks: tuple[int, ...] = ()

    def gone(self) -> Announcement:
        """Return the announcement that this publication has ended."""
        return msgspec.structs.replace(self, state="gone")

    def after(self, payload: bytes) -> Announcement:
        """Return the announcement as it is once this payload is sent: itself, unless that has news."""
        try:
            batch = _decode_head(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self
        if (batch.epoch, batch.block_size) == (self.epoch, self.block_size) and batch.rank in self.ranks:
            return self
        ranks = tuple(sorted({*self.ranks, batch.rank}))
        return msgspec.structs.replace(self, epoch=batch.epoch, block_size=batch.block_size, ranks=ranks)

    def encode(self) -> bytes:
        """Return the announcement as JSON."""
        return msgspec.json.encode(self)


class _BatchHead(msgspec.Struct, tag="kvist1", array_like=True, frozen=True, gc=False):
    """How a canonical batch begins; the rest is passed over."""

    worker: str
    rank: int
    epoch: int
    sequence: int
    block_size: int


_decode_head = msgspec.msgpack.Decoder(_BatchHead).decode
_decode = msgspec.json.Decoder(Announcement).decode


def decode_announcement(data: bytes, source: str) -> Announcement:
    """Return the announcement in JSON; raises MalformedMessageError for anything else."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessageError(source, f"not an announcement: {error}") from None


class MqttPublication:
    """Sends to a broker from a thread of its own. What the broker did not acknowledge is sent again after a reconnect.

    While the broker is away or slower than the publisher, `send` raises BlockingIOError once the hand-over is full.
    """

    def __init__(self, url: BrokerUrl) -> None:
        """Begin to connect; `url` names a worker. Raises InvalidValueError for TLS files that cannot be used."""
        self._url = url.with_worker(None)
        self._id = random.SystemRandom().getrandbits(64)
        self._announcement = Announcement(url.worker or "", url.model, "alive", f"{self._id:016x}")
        self._place = url.name(STREAM)
        will = aiomqtt.Will(self._place, self._announcement.gone().encode(), QOS, retain=True)
        self._connection = Connection(self._url, self._id, will)
        self._numbers = count()
        # By the order they were taken over in, which is the order they are sent in.
        self._unacknowledged: dict[int, Message] = {}
        self._places: dict[bytes, str] = {}
        self._answers: Answers | None = None
        self._is_served = asyncio.Event()
        self._has_warned = False
        self._loop = BrokerLoop(f"kvist-mqtt {url.public}", self._serve)
        self._loop.start()

    @property
    def endpoint(self) -> str:
        """The URL a subscriber connects to, without secrets."""
        return self._url.public

    @property
    def problem(self) -> str | None:
        """Why nothing can be sent just now, None while all is well."""
        return self._connection.problem

    def serve_replay(self, source: ReplaySource) -> None:
        """Answer replay requests from `source`, in the publication's own threads."""
        answers = Answers(source)
        answers.page_bytes = PAGE_BYTES
        self._answers = answers
        self._loop.call(self._is_served.set)

    def send(self, message: Message) -> None:
        """Hand the message over; never waits."""
        self._loop.put(message)

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait up to `timeout_s` for the broker to acknowledge what was sent, say goodbye and disconnect."""
        self._loop.close(timeout_s)

    async def _serve(self) -> None:
        await self._connection.stay(self._use, closing=self._loop.closing, on_failure=self._loop.opened)

    async def _use(self, client: aiomqtt.Client) -> None:
        """Publish until closed; raises MqttError when the connection is lost."""
        client.pending_calls_threshold = 2 * WINDOW
        await subscribe(client, self._url.name(ASK), self._place)
        await self._announce(client)
        self._connection.is_up()
        self._loop.opened()
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._listen(client), name="kvist-mqtt-listen"),
                    tasks.create_task(self._answer(client), name="kvist-mqtt-answer"),
                ]
                await self._publish_all(client, tasks)
                for task in beside:
                    task.cancel()
        except* aiomqtt.MqttError as failed:
            raise failed.exceptions[0] from None
        finally:
            with suppress(aiomqtt.MqttError):
                await client.publish(
                    self._place, self._announcement.gone().encode(), QOS, retain=True, timeout=FAREWELL_TIMEOUT_S
                )

    async def _publish_all(self, client: aiomqtt.Client, tasks: asyncio.TaskGroup) -> None:
        """Send what is unacknowledged, then what comes, until closed; return once all of it is acknowledged."""
        window = asyncio.Semaphore(WINDOW)
        due = list(self._unacknowledged)
        while True:
            for number in due:
                await window.acquire()
                await self._note(client, self._unacknowledged[number])
                tasks.create_task(self._publish(client, number, window), name="kvist-mqtt-publish")
            messages = await self._loop.take()
            if not messages:
                break
            due = [next(self._numbers) for _ in messages]
            self._unacknowledged.update(zip(due, messages, strict=True))
        for _ in range(WINDOW):
            await window.acquire()

    async def _publish(self, client: aiomqtt.Client, number: int, window: asyncio.Semaphore) -> None:
        """Send one message, at once, and wait until it is acknowledged: a dead broker is found by its keepalive."""
        message = self._unacknowledged[number]
        place = self._places.get(message.topic)
        if place is None:
            place = self._places[message.topic] = self._url.name(STREAM, self._url.token_of(message.topic))
        await client.publish(place, pack(self._id, message), QOS, timeout=math.inf)
        del self._unacknowledged[number]
        window.release()

    async def _note(self, client: aiomqtt.Client, message: Message) -> None:
        """Announce what a message has news of, before it is sent."""
        announcement = self._announcement.after(message.payload)
        if announcement is not self._announcement:
            self._announcement = announcement
            await self._announce(client)

    async def _announce(self, client: aiomqtt.Client) -> None:
        await client.publish(self._place, self._announcement.encode(), QOS, retain=True)

    async def _listen(self, client: aiomqtt.Client) -> None:
        """Take questions, and see that nobody's farewell stays in the place of our announcement."""
        async for message in client.messages:
            data = message.payload if isinstance(message.payload, bytes) else b""
            if message.topic.value != self._place:
                if self._answers is not None:
                    self._answers.receive(data)
            elif self._is_displaced_by(data):
                await self._announce(client)

    def _is_displaced_by(self, data: bytes) -> bool:
        """Return whether the announcement is gone while we are here; warn if another publisher is this worker, too.

        A publisher that was here before may have lost its connection unnoticed: its last will comes late.
        """
        try:
            theirs = decode_announcement(data, self._place)
        except MalformedMessageError:
            return True
        is_ours = theirs.publication_id == self._announcement.publication_id
        if theirs.state == "gone":
            return True
        if not is_ours and not self._has_warned:
            self._has_warned = True
            _logger.warning("another publisher is, or was, the same worker url=%s", self._url.public)
        return False

    async def _answer(self, client: aiomqtt.Client) -> None:
        await self._is_served.wait()
        assert self._answers is not None

        async def send(name: str, page: bytes) -> None:
            await client.publish(self._url.name(ANSWER, name), page, QOS)

        await self._answers.serve(send)

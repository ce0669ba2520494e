"""The two ends of a stream through an MQTT broker, and what its publisher announces of itself.

That is one retained JSON object for each worker, which people can read as well (docs/transports.md). `epoch` and
`block_size` are those of its latest batches, null before the first and for an engine's own events.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Literal, Self

import aiomqtt
import msgspec

from kvist.errors import MalformedMessageError
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.broker import ANSWER, ASK, STREAM, BrokerUrl, pack, unpack
from kvist.events.transports.broker_publication import BrokerPublication
from kvist.events.transports.broker_replay import Asking
from kvist.events.transports.mqtt.link import QOS, MqttLink, subscribe
from kvist.events.transports.received import MalformedCounter, MessageQueue
from kvist.events.types import RankEnvelope

_logger = logging.getLogger(__name__)

WINDOW = 64
"""Messages on their way to the broker that it has not acknowledged; those behind them wait."""
PAGE_BYTES = 64 << 10
"""Bytes in a page of an answer: AWS IoT takes no message above 128 KiB."""
FAREWELL_TIMEOUT_S = 0.5
UNSUBSCRIBE_TIMEOUT_S = 1.0


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
        return msgspec.json.encode(self)


class _BatchHead(RankEnvelope, tag="kvist1", array_like=True, frozen=True, gc=False):
    """How a canonical batch begins; the rest is passed over."""


_decode_head = msgspec.msgpack.Decoder(_BatchHead).decode
_decode = msgspec.json.Decoder(Announcement).decode


def decode_announcement(data: bytes, source: str) -> Announcement:
    """Return the announcement in JSON; raises MalformedMessageError for anything else."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessageError(source, f"not an announcement: {error}") from None


class MqttPublication(BrokerPublication[aiomqtt.Client]):
    """Announces its worker, and sends again what was not acknowledged; raises InvalidValueError for its TLS files."""

    def __init__(self, url: BrokerUrl) -> None:
        self._numbers = count()
        # By the order they were taken over in, which is the order they are sent in.
        self._unacknowledged: dict[int, Message] = {}
        self._is_displaced = asyncio.Event()
        self._has_warned = False
        super().__init__(url, PAGE_BYTES)

    def _new_link(self) -> MqttLink:
        self._announcement = Announcement(self._url.worker or "", self._url.model, "alive", f"{self._id:016x}")
        self._place = self._url.name(STREAM)
        will = aiomqtt.Will(self._place, self._announcement.gone().encode(), QOS, retain=True)
        return MqttLink(self._url, self._id, self._prepare, self._receive, will)

    async def _prepare(self, client: aiomqtt.Client) -> None:
        client.pending_calls_threshold = 2 * WINDOW
        await subscribe(client, self._url.name(ASK), self._place)
        await self._announce(client)

    async def _send_all(self, client: aiomqtt.Client) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                announcing = tasks.create_task(self._stay_announced(client), name="kvist-mqtt-announce")
                await self._publish_all(client, tasks)
                announcing.cancel()
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
                await self._announce_news(client, self._unacknowledged[number])
                tasks.create_task(self._publish(client, number, window), name="kvist-mqtt-publish")
            messages = await self._loop.receive()
            if not messages:
                break
            due = [next(self._numbers) for _ in messages]
            self._unacknowledged.update(zip(due, messages, strict=True))
        for _ in range(WINDOW):
            await window.acquire()

    async def _publish(self, client: aiomqtt.Client, number: int, window: asyncio.Semaphore) -> None:
        """Send one message, at once, and wait until it is acknowledged: a dead broker is found by its keepalive."""
        message = self._unacknowledged[number]
        place = self._url.name(STREAM, self._url.token_of(message.topic))
        await client.publish(place, pack(self._id, message), QOS, timeout=math.inf)
        del self._unacknowledged[number]
        window.release()

    async def _announce_news(self, client: aiomqtt.Client, message: Message) -> None:
        announcement = self._announcement.after(message.payload)
        if announcement is not self._announcement:
            self._announcement = announcement
            await self._announce(client)

    async def _announce(self, client: aiomqtt.Client) -> None:
        await client.publish(self._place, self._announcement.encode(), QOS, retain=True)

    async def _stay_announced(self, client: aiomqtt.Client) -> None:
        """See that nobody's farewell stays in the place of our announcement."""
        while True:
            await self._is_displaced.wait()
            self._is_displaced.clear()
            await self._announce(client)

    def _receive(self, message: aiomqtt.Message) -> None:
        """Take a question, or what stands in the place of our announcement."""
        data = message.payload if isinstance(message.payload, bytes) else b""
        if message.topic.value != self._place:
            self._answers.receive(data)
        elif self._is_displaced_by(data):
            self._is_displaced.set()

    def _is_displaced_by(self, data: bytes) -> bool:
        """Return whether the announcement is gone, as by a late last will; warn of another publisher here."""
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

    async def _send_page(self, client: aiomqtt.Client, name: str, page: bytes) -> None:
        await client.publish(name, page, QOS)


class MqttSubscription:
    """Follows one worker. Its publisher is gone once it said so, or the broker did in its place."""

    is_caught_up = True

    def __init__(self, url: BrokerUrl) -> None:
        """`url` names a worker. Raises InvalidValueError for TLS files that cannot be used."""
        self.num_connects = 0
        """How often a publication was heard that was another than before, or after the broker had been away."""
        self.is_peer_gone = False
        """Whether the publication heard last has ended: it said so, or its last will did."""
        self._url = url.with_worker(None)
        self._place = url.name(STREAM)
        self._answers_place = url.name(ANSWER, "")
        self._link = MqttLink(self._url, secrets.randbits(64), self._prepare, self._receive)
        self._malformed = MalformedCounter(url.public)
        self._queue = MessageQueue(url.public)
        self._asking: dict[str, Asking] = {}  # by the end of the answer's topic
        self._publication_id: int | None = None

    @property
    def num_malformed(self) -> int:
        return self._malformed.num

    @property
    def problem(self) -> str | None:
        return self._link.problem

    async def __aenter__(self) -> Self:
        await self._link.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._link.__aexit__()

    async def receive(self) -> list[Message]:
        return await self._queue.receive()

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask the publisher, once the broker is there; None at once if the publisher is known to be gone."""
        if self.is_peer_gone:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                client = await self._link.connected()
            return await self._ask(client, Asking(request), timeout_s)
        except (TimeoutError, aiomqtt.MqttError):
            return None

    async def _ask(self, client: aiomqtt.Client, asking: Asking, timeout_s: float) -> list[Message] | None:
        place = self._url.name(ANSWER, asking.name)
        self._asking[asking.name] = asking
        lost = asyncio.create_task(self._link.lost(), name="kvist-mqtt-lost")
        lost.add_done_callback(lambda _: asking.receive(None))
        try:
            await subscribe(client, place)
            return await asking.ask(partial(client.publish, self._url.name(ASK)), timeout_s)
        finally:
            lost.cancel()
            del self._asking[asking.name]
            with suppress(aiomqtt.MqttError):
                await client.unsubscribe(place, timeout=UNSUBSCRIBE_TIMEOUT_S)

    async def _prepare(self, client: aiomqtt.Client) -> None:
        self._publication_id = None
        await subscribe(client, self._place, f"{self._place}/+")

    def _receive(self, message: aiomqtt.Message) -> None:
        """Take what the broker sends: an announcement, a page of an answer, or a message of the stream."""
        topic = message.topic.value
        data = message.payload if isinstance(message.payload, bytes) else b""
        if topic == self._place:
            self._receive_announcement(data)
        elif topic.startswith(self._answers_place):
            asking = self._asking.get(topic.removeprefix(self._answers_place))
            if asking is not None:
                asking.receive(data)
        else:
            unpacked = unpack(self._url.topic_of(topic.removeprefix(f"{self._place}/")), data, self._malformed)
            if unpacked is not None:
                self._note_publication(unpacked[0])
                self._queue.put(unpacked[1])

    def _receive_announcement(self, data: bytes) -> None:
        if not data:
            return  # somebody removed the announcement
        try:
            announcement = decode_announcement(data, self._place)
            publication_id = int(announcement.publication_id, 16)
        except (MalformedMessageError, ValueError):
            self._malformed.skip_message([len(self._place), len(data)])
            return
        if announcement.state == "alive":
            self._note_publication(publication_id)
            self.is_peer_gone = False
        elif self._publication_id in (None, publication_id):
            self.is_peer_gone = True
            self._queue.return_now()

    def _note_publication(self, publication_id: int) -> None:
        if publication_id != self._publication_id:
            self._publication_id = publication_id
            self.num_connects += 1
            self.is_peer_gone = False

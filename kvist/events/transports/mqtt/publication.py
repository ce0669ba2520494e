"""The publisher's end of a stream through an MQTT broker, and what it announces of itself.

That is one retained JSON object for each worker, which people can read as well (docs/transports.md). `epoch` and
`block_size` are those of its latest batches, null before the first and for an engine's own events.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from itertools import count
from typing import Literal

import aiomqtt
import msgspec

from kvist.errors import MalformedMessageError
from kvist.events.transports.base import Message
from kvist.events.transports.broker import ASK, STREAM, BrokerUrl, pack
from kvist.events.transports.broker_publication import BrokerPublication
from kvist.events.transports.mqtt.link import QOS, MqttLink, subscribe
from kvist.events.types import RankEnvelope

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

"""A subscriber's end of a stream through an MQTT broker."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from typing import Self

import aiomqtt

from kvist.errors import MalformedMessageError
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.broker import ANSWER, ASK, STREAM, BrokerUrl, unpack
from kvist.events.transports.broker_replay import Asking
from kvist.events.transports.mqtt.link import MqttLink, subscribe
from kvist.events.transports.mqtt.publication import decode_announcement
from kvist.events.transports.received import MalformedCounter, MessageQueue

UNSUBSCRIBE_TIMEOUT_S = 1.0


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

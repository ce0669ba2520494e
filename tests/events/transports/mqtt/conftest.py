"""A broker, and publications and subscriptions of one worker on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiomqtt
import pytest

from kvist.events.transports import Message, Publication, Subscription
from kvist.events.transports.broker import BrokerUrl
from kvist.events.transports.mqtt import MqttPublication, MqttSubscription

TOPIC = b"kv/pod-1/0"


class Wire:
    """One worker's stream on one broker; publications are closed at the end."""

    place = "kvist/org%2Fmodel/pod-1"

    def __init__(self, broker: Any, until: Callable[[Callable[[], object]], Awaitable[None]]) -> None:
        self.broker = broker
        self._until = until
        self.publications: list[MqttPublication] = []

    def url(self, userinfo: str = "", scheme: str = "mqtt", query: str = "") -> BrokerUrl:
        return BrokerUrl.parse(f"{scheme}://{userinfo}127.0.0.1:{self.broker.port}/org%2Fmodel/pod-1{query}")

    def publish(self, url: BrokerUrl | None = None) -> MqttPublication:
        self.publications.append(MqttPublication(url or self.url()))
        return self.publications[-1]

    def subscribe(self, url: BrokerUrl | None = None) -> MqttSubscription:
        return MqttSubscription(url or self.url())

    async def publish_to(self, *subscriptions: MqttSubscription, url: BrokerUrl | None = None) -> MqttPublication:
        """Open a publication once these subscriptions are there, and wait until they heard of it.

        amqtt acknowledges what it is to keep before it keeps it: who comes in between hears nothing.
        """
        await self._until(lambda: all(subscription.problem is None for subscription in subscriptions))
        publication = await asyncio.to_thread(self.publish, url)
        for subscription in subscriptions:
            await self._until(lambda: publication._id in subscription._publications)  # noqa: B023 - awaited in the same round
        return publication

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[aiomqtt.Client]:
        """Connect with a client that is not ours."""
        async with aiomqtt.Client("127.0.0.1", self.broker.port) as client:
            yield client

    async def announced(self) -> bytes:
        """Return what the broker tells a newcomer about the worker."""
        async with asyncio.timeout(60), self.operator() as client:
            await client.subscribe(self.place, 1)
            message = await anext(aiter(client.messages))
            assert isinstance(message.payload, bytes)
            return message.payload


@pytest.fixture
def wires(until: Callable[[Callable[[], object]], Awaitable[None]]) -> Iterator[Callable[[Any], Wire]]:
    """Return a function that makes a Wire on a broker."""
    made: list[Wire] = []

    def make(broker: Any) -> Wire:
        made.append(Wire(broker, until))
        return made[-1]

    yield make
    for wire in made:
        for publication in wire.publications:
            publication.close(timeout_s=1)


@pytest.fixture
def wire(start_mqtt_broker: Callable[..., Any], wires: Callable[[Any], Wire]) -> Wire:
    return wires(start_mqtt_broker())


@pytest.fixture
def send() -> Callable[[Publication, int], None]:
    """Return a function that sends a small message of this number, which must fit."""
    return lambda publication, sequence: publication.send(Message(TOPIC, sequence, b"payload"))


@pytest.fixture
def take_until() -> Callable[[Subscription, int], Any]:
    """Return a coroutine function that receives until a message of this number came, and returns all numbers."""

    async def take(subscription: Subscription, sequence: int) -> list[int]:
        sequences: list[int] = []
        async with asyncio.timeout(60):
            while sequence not in sequences:
                sequences += [message.sequence for message in await subscription.receive()]
        return sequences

    return take

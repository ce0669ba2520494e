"""A NATS server, and publications and subscriptions of one worker on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvist.events.transports import Endpoint, Message, ReplayRequest, open_publication
from kvist.events.transports.broker import BrokerUrl
from kvist.events.transports.nats import NatsPublication, NatsSubscription

TOPIC = b"kv/pod-1/0"


class KeptMessages:
    """A replay source that keeps what it is given."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    def replay(self, request: ReplayRequest) -> list[Message]:
        return [message for message in self.messages if message.sequence >= request.start_sequence]


class Wire:
    """One worker's stream on one server; publications are closed at the end."""

    def __init__(self, start_nats_server: Callable[..., Any]) -> None:
        self.start_server = start_nats_server
        self.publications: list[NatsPublication] = []

    def url(self, server: Any, userinfo: str = "", scheme: str = "nats", query: str = "") -> str:
        return f"{scheme}://{userinfo}127.0.0.1:{server.port}/org%2Fmodel/pod-1{query}"

    def publish(self, url: str) -> NatsPublication:
        publication = open_publication(url)
        assert isinstance(publication, NatsPublication)
        self.publications.append(publication)
        return publication

    def subscribe(self, url: str) -> NatsSubscription:
        broker = Endpoint.parse(url).broker
        assert broker is not None
        return NatsSubscription(broker)

    def send(self, publication: NatsPublication, *sequences: int, payload: bytes = b"x") -> None:
        for sequence in sequences:
            give_up_s = time.monotonic() + 180
            while True:
                try:
                    publication.send(Message(TOPIC, sequence, payload))
                    break
                except BlockingIOError:
                    assert time.monotonic() < give_up_s
                    time.sleep(0.001)

    def send_until_refused(self, publication: NatsPublication) -> None:
        for sequence in range(100_000):
            publication.send(Message(TOPIC, sequence, b""))

    async def take(self, subscription: NatsSubscription, num_messages: int) -> list[int]:
        """Return the sequences of the next messages."""
        sequences: list[int] = []
        async with asyncio.timeout(60):
            while len(sequences) < num_messages:
                sequences += [message.sequence for message in await subscription.receive()]
        return sequences

    def parse(self, url: str) -> BrokerUrl:
        return BrokerUrl.parse(url)

    def keep(self, messages: list[Message]) -> KeptMessages:
        return KeptMessages(messages)


@pytest.fixture
def wire(start_nats_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr("kvist.events.transports.base.MAX_RECONNECT_S", 0.2)
    wire = Wire(start_nats_server)
    yield wire
    for publication in wire.publications:
        publication.close(timeout_s=1)

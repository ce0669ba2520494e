"""What every transport is held to: one `Kit` a transport, over which the same suite runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvist.events.transports import (
    Endpoint,
    Message,
    Publication,
    ReplayRequest,
    Subscription,
    open_publication,
    open_subscription,
)

_names = count()


class KeptMessages:
    """A replay source that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

        self.requests: list[ReplayRequest] = []

    def replay(self, request: ReplayRequest) -> list[Message]:
        self.requests.append(request)
        start = request.start_sequence
        return [m for m in self.messages if request.topic in (None, b"", m.topic) and m.sequence >= start]


class Kit:
    """One address on one transport, with everything opened on it closed at the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_shared = Endpoint.parse(url).broker is not None
        """Whether two publications may use the address at once, which a broker does not prevent."""
        self.loses_for_the_slow = True
        """Whether what a subscriber does not read is bounded."""
        self._publications: list[Publication] = []

    def publish(self, source: KeptMessages | None = None) -> Publication:
        """Open a publication, always at the same address."""
        publication = open_publication(self.url)
        self._publications.append(publication)
        if source is not None:
            publication.serve_replay(source)
        return publication

    def subscribe(self) -> Subscription:
        """Return a subscription that is not entered yet."""
        return open_subscription(Endpoint.parse(self.url))

    def close(self) -> None:
        """Close all publications."""
        for publication in self._publications:
            publication.close(timeout_s=1)


@pytest.fixture(scope="session")
def kernel_bytes() -> int:
    """How much the kernel keeps at most of what one end of a TCP connection has sent and the other has not read."""
    limits = [Path(f"/proc/sys/net/ipv4/tcp_{kind}").read_text().split() for kind in ("rmem", "wmem")]
    return sum(int(most) for _, _, most in limits)


@pytest.fixture
def kept() -> KeptMessages:
    return KeptMessages()


@pytest.fixture(params=["memory", "zmtp", "ipc", "nats", "jetstream", "mqtt"])
def kit(
    request: pytest.FixtureRequest,
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
    start_nats_server: Callable[..., Any],
    start_mqtt_broker: Callable[..., Any],
) -> Iterator[Kit]:
    brokers = []

    def nats_url(has_jetstream: bool) -> str:
        # A subscriber that does not read is cut off soon.
        server = start_nats_server("max_pending: 4MB\nwrite_deadline: 500ms", has_jetstream=has_jetstream)
        return f"nats://127.0.0.1:{server.port}/model%2Fa.b/worker{'?jetstream=KV' if has_jetstream else ''}"

    def mqtt_url() -> str:
        brokers.append(start_mqtt_broker())
        return f"mqtt://127.0.0.1:{brokers[0].port}/model%2Fa.b/worker"

    urls = {
        "mqtt": mqtt_url,
        "nats": lambda: nats_url(has_jetstream=False),
        "jetstream": lambda: nats_url(has_jetstream=True),
        "memory": lambda: f"memory://suite-{next(_names)}",
        "zmtp": lambda: f"tcp://127.0.0.1:{free_port()}",
        "ipc": lambda: f"ipc://{tmp_path_factory.mktemp('s')}/k",
    }
    kit = Kit(urls[request.param]())
    kit.loses_for_the_slow = all(broker.is_mosquitto for broker in brokers)
    yield kit
    kit.close()

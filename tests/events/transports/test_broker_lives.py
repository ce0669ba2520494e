"""Random lives of publishers and subscribers on a broker that dies: what arrives was sent, in its order, gaps shown."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count, pairwise
from typing import Any

import pytest
from lives import seeds

from kvist.events.transports import (
    Endpoint,
    Message,
    Publication,
    ReplayRequest,
    Subscription,
    open_publication,
    open_subscription,
)

LIVES = seeds(2)
NUM_ACTS = 12
TOPICS = [b"kv/worker/0", b"kv/worker/1", b"kv/worker/12", b"other \xff"]
MARK = b"mark"


class Kept:
    """A publisher's replay buffer."""

    def __init__(self, size: int) -> None:
        self.messages: deque[Message] = deque(maxlen=size)

    def replay(self, request: ReplayRequest) -> list[Message]:
        topic, start = request.topic, request.start_sequence
        return [each for each in tuple(self.messages) if topic in (None, b"", each.topic) and each.sequence >= start]


class Publisher:
    """One publication, and all that it was given, in order."""

    def __init__(self, publication: Publication, number: int) -> None:
        self.publication = publication
        self.number = number
        self.sent: list[Message] = []
        self.places: dict[bytes, int] = {}
        self.kept = Kept(300)
        publication.serve_replay(self.kept)

    def send(self, topic: bytes, sequence: int, size: int) -> None:
        payload = b"%d %d " % (self.number, len(self.sent))
        message = Message(topic, sequence, payload + bytes(size))
        self.places[payload] = len(self.sent)
        self.sent.append(message)
        self.kept.messages.append(message)
        give_up_s = time.monotonic() + 60
        while True:
            try:
                return self.publication.send(message)
            except BlockingIOError:
                assert time.monotonic() < give_up_s
                time.sleep(0.001)


class Listener:
    """A subscription, and what came of it since it was last looked at."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.heard: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.since = 0
        """From where on in the life's whole history it must have heard all, unless something was lost since."""
        self.has_lost = True
        self.num_connects = self.num_lost = 0

    async def listen(self) -> None:
        while True:
            await self.reads.wait()
            messages = await self.subscription.receive()
            self.heard += messages


class Life:
    """One worker's stream on one broker."""

    def __init__(self, seed: int, broker: Any, url: str, until: Any) -> None:
        self.random = random.Random(seed)
        self.broker = broker
        self.url = url
        self.until = until
        self.sequences = count()
        self.publishers: list[Publisher] = []
        self.listeners: dict[Listener, asyncio.Task[None]] = {}
        self.history: list[Message] = []
        self.marks = count()
        self.told: list[str] = []

    async def live(self) -> None:
        acts = {
            self.say: 8,
            self.say_while_the_broker_dies: 3,
            self.begin_anew: 2,
            self.join: 2,
            self.leave: 1,
            self.read_slowly: 2,
            self.ask: 4,
        }
        await self.open()
        await self.join()
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_ACTS):
            self.told.append(act.__name__)
            await act()
            await self.agree()
        await self.close()

    # --- Publishers -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        publication = await asyncio.to_thread(open_publication, self.url)
        self.publishers.append(Publisher(publication, len(self.publishers)))

    async def say(self) -> None:
        """Say something on some topics, of which numbers may be missing or come again."""
        publisher, topics = self.publishers[-1], self.random.sample(TOPICS, self.random.randint(1, 3))
        for _ in range(self.random.choice((1, 5, 64, 300))):
            sequence = next(self.sequences) * self.random.choice((1, 1, 1, 2))
            size = self.random.choice((0, 10, 10, 500, 20_000))
            await asyncio.to_thread(publisher.send, self.random.choice(topics), sequence, size)
            self.history.append(publisher.sent[-1])

    async def say_while_the_broker_dies(self) -> None:
        saying = asyncio.create_task(self.say())
        await asyncio.sleep(self.random.choice((0.0, 0.005, 0.02)))
        self.broker.kill()
        for listener in self.listeners:
            listener.has_lost = True
        if self.random.choice((True, False)):
            await self.until(lambda: all(each.subscription.problem for each in self.listeners))
        await saying
        if "jetstream" in self.url and self.random.randrange(3) == 0:
            shutil.rmtree(self.broker.folder / "jetstream")
        await asyncio.to_thread(self.broker.start)

    async def begin_anew(self) -> None:
        """Another process is the same worker: with its numbers, or from the beginning on."""
        self.sequences = count() if self.random.choice((True, False)) else self.sequences
        await asyncio.to_thread(self.publishers[-1].publication.close, 30)
        await self.open()

    # --- Subscribers ------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        if len(self.listeners) < 3:
            listener = Listener(open_subscription(Endpoint.parse(self.url)))
            await listener.subscription.__aenter__()
            self.listeners[listener] = asyncio.create_task(listener.listen())
            listener.since = len(self.history)

    async def leave(self) -> None:
        if len(self.listeners) > 1:
            await self.stop(self.random.choice([*self.listeners]))

    async def stop(self, listener: Listener) -> None:
        task = self.listeners.pop(listener)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await listener.subscription.__aexit__(None, None, None)

    async def read_slowly(self) -> None:
        """Leave a subscriber's messages where they are, up to its capacity, and lose the newest beyond it."""
        listener = self.random.choice([*self.listeners])
        listener.reads.clear()
        for _ in range(self.random.randint(1, 3)):
            await self.say()
        listener.reads.set()

    async def ask(self) -> None:
        """A replay is what the publisher keeps, from any number on, of one topic or of all."""
        listener, publisher = self.random.choice([*self.listeners]), self.publishers[-1]
        topic = self.random.choice((None, b"", *TOPICS))
        sequences = [each.sequence for each in publisher.kept.messages] or [0]
        request = ReplayRequest(topic, self.random.choice((0, *sequences, max(sequences) + 1)), None)
        expected = publisher.kept.replay(request)
        answer = None
        give_up_s = time.monotonic() + 60
        while answer is None:
            assert time.monotonic() < give_up_s, self.told
            answer = await listener.subscription.replay(request, 5.0)
        assert answer == expected, self.told

    # --- What must be -----------------------------------------------------------------------------------------------

    async def agree(self) -> None:
        """Send marks until each has heard one, and judge all that came before it."""
        mark, publisher = next(self.marks), self.publishers[-1]
        behind = b"%d" % mark
        give_up_s = time.monotonic() + 60
        while not all(self.has_heard(listener, behind) for listener in self.listeners):
            assert time.monotonic() < give_up_s, (self.told, [each.subscription.problem for each in self.listeners])
            with suppress(BlockingIOError):
                publisher.publication.send(Message(MARK, 0, behind))
            await asyncio.sleep(0.02)
        for listener in self.listeners:
            self.judge(listener)

    def has_heard(self, listener: Listener, mark: bytes) -> bool:
        return any(each.topic == MARK and each.payload == mark for each in listener.heard)

    def judge(self, listener: Listener) -> None:
        heard, listener.heard = listener.heard, []
        num_connects, before = listener.subscription.num_connects, listener.num_connects
        listener.num_connects = num_connects
        messages = [each for each in heard if each.topic != MARK]
        places = []
        for message in messages:
            number, place = map(int, message.payload.split(b" ", 2)[:2])
            assert message == self.publishers[number].sent[place], self.told
            places.append((number, place))
        num_rewinds = sum(later <= earlier for earlier, later in pairwise(places))
        if num_connects == before:
            assert num_rewinds == 0, (self.told, places)
        num_lost = listener.subscription._queue.num_lost  # type: ignore[attr-defined]
        if not listener.has_lost and num_lost == listener.num_lost:
            assert messages == self.history[listener.since :], (self.told, len(messages), listener.since)
        assert listener.subscription.num_malformed == 0
        assert listener.subscription.problem is None
        assert len(messages) > 0 or not self.history[listener.since :] or listener.has_lost
        listener.since, listener.has_lost, listener.num_lost = len(self.history), False, num_lost

    async def close(self) -> None:
        for listener in tuple(self.listeners):
            await self.stop(listener)
        for publisher in self.publishers:
            await asyncio.to_thread(publisher.publication.close, 5)


@pytest.fixture(params=["nats", "jetstream", "deliver all", "mqtt"])
def broker(
    request: pytest.FixtureRequest, start_nats_server: Callable[..., Any], start_mqtt_broker: Callable[..., Any]
) -> tuple[Any, str]:
    if request.param == "mqtt":
        server = start_mqtt_broker()
    else:
        server = start_nats_server(has_jetstream=request.param != "nats")
    options = {"jetstream": "?jetstream=KV", "deliver all": "?jetstream=KV&deliver=all"}.get(request.param, "")
    scheme = "mqtt" if request.param == "mqtt" else "nats"
    return server, f"{scheme}://127.0.0.1:{server.port}/org%2Fm/worker{options}"


@pytest.mark.parametrize("seed", LIVES)
async def test_a_random_life_on_a_broker(
    seed: int, broker: tuple[Any, str], until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvist.events.transports.base.MAX_RECONNECT_S", 0.2)
    monkeypatch.setattr("kvist.events.transports.received.QUEUE_CAPACITY", 400)
    life = Life(seed, *broker, until)
    try:
        await life.live()
    finally:
        await life.close()

"""A network in simulated time: one address, whoever publishes there, subscribers, and all that goes wrong between."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from kvist.events.codec import is_snapshot_part
from kvist.events.transports import Endpoint, Message, ReplayRequest
from kvist.events.transports.base import ReplaySource
from kvist.events.transports.block import MessageBlock

NOTHING = ()


@dataclass(slots=True)
class Weather:
    """How likely each fault is for a message."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    garble: float = 0.0


class Link:
    """One address. A message is lost, repeated, delayed or delivered; order is kept unless the weather says so."""

    def __init__(self, rng: random.Random, faults: Counter[str]) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = rng
        self.faults = faults
        self.weather = Weather()
        self.publication: WirePublication | None = None
        self.subscriptions: list[WireSubscription] = []
        self.is_cut = False
        self.is_jammed = False
        self.drops_next = 0
        self.bad_answer_rate = 0.0
        self.bad_answers: tuple[str, ...] = ()
        self.tells_departure = False
        self.speaks_engine = False
        self.num_connections = 0
        self.queue_capacity = 10_000
        self.kept: deque[Message] = deque(maxlen=50)
        self._num_clearings = 0
        self._free_at_s = 0.0

    def connect(self) -> None:
        """Take note that publisher and subscribers can see each other, now or again."""
        self.num_connections += 1
        for subscription in self.subscriptions:
            subscription.connected()

    def cut(self) -> None:
        """Lose all that is sent from here on."""
        self.num_connections += 1
        self.is_cut = True

    def mend(self) -> None:
        """Carry messages again."""
        self.is_cut = False
        if self.publication is not None:
            self.connect()

    def clear_up(self) -> None:
        """Have no more faults; what is late by now never comes."""
        self.weather = Weather()
        self.drops_next = 0
        self.bad_answer_rate = 0.0
        self._num_clearings += 1
        self.is_jammed = False
        for subscription in self.subscriptions:
            subscription.resume()
        if self.is_cut:
            self.mend()

    def send(self, message: Message) -> None:
        """Carry a message, or not."""
        self.kept.append(message)
        if self.is_cut:
            self.faults["lost in a cut"] += 1
        elif self.drops_next:
            self.drops_next -= 1
            self.faults["dropped"] += 1
        else:
            for carried, delay_s in self._fate(message):
                self._deliver_in(carried, delay_s)

    def resend(self, message: Message) -> None:
        """Deliver something once more."""
        self.faults["repeated late"] += 1
        self._deliver_in(message, 0.001)

    def _fate(self, message: Message) -> list[tuple[Message, float | None]]:
        """Return what arrives, each with its delay, None for in order."""
        weather, rng, faults = self.weather, self.rng, self.faults
        if rng.random() < weather.drop:
            faults["dropped"] += 1
            return []
        if rng.random() < weather.garble:
            faults["garbled"] += 1
            return [(message._replace(payload=_garbled(message.payload, rng)), None)]
        carried: list[tuple[Message, float | None]] = [(message, None)]
        if rng.random() < weather.delay:
            faults["delayed"] += 1
            carried = [(message, rng.random() * 5)]
        elif rng.random() < weather.reorder:
            faults["reordered"] += 1
            carried = [(message, 0.0)]
        if rng.random() < weather.duplicate:
            faults["duplicated"] += 1
            carried.append((message, None if self.speaks_engine else rng.choice((None, rng.random() * 3))))
        return carried

    def _deliver_in(self, message: Message, delay_s: float | None) -> None:
        # An engine's stream is one connection, and what is on its way ends with that.
        deliver = partial(self._deliver, message, self.num_connections if self.speaks_engine else None)
        if delay_s is None:
            # Never the same moment twice: the loop calls what is due then in any order.
            self._free_at_s = max(self._free_at_s + 1e-9, self.loop.time() + self.rng.random() * 0.002)
            self.loop.call_at(self._free_at_s, deliver)
        else:
            self.loop.call_later(delay_s, self._deliver_late, deliver, self._num_clearings)

    def _deliver_late(self, deliver: Callable[[], None], num_clearings: int) -> None:
        if num_clearings == self._num_clearings:
            deliver()

    def _deliver(self, message: Message, connection: int | None) -> None:
        if connection in (None, self.num_connections):
            for subscription in self.subscriptions:
                if not subscription.has_yet_to_connect:
                    subscription.deliver(message)


def _garbled(payload: bytes, rng: random.Random) -> bytes:
    """Return bytes that are no batch any more."""
    if rng.random() < 0.5:
        return payload[: rng.randrange(len(payload))]
    return rng.randbytes(rng.randrange(40))


class WirePublication:
    """The publisher's end of a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.source: ReplaySource | None = None
        link.publication = self
        if not link.is_cut:
            link.connect()

    @property
    def endpoint(self) -> str:
        return "tcp://virtual:1"

    def serve_replay(self, source: ReplaySource) -> None:
        self.source = source

    def send(self, message: Message) -> None:
        if self._link.is_jammed:
            self._link.faults["refused by a full transport"] += 1
            raise BlockingIOError("full")
        self._link.send(message)

    def close(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002 - what is on its way arrives anyway
        if self._link.publication is self:
            self._link.publication = None
            if self._link.tells_departure:
                for subscription in self._link.subscriptions:
                    subscription.departed()


class WireSubscription:
    """A subscriber's end of a link."""

    num_malformed = 0
    problem: str | None = None

    def __init__(self, link: Link, *, in_blocks: bool) -> None:
        self.num_connects = 0
        self.has_yet_to_connect = False
        self.is_peer_gone = False
        self._link = link
        self._in_blocks = in_blocks
        self._queue: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_stalled = False

    @property
    def is_caught_up(self) -> bool:
        return not self._queue and self._link.publication is not None and not self._link.is_cut

    async def __aenter__(self) -> Self:
        self._link.subscriptions.append(self)
        if self._link.publication is not None and not self._link.is_cut:
            self.connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.subscriptions.remove(self)

    def connected(self) -> None:
        """Connect; to an engine only once all is taken that another connection brought."""
        self.is_peer_gone = False
        if self._link.speaks_engine and self._queue:
            self.has_yet_to_connect = True
        else:
            self.num_connects += 1

    def _connect_at_last(self) -> None:
        self.has_yet_to_connect = False
        if self._link.publication is not None and not self._link.is_cut:
            self.connected()

    def departed(self) -> None:
        self.is_peer_gone = True
        self._wake()

    def stall(self) -> None:
        """Take no messages out of the queue, as when the process stands still."""
        self._is_stalled = True

    def resume(self) -> None:
        self._is_stalled = False
        if self._queue:
            self._wake()

    def deliver(self, message: Message) -> None:
        """Have a message arrive; the newest is lost where the queue is full."""
        if len(self._queue) >= self._link.queue_capacity:
            self._link.faults["lost by a slow subscriber"] += 1
            return
        self._queue.append(message)
        if not self._is_stalled:
            self._wake()

    async def receive(self) -> Sequence[Message]:
        while not self._queue or self._is_stalled:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self.is_peer_gone and not self._queue:
                return NOTHING
        messages = [self._queue.popleft() for _ in range(len(self._queue))]
        if self.has_yet_to_connect:
            self._link.loop.call_later(0.1, self._connect_at_last)
        return self._block(messages)

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask; the answer may be lost, cut short, late, or mixed up."""
        link = self._link
        fault = link.rng.choice(link.bad_answers) if link.rng.random() < link.bad_answer_rate else ""
        await asyncio.sleep(link.rng.random() * 0.02)
        publication = link.publication
        if publication is not None and publication.source is None:
            return None
        if fault == "replay refused" or publication is None or link.is_cut:
            if fault:
                link.faults[fault] += 1
            await asyncio.sleep(link.rng.choice((0.0, timeout_s)))
            return None
        if request.topic is not None and link.speaks_engine:  # what an engine does not understand it does not answer
            await asyncio.sleep(timeout_s)
            return None
        answer = []
        for message in publication.source.replay(request):
            answer.append(message)
            if link.rng.random() < 0.1:
                await asyncio.sleep(link.rng.random() * 0.05)
                if link.publication is not publication or link.is_cut:
                    link.faults["replay interrupted"] += 1
                    return None
        return await self._meddled(fault, answer, timeout_s)

    async def _meddled(self, fault: str, answer: list[Message], timeout_s: float) -> list[Message] | None:
        rng = self._link.rng
        has_snapshot = any(is_snapshot_part(message.payload) for message in answer)
        if not fault or (fault.startswith("snapshot") and not has_snapshot) or not answer:
            return answer
        self._link.faults[fault] += 1
        if fault == "replay interrupted":
            await asyncio.sleep(timeout_s)
            return None
        if fault == "replay late":
            await asyncio.sleep(rng.random() * 4)
        elif fault in ("replay cut short", "snapshot cut short"):
            del answer[rng.randrange(len(answer)) :]
        elif fault in ("replay with a hole", "snapshot with a hole"):
            del answer[rng.randrange(len(answer))]
        elif fault == "replay repeated":
            answer += answer[rng.randrange(len(answer)) :]
        elif fault == "replay reordered":
            rng.shuffle(answer)
        elif fault == "replay garbled":
            idx = rng.randrange(len(answer))
            answer[idx] = answer[idx]._replace(payload=_garbled(answer[idx].payload, rng))
        return answer

    def _block(self, messages: list[Message]) -> Sequence[Message]:
        return MessageBlock.of(messages) if self._in_blocks else messages

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Network:
    """All links, by address; hands out subscriptions in place of `open_subscription`."""

    def __init__(self, rng: random.Random, faults: Counter[str], *, in_blocks: bool) -> None:
        self._rng = rng
        self._faults = faults
        self._in_blocks = in_blocks
        self.links: dict[str, Link] = {}

    def link(self, address: str) -> Link:
        if address not in self.links:
            self.links[address] = Link(random.Random(self._rng.getrandbits(32)), self._faults)
        return self.links[address]

    def open_subscription(self, endpoint: Endpoint, *_: object) -> WireSubscription:
        return WireSubscription(self.link(endpoint.address), in_blocks=self._in_blocks)

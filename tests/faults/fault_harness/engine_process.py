"""An engine as a process: reads commands from standard input, and tells what it holds; ends by kill -9.

`engine_process.py KIND URL WORKER SEED NUM_RANKS RATE MAX_BLOCKS` answers each line "live N", "fill N", "quiet" or
"tell". Its KIND is `embedded`, with our publisher inside, or `stock`, with a stream of its own as vLLM has.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from fault_harness.engine import BLOCK_SIZE, Engine, digest_of
from fault_harness.lossy import LossyPublication
from fault_harness.workers import as_vllm
from kvist.errors import InvalidValueError
from kvist.events.engine_events import EngineEvent
from kvist.events.transports import Message, Publication, ReplayRequest, open_publication
from kvist.publisher import KvEventPublisher, PublisherLimits

BIND_TIMEOUT_S = 180.0
NUM_KEPT = 10_000


class StockPublisher:
    """The event side of a vLLM process: each event is a numbered batch, the last of which it sends again."""

    num_lost = num_waiting = 0

    def __init__(self, publication: Publication, rng: random.Random, rate: float) -> None:
        self.faults: Counter[str] = Counter()
        self._rate = rate
        self._publication = publication
        self._rng = rng
        self._kept: deque[Message] = deque(maxlen=NUM_KEPT)
        self._num_sent = 0
        publication.serve_replay(self)

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        return iter([message for message in list(self._kept) if message.sequence >= request.start_sequence])

    def report(self, event: EngineEvent) -> None:
        payload = msgspec.msgpack.encode([time.time(), [as_vllm(event)], event.rank])
        message = Message(b"", self._num_sent, payload)
        self._num_sent += 1
        self._kept.append(message)
        if self._rng.random() < self._rate:  # as at a full queue; a connection neither repeats nor reorders
            self.faults["dropped"] += 1
        else:
            self._publication.send(message)

    def be_kind(self) -> None:
        """Lose nothing from here on."""
        self._rate = 0.0


class EmbeddedPublisher:
    """Our publisher, behind a publication that meddles."""

    def __init__(
        self, publication: Publication, rng: random.Random, rate: float, worker: str = "", num_ranks: int = 1
    ) -> None:
        self._lossy = LossyPublication(publication, rng, rate)
        limits = PublisherLimits(coalesce_s=0.002, heartbeat_s=0.2, replay_max_batches=rng.choice((3, 50, 10_000)))
        self._publisher = KvEventPublisher(
            self._lossy, worker=worker, block_size=BLOCK_SIZE, num_ranks=num_ranks, limits=limits
        )
        self.report = self._publisher.report

    @property
    def faults(self) -> Counter[str]:
        return self._lossy.faults

    @property
    def num_lost(self) -> int:
        return self._publisher.statistics().num_lost_events

    @property
    def num_waiting(self) -> int:
        return self._publisher.statistics().num_waiting_events

    def be_kind(self) -> None:
        """Meddle no more."""
        self._lossy.rate = 0.0


def main(kind: str, url: str, worker: str, seed: int, num_ranks: int, rate: float, max_blocks: int) -> None:
    rng = random.Random(seed)
    publication = _bound(url, worker)
    if kind == "stock":
        publisher: StockPublisher | EmbeddedPublisher = StockPublisher(publication, rng, rate)
    else:
        publisher = EmbeddedPublisher(publication, rng, rate, worker, num_ranks)
    options = {"max_blocks": max_blocks, "has_copies": kind == "stock"}
    if max_blocks > 1000:  # prompts of which nearly all differ
        options |= {"num_branches": 1 << 20, "max_depth": 16}
    rngs = [random.Random(rng.getrandbits(32)) for _ in range(num_ranks)]
    engines = [Engine(each, rank, publisher.report, **options) for rank, each in enumerate(rngs)]
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, number = line.strip().partition(" ")
        if what == "live":
            for _ in range(int(number)):
                rng.choice(engines).live()
                if rng.random() < 0.05:
                    time.sleep(0.001)
        elif what == "fill":
            for engine in engines:
                while engine.num_blocks < int(number):
                    engine.store(4)
                    while publisher.num_waiting > 10_000:
                        time.sleep(0.01)
        elif what == "quiet":
            publisher.be_kind()
        held = [digest_of(engine.held) for engine in engines] if what == "tell" else []
        num_blocks = sum(engine.num_stored for engine in engines)
        told = {"held": held, "faults": publisher.faults, "blocks": num_blocks, "lost": publisher.num_lost}
        print(json.dumps(told), flush=True)


def _bound(url: str, worker: str) -> Publication:
    """Return a publication at the URL, whose port an outgoing connection may have for a while after a kill."""
    give_up_s = time.monotonic() + BIND_TIMEOUT_S
    while True:
        try:
            return open_publication(url, worker)
        except InvalidValueError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    kind, url, worker, seed, num_ranks, rate, max_blocks = sys.argv[1:]
    main(kind, url, worker, int(seed), int(num_ranks), float(rate), int(max_blocks))

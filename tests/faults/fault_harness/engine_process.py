"""An engine as a process: reads commands from standard input, and tells what it holds; ends by kill -9.

`engine_process.py URL WORKER SEED NUM_RANKS RATE MAX_BLOCKS` answers each line "live N", "fill N", "quiet" or "tell".
"""

from __future__ import annotations

import json
import random
import sys
import time

from fault_harness.engine import BLOCK_SIZE, Engine, digest_of
from fault_harness.lossy import LossyPublication
from kvist.errors import InvalidValueError
from kvist.events.transports import Publication, open_publication
from kvist.publisher import KvEventPublisher, PublisherLimits

BIND_TIMEOUT_S = 20.0


def main(url: str, worker: str, seed: int, num_ranks: int, rate: float, max_blocks: int) -> None:
    rng = random.Random(seed)
    publication = LossyPublication(_bound(url, worker), rng, rate)
    limits = PublisherLimits(coalesce_s=0.002, heartbeat_s=0.2, replay_max_batches=rng.choice((3, 50, 10_000)))
    publisher = KvEventPublisher(publication, worker=worker, block_size=BLOCK_SIZE, num_ranks=num_ranks, limits=limits)
    options = {"max_blocks": max_blocks}
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
                    while publisher.statistics().num_waiting_events > 10_000:
                        time.sleep(0.01)
        elif what == "quiet":
            publication.rate = 0.0
        held = [digest_of(engine.held) for engine in engines] if what == "tell" else []
        lost = publisher.statistics().num_lost_events
        told = {"held": held, "faults": publication.faults, "blocks": sum(e.num_stored for e in engines), "lost": lost}
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
    url, worker, seed, num_ranks, rate, max_blocks = sys.argv[1:]
    main(url, worker, int(seed), int(num_ranks), float(rate), int(max_blocks))

"""Embed the publisher in an engine: report what the cache does, and follow it with an index.

    python examples/embedded_publisher.py

An engine calls `created`, `stored`, `removed` and `cleared` from its own thread; no call waits or raises. Here the
"engine" is a few lines, and the index runs in the same process; a router would run elsewhere and connect to the
printed URL.
"""

from __future__ import annotations

import asyncio

from kvist.events import FULL, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.indexer import Indexer
from kvist.publisher import KvEventPublisher
from kvist.radix import RadixIndex

BLOCK_SIZE = 16
PROMPT = list(range(4 * BLOCK_SIZE))


def serve_one_request(publisher: KvEventPublisher) -> None:
    """Do what an engine does to its cache when it prefills a prompt of four blocks."""
    engine_hashes = [901, 902, 903, 904]  # whatever the engine calls its blocks
    publisher.stored(engine_hashes, PROMPT, window=FULL, group=0)
    publisher.stored([71, 72], PROMPT[: 2 * BLOCK_SIZE], window=1024, group=1)  # a sliding group: not published
    publisher.removed([904], window=FULL, group=0)  # the last block's slot went to another request


async def main() -> None:
    """Publish from an engine's thread, index, and ask who holds the prompt."""
    index = RadixIndex()
    with KvEventPublisher("tcp://127.0.0.1:0", worker="gpu-0", block_size=BLOCK_SIZE) as publisher:
        publisher.created(window=1024, group=1)
        publisher.created(window=FULL, group=0)
        async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
            indexer.add_source("gpu-0", publisher.endpoint)
            await asyncio.to_thread(serve_one_request, publisher)
            prompt_hashes = block_hashes(PROMPT, BLOCK_SIZE)
            async with asyncio.timeout(30):
                while index.digest(WorkerRank("gpu-0", 0)).num_blocks != 3:  # noqa: ASYNC110 - no event to wait for
                    await asyncio.sleep(0.01)
            for (worker, rank), depths in index.match(prompt_hashes).items():
                print(f"{worker} rank {rank} holds {depths.gpu} of {len(prompt_hashes)} blocks in GPU memory")
        statistics = publisher.statistics()
    print(f"published at {publisher.endpoint}: {statistics.num_sent_messages} messages")


if __name__ == "__main__":
    asyncio.run(main())

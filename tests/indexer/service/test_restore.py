"""From one service to another: a dump, and a start from it, over real sockets."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvist.publisher import KvEventPublisher, PublisherLimits

BLOCK_SIZE = 4


@pytest.fixture
def publisher():
    """Return a publisher that sends heartbeats often, and keeps everything for replay."""
    limits = PublisherLimits(coalesce_s=0.001, heartbeat_s=0.05)
    with KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=BLOCK_SIZE, limits=limits) as publisher:
        yield publisher


class Fleet:
    """Chains that a publisher was told, and whether a service knows them."""

    def __init__(self, publisher, seed=0):
        self._publisher = publisher
        self._rng = random.Random(seed)
        self._next_hash = 1
        self.chains = {}

    def store(self, num_chains, num_blocks=8):
        for _ in range(num_chains):
            tokens = [self._rng.randrange(1 << 32) for _ in range(num_blocks * BLOCK_SIZE)]
            hashes = list(range(self._next_hash, self._next_hash + num_blocks))
            self._next_hash += num_blocks
            self._publisher.stored(hashes, tokens)
            self.chains[hashes[0]] = (hashes, tokens)

    def cut(self, num_chains):
        """Remove the second half of some chains."""
        for first in self._rng.sample(sorted(self.chains), num_chains):
            hashes, tokens = self.chains[first]
            half = len(hashes) // 2
            self._publisher.removed(hashes[half:])
            self.chains[first] = (hashes[:half], tokens)

    async def is_known_to(self, client, instance="1"):
        for hashes, tokens in self.chains.values():
            if await client.scores(tokens) != {instance: {"0": len(hashes) * BLOCK_SIZE}}:
                return False
        return True


def port_of(publisher):
    return int(publisher.endpoint.partition("?")[0].rpartition(":")[2])


def options_of(publisher):
    return publisher.endpoint.partition("?")[2]


async def register(client, publisher, instance_id=1):
    body = {"instance_id": instance_id, "model_name": "default", "block_size": BLOCK_SIZE}
    endpoint = publisher.endpoint.replace("0.0.0.0", "127.0.0.1").replace("*", "127.0.0.1")
    assert (await client.post("/register", body | {"endpoint": endpoint})).status_code == 201


async def is_live(client, instance_id=1):
    ranks = (await client.workers())[instance_id]["listeners"]["0"]["ranks"]
    return bool(ranks) and all(rank["state"] == "live" for rank in ranks.values())


async def test_a_service_started_from_a_peer_knows_what_it_knows_and_goes_on_from_there(
    start_index, client, publisher, eventually
):
    fleet = Fleet(publisher)
    fleet.store(30)
    fleet.cut(10)
    await register(client, publisher)
    await eventually(lambda: fleet.is_known_to(client))
    second = await start_index(peers=(client.service.url,))
    await eventually(lambda: is_live(second))
    assert await fleet.is_known_to(second)
    fleet.cut(5)
    fleet.store(5)
    await eventually(lambda: fleet.is_known_to(second))
    counters = (await second.workers())[1]["listeners"]["0"]["counters"]
    assert counters["num_cleared"] == counters["num_diverged"] == counters["num_recovered"] == 0
    assert counters["num_batches"] < 15


async def test_what_happens_during_the_restore_is_not_missed(start_index, client, publisher, eventually):
    fleet = Fleet(publisher)
    fleet.store(100)
    await register(client, publisher)
    await eventually(lambda: fleet.is_known_to(client))

    async def churn():
        for _ in range(40):
            fleet.store(2)
            fleet.cut(1)
            await asyncio.sleep(0.005)

    churning = asyncio.create_task(churn())
    second = await start_index(peers=(client.service.url,))
    await churning
    await eventually(lambda: fleet.is_known_to(second))
    assert await is_live(second)

"""A fleet's days compressed: workers come, store, remove, restart and leave, and memory returns to where it was."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import psutil
import pytest

from kvist.events.transports import Endpoint, Message, ReplayRequest
from kvist.events.transports.memory import MemoryPublication
from kvist.indexer import Indexer
from kvist.radix import RadixIndex

BLOCK_SIZE = 16
MAX_GROWTH_BYTES = 8 << 20
DEADLINE_S = 180.0
SYSTEM_PROMPTS = [[number] * 4 * BLOCK_SIZE for number in range(8)]
_names = count()


class Kept:
    """A replay socket: what a process published since it started."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def replay(self, request: ReplayRequest) -> list[Message]:
        return self.messages[request.start_sequence :]


class Engine:
    """A worker's engine in this process: stores chains below shared system prompts, and evicts the oldest."""

    def __init__(self, rng: random.Random, url: str) -> None:
        self._rng = rng
        self.url = url
        self._start()

    def _start(self) -> None:
        self._kept = Kept()
        self._held: list[int] = []
        self._publication = MemoryPublication(Endpoint.parse(self.url))
        self._publication.serve_replay(self._kept)

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._publication.close()

    def work(self, num_conversations: int, capacity: int) -> None:
        """Store conversations, and remove what does not fit, in no particular order."""
        events: list[Any] = []
        for _ in range(num_conversations):
            tokens = self._rng.choice(SYSTEM_PROMPTS) + [self._rng.getrandbits(32) for _ in range(8 * BLOCK_SIZE)]
            chain = [hash(tuple(tokens[:end])) & 0x7FFF_FFFF_FFFF_FFFF for end in range(16, len(tokens) + 1, 16)]
            events.append(["BlockStored", chain, None, tokens, BLOCK_SIZE, None, "GPU"])
            self._held += chain
        while len(self._held) > capacity:
            removed = self._held.pop(self._rng.randrange(len(self._held) // 2))
            events.append(["BlockRemoved", [removed], "GPU"])
        self.publish(events)

    def publish(self, events: list[Any]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._kept.messages.append(Message(b"", len(self._kept.messages), payload))
        self._publication.send(self._kept.messages[-1])


async def live(indexer: Indexer, num_workers: int, num_alive: int, seed: int) -> None:
    """Let `num_workers` come and go, `num_alive` at a time, in random order."""
    rng = random.Random(seed)
    fleet: dict[str, Engine] = {}
    for number in range(num_workers):
        while len(fleet) >= num_alive:
            name = rng.choice(list(fleet))
            fleet.pop(name).close()
            indexer.remove_source(name)
        name = f"worker {next(_names)}"
        fleet[name] = Engine(rng, f"memory://churn-{name.split()[1]}")
        indexer.add_source(name, fleet[name].url)
        for engine in rng.sample(list(fleet.values()), min(4, len(fleet))):
            engine.work(rng.randint(1, 4), capacity=100)
            if rng.random() < 0.05:
                engine.restart()
        if number % 8 == 0:
            await asyncio.sleep(0)
    for name, engine in fleet.items():
        engine.close()
        indexer.remove_source(name)


async def has_settled(index: RadixIndex) -> bool:
    """Wait until all that is gone is swept."""
    give_up_s = time.monotonic() + DEADLINE_S
    while (left := index.statistics()).num_retired or left.num_blocks or left.num_ranks:
        assert time.monotonic() < give_up_s, left
        await asyncio.sleep(0.01)
    gc.collect()
    return True


@pytest.mark.parametrize("num_workers", [300, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_memory_returns_to_its_start_after_the_fleets_life(num_workers: int) -> None:
    process = psutil.Process()
    index = RadixIndex(seed=1)
    async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
        # What stays from a first day on: code, caches, and pages that the C library keeps for itself.
        await live(indexer, num_workers // 3, 32, seed=0)
        assert await has_settled(index)
        before_bytes, before_index_bytes = process.memory_info().rss, index.statistics().size_bytes
        for day in range(3):
            await live(indexer, num_workers // 3, 32, seed=day)
            assert await has_settled(index)
        statistics = index.statistics()
        assert statistics.num_sets == statistics.num_held == 0
        assert not indexer.resyncing
        assert not indexer.statistics()
        assert statistics.size_bytes <= before_index_bytes + (1 << 20)
        assert process.memory_info().rss - before_bytes < MAX_GROWTH_BYTES


def test_a_service_gives_back_what_workers_that_left_had(
    service: Any, start_vllm: Callable[..., Any], free_port: Callable[[], int]
) -> None:
    """Over real sockets, and without waiting for the interpreter to look for garbage."""
    process = psutil.Process()
    tokens = list(range(BLOCK_SIZE))
    keeper = {"model_name": "m", "block_size": BLOCK_SIZE, "endpoint": "tcp://127.0.0.1:9", "instance_id": 0}
    assert service.call("POST", "/register", keeper)[0] == 201
    before_bytes = 0
    port = free_port()
    for number in range(1, 41):
        engine = start_vllm(port)
        for hash_number in range(40):
            engine.store(hash_number, [number, hash_number, *tokens[2:]])
        body = keeper | {"instance_id": number, "endpoint": f"tcp://127.0.0.1:{port}"}
        assert service.call("POST", "/register", body | {"replay_endpoint": f"tcp://127.0.0.1:{port + 1}"})[0] == 201
        prompt = {"model_name": "m", "token_ids": [number, 39, *tokens[2:]]}
        give_up_s = time.monotonic() + DEADLINE_S
        while not service.call("POST", "/query", prompt)[1]["scores"]:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        assert service.call("POST", "/unregister", {"instance_id": number, "model_name": "m"})[0] == 200
        assert service.call("POST", "/query", prompt)[1]["instances"] == {}
        engine.kill()
        if number == 10:
            before_bytes = process.memory_info().rss
    assert service.call("POST", "/unregister", {"instance_id": 0, "model_name": "m"})[0] == 200
    assert process.memory_info().rss - before_bytes < MAX_GROWTH_BYTES

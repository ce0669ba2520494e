"""Histories with real processes, sockets and brokers: engines and brokers end by kill -9, routers at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fault_harness.engine import BLOCK_SIZE
from fault_harness.fleet import Tally
from kvist.events import WorkerRank
from kvist.indexer import Indexer
from kvist.radix import RadixIndex

EXACT_TIMEOUT_S = 60.0


class EngineProcess:
    """One engine at a URL: killed and started again at will."""

    def __init__(
        self, url: str, worker: str, rng: random.Random, *, rate: float, num_ranks: int = 1, max_blocks: int = 150
    ) -> None:
        self.url = url
        self._worker = worker
        self.num_ranks = num_ranks
        self.num_blocks = 0
        self.faults: dict[str, int] = {}
        self._rng = rng
        self._rate = rate
        self._max_blocks = max_blocks
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        script = Path(__file__).with_name("engine_process.py")
        numbers = (self._rng.getrandbits(32), self.num_ranks, self._rate, self._max_blocks)
        folders = [str(script.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), self.url, self._worker, *map(str, numbers)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"

    async def do(self, command: str) -> Any:
        """Have it do something; return what it tells."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        told = json.loads(await self._process.stdout.readline())
        self._told = told
        return told

    async def kill(self) -> None:
        if self._process is not None:
            told = await self.do("live 0")
            self.num_blocks += told["blocks"]
            for kind, number in told["faults"].items():
                self.faults[kind] = self.faults.get(kind, 0) + number
            self._process.kill()
            await self._process.wait()
            self._process = None


class LiveFleet:
    """Engines, a router in this process, and perhaps a broker between them."""

    def __init__(self, urls: list[str], seed: int, broker: Any = None, **options: Any) -> None:
        self.tally = Tally(num_histories=1)
        self.engines = [
            EngineProcess(url, f"pod-{number}", random.Random(f"{seed} {number}"), **options)
            for number, url in enumerate(urls)
        ]
        self._rng = random.Random(seed)
        self._broker = broker
        self._exits = AsyncExitStack()

    async def play(self, num_steps: int, events_a_step: int = 60, fill: int = 0) -> Tally:
        """Do so much, then have quiet and see that all is exact."""
        try:
            for engine in self.engines:
                await engine.start()
            await self._start_router()
            if fill:
                await asyncio.gather(*(engine.do(f"fill {fill}") for engine in self.engines))
            for _ in range(num_steps):
                await self._step(events_a_step)
            if fill:
                await asyncio.gather(*(engine.do(f"fill {fill}") for engine in self.engines))
            await self._become_quiet()
        finally:
            for engine in self.engines:
                await engine.kill()
                self.tally.num_blocks += engine.num_blocks
                self.tally.faults.update(engine.faults)
            await self._exits.aclose()
        return self.tally

    async def _start_router(self) -> None:
        self._index = RadixIndex(seed=self._rng.getrandbits(32))
        self._exits = AsyncExitStack()
        self._indexer = await self._exits.enter_async_context(Indexer(self._index, block_size=BLOCK_SIZE))
        for number, engine in enumerate(self.engines):
            self._indexer.add_source(str(number), engine.url)

    async def _step(self, num_events: int) -> None:
        choice = self._rng.random()
        engine = self._rng.choice(self.engines)
        living = asyncio.gather(*(each.do(f"live {self._rng.randint(0, num_events)}") for each in self.engines))
        if choice < 0.25:
            await living
            self._note("publisher killed")
            await engine.kill()
            await engine.start()
        elif choice < 0.4:
            self._note("router killed")
            await self._exits.aclose()
            await living
            await self._start_router()
        elif choice < 0.6 and self._broker is not None:
            self._note("broker killed")
            self._broker.kill()
            await living
            self._broker.start()
        elif choice < 0.75:
            self._note("subscriber stalled")
            time.sleep(self._rng.random() * 0.3)  # noqa: ASYNC251 - that is the fault: nothing is read meanwhile
            await living
        else:
            await living
            await asyncio.sleep(self._rng.random() * 0.1)

    def _note(self, kind: str) -> None:
        self.tally.faults[kind] += 1

    async def _become_quiet(self) -> None:
        for engine in self.engines:
            await engine.do("quiet")
        began_s = time.monotonic()
        while wrong := [each for engine in self.engines for each in await self._wrong(engine)]:
            assert time.monotonic() < began_s + EXACT_TIMEOUT_S, wrong
            await asyncio.sleep(0.05)
        self.tally.until_exact_s.append(time.monotonic() - began_s)
        self.tally.num_ranks += sum(engine.num_ranks for engine in self.engines)

    async def _wrong(self, engine: EngineProcess) -> list[str]:
        number = str(self.engines.index(engine))
        told = await engine.do("tell")
        assert told["lost"] == 0
        wrong = []
        for rank, expected in enumerate(told["held"]):
            held = self._index.digest(WorkerRank(number, rank))
            if [held.num_blocks, held.digest] != expected or not self._indexer.is_exact(number, rank):
                wrong.append(f"{engine.url} rank {rank} {self._indexer.states(number)}: {held}, expected {expected}")
        return wrong


async def play_live(
    transport: str,
    seed: int,
    free_port: Callable[[], int],
    broker: Any,
    *,
    num_workers: int,
    num_steps: int,
    **options: Any,
) -> Tally:
    """Play one history over a transport."""
    fill, events_a_step = options.pop("fill", 0), options.pop("events_a_step", 60)
    if transport == "tcp":
        urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(num_workers)]
    else:
        urls = [f"{transport}://127.0.0.1:{broker.port}/model/pod-{number}" for number in range(num_workers)]
    fleet = LiveFleet(urls, seed, broker, **options)
    try:
        return await fleet.play(num_steps, events_a_step, fill)
    except BaseException as error:
        error.add_note(f"fault seed {seed}, over {transport}")
        raise

"""One schedule, played to a router of one process and to four fronts in turn, falls to the same workers."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService
from kvist.router.fleet.load import LoadTracker
from kvist.router.policy.in_flight import PromptsInFlight
from kvist.router.policy.work import WorkRows

NUM_FRONTS, NUM_STEPS = 4, 120


def known_to(service: RouterService) -> Any:
    """What its next decision is made from, but for the prompt."""
    known = service.keeper
    assert known.index is not None
    return [
        (
            rank.target,
            rank.display_state,
            rank.num_blocks,
            *msgspec.structs.astuple(known.load.load(rank.target)),
        )
        for worker in known.fleet.workers
        for rank in known.index.ranks(worker.url)
    ]


class Clients:
    """Sends the same request to both, and holds what is to be held."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.held: list[asyncio.Task[httpx.Response]] = []

    async def answer(self, received: Any, writer: asyncio.StreamWriter) -> None:
        if json.loads(received.body).get("max_tokens") == 99:
            await self.released.wait()
        writer.write(b'HTTP/1.1 200 X\r\ncontent-length: 15\r\n\r\n{"choices": []}')

    def release(self) -> None:
        self.released.set()
        self.released = asyncio.Event()


def at(now_s: Callable[[], float], method: Any) -> Any:
    """Let it be another time for this method."""
    told = inspect.signature(method)

    def timed(*args: Any, **named: Any) -> Any:
        call = told.bind(*args, **named)
        call.arguments["now_s"] = now_s()
        return method(*call.args, **call.kwargs)

    return timed


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("policy", ["kv", "round-robin", "least-loaded"])
async def test_four_fronts_decide_as_one_process_does(
    worker, engine, fronts_of, until, monkeypatch, policy, seed
) -> None:
    for module in ("kvist.router.policy.baselines", "kvist.router.policy.priced"):
        monkeypatch.setattr(f"{module}.draw", lambda chances, _: chances.index(max(chances)))
    monkeypatch.setattr("kvist.router.routing.RANKS_MAX_AGE_S", -1.0)  # each knows what the others know now
    now_s = 0.0  # the same for all: who is asked a millisecond later may decide otherwise
    for owner, names in (
        (WorkRows, ("read", "dispatch", "answer", "withdraw", "end_unstreamed")),
        (PromptsInFlight, ("read", "add", "settle")),
        (LoadTracker, ("begin", "load")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, at(lambda: now_s, getattr(owner, name)))
    random, clients = Random(seed), Clients()
    async with AsyncExitStack() as exits:
        engines = [exits.enter_context(engine(f"e{number}")) for number in range(2)]
        infos = [None, None, *(each.server_info for each in engines)]
        workers = [await exits.enter_async_context(worker(server_info=info, answer=clients.answer)) for info in infos]
        config = RouterConfig(
            worker_urls=tuple(each.url for each in workers),
            port=0,
            policy=policy,
            block_size=16,
            health_interval_s=0.05,
        )
        alone = await exits.enter_async_context(RouterService(config))
        fronts = await exits.enter_async_context(fronts_of(config, NUM_FRONTS))
        urls = [alone.url, *(front.url for front in fronts)]
        client = await exits.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        conversations = [[random.randrange(1000) for _ in range(random.randrange(20, 200))] for _ in range(8)]
        stored: dict[str, int] = {}
        if policy == "kv":
            for each, held_by in zip(engines, workers[2:], strict=True):
                tokens = conversations[random.randrange(8)] * 3
                each.store(tokens)
                stored[held_by.url] = len(tokens) // 16
        chosen: list[list[str]] = []

        def is_settled() -> bool:
            if policy == "kv":
                expected = known_to(alone)
                held = {target.worker: num_blocks for target, _, num_blocks, *_ in expected}
                has_heard_all = len(held) == len(workers) and held.items() >= stored.items()
                return has_heard_all and all(known_to(front) == expected for front in fronts)
            loads = [front.keeper.load for front in (alone, *fronts)]
            return all(
                [load.running_requests(url) for load in loads].count(loads[0].running_requests(url)) == 5
                for url in config.worker_urls
            )

        async def ask(url: str, body: dict[str, Any]) -> str:
            return (await client.post(f"{url}/v1/completions", json=body)).headers["x-kvist-worker"]

        for step in range(NUM_STEPS):
            await until(is_settled)
            now_s += random.expovariate(100)
            if random.random() < 0.05:
                clients.release()
                await asyncio.gather(*clients.held)
                clients.held.clear()
                continue
            conversation = random.choice(conversations)
            conversation += [random.randrange(1000) for _ in range(random.randrange(0, 60))]
            is_held = random.random() < 0.3
            body = {"model": "m", "prompt": conversation, "max_tokens": 99 if is_held else 1}
            num_received = [len(each.completions) for each in workers]
            asked = [asyncio.create_task(ask(url, body)) for url in (urls[0], urls[1 + step % NUM_FRONTS])]
            if is_held:
                expected = sum(num_received) + 2
                await until(lambda expected=expected: sum(len(each.completions) for each in workers) == expected)
                fallen = [len(each.completions) - before for each, before in zip(workers, num_received, strict=True)]
                assert sorted(fallen) == [0, 0, 0, 2], step
                clients.held += asked
            else:
                chosen.append(await asyncio.gather(*asked))
                assert chosen[-1][0] == chosen[-1][1], step
        clients.release()
        await asyncio.gather(*clients.held)
        assert len({workers for workers, _ in chosen}) == len(workers)

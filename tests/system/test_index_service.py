"""The index as a process: engines over ZeroMQ in, a plain HTTP client out, and a second process that takes over."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvist.cli.up import Child, ProcessGroup
from kvist.errors import KvistError
from kvist.publisher import KvEventPublisher, PublisherLimits

pytestmark = pytest.mark.xdist_group("whole system")

Until = Callable[[Callable[[], object]], Awaitable[None]]
BLOCK_SIZE = 4
PROMPT = list(range(100, 140))


@pytest.fixture
async def group() -> AsyncIterator[ProcessGroup]:
    async with ProcessGroup() as group:
        yield group


@pytest.fixture
def chain(start_vllm: Callable[..., Any], free_port: Callable[[], int]) -> Callable[..., Any]:
    """Return a function that starts an engine, which holds the first blocks of the prompt."""

    def start(num_blocks: int, port: int | None = None) -> Any:
        port = port or free_port()
        engine = start_vllm(port)
        engine.endpoint = f"tcp://127.0.0.1:{port}"
        engine.port = port
        extend(engine, 0, num_blocks)
        return engine

    return start


def extend(engine: Any, first: int, last: int, rank: int = 0) -> None:
    """Store the prompt's blocks from `first` to before `last`, named 1, 2, …"""
    for idx in range(first, last):
        tokens = PROMPT[idx * BLOCK_SIZE : (idx + 1) * BLOCK_SIZE]
        engine.store(idx + 1, tokens, idx or None, rank=rank)


async def start_index(group: ProcessGroup, *arguments: str) -> Child:
    index = await group.start("index", "index", "--block-size", str(BLOCK_SIZE), "--port", "0", *arguments)
    while not await asyncio.to_thread(has_joined, index):  # noqa: ASYNC110 - what is waited for is another process
        await asyncio.sleep(0.05)
    return index


def has_joined(index: Child) -> bool:
    try:
        urllib.request.urlopen(f"{index.url}/readiness", timeout=60).close()
    except urllib.error.HTTPError as error:
        error.close()
        return False
    return True


def post(index: Child, path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{index.url}{path}", json.dumps({"model_name": "default"} | body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def scores(index: Child, token_ids: list[int] = PROMPT) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = post(index, "/query", token_ids=token_ids)["scores"]
    return found


async def test_a_fleet_is_followed_through_the_death_and_return_of_an_engine(
    group: ProcessGroup, chain: Callable[..., Any], until: Until
) -> None:
    engines = [chain(3), chain(5)]
    workers = f"1={engines[0].endpoint},2={engines[1].endpoint}"
    index = await start_index(group, "--workers", workers, "--replay")
    await until(lambda: scores(index) == {"1": {"0": 12}, "2": {"0": 20}})
    engines[1].kill()
    engines[1] = chain(1, engines[1].port)
    await until(lambda: scores(index) == {"1": {"0": 12}, "2": {"0": 4}})
    engines[0].remove(2)
    await until(lambda: scores(index)["1"] == {"0": 4})
    extend(engines[0], 1, 2)
    await until(lambda: scores(index)["1"] == {"0": 12})  # the third block never left


async def test_a_second_service_starts_from_the_first_and_goes_on_when_that_is_gone(
    group: ProcessGroup, chain: Callable[..., Any], until: Until, free_port: Callable[[], int]
) -> None:
    engine = chain(4)
    limits = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.1)
    with KvEventPublisher(f"tcp://127.0.0.1:{free_port()}", worker="w", block_size=4, limits=limits) as publisher:
        publisher.stored([1, 2], PROMPT[:8])
        workers = f"1={engine.endpoint},2={publisher.endpoint.partition('?')[0]}"
        first = await start_index(group, "--workers", workers, "--replay")
        await until(lambda: scores(first) == {"1": {"0": 16}, "2": {"0": 8}})
        second = await start_index(group, "--workers", workers, "--replay", "--peers", first.url)
        first.process.kill()
        await first.process.wait()
        await until(lambda: scores(second) == {"1": {"0": 16}, "2": {"0": 8}})
        publisher.removed([1])
        extend(engine, 4, 6)
        await until(lambda: scores(second) == {"1": {"0": 24}})
        publisher.stored([1], PROMPT[:4])
        await until(lambda: scores(second) == {"1": {"0": 24}, "2": {"0": 8}})


async def test_it_ends_in_order_amid_events_and_requests(group: ProcessGroup, chain: Callable[..., Any]) -> None:
    engine = chain(1)
    index = await start_index(group, "--workers", f"1={engine.endpoint}", "--replay")
    for _ in range(50):
        extend(engine, 0, 10)
        await asyncio.to_thread(scores, index)
    index.process.send_signal(signal.SIGTERM)
    extend(engine, 0, 10)
    assert await index.process.wait() == 0


async def test_a_service_that_was_killed_goes_on_from_its_folder(
    group: ProcessGroup, chain: Callable[..., Any], until: Until, free_port: Callable[[], int], tmp_path: Path
) -> None:
    engine = chain(3)
    limits = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.1)
    with KvEventPublisher(f"tcp://127.0.0.1:{free_port()}", worker="w", block_size=4, limits=limits) as publisher:
        publisher.stored([1, 2], PROMPT[:8])
        arguments = ("--state-dir", str(tmp_path), "--state-interval-s", "0.05")
        first = await start_index(group, *arguments)
        for instance_id, endpoint in enumerate((engine.endpoint, publisher.endpoint.partition("?")[0]), 1):
            post(first, "/register", instance_id=instance_id, endpoint=endpoint, block_size=BLOCK_SIZE)
        await until(lambda: scores(first) == {"1": {"0": 12}, "2": {"0": 8}})
        await until(lambda: all(kind in read(tmp_path / "index.state") for kind in (b"engine", b"canonical")))
        first.process.kill()
        await first.process.wait()
        engine.remove(3)
        publisher.removed([2])
        second = await start_index(group, *arguments)
        await until(lambda: state_of(second)["is_proven"])
        assert state_of(second)["streams"]["proven"] == 2
        await until(lambda: scores(second) == {"1": {"0": 8}, "2": {"0": 4}})
        with pytest.raises(KvistError, match="another: ended with exit code 2 before it was ready"):
            await group.start("another", "index", "--port", "0", *arguments)


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def state_of(index: Child) -> dict[str, Any]:
    """Return what the service says of its state on disk."""
    with urllib.request.urlopen(f"{index.url}/health", timeout=60) as answer:
        state: dict[str, Any] = json.load(answer)["state"]
    return state

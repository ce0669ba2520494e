"""A fleet that streams through a real MQTT broker: publishers that are killed, a broker that is killed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvist.events import WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.session import Session
from kvist.router.config import RouterConfig
from kvist.router.index import FleetIndex

BLOCK_SIZE = 4

HASHES = block_hashes(list(range(1, 13)), BLOCK_SIZE)

ENGINE = """
import sys, time
from kvist.publisher import KvEventPublisher

publisher = KvEventPublisher(sys.argv[1], worker="pod-1", block_size=4)
publisher.stored([1, 2, 3], list(range(1, 13)))
time.sleep(600)
"""


@pytest.fixture
def broker(start_mqtt_broker: Callable[..., Any]) -> Any:
    return start_mqtt_broker()


@pytest.fixture
def url(broker: Any) -> str:
    return f"mqtt://127.0.0.1:{broker.port}/model/pod-1"


@asynccontextmanager
async def engine(url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an engine that holds three blocks; it ends by kill -9, here at the latest."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ENGINE, url)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def failure(index: FleetIndex) -> str | None:
    """Return why the worker's stream cannot be received."""
    return next((source.failure for source in index.source_statistics()), None)


async def test_a_killed_engines_overlap_is_zero_at_once_and_back_with_the_engine(url, until, monkeypatch):
    monkeypatch.setattr(Session, "tick", lambda *_: None)  # or its silence would be noticed in the end
    held = {WorkerRank("pod-1", 0): (3, 3, 3, 3)}
    async with FleetIndex(RouterConfig(block_size=BLOCK_SIZE), time.monotonic) as index:
        index.follow("pod-1", [url])
        async with engine(url) as process:
            await until(lambda: index.match(HASHES) == held)
            process.kill()
            await until(lambda: index.match(HASHES) == {})
        async with engine(url):
            await until(lambda: index.match(HASHES) == held)
        assert next(index.source_statistics()).num_restarts == 1


async def test_a_broker_that_is_away_is_shown_and_the_index_exact_again_after_it(broker, url, until):
    async with FleetIndex(RouterConfig(block_size=BLOCK_SIZE), time.monotonic) as index, engine(url):
        index.follow("pod-1", [url])
        await until(lambda: index.match(HASHES))
        broker.kill()
        await until(lambda: "Connection refused" in (failure(index) or ""))
        broker.start()
        await until(lambda: failure(index) is None)
        await until(lambda: index.match(HASHES))
        assert next(index.source_statistics()).num_restarts == 0


async def test_a_stream_whose_client_is_not_installed_costs_its_worker_overlap_and_nothing_else(
    url, until, monkeypatch
):
    for name in [name for name in sys.modules if name.startswith("kvist.events.transports.mqtt")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiomqtt", None)
    async with FleetIndex(RouterConfig(block_size=BLOCK_SIZE), time.monotonic) as index:
        index.follow("pod-1", [url])
        await until(lambda: "pip install 'kvist[mqtt]'" in (failure(index) or ""))
        assert index.match(HASHES) == {}

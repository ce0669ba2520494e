"""The bundled model behind a real server on a free port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest

from kvist.engine import bundled_model_path
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore
from kvist.engine.loading import load_engine
from kvist.engine.server.api import Api, ServedModel
from kvist.http import HttpLimits, HttpServer
from kvist.openai.tokenization import ChatTokenizer

DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running server and the engine core behind it."""

    url: str
    core: EngineCore

    def metric(self, name: str) -> float:
        """Return a metric's sum over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvist_engine_{name}")]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_until_idle(self) -> None:
        """Fail unless soon no sequence runs or waits and no block is held."""
        names = ("requests_running", "requests_waiting", "kv_blocks_used")
        give_up_s = time.monotonic() + DEADLINE_S
        while any(self.metric(name) for name in names):
            assert time.monotonic() < give_up_s, "blocks leaked"
            time.sleep(0.01)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Serve for the whole session, in a thread with a loop of its own."""
    core = load_engine(EngineConfig(model_dir=bundled_model_path(), max_num_seqs=8, max_num_batched_tokens=256)).core
    ready, ports = threading.Event(), []
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        model = ServedModel(
            names=("tiny", "alias"),
            path=str(bundled_model_path()),
            kv_cache_dtype="float32",
            kv_events_endpoint="tcp://127.0.0.1:5557",
        )
        tokenizer = ChatTokenizer.load(bundled_model_path())
        async with AsyncEngine(core, max_num_open=40) as engine:
            limits = HttpLimits(max_body_bytes=2**20)
            async with HttpServer(Api(engine, tokenizer, model).handle, limits=limits) as server:
                ports.append(server.port)
                ready.set()
                await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    yield Served(f"http://127.0.0.1:{ports[0]}", core)
    loop.call_soon_threadsafe(stopped.set)
    thread.join()
    loop.close()


@pytest.fixture
def post(served: Served) -> Callable[..., httpx.Response]:
    """Post JSON (or raw content) to a path of the server."""

    def send(path: str, json: object = None, **options: object) -> httpx.Response:
        return httpx.post(served.url + path, json=json, timeout=60, **options)

    return send

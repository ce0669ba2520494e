"""What a worker's HTTP API says of prompts that it holds for others; nothing is transferred."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest_asyncio

from kvist.engine import bundled_model_path
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.server.api import Api, ServedModel, ServedTransfers
from kvist.http import HttpServer
from kvist.openai.tokenization import ChatTokenizer
from kvist.transfer.commands import (
    Command,
    Fetch,
    FetchFailed,
    FetchReleased,
    OfferReleased,
    Report,
    WithdrawOffer,
)

ENDPOINTS = ("tcp://10.0.0.1:7101", "tcp://10.0.0.1:7102")


@dataclass
class Transfers:
    """Transfers that release what is withdrawn at once, and can fetch nothing."""

    engine: AsyncEngine | None = None
    is_alive: bool = True
    wanted: list[Fetch] = field(default_factory=list)

    def command(self, command: Command) -> None:
        match command:
            case Fetch(request_id):
                self.wanted.append(command)
                self._report(FetchFailed(request_id, "nothing can be fetched"))
                self._report(FetchReleased(request_id))
            case WithdrawOffer(remote_request_id):
                self._report(OfferReleased(remote_request_id, False))

    def _report(self, report: Report) -> None:
        assert self.engine is not None
        self.engine.submit(partial(self.engine._core.on_report, report))


@dataclass(frozen=True)
class Served:
    client: httpx.AsyncClient
    engine: AsyncEngine
    transfers: Transfers

    async def post(self, **params: Any) -> httpx.Response:
        asked = {"prompt": [5, 6, 7, 8] * 5, "max_tokens": 3, "ignore_eos": True, "kv_transfer_params": params}
        return await self.client.post("/v1/completions", json=asked)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    core = load_engine(EngineConfig(model_dir=bundled_model_path(), max_model_len=128, max_num_seqs=2)).core
    transfers = Transfers()
    core.handoffs.attach(transfers.command)
    said = ServedTransfers(role="both", endpoints=ENDPOINTS, agent="shared_memory", is_alive=lambda: transfers.is_alive)
    model = ServedModel(
        names=("tiny",),
        path="/m",
        transfers=said,
        kv_cache_dtype="float32",
    )
    tokenizer = ChatTokenizer.load(bundled_model_path())
    async with AsyncEngine(core, max_num_open=4) as engine:
        transfers.engine = engine
        async with (
            HttpServer(Api(engine, tokenizer, model).handle) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
        ):
            yield Served(client, engine, transfers)


async def test_a_held_prompt_names_the_endpoint_of_every_rank(served) -> None:
    params = (await served.post(do_remote_decode=True)).json()["kv_transfer_params"]
    assert params["remote_endpoints"] == list(ENDPOINTS)
    assert (await served.client.get("/server_info")).json()["kv_transfer"]["endpoints"] == list(ENDPOINTS)
    assert served.engine.statistics().handoffs.num_held == 1


async def test_every_rank_that_holds_a_prompt_is_asked_for_it(served) -> None:
    params = (await served.post(do_remote_decode=True)).json()["kv_transfer_params"]
    assert (await served.post(**params)).json()["usage"]["completion_tokens"] == 3
    assert served.transfers.wanted[0].endpoints == ENDPOINTS


async def test_a_worker_whose_transfers_have_stopped_is_not_healthy(served) -> None:
    assert (await served.client.get("/health")).status_code == 200
    served.transfers.is_alive = False
    unhealthy = await served.client.get("/health")
    assert (unhealthy.status_code, unhealthy.json()["error"]["message"]) == (503, "transfers have stopped")

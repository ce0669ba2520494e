"""An index service on a free port, and a client that posts JSON to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from kvist.indexer.service import IndexConfig
from kvist.indexer.service.service import IndexService

BLOCK_SIZE = 4


class Client:
    """Talks to one service."""

    def __init__(self, service: IndexService, http: httpx.AsyncClient) -> None:
        self.service = service
        self.http = http

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.http.get(path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if not isinstance(body, bytes):
            return await self.http.post(path, json=body, **options)
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return await self.http.post(path, content=body, headers=headers, **options)

    async def register(self, port: int, instance_id: int = 1, **options: Any) -> httpx.Response:
        """Register an endpoint of this machine."""
        body = {
            "instance_id": instance_id,
            "endpoint": f"tcp://127.0.0.1:{port}",
            "model_name": "default",
            "block_size": BLOCK_SIZE,
        }
        return await self.post("/register", body | options)

    async def query(self, token_ids: list[int], **options: Any) -> dict[str, Any]:
        """Return the answer to a query that is right."""
        answer = await self.post("/query", {"token_ids": token_ids, "model_name": "default"} | options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def scores(self, token_ids: list[int], **options: Any) -> dict[str, dict[str, int]]:
        """Return the tokens on the GPU, by instance and rank."""
        return (await self.query(token_ids, **options))["scores"]

    async def workers(self) -> dict[int, dict[str, Any]]:
        """Return what `GET /workers` says, by instance."""
        return {worker["instance_id"]: worker for worker in (await self.get("/workers")).json()}


@pytest.fixture
async def start_index() -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    """Return a function that starts a service with the given configuration; all end with the test."""
    async with AsyncExitStack() as exits:

        async def start(**config: Any) -> Client:
            service = await exits.enter_async_context(IndexService(IndexConfig(port=0, **config)))
            http = await exits.enter_async_context(httpx.AsyncClient(base_url=service.url, timeout=60))
            return Client(service, http)

        yield start


@pytest.fixture
async def client(start_index) -> Client:
    """Return the client of a service that knows nobody yet."""
    return await start_index(block_size=BLOCK_SIZE)


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]:
    """Return `until` for conditions that must themselves be awaited."""

    async def poll(condition: Callable[[], Awaitable[object]]) -> None:
        async with asyncio.timeout(180):
            while not await condition():  # noqa: ASYNC110 - what is waited for is behind a socket
                await asyncio.sleep(0.005)

    return poll

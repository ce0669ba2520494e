"""A running index service: everything built from one configuration, started and ended together.

    async with IndexService(IndexConfig(workers=("1=tcp://127.0.0.1:5557",), block_size=16)) as service:
        ...  # listens on service.url

The server listens at once. The index joins when it is compiled, or its machine code loaded, and restored: until then
`/health` and `/readiness` say so, and every other request is answered with 503. The server stops first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvist import __version__
from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.files import exclusive_folder
from kvist.http import HttpLimits, HttpServer, Request, Responder, default_max_connections
from kvist.indexer import compilation
from kvist.indexer.service.config import IndexConfig

if TYPE_CHECKING:
    from kvist.indexer.service.api import Api

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 4.0
"""Time that running requests get when the service stops."""

RETRY_AFTER_S = 1


class IndexService(ComposedContext):
    """Listens from `async with` on until the block ends.

    If this process has compiled the index before, the index has joined when the block begins. If it cannot join, the
    block is cancelled and the context raises the error.
    """

    def __init__(self, config: IndexConfig, started_s: float | None = None) -> None:
        """`started_s`, of the monotonic clock, is when the process started, if the caller knows."""
        self._config = config
        self._started_s = time.monotonic() if started_s is None else started_s
        self._state = "compiling"
        self._api: Api | None = None
        self._joined = asyncio.Event()
        limits = HttpLimits(
            max_connections=config.max_connections or default_max_connections(),
            max_connections_per_peer=config.max_connections_per_peer,
            max_body_bytes=config.max_body_bytes,
            close_timeout_s=CLOSE_TIMEOUT_S,
        )
        self._server = HttpServer(self._handle, host=config.host, port=config.port, limits=limits)

    async def _open(self, exits: AsyncExitStack) -> None:
        if self._config.state_dir is not None:
            exits.enter_context(exclusive_folder("state_dir", Path(self._config.state_dir)))
        tasks = await exits.enter_async_context(BackgroundTasks())
        await exits.enter_async_context(self._server)
        tasks.create_task(self._run_index(), name="kvist-index")
        logger.info("listening url=%s", self.url)
        if compilation.is_loaded():
            await self._joined.wait()

    @property
    def url(self) -> str:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self._server.port}"

    async def _run_index(self) -> None:
        """Open the index as soon as it is compiled, and keep it until the server has stopped."""
        await compilation.load()
        from kvist.indexer.service.api import open_api

        self._state = "restoring"
        async with open_api(self._config, self._server.statistics) as api:
            api.cold_start_s = time.monotonic() - self._started_s
            self._api = api
            self._joined.set()
            logger.info("index ready url=%s cold_start_s=%.2f", self.url, api.cold_start_s)
            await asyncio.Event().wait()  # until cancelled

    def _handle(self, request: Request, responder: Responder) -> Coroutine[Any, Any, None] | None:
        api = self._api
        if api is not None:
            return api.handle(request, responder)
        headers = [(b"content-type", b"application/json")]
        if request.path == "/health":
            health = {"status": "ok", "version": __version__, "cold_start_s": None}
            responder.answer(HTTPStatus.OK, headers, msgspec.json.encode(health))
            return None
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        page: dict[str, Any] = {"ready": False, "index": self._state}
        if request.path != "/readiness":
            page = {"error": f"the index is {self._state}; GET /readiness says when it has joined"}
        responder.answer(HTTPStatus.SERVICE_UNAVAILABLE, headers, msgspec.json.encode(page))
        return None

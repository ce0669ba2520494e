"""Tells prefill workers which prompts nobody will fetch, so that they need not hold them until their time is over.

    async with Releases(pool, metrics.released) as releases:
        releases.release(worker_url, remote_request_id, headers)

A worker that is not told frees the blocks all the same, later: so this is tried once, in the background, and given up
when too many wait. Bundled workers alone have the endpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple, Self
from urllib.parse import quote

from kvist.errors import leave_group
from kvist.http import Headers, UpstreamError, UpstreamPool

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""What a decode worker that dies can leave behind at once; beyond it releases are dropped, and counted."""

_NUM_SENDERS = 4
_TIMEOUT_S = 5.0


class _Release(NamedTuple):
    worker: str
    remote_request_id: str
    headers: Headers


class Releases:
    """Sends releases for as long as it is open, each at most once; those that wait when it closes are not sent."""

    def __init__(self, pool: UpstreamPool, on_outcome: Callable[[str], None]) -> None:
        """`on_outcome` is told of each: `released`, `unknown` to its worker, `failed` or `dropped`."""
        self._pool = pool
        self._on_outcome = on_outcome
        self._waiting: asyncio.Queue[_Release] = asyncio.Queue(MAX_WAITING)
        self._group = asyncio.TaskGroup()
        self._senders: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._senders = [self._group.create_task(self._send(), name="release prompts") for _ in range(_NUM_SENDERS)]
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for sender in self._senders:
            sender.cancel()
        await leave_group(self._group, error)

    def release(self, worker: str, remote_request_id: str, headers: Headers) -> None:
        """Have the worker told, soon, that nobody will fetch what it holds under this name. Never waits."""
        try:
            self._waiting.put_nowait(_Release(worker, remote_request_id, headers))
        except asyncio.QueueFull:
            self._on_outcome("dropped")

    async def _send(self) -> None:
        while True:
            self._on_outcome(await self._outcome(await self._waiting.get()))

    async def _outcome(self, release: _Release) -> str:
        """Return what came of it: `released`, `unknown` where it is held no more, or `failed`."""
        target = "/kv_transfer/" + quote(release.remote_request_id, safe="")
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                self._pool.exchange(release.worker, "DELETE", target, release.headers) as response,
            ):
                async for _ in response.body():
                    pass
        except (UpstreamError, TimeoutError) as error:
            logger.info("prompt not released worker=%s reason=%s", release.worker, error)
            return "failed"
        match response.status:
            case HTTPStatus.NO_CONTENT:
                return "released"
            case HTTPStatus.NOT_FOUND:
                return "unknown"
        logger.info("prompt not released worker=%s status=%d", release.worker, response.status)
        return "failed"

"""Tells prefill workers which prompts nobody will fetch, so that they need not hold them until their time is over.

A worker that is not told frees the blocks all the same, later: so this is tried once, and given up when too many wait.
Bundled workers alone have the endpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import quote

from kvist.http import Headers, ResponseReceiver, UpstreamError, UpstreamPool

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""What a decode worker that dies can leave behind at once; beyond it releases are dropped, and counted."""

_OUTCOMES = {204: "released", 404: "unknown"}


class Releases:
    """Sends releases, each at most once."""

    def __init__(self, pool: UpstreamPool, on_outcome: Callable[[str], None]) -> None:
        """`on_outcome` is told of each: `released`, `unknown` to its worker, `failed` or `dropped`."""
        self._pool = pool
        self._on_outcome = on_outcome
        self._num_waiting = 0

    def release(self, worker: str, remote_request_id: str, headers: Headers) -> None:
        """Tell the worker that nobody will fetch what it holds under this name. Never waits."""
        if self._num_waiting == MAX_WAITING:
            self._on_outcome("dropped")
            return
        self._num_waiting += 1
        target = "/kv_transfer/" + quote(remote_request_id, safe="")
        self._pool.send(_Release(worker, self._ended), worker, "DELETE", target, headers)

    def _ended(self, worker: str, status: int) -> None:
        self._num_waiting -= 1
        outcome = _OUTCOMES.get(status, "failed")
        if outcome == "failed":
            logger.info("prompt not released worker=%s status=%d", worker, status)
        self._on_outcome(outcome)


class _Release(ResponseReceiver):
    """Says what status it ended with, 0 without an answer."""

    status = 0

    def __init__(self, worker: str, on_ended: Callable[[str, int], None]) -> None:
        self._worker = worker
        self._on_ended = on_ended

    def on_head(self, status: int, _headers: Headers) -> None:
        self.status = status

    def on_data(self, piece: bytes) -> None:
        """Drop it."""

    def on_end(self) -> None:
        self._on_ended(self._worker, self.status)

    def on_failure(self, _: UpstreamError) -> None:
        self._on_ended(self._worker, 0)

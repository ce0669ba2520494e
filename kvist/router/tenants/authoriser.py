"""Asks an authoriser over HTTP which tenant a key belongs to; its answers are cached for a time.

    GET URL                          2xx and an entry of a file of tenants, without keys     the tenant
    authorization: Bearer KEY        401, 403                                                the same for the client
                                     anything else, or nothing in time                       503: nobody is let in

At most one request a key is under way; all who need its answer wait for it. Answers are cached by the key's SHA-256,
the latest `MAX_KEPT` tenants and as many refusals: so made-up keys do not evict real ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from hashlib import sha256
from http import HTTPStatus
from time import monotonic
from urllib.parse import urlsplit

import msgspec

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import MalformedMessageError
from kvist.http import UpstreamError, UpstreamLimits, UpstreamPool
from kvist.router.tenants.tenant import DEFAULT, Tenant

logger = logging.getLogger(__name__)

MAX_KEPT = 10_000
MAX_ASKED = 256
"""Requests to the authoriser at a time."""
MAX_ANSWER_BYTES = 64 * 1024

Verdict = Tenant | HTTPStatus
"""The key's tenant, or the status of the refusal."""

_decode = msgspec.json.Decoder(Tenant).decode


class Authoriser(ComposedContext):
    """Can be asked while its context is open."""

    def __init__(self, url: str, ttl_s: float, timeout_s: float, now_s: Callable[[], float] = monotonic) -> None:
        parts = urlsplit(url)
        self._url, self._origin, self._target = url, f"{parts.scheme}://{parts.netloc}", parts.path or "/"
        self._ttl_s, self._timeout_s, self._now_s = ttl_s, timeout_s, now_s
        self._pool = UpstreamPool(UpstreamLimits(connect_timeout_s=timeout_s))
        self._tasks = BackgroundTasks()
        self._asked: dict[bytes, asyncio.Task[Verdict]] = {}
        self._tenants: dict[bytes, tuple[float, Verdict]] = {}
        self._refusals: dict[bytes, tuple[float, Verdict]] = {}
        """Answers, and until when each is valid; the oldest are first in both."""
        self._is_failing = False

    async def _open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self._pool)
        await exits.enter_async_context(self._tasks)

    def cached(self, digest: bytes) -> Verdict | None:
        """Return the cached answer for a key, None if the authoriser has to be asked."""
        until_s, verdict = self._tenants.get(digest) or self._refusals.get(digest) or (0.0, None)
        return verdict if self._now_s() < until_s else None

    async def ask(self, key: bytes) -> Verdict:
        """Return the authoriser's answer for a key; SERVICE_UNAVAILABLE if it gave none that can be used."""
        digest = sha256(key).digest()
        asked = self._asked.get(digest)
        if asked is None:
            if len(self._asked) >= MAX_ASKED:
                return HTTPStatus.SERVICE_UNAVAILABLE
            asked = self._asked[digest] = self._tasks.create_task(self._ask(digest, key), name="kvist-authoriser")
        return await asyncio.shield(asked)

    async def _ask(self, digest: bytes, key: bytes) -> Verdict:
        try:
            async with self._pool.clock.timeout(self._timeout_s):
                verdict = await self._answer(key)
        except (TimeoutError, UpstreamError, MalformedMessageError, ValueError) as error:  # msgspec's errors are, too
            if not self._is_failing:
                logger.error("authoriser gave no valid answer url=%s reason=%s", self._url, str(error) or "timeout")
            self._is_failing = True
            return HTTPStatus.SERVICE_UNAVAILABLE
        finally:
            del self._asked[digest]
        if self._is_failing:
            logger.info("authoriser answers again url=%s", self._url)
        self._is_failing = False
        self._tenants.pop(digest, None)
        self._refusals.pop(digest, None)
        kept = self._tenants if isinstance(verdict, Tenant) else self._refusals
        kept[digest] = self._now_s() + self._ttl_s, verdict
        if len(kept) > MAX_KEPT:
            del kept[next(iter(kept))]
        return verdict

    async def _answer(self, key: bytes) -> Verdict:
        """Send the request; raises UpstreamError, and the others for an answer that cannot be used."""
        headers = [(b"accept", b"application/json"), (b"authorization", b"Bearer " + key)]
        async with self._pool.exchange(self._origin, "GET", self._target, headers) as response:
            body = await response.read(MAX_ANSWER_BYTES)
        if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return HTTPStatus(response.status)
        if not 200 <= response.status < 300:
            raise ValueError(f"status {response.status}, expected 2xx, 401 or 403")
        tenant = _decode(body)
        if tenant.name == DEFAULT.name:
            raise ValueError(f"name: got {tenant.name!r}, expected another, as that is who has the router's own keys")
        return tenant

"""Finds the tenant of a request by its key."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError
from kvist.files import file_stamp
from kvist.http import Request
from kvist.openai.errors import RequestError
from kvist.router.config import RouterConfig
from kvist.router.tenants.authoriser import Authoriser, Verdict
from kvist.router.tenants.tenant import DEFAULT, UNRESOLVED, Tenant, read_tenants

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""How often the file is checked for changes."""
_REFUSALS = {
    HTTPStatus.UNAUTHORIZED: (
        "authorization: expected 'Bearer' and the API key, or x-api-key",
        "invalid_api_key",
        None,
    ),
    HTTPStatus.FORBIDDEN: ("authorization: the key's owner may not use this service", "key_forbidden", None),
    HTTPStatus.SERVICE_UNAVAILABLE: ("whose key it is cannot be told now; ask again", "authoriser_unavailable", 1),
}


class Keys(ComposedContext):
    """Looks keys up by their SHA-256, so that the time a lookup takes reveals nothing of the keys.

    While its context is open it reloads the file of tenants when that changes; a file with an error changes nothing.
    """

    def __init__(self, config: RouterConfig) -> None:
        """Load the keys of the settings and those of the file; raises InvalidValueError."""
        self._path = None if config.tenants is None else Path(config.tenants)
        self._stamp = file_stamp(self._path)
        self._listed = {} if self._path is None else read_tenants(self._path)
        self._authoriser = None
        if config.auth_url is not None:
            self._authoriser = Authoriser(config.auth_url, config.auth_ttl_s, config.auth_timeout_s)
        self.reconfigure(config)

    def reconfigure(self, config: RouterConfig) -> None:
        self._is_open = not config.asks_for_keys
        keys = (config.api_key, config.admin_key)
        self._own = {sha256(key.encode()).digest() for key in keys if key is not None}

    async def _open(self, exits: AsyncExitStack) -> None:
        if self._authoriser is not None:
            await exits.enter_async_context(self._authoriser)
        if self._path is not None:
            tasks = await exits.enter_async_context(BackgroundTasks())
            tasks.create_task(self._follow(self._path), name="kvist-tenants")

    def tenant_of(self, request: Request) -> Tenant:
        """Return the request's tenant, UNRESOLVED where the authoriser has to be asked (`resolve_tenant`).

        Raises RequestError where keys are required: 401 without a known one, 403 if its owner may not use the service.
        """
        if self._is_open:
            return DEFAULT
        key = request.client_key
        digest = sha256(key).digest() if key else b""
        tenant = DEFAULT if digest in self._own else self._listed.get(digest)
        if tenant is None and key and self._authoriser is not None:
            return _admitted(self._authoriser.cached(digest) or UNRESOLVED)
        return _admitted(tenant or HTTPStatus.UNAUTHORIZED)

    async def resolve_tenant(self, request: Request) -> Tenant:
        """Return the request's tenant; raises RequestError as `tenant_of`, and 503 if the authoriser is away."""
        tenant = self.tenant_of(request)
        if tenant is UNRESOLVED and self._authoriser is not None:
            tenant = _admitted(await self._authoriser.ask(request.client_key or b""))
        return tenant

    async def _follow(self, path: Path) -> NoReturn:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if (stamp := file_stamp(path)) == self._stamp:
                continue
            self._stamp = stamp
            try:
                self._listed = await asyncio.to_thread(read_tenants, path)
                logger.info("tenants reloaded num_keys=%d", len(self._listed))
            except InvalidValueError as error:
                logger.error("tenants not reloaded reason=%s", error)


def _admitted(verdict: Verdict) -> Tenant:
    if isinstance(verdict, Tenant):
        return verdict
    message, code, retry_after_s = _REFUSALS[verdict]
    raise RequestError(verdict, message, code=code, retry_after_s=retry_after_s)

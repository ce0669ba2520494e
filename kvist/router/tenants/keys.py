"""Which tenant a request is of, by the key that it bears."""

from __future__ import annotations

import asyncio
import logging
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn, Self

from kvist.errors import InvalidValueError, leave_group
from kvist.files import file_stamp
from kvist.http import Request
from kvist.openai.errors import RequestError
from kvist.router.config import RouterConfig
from kvist.router.tenants.tenant import DEFAULT, Tenant, read_tenants

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the file is looked at."""


class Keys:
    """Knows keys by their SHA-256 alone: how long it takes to find none tells nothing of those there are.

    While its context is open it follows the file of tenants; one that cannot be used leaves all as it was.
    """

    def __init__(self, config: RouterConfig) -> None:
        """Know the keys of the settings and those of the file; raises InvalidValueError."""
        self._path = None if config.tenants is None else Path(config.tenants)
        self._stamp = file_stamp(self._path)
        self._listed = {} if self._path is None else read_tenants(self._path)
        self._tasks = asyncio.TaskGroup()
        self.reconfigure(config)

    def reconfigure(self, config: RouterConfig) -> None:
        """Know the keys of these settings from now on."""
        self._is_open = not config.asks_for_keys
        keys = (config.api_key, config.admin_key)
        self._own = {sha256(key.encode()).digest() for key in keys if key is not None}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        if self._path is not None:
            self._following = self._tasks.create_task(self._follow(self._path), name="kvist-tenants")
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._path is not None:
            self._following.cancel()
        await leave_group(self._tasks, error)

    def tenant_of(self, request: Request) -> Tenant:
        """Return who asks; raises RequestError (401) for one without a key that is known, where keys are asked for."""
        if self._is_open:
            return DEFAULT
        token = request.bearer_token
        digest = sha256(token).digest() if token else b""
        if (tenant := DEFAULT if digest in self._own else self._listed.get(digest)) is None:
            message = "authorization: expected 'Bearer' and the API key"
            raise RequestError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        return tenant

    async def _follow(self, path: Path) -> NoReturn:
        while True:
            await asyncio.sleep(LOOK_S)
            if (stamp := file_stamp(path)) == self._stamp:
                continue
            self._stamp = stamp
            try:
                self._listed = await asyncio.to_thread(read_tenants, path)
                logger.info("tenants reloaded num_keys=%d", len(self._listed))
            except InvalidValueError as error:
                logger.error("tenants stay as they were reason=%s", error)

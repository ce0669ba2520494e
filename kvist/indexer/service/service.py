"""A running index service: everything built from one configuration, started and ended together.

    async with IndexService(IndexConfig(workers=("1=tcp://127.0.0.1:5557",), block_size=16)) as service:
        ...  # serves on service.url

The server listens last, when everything compiled is compiled, and stops first.
"""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import kvist.indexer.canonical_lane
import kvist.indexer.engine_lane
import kvist.indexer.frames  # noqa: F401 - all three compiled here, rather than with the first stream
from kvist.http import HttpLimits, HttpServer, default_max_connections
from kvist.indexer.dumps.dumper import Dumper
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.indexer.service.api import Api
from kvist.indexer.service.bodies import DEFAULT_GROUP
from kvist.indexer.service.config import IndexConfig
from kvist.indexer.service.endpoints import EndpointRules
from kvist.indexer.service.metrics import Gauges, RequestCounters
from kvist.indexer.service.registrations import Registrations
from kvist.indexer.service.registry import Namespace, Registry, Stream
from kvist.indexer.service.restore import Restorer
from kvist.metrics_page import MetricsPage

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 4.0
"""Time that running requests get when the service stops."""


class IndexService:
    """Serves from `async with` on until the block ends."""

    def __init__(self, config: IndexConfig, started_s: float | None = None) -> None:
        """`started_s`, of the monotonic clock, is when the process began to load this, if the caller knows."""
        self._config = config
        self._started_s = time.monotonic() if started_s is None else started_s
        self._exits = AsyncExitStack()
        self._server: HttpServer | None = None
        self.cold_start_s = 0.0
        """Seconds until it served."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            await self._start(exits)
            self._exits = exits.pop_all()
        self.cold_start_s = self._api.cold_start_s = time.monotonic() - self._started_s
        logger.info("index serves url=%s cold_start_s=%.2f", self.url, self.cold_start_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, let requests end within `CLOSE_TIMEOUT_S`, release everything."""
        await self._exits.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        """Return where the service listens."""
        assert self._server is not None
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self._server.port}"

    async def _start(self, exits: AsyncExitStack) -> None:
        config = self._config
        rules = EndpointRules(config.allow_endpoints, config.replay)
        is_held = bool(config.peers) or config.state_dir is not None
        registry = Registry(
            time.monotonic, max_blocks=config.max_blocks, num_ranks=config.data_parallel_size, is_held=is_held
        )
        await exits.enter_async_context(registry)
        dumper = Dumper()
        keeper = await self._open_state(exits, registry, dumper)
        for worker in config.parsed_workers():
            assert config.block_size is not None
            namespace = Namespace(config.model_name, DEFAULT_GROUP)
            stream = Stream(worker.endpoint, rules.with_replay(worker.endpoint))
            await registry.register(namespace, config.block_size, worker.instance_id, worker.dp_rank, stream)
        restorer = Restorer(registry, rules, config.admin_key or config.api_key)
        is_restored = bool(config.peers) and await restorer.restore(config.peers)
        if keeper is not None:
            if not is_restored:
                registrations = Registrations(registry, rules)
                await keeper.load(registrations, registrations.follow_all)
            keeper.begin()
        registry.release()
        counters = RequestCounters()
        page = MetricsPage(Gauges(registry, counters, lambda: server.statistics(), keeper).collect)
        self._api = Api(registry, rules, counters, page, config.api_key, config.admin_key, dumper, keeper)
        limits = HttpLimits(
            max_connections=config.max_connections or default_max_connections(),
            max_connections_per_peer=config.max_connections_per_peer,
            max_body_bytes=config.max_body_bytes,
            close_timeout_s=CLOSE_TIMEOUT_S,
        )
        server = HttpServer(
            self._api.handle,
            quick_endpoints=self._api.quick_endpoints,
            may_quick=self._api.may_query,
            host=config.host,
            port=config.port,
            limits=limits,
        )
        self._server = await exits.enter_async_context(server)

    async def _open_state(self, exits: AsyncExitStack, registry: Registry, dumper: Dumper) -> StateKeeper | None:
        """Return what keeps the indexes on disk, if anything does; it saves once more when the server has stopped."""
        config = self._config
        if config.state_dir is None:
            return None
        keeper = StateKeeper(
            Path(config.state_dir), "index", config.state_interval_s, lambda: registry, dumper, time.monotonic
        )
        await exits.enter_async_context(keeper)
        exits.push_async_callback(keeper.stop)
        return keeper

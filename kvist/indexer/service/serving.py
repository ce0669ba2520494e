"""What of an index service needs compiled code: the indexes, what they are restored from, and the API on them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kvist.http import ServerStatistics
from kvist.indexer.dumps.dumper import Dumper
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.indexer.memory import default_max_blocks
from kvist.indexer.service.api import Api
from kvist.indexer.service.bodies import DEFAULT_GROUP
from kvist.indexer.service.config import IndexConfig
from kvist.indexer.service.endpoints import EndpointRules
from kvist.indexer.service.metrics import Gauges, RequestCounters
from kvist.indexer.service.registry import Namespace, Registry, Stream
from kvist.indexer.service.restore import Registrations, Restorer
from kvist.metrics_page import MetricsPage


@asynccontextmanager
async def open_api(config: IndexConfig, server: Callable[[], ServerStatistics]) -> AsyncIterator[Api]:
    """Have the API on indexes that follow what is configured, once they are restored, until the context ends."""
    rules = EndpointRules(config.allow_endpoints, config.replay)
    is_held = bool(config.peers) or config.state_dir is not None
    registry = Registry(
        time.monotonic,
        max_blocks=config.max_blocks or default_max_blocks(),
        num_ranks=config.data_parallel_size,
        has_full_reports=config.full_reports,
        is_held=is_held,
    )
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(registry)
        dumper = Dumper()
        keeper = await _open_state(config, exits, registry, dumper)
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
        page = MetricsPage(Gauges(registry, counters, server, keeper).collect)
        yield Api(registry, rules, counters, page, config.api_key, config.admin_key, dumper, keeper)


async def _open_state(
    config: IndexConfig, exits: AsyncExitStack, registry: Registry, dumper: Dumper
) -> StateKeeper | None:
    """Return what keeps the indexes on disk, if anything does; it saves once more at the end."""
    if config.state_dir is None:
        return None
    keeper = StateKeeper(
        Path(config.state_dir), "index", config.state_interval_s, lambda: registry, dumper, time.monotonic
    )
    await exits.enter_async_context(keeper)
    exits.push_async_callback(keeper.stop)
    return keeper

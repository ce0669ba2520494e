"""A router's index with a folder, as often as a test starts it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvist.contexts import BackgroundTasks
from kvist.events import WorkerRank
from kvist.indexer import Indexer
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.radix import RadixIndex
from kvist.router.index import FleetState


@dataclass
class Kept:
    """An index that is kept in a folder."""

    index: RadixIndex
    indexer: Indexer
    keeper: StateKeeper

    def is_exact(self, truth, worker: str = "w", rank: int = 0) -> bool:
        """Tell whether what is known of a rank is known for certain, and is the truth."""
        held = self.index.digest(WorkerRank(worker, rank))
        return self.indexer.is_exact(worker, rank) and (held.num_blocks, held.digest) == truth.digest()

    def state(self, worker: str = "w") -> str | None:
        """Return the state of the worker's first rank."""
        return next((state.value for state in self.indexer.states(worker).values()), None)


@pytest.fixture
def start_kept(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Kept]]:
    """Return what starts an index on the test's folder, follows streams, and saves at the end."""

    @asynccontextmanager
    async def start(
        *streams: tuple[str, str], block_size: int = 4, interval_s: float = 3600.0, is_killed: bool = False
    ) -> AsyncIterator[Kept]:
        index = RadixIndex()
        async with Indexer(index, block_size=block_size) as indexer:
            fleet = FleetState(index, indexer)
            keeper = StateKeeper(tmp_path, "router", interval_s, lambda: [fleet], time.monotonic)
            async with BackgroundTasks() as tasks:
                await keeper.load(fleet)
                keeper.start(tasks)
                for worker, url in streams:
                    indexer.add_source(worker, url)
                yield Kept(index, indexer, keeper)
                if not is_killed:
                    await keeper.stop()

    return start

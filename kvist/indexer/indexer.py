"""The indexer: one task a source, all in front of one index."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, closing
from functools import partial

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError, MissingExtraError
from kvist.events import WorkerRank
from kvist.events.follow import Turns, follow
from kvist.events.session import SourceState
from kvist.events.transports import open_subscription
from kvist.events.transports.zmtp import Reads
from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled.frames import split
from kvist.indexer.source import Progress, Source
from kvist.indexer.statistics import DEFAULT_NUM_RANKS, SourceStatistics
from kvist.radix import RadixIndex

_logger = logging.getLogger(__name__)

MAX_REPLAYS_AT_ONCE = 32
"""Replays under way at a time: a fleet that restarts is replayed one part after the other."""
MAX_SNAPSHOTS_AT_ONCE = 8
"""Snapshots under way at a time: a router that starts has as many answers in memory."""
SWEEP_INTERVAL_S = 0.2


class Indexer(ComposedContext):
    """Keeps an index in step with the streams of a fleet; no silent, slow or malformed source ever raises here.

    Use it as `async with Indexer(index, block_size=64) as indexer`, and the index only from the same event loop; in the
    end the index keeps what it has.
    Blocks of several sizes can be in one index, because a block's hash depends on its size.
    """

    def __init__(
        self,
        index: RadixIndex,
        *,
        block_size: int | None = None,
        num_ranks: int = DEFAULT_NUM_RANKS,
        has_full_reports: bool = False,
        clock: Callable[[], float] = time.monotonic,
        is_held: bool = False,
        max_delay_s: float = 0.0,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        """Feed `index` with blocks of `block_size` tokens: streams with another size are refused.

        Without `block_size`, each stream has the size given to `add_source`, or the first one it names. Streams may
        name the ranks below `num_ranks`, unless `limit_ranks` sets another bound for their worker. For
        `has_full_reports` see `EngineFollower`.

        With `is_held`, streams are subscribed to but not read until `release`, so that `resume` can come first. A
        message may wait up to `max_delay_s` for others, so that they are applied together. `on_round` is called when
        messages were applied, and now and then: ranks may have come, or be resyncing or no longer so.
        """
        if block_size is not None and block_size <= 0:
            raise InvalidValueError("block_size", block_size, "a positive number of tokens")
        self._index = index
        self._block_size = block_size
        self._num_ranks = num_ranks
        self._has_full_reports = has_full_reports
        self._limits: dict[str, int] = {}
        self._clock, self._max_delay_s, self._on_round = clock, max_delay_s, on_round
        self._tasks = BackgroundTasks()
        self._sources: dict[str, dict[Source, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._parked: dict[str, list[Source]] = {}
        self.resyncing: set[WorkerRank] = set()
        """The ranks whose overlap must count as zero now, because their blocks may be gone; always up to date."""
        self._turns = Turns()
        self._replay_gate = asyncio.Semaphore(MAX_REPLAYS_AT_ONCE)
        self._snapshot_gate = asyncio.Semaphore(MAX_SNAPSHOTS_AT_ONCE)
        self.block_sizes: Mapping[str, int] = {}
        """Tokens per block by worker, where known; replaced by a new mapping at each change."""
        self._released = asyncio.Event()
        if not is_held:
            self._released.set()

    async def _open(self, exits: AsyncExitStack) -> None:
        self._reads = exits.enter_context(closing(Reads(self._max_delay_s)))
        await exits.enter_async_context(self._tasks)
        self._tasks.create_task(self._sweep(), name="kvist-sweep")

    def add_source(self, worker: str, url: str, *, rank: int = 0, block_size: int | None = None) -> None:
        """Follow a stream and attribute its blocks to `worker`, whatever name it uses itself; returns at once.

        A worker may have several streams, such as one a data-parallel rank, as long as no two report the same rank;
        `rank` is that of batches that name none. A parked stream continues from its progress. If only other streams are
        parked for the worker, they are dropped, because its ranks may have changed. Raises InvalidValueError for a rank
        out of range, a wrong URL, or one that the worker already has.
        """
        if not 0 <= rank < MAX_RANKS:
            raise InvalidValueError("rank", rank, f"a number from 0 to {MAX_RANKS - 1}")
        if any(source.url == url for source in self._sources.get(worker, ())):
            raise InvalidValueError("url", url, f"a stream that worker {worker} does not have yet")
        block_size = block_size or self._block_size
        source = self._unpark(worker, url, rank, block_size)
        if source is None:
            source = self._new_source(worker, url, rank, block_size)
            self.drop_parked(worker)
        if source.block_size is not None:
            self._set_block_size(worker, source.block_size)
        task = self._tasks.create_task(self._follow(source), name=f"kvist-source-{worker}")
        self._sources.setdefault(worker, {})[source] = task

    def remove_source(self, worker: str) -> None:
        """Stop following a worker and drop its blocks, at once; no-op for a worker without a stream."""
        for task in self._sources.pop(worker, {}).values():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._parked.pop(worker, None)
        self._limits.pop(worker, None)
        self.block_sizes = {name: size for name, size in self.block_sizes.items() if name != worker}
        self._drop_blocks(worker)

    def limit_ranks(self, worker: str, num_ranks: int) -> None:
        """Let the worker's streams name only ranks below `num_ranks` from now on, until the worker is removed."""
        self._limits[worker] = num_ranks
        for source in self._sources.get(worker, ()):
            source.bound.num_ranks = num_ranks

    def park(self, worker: str, url: str, rank: int, progress: Progress, block_size: int) -> Source:
        """Keep the progress of a stream until `add_source`; its blocks, loaded now, do not count until then."""
        source = self._new_source(worker, url, rank, block_size)
        source.resume(progress, self._clock())
        self._parked.setdefault(worker, []).append(source)
        return source

    def drop_parked(self, worker: str | None = None) -> None:
        """Drop the parked streams of a worker, or of all workers, and their blocks."""
        for name in [*self._parked] if worker is None else [worker]:
            for source in self._parked.pop(name, ()):
                source.clear()
            if name not in self._sources:
                self._index.remove_worker(name)

    @property
    def sources(self) -> list[Source]:
        return [source for sources in self._sources.values() for source in sources]

    @property
    def parked(self) -> list[Source]:
        return [source for sources in self._parked.values() for source in sources]

    @property
    def are_all_connected(self) -> bool:
        subscriptions = [source.subscription for source in self.sources]
        return all(each is not None and each.num_connects > 0 for each in subscriptions)

    def record_connects(self) -> None:
        """Record that the connections made so far are to the processes whose blocks `resume` brings."""
        for source in self.sources:
            source.record_connects()

    def resume(self, worker: str, progress: Progress) -> Source:
        """Continue a worker's one stream from another indexer's progress, whose blocks are loaded now."""
        (source,) = self._sources[worker]
        source.resume(progress, self._clock())
        return source

    def undo_resume(self, worker: str) -> None:
        """Undo `resume` or `park`, and drop the worker's blocks."""
        for source in self._sources.get(worker, ()):
            source.undo_resume()
        self._parked.pop(worker, None)
        self._drop_blocks(worker)

    def release(self) -> None:
        """Begin to read the streams."""
        self._released.set()

    def states(self, worker: str) -> dict[int, SourceState]:
        """Return, for each rank that the worker's streams named, how far its blocks in the index can be trusted."""
        return {rank: state for source in self._sources.get(worker, ()) for rank, state in source.states().items()}

    def ranks_counting_copies(self, worker: str) -> set[int]:
        """Return the ranks of a worker whose copies are counted: they must not be asked to report their blocks anew."""
        return {rank for source in self._sources.get(worker, ()) for rank in source.ranks_counting_copies()}

    def is_exact(self, worker: str, rank: int) -> bool:
        """Return whether the index holds exactly the blocks that the rank has reported."""
        return self.states(worker).get(rank) is SourceState.LIVE

    def statistics(self) -> list[SourceStatistics]:
        return [*self.each_statistics()]

    def each_statistics(self) -> Iterator[SourceStatistics]:
        for source in self.sources:
            yield source.statistics(self._clock())

    def _new_source(self, worker: str, url: str, rank: int, block_size: int | None) -> Source:
        return Source(
            worker,
            url,
            block_size,
            self._index,
            self.resyncing,
            rank,
            self._limits.get(worker, self._num_ranks),
            has_full_reports=self._has_full_reports,
            on_block_size=partial(self._set_block_size, worker),
        )

    def _set_block_size(self, worker: str, block_size: int) -> None:
        self.block_sizes = {**self.block_sizes, worker: block_size}

    def _unpark(self, worker: str, url: str, rank: int, block_size: int | None) -> Source | None:
        for source in self._parked.get(worker, ()):
            if source.adopt_url(url, rank, block_size):
                self._parked[worker].remove(source)
                return source
        return None

    def _drop_blocks(self, worker: str) -> None:
        self._index.remove_worker(worker)
        self.resyncing.difference_update([source for source in self.resyncing if source.worker == worker])

    async def _follow(self, source: Source) -> None:
        if source.endpoint.is_bound and self._ending:  # one of these may still listen at the address
            await asyncio.wait(self._ending)
        try:
            async with open_subscription(source.endpoint, split, self._reads) as subscription:
                source.subscription = subscription
                await self._released.wait()
                await follow(
                    subscription,
                    source,
                    clock=self._clock,
                    turns=self._turns,
                    replay_gate=self._replay_gate,
                    snapshot_gate=self._snapshot_gate,
                    num_connects=source.num_known_connects,
                    on_round=self._on_round,
                )
        except (InvalidValueError, MissingExtraError) as error:
            source.fail(str(error), self._clock())
            _logger.error("source cannot be followed: %s worker=%s", error, source.worker)

    async def _sweep(self) -> None:
        while True:
            has_more = self._index.sweep()
            await asyncio.sleep(0 if has_more else SWEEP_INTERVAL_S)

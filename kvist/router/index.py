"""The fleet's caches as far as they are known: the indexer applies event streams, the index answers with overlaps.

The index joins once its code is compiled, or loaded from an earlier compilation; until then nobody holds anything.
Workers of several models and block sizes share it: a block's hash depends on its tokens and its size, and routing
counts the matches only of workers that have the model.

What no event tells is expected, by the prompts that workers were sent (`kvist.router.unreported`).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.events.session import SourceState
from kvist.events.transports import Endpoint
from kvist.indexer import SourceStatistics, compilation
from kvist.indexer.memory import default_max_blocks
from kvist.router.config import RouterConfig
from kvist.router.unreported import STEP_BLOCKS, UnreportedPrompts, add_expected, holder_of

if TYPE_CHECKING:
    from kvist.indexer import Indexer
    from kvist.indexer.dumps.dumper import Namespaced
    from kvist.indexer.dumps.format import NamespaceHead, StreamState
    from kvist.indexer.dumps.keeper import StateKeeper, StateStatistics
    from kvist.indexer.source import Source
    from kvist.radix import RadixIndex

_logger = logging.getLogger(__name__)

Overlaps: TypeAlias = Mapping[WorkerRank, tuple[int, ...]]
"""Leading blocks a rank holds in each tier or a faster one; a rank that holds none is absent."""

APPROXIMATE = "approximate"
_MAX_EVENT_DELAY_S = 0.05
"""How long events are collected before they are applied: prompts of the last seconds count without them."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """How well one rank's cache is known; `state` is None where no stream reports on it.

    `clearing` identifies the last time that its blocks were dropped. An approximate rank stands for all of a worker
    that no stream reports on, and is expected to hold the prompts that the worker was sent.
    """

    target: WorkerRank
    state: SourceState | None = None
    num_blocks: int = 0
    clearing: int | None = None
    is_approximate: bool = False
    slot: int | None = None
    """In the index, as `clearing` is (`RadixIndex.slot_of`, `RadixIndex.clearing_of`)."""
    is_counted: bool = False
    """Whether copies of its blocks are counted, so that blocks it reports again would count as more copies."""
    expected_clearing: int | None = None
    """As `clearing`, of the rank that stands for what this one is expected to hold beside what it reports."""

    @property
    def display_state(self) -> str | None:
        """Return the state as operators see it, "approximate" where it is an expectation."""
        return APPROXIMATE if self.is_approximate else self.state


class Caches(Protocol):
    """The fleet's caches, as far as decisions need them."""

    @property
    def block_sizes(self) -> Mapping[str, int]:
        """Tokens per block by worker, where that is known; a new mapping whenever that changes."""

    @property
    def has_joined(self) -> bool:
        """Whether prompts can be hashed and matched."""

    @property
    def num_clearings(self) -> int:
        """A number that changes whenever a rank comes or is cleared."""

    def match(
        self, hashes: NDArray[np.uint64], num_usable: int | None = None, num_exact: int | None = None
    ) -> Overlaps | None:
        """Return who holds how many leading blocks, of the first `num_usable`, without ranks whose blocks may be gone.

        Of a prompt with images `num_exact` blocks have the engines' names. None if another process is just writing to
        the index.
        """

    def ranks(self, worker: str) -> list[RankStatus]:
        """Return the ranks of a worker, in order. It takes some 10 µs a rank."""

    def is_expecting(self, worker: str) -> bool:
        """Return whether the worker's cache is only guessed, from the prompts it was sent: it streams no events."""

    def record_computed(self, target: WorkerRank, hashes: NDArray[np.uint64]) -> None:
        """Record that a rank now holds all blocks of a prompt, unless its events have said so."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetState:
    """The index as it is saved to disk and loaded; a loaded stream waits until its worker is followed at its URL."""

    index: RadixIndex
    indexer: Indexer
    namespace: tuple[str, str] = ("", "")

    def endpoint_of(self, source: Source) -> str:
        return source.url

    def find(self, head: NamespaceHead) -> Namespaced | None:
        """Return this index if the saved one was a router's."""
        if (head.model_name, head.group) != self.namespace:
            _logger.warning("state not loaded: it is not a router's model=%s", head.model_name or None)
            return None
        return self

    def resume(self, into: Namespaced, state: StreamState) -> Source | None:
        assert state.progress is not None
        try:
            return into.indexer.park(state.worker, state.url, state.rank, state.progress, state.block_size)
        except InvalidValueError as error:
            _logger.warning("stream not loaded: %s worker=%s", error, state.worker)
            return None


class _Streams(NamedTuple):
    """Where a worker's events come from, and their tokens per block; None where the events say that themselves."""

    endpoints: tuple[str, ...]
    block_size: int | None


class FleetIndex(ComposedContext):
    """Knows what each rank holds; a silent, slow or broken stream costs its worker overlap and nothing else.

    Where this process has compiled the index before, it has joined once the context is open. Elsewhere it joins by
    itself; should that fail, the context ends with the error.
    """

    def __init__(self, config: RouterConfig, now_s: Callable[[], float], descriptor: int | None = None) -> None:
        """Keep the index in the file of a `descriptor`, if given, for other processes to read."""
        self._config, self._descriptor = config, descriptor
        self._max_blocks = config.max_blocks or default_max_blocks()
        self.unreported = UnreportedPrompts(self._states, self._max_blocks, config.expected_time_to_live_s, now_s)
        self._limits: dict[str, int] = {}
        self._now_s = now_s
        self.radix: RadixIndex | None = None
        """The index, once it has joined."""
        self.joined_at_s: float | None = None
        """When it joined."""
        self.on_round: Callable[[], None] = lambda: None
        """Is called when events were applied, and now and then: the ranks, or those resyncing, may have changed."""
        self._indexer: Indexer | None = None
        self._streams: dict[str, _Streams] = {}
        self._tasks = BackgroundTasks()
        self._recordings = deque[Iterator[None]]()
        self._kept: list[FleetState] = []
        self._keeper: StateKeeper | None = None

    async def _open(self, exits: AsyncExitStack) -> None:
        if compilation.is_loaded():
            await self._join()
        await exits.enter_async_context(self._tasks)
        self._tasks.create_task(self._follow(), name="kvist-index")
        exits.push_async_callback(self._save)

    async def _save(self) -> None:
        if self._keeper is not None:
            await self._keeper.stop()

    @property
    def block_sizes(self) -> Mapping[str, int]:
        """Return the tokens per block of each worker whose stream is followed and has reported blocks."""
        return {} if self._indexer is None else self._indexer.block_sizes

    @property
    def has_joined(self) -> bool:
        return self.joined_at_s is not None

    @property
    def num_clearings(self) -> int:
        return 0 if self.radix is None else self.radix.num_clearings

    def follow(self, worker: str, endpoints: Sequence[str], block_size: int | None = None) -> None:
        """Follow exactly these streams for the worker; its blocks are dropped if they, or the size of blocks, change.

        Raises InvalidValueError for an endpoint that is no URL of a stream; then nothing has changed.
        """
        wanted = _Streams(tuple(dict.fromkeys(endpoints)), block_size or self._config.block_size)
        for endpoint in wanted.endpoints:
            Endpoint.parse(endpoint)
        if wanted == self._streams.get(worker, _Streams((), wanted.block_size)):
            return
        if self._streams.pop(worker, None) is not None and self._indexer is not None:
            self._indexer.remove_source(worker)
        if wanted.endpoints:
            self._streams[worker] = wanted
            self._add_sources(worker)
        else:
            self._limits.pop(worker, None)

    def limit_ranks(self, worker: str, num_ranks: int) -> None:
        """Refuse events of the worker for ranks beyond those that it says it has, or that any worker may have."""
        num_ranks = min(num_ranks, self._config.data_parallel_size)
        if self._limits.get(worker) != num_ranks:
            self._limits[worker] = num_ranks
            if self._indexer is not None:
                self._indexer.limit_ranks(worker, num_ranks)

    def has_reported(self, worker: str) -> bool:
        return bool(self._states(worker))

    def is_expecting(self, worker: str) -> bool:
        return self.unreported.has_room(worker) and not self.has_reported(worker)

    def record_computed(self, target: WorkerRank, hashes: NDArray[np.uint64]) -> None:
        steps = self.unreported.record(target, hashes)
        if len(hashes) <= STEP_BLOCKS and not self._recordings:
            deque(steps, maxlen=0)
            return
        self._recordings.append(steps)
        if len(self._recordings) == 1:
            self._tasks.create_task(self._record(), name="kvist-record")

    async def _record(self) -> None:
        while self._recordings:
            for _ in self._recordings[0]:
                await asyncio.sleep(0)
            self._recordings.popleft()

    def _states(self, worker: str) -> Mapping[int, SourceState]:
        """Return the state of each rank that streams have reported on."""
        return {} if self._indexer is None else self._indexer.states(worker)

    def match(
        self, hashes: NDArray[np.uint64], num_usable: int | None = None, num_exact: int | None = None
    ) -> Overlaps:
        """Return who holds how many leading blocks, of the first `num_usable`; ranks being resynchronised hold none."""
        if self.radix is None:
            return {}
        match = self.radix.match(hashes, num_usable)
        # Plain tuples, made column by column: with hundreds of holders that takes half the time of `to_dict`.
        overlaps = dict(zip(match.ranks, zip(*match.depths.T.tolist(), strict=True), strict=True))
        expected = self.unreported.pop_from(overlaps)
        if self._indexer is None:
            overlaps.clear()  # a state that is just being loaded does not count yet
        for target in self.resyncing & overlaps.keys():
            del overlaps[target]
        for target, state, depths in expected:
            if target not in self.resyncing:
                add_expected(overlaps, target, state, depths, num_exact)
        return overlaps

    def ranks(self, worker: str) -> list[RankStatus]:
        """Return the ranks that this worker's events came from, in order.

        A worker that is only expected to hold what it was sent has one rank, 0.
        """
        if self.radix is None:
            return []
        if self.is_expecting(worker):
            return [self._status(target := WorkerRank(worker, 0), None, holder_of(target))]
        if self._indexer is None:
            return []
        counted = self._indexer.ranks_counting_copies(worker)
        return [
            self._status(target := WorkerRank(worker, rank), state, target, is_counted=rank in counted)
            for rank, state in sorted(self._indexer.states(worker).items())
        ]

    @property
    def resyncing(self) -> AbstractSet[WorkerRank]:
        """Return the ranks that are being resynchronised, whose blocks do not count: a live view."""
        return frozenset() if self._indexer is None else self._indexer.resyncing

    def touch(self, hashes: NDArray[np.uint64]) -> None:
        """Mark blocks as just used, as another process has matched them."""
        if self.radix is not None:
            self.radix.touch(hashes)

    def _status(
        self, target: WorkerRank, state: SourceState | None, holder: WorkerRank, *, is_counted: bool = False
    ) -> RankStatus:
        radix = self.radix
        assert radix is not None
        slot, num_blocks = radix.slot_of(holder), radix.digest(holder).num_blocks
        is_guessed, clearing = holder is not target, radix.clearing_of(holder)
        expected_clearing = None if is_guessed else self.unreported.clearing_of(target)
        return RankStatus(target, state, num_blocks, clearing, is_guessed, slot, is_counted, expected_clearing)

    def source_statistics(self) -> Iterator[SourceStatistics]:
        if self._indexer is not None:
            yield from self._indexer.each_statistics()

    def state_statistics(self) -> StateStatistics | None:
        """Return the statistics of saving the index to disk, None where it is not saved."""
        return None if self._keeper is None else self._keeper.statistics()

    async def _join(self) -> None:
        """Compile the index, or load what was compiled before."""
        await compilation.load()
        from kvist.radix import RadixIndex

        if self._descriptor is None:
            self.radix = RadixIndex(max_blocks=self._max_blocks)
        else:
            from kvist.radix.memory import index_bytes, segment_bits_for

            segment_bits = segment_bits_for(self._max_blocks)
            os.ftruncate(self._descriptor, index_bytes(segment_bits))
            memory = mmap.mmap(self._descriptor, 0)
            self.radix = RadixIndex(max_blocks=self._max_blocks, segment_bits=segment_bits, memory=memory)
        self.unreported.radix = self.radix
        if self._config.state_dir is not None:
            from kvist.indexer.dumps.keeper import StateKeeper

            folder, interval_s = Path(self._config.state_dir), self._config.state_interval_s
            self._keeper = StateKeeper(folder, "router", interval_s, lambda: self._kept, self._now_s)
        self.joined_at_s = self._now_s()
        _logger.info("index ready")

    async def _follow(self) -> None:
        if self.radix is None:
            await self._join()
        assert self.radix is not None
        await asyncio.to_thread(import_module, "kvist.indexer.indexer")  # for some 50 ms, while requests are served
        from kvist.indexer import Indexer

        async with Indexer(
            self.radix,
            num_ranks=self._config.data_parallel_size,
            has_full_reports=self._config.full_reports,
            clock=self._now_s,
            max_delay_s=_MAX_EVENT_DELAY_S,
            on_round=lambda: self.on_round(),
        ) as indexer:
            if self._keeper is not None:
                fleet = FleetState(self.radix, indexer)
                self._kept.append(fleet)
                await self._keeper.load(fleet)
                self._keeper.start(self._tasks)
            self._indexer = indexer
            for worker in self._streams:
                self._add_sources(worker)
            await asyncio.Event().wait()  # until cancelled

    def _add_sources(self, worker: str) -> None:
        if self._indexer is not None:
            if worker in self._limits:
                self._indexer.limit_ranks(worker, self._limits[worker])
            streams = self._streams[worker]
            for endpoint in streams.endpoints:
                self._indexer.add_source(worker, endpoint, block_size=streams.block_size)
            self._indexer.drop_parked(worker)

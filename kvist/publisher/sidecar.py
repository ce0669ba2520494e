"""The sidecar: follows the stream of an engine that knows nothing of Kvist, and publishes a canonical one.

With a state folder it survives its own end: what it knew is saved now and then, and believed again once the engine's
replay proves that it is the same process and brings what came since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from kvist.events import EngineStored, WorkerRank
from kvist.events.dialects import DecodedEngineBatch
from kvist.events.engine_events import KnownWindow
from kvist.events.follow import Ticker, follow
from kvist.events.transports import Endpoint, Message, Publication, ReplayRequest, open_publication, open_subscription
from kvist.events.transports.base import ReplaySource
from kvist.files import in_thread
from kvist.publisher.buffers import PublisherLimits, PublisherStatistics
from kvist.publisher.publisher import KvEventPublisher
from kvist.publisher.sidecar_feed import SidecarFeed
from kvist.publisher.state import EngineProgress, SidecarState, StateStore
from kvist.publisher.stream import RankState, RankStream, topic_of

_logger = logging.getLogger(__name__)

LIMITS = PublisherLimits(inbox_capacity=1 << 20, num_events_a_slice=4096)
"""A sidecar's inbox holds more than an engine's: nobody shares this process's memory, and a loss clears a rank.

Nobody waits for its interpreter lock either: offered every 8 events, it costs 2 of 11 µs a block.
"""

FAILURE_CHECK_INTERVAL_S = 0.5

SAVE_INTERVAL_S = 2.0
"""How long after a save the next begins, if anything changed …"""
SAVE_COST_FACTOR = 20
"""… but at least so many times as long as that save took: 1 s for a million blocks, which are 40 MB."""


@dataclass(frozen=True, slots=True)
class SidecarStatistics:
    """What a sidecar did: on the engine's side, summed over its endpoints, and as a publisher."""

    num_engine_batches: int
    num_malformed: int
    num_gaps: int
    num_recovered: int
    num_lost: int
    num_restarts: int
    published: PublisherStatistics


class Sidecar:
    """Republishes an engine's events as canonical batches; a restarted engine's ranks are cleared first.

    Give it one endpoint for each data-parallel rank that has its own. Without a `block_size` the first stored event
    tells it, and nothing is published before. Use it as `with Sidecar(...) as sidecar: await sidecar.run()`.
    """

    def __init__(
        self,
        engine_endpoints: Sequence[Endpoint],
        *,
        to: str,
        worker: str,
        block_size: int | None = None,
        window: KnownWindow | None = None,
        lora_names: Mapping[int, str] | None = None,
        limits: PublisherLimits = LIMITS,
        state_dir: Path | None = None,
        has_full_reports: bool = False,
        has_all_groups: bool = False,
    ) -> None:
        """Bind the publication at the URL `to`, and read what an earlier sidecar of the worker left in `state_dir`.

        Copies of a block are counted of vLLM, which reports each; not if it `has_full_reports`: if others than Kvist's
        router have it report what it holds anew. With `has_all_groups` a second stream of each rank has what its other
        groups hold. Raises InvalidValueError when a value is wrong, the port taken, or the folder unusable.
        """
        counts_copies = not has_full_reports and all(each.engine == "vllm" for each in engine_endpoints)
        # Raises now for a value that would otherwise be refused only when the first event comes.
        source = WorkerRank(worker, 0)
        topic_of(source)
        RankStream(source, 1 if block_size is None else block_size, epoch=0, window=window)
        self._worker = worker
        self._new_publisher = partial(
            KvEventPublisher,
            worker=worker,
            window=window,
            lora_names=lora_names,
            num_ranks=0,  # which ranks there are, the engine's events tell
            counts_copies=counts_copies,
            has_full_reports=has_full_reports,
            has_all_groups=has_all_groups,
            num_ahead=int(any(each.drops_last_block for each in engine_endpoints)),
            limits=limits,
        )
        counted = f"counts_copies={counts_copies} has_all_groups={has_all_groups}"
        # What a saved state depends on beside the block size.
        self._settings = f"window={window} lora_names={sorted((lora_names or {}).items())} {counted}"
        self.block_size = block_size
        """The engine's, None while it is neither given, nor saved, nor learnt."""
        self._publisher: KvEventPublisher | None = None
        self._ticker = Ticker()
        self._feeds = [SidecarFeed(each, self._publisher_for, has_full_reports) for each in engine_endpoints]
        with ExitStack() as exits:
            self._store = None if state_dir is None else exits.enter_context(StateStore(state_dir, worker))
            saved = self._load()
            self._publication = AnsweringPublication(open_publication(to, worker))
            self.endpoint = self._publication.endpoint
            self._exits = exits.pop_all()
        if self.block_size is not None:
            self._start_publisher(self.block_size)
        if saved is not None:
            self._restore(saved)

    async def run(self) -> None:
        """Follow every endpoint until cancelled or publishing fails, as `close` raises; raises InvalidValueError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._ticker.run(), name="kvist-sidecar-ticker")]
                running += [
                    tasks.create_task(self._follow(feed), name=f"kvist-sidecar-{feed.endpoint.address}")
                    for feed in self._feeds
                ]
                if self._store is not None:
                    running.append(tasks.create_task(self._save_now_and_then(self._store), name="kvist-sidecar-state"))
                # Polled, because the publisher's thread knows nothing of this loop.
                while self._publisher is None or self._publisher.failure is None:  # noqa: ASYNC110
                    await asyncio.sleep(FAILURE_CHECK_INTERVAL_S)
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    def statistics(self) -> SidecarStatistics:
        feeds = [feed.feed for feed in self._feeds]
        return SidecarStatistics(
            num_engine_batches=sum(feed.num_batches for feed in feeds),
            num_malformed=sum(feed.num_malformed for feed in feeds),
            num_gaps=sum(feed.session.num_gaps for feed in feeds),
            num_recovered=sum(feed.session.num_recovered for feed in feeds),
            num_lost=sum(feed.session.num_lost for feed in feeds),
            num_restarts=sum(max(0, feed.session.num_epochs - 1) for feed in feeds),
            published=PublisherStatistics() if self._publisher is None else self._publisher.statistics(),
        )

    def close(self) -> None:
        """Publish what was received, then stop; raises what had ended publishing, if any."""
        with self._exits:
            if self._publisher is None:
                self._publication.close()
            else:
                self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publisher_for(self, batch: DecodedEngineBatch) -> KvEventPublisher | None:
        """Return the publisher, started by the first batch that tells the block size if none was given."""
        if self._publisher is None:
            block_size = next((event.block_size for event in batch.events if isinstance(event, EngineStored)), None)
            if block_size is not None and block_size > 0:
                _logger.info("block size learnt from the engine worker=%s block_size=%d", self._worker, block_size)
                self._start_publisher(block_size)
        return self._publisher

    def _start_publisher(self, block_size: int) -> None:
        self.block_size = block_size
        self._publisher = self._new_publisher(self._publication, block_size=block_size)

    async def _follow(self, feed: SidecarFeed) -> None:
        async with open_subscription(feed.endpoint) as subscription:
            await follow(subscription, feed, clock=time.monotonic, ticker=self._ticker, replay_gate=asyncio.Semaphore())

    def _load(self) -> SidecarState | None:
        """Return what an earlier sidecar saved that was configured like this one."""
        saved = None if self._store is None else self._store.load()
        if saved is None:
            return None
        if saved.settings != self._settings or self.block_size not in (None, saved.block_size):
            text = "saved state is of a sidecar configured otherwise, starting empty"
            _logger.warning("%s saved=%s block_size=%d now=%s", text, saved.settings, saved.block_size, self._settings)
            return None
        self.block_size = saved.block_size
        return saved

    def _restore(self, saved: SidecarState) -> None:
        assert self._publisher is not None
        streams = {stream.name: stream for stream in saved.streams}
        for feed in self._feeds:
            stream = streams.get(feed.name)
            if stream is not None:
                ranks = {rank: saved.ranks[rank] for rank in stream.ranks if rank in saved.ranks}
                feed.restore(self._publisher, stream, ranks, time.monotonic())

    async def _save_now_and_then(self, store: StateStore) -> None:
        saved: list[EngineProgress] = []
        interval_s = SAVE_INTERVAL_S
        while True:
            await asyncio.sleep(interval_s)
            streams = [stream for feed in self._feeds if (stream := feed.progress()) is not None]
            if self._publisher is None or not all(feed.is_settled for feed in self._feeds) or streams == saved:
                continue
            started_s = time.monotonic()
            state = await self._copy(self._publisher, streams)
            try:
                await in_thread(store.save, state)
            except OSError as error:
                _logger.error("state cannot be saved: %s path=%s", error, store.path)
            else:
                saved = streams
            interval_s = max(SAVE_INTERVAL_S, SAVE_COST_FACTOR * (time.monotonic() - started_s))

    async def _copy(self, publisher: KvEventPublisher, streams: Sequence[EngineProgress]) -> SidecarState:
        """Return what is held once all that these streams brought, and nothing else, is in the publisher's."""
        wanted = {rank for stream in streams for rank in stream.ranks}
        ranks: dict[int, RankState] = {}

        def copy(rank_streams: Mapping[int, RankStream]) -> None:
            ranks.update({rank: rank_streams[rank].state() for rank in wanted & rank_streams.keys()})

        await asyncio.wrap_future(publisher.between_events(copy))
        assert self.block_size is not None
        return SidecarState(self.block_size, self._settings, tuple(streams), ranks)


class AnsweringPublication:
    """A publication that answers from the start: with nothing, until its publisher does.

    While a sidecar does not know its engine's block size it has no publisher, and yet whoever followed another sidecar
    here must learn that this one does not hold what that one did.
    """

    def __init__(self, publication: Publication) -> None:
        self._source: ReplaySource | None = None
        self.endpoint, self.send, self.close = publication.endpoint, publication.send, publication.close
        publication.serve_replay(self)

    def serve_replay(self, source: ReplaySource) -> None:
        self._source = source

    def replay(self, request: ReplayRequest) -> Iterable[Message]:
        source = self._source
        return () if source is None else source.replay(request)

"""The sidecar: follows the stream of an engine that knows nothing of Kvist, and publishes a canonical one.

With a state folder it can be restarted: it saves its state now and then, and uses it again once the engine's replay
proves that it is the same process, and brings what came since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, Unpack

from kvist.contexts import BackgroundTasks
from kvist.events import EngineCleared
from kvist.events.dialects import DecodedEngineBatch
from kvist.events.follow import Question, Turns, follow
from kvist.events.session import NO_REPLAY, SourceState
from kvist.events.transports import Endpoint, Message, open_subscription
from kvist.files import in_thread
from kvist.publisher.buffers import PublisherLimits, PublisherStatistics
from kvist.publisher.engine_feed import EngineFeed
from kvist.publisher.filter import largest_windows_first
from kvist.publisher.publisher import KvEventPublisher
from kvist.publisher.state import SidecarState, StateStore, StreamProgress
from kvist.publisher.stream import RankState, StreamOptions, Streams

_logger = logging.getLogger(__name__)

_NUM_FINGERPRINTS = 256
"""Saved messages' fingerprints, which prove that the engine is the same process; the last one nearly always does."""
MAX_WAITING_EVENTS = 4096
"""Events that wait for the publisher's thread before no more are received; it bounds the memory that they take.

The engine keeps the rest, up to its high-water mark.
"""
_WAIT_S = 0.001
"""How long the publisher's thread has the interpreter to itself before the inbox is checked again."""
LIMITS = PublisherLimits(inbox_capacity=1 << 20, num_events_a_slice=4096)
"""A sidecar's inbox holds `MAX_WAITING_EVENTS` and any message of an engine, so that nothing is lost.

Nobody waits for its interpreter lock: to offer it every 8 events costs 2 of 11 µs a block.
"""
FAILURE_CHECK_INTERVAL_S = 0.5
SAVE_INTERVAL_S = 2.0
"""How long after a save the next begins, if anything changed …"""
SAVE_COST_FACTOR = 20
"""… but at least so many times as long as that save took: 1 s for a million blocks, which are 40 MB."""


class SidecarFeed:
    """A `Follower` of one endpoint: reports its events to the publisher, and clears its ranks when some were lost.

    Restored state is kept back until the engine's replay proves that it is the same process.
    """

    def __init__(self, endpoint: Endpoint, publisher: KvEventPublisher) -> None:
        self.endpoint = endpoint
        self.feed = EngineFeed(
            endpoint.engine, endpoint.address, self, NO_REPLAY if endpoint.replay_address is None else None
        )
        self.on_reconnect, self.on_departure = self.feed.on_reconnect, self.feed.on_departure
        self.questions = self.feed.questions
        self._is_applying_answer = False
        self._publisher = publisher
        self._ranks: set[int] = set()
        self._num_processes = 1  # of the engine, up to the last clearing
        self._restored: Mapping[int, RankState] | None = None
        # Ranks that reported an empty cache after the last loss in the stream, which several ranks may share.
        self._cleared_ranks: set[int] = set()
        self._published_completeness: dict[int, bool] = {}  # of each rank, as last passed to the publisher

    @property
    def name(self) -> str:
        """Return the name of the stream in a saved state."""
        return f"{self.endpoint.engine} {self.endpoint.address}"

    @property
    def is_settled(self) -> bool:
        """Return whether nothing waits for an answer of the engine, and no answer is being applied."""
        is_asking = self.feed.session.state is SourceState.RESYNCING
        return self._restored is None and not is_asking and not self._is_applying_answer

    @property
    def is_complete(self) -> bool:
        """Return whether no event of the engine was lost, so that the publisher's streams lack no block."""
        return self.feed.session.state is SourceState.LIVE

    @property
    def _complete_ranks(self) -> frozenset[int]:
        """Return the ranks that lack no block; to be read while the session asks nothing."""
        return frozenset(self._ranks if self.is_complete else self._cleared_ranks)

    def progress(self) -> StreamProgress | None:
        """Return how far a settled stream was followed, None before its first message."""
        session = self.feed.session
        if session.epoch is None or session.expected_sequence == 0:
            return None
        known = [pair for pair in self.feed.restarts.remembered() if pair[0] < session.expected_sequence]
        return StreamProgress(
            self.name,
            session.expected_sequence,
            self.is_complete,
            fingerprints=tuple(known[-_NUM_FINGERPRINTS:]),
            ranks=tuple(sorted(self._ranks)),
            complete_ranks=tuple(sorted(self._complete_ranks)),
        )

    def restore(self, progress: StreamProgress, ranks: Mapping[int, RankState], now_s: float) -> None:
        """Continue from saved progress once the engine has proven to be the same; call it before anything else."""
        self._restored = ranks
        self._cleared_ranks = {*progress.complete_ranks}
        self.feed.resume(progress.next_sequence, progress.fingerprints, now_s, is_complete=progress.is_complete)
        self.feed.on_reconnect(now_s)  # a live message proves nothing: another process may have come as far

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        for message in messages:
            yield from self._wait_for_room()
            self.feed.receive(message, now_s)
            yield
        self._publish_completeness()

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        self._is_applying_answer = True  # the session is ahead of the publisher until all steps are applied
        try:
            for step in self.feed.judge(question, messages, now_s):
                yield from self._wait_for_room()
                self.feed.apply_step(step)
                yield
        finally:
            self._is_applying_answer = False
        if self.feed.session.state is not SourceState.RESYNCING:
            self._resume_ranks()
        self._publish_completeness()

    def _wait_for_room(self) -> Iterator[None]:
        """Yield until the publisher's thread has caught up: meanwhile nothing is received of this endpoint."""
        while self._publisher.num_waiting_events >= MAX_WAITING_EVENTS:
            if self._publisher.failure is not None:
                return  # nobody processes them any more: they are counted as lost
            time.sleep(_WAIT_S)
            yield

    def apply(self, batch: DecodedEngineBatch) -> None:
        """Report a batch's events to the publisher, once the block size is known (called by the feed)."""
        self._resume_ranks()
        if not self._publisher.learn_block_size(batch.events):
            return
        if new_ranks := {event.rank for event in batch.events} - self._ranks:
            self._ranks |= new_ranks
            if not self.is_complete:
                self._publish_completeness()
        for event in largest_windows_first(batch.events):
            self._publisher.report(event)
            if isinstance(event, EngineCleared):
                self._cleared_ranks.add(event.rank)
                self._publish_completeness()  # before the next event: copies are counted in complete ranks

    def clear(self) -> None:
        """Report that every rank of this endpoint holds nothing that is known (called by the feed)."""
        if self._restored is not None:
            _logger.warning("saved state discarded: the engine may be another one source=%s", self.name)
            self._ranks |= self._restored.keys()  # cleared, too: the engine may stay silent about them for long
            self._restored = None
        self._cleared_ranks.clear()
        is_other_process = self.feed.session.num_epochs > self._num_processes
        self._num_processes = self.feed.session.num_epochs
        for rank in self._ranks:
            self._publisher.report(EngineCleared(rank))
        if self.feed.session.is_complete:
            self._publish_completeness()  # before the next event: copies are counted in complete ranks
        else:
            self._set_complete_ranks(frozenset())
        if is_other_process:
            ranks = frozenset(self._ranks)

            def forget_groups(streams: Streams) -> None:
                for rank in ranks & streams.keys():
                    streams[rank].forget_groups()

            self._publisher.call_between_batches(forget_groups)

    def _resume_ranks(self) -> None:
        """Give the restored state, if any, to the publisher: the engine has proven to be the same process."""
        if self._restored is None:
            return
        restored, self._restored = self._restored, None
        self._ranks |= restored.keys()
        self._publisher.resume(restored)
        num_blocks = sum(rank.residency.num_blocks for rank in restored.values())
        _logger.info("resumed from saved state source=%s num_blocks=%d", self.name, num_blocks)

    def _publish_completeness(self) -> None:
        """Let the publisher's heartbeats say which ranks lack blocks, unless that depends on an answer."""
        session = self.feed.session
        if session.is_in_step or session.state is not SourceState.RESYNCING:
            self._set_complete_ranks(self._complete_ranks)

    def _set_complete_ranks(self, complete_ranks: frozenset[int]) -> None:
        completeness = {rank: rank in complete_ranks for rank in self._ranks}
        if completeness == self._published_completeness:
            return
        self._published_completeness = completeness
        self._publisher.set_complete(completeness)


@dataclass(frozen=True, slots=True)
class SidecarStatistics:
    """The counters of a sidecar: those of the engine's streams, summed, and those of its publisher."""

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
        limits: PublisherLimits = LIMITS,
        state_dir: Path | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        """Bind the publication at the URL `to`, and read what an earlier sidecar of the worker left in `state_dir`.

        Copies of a block are counted of vLLM, which reports each. Raises InvalidValueError when a value is wrong, the
        port taken, or the folder unusable.
        """
        is_vllm = options["counts_copies"] = all(each.engine == "vllm" for each in engine_endpoints)
        options["has_full_reports"] = is_vllm and options.get("has_full_reports", False)
        options["num_ahead"] = int(any(each.drops_last_block for each in engine_endpoints))
        # A saved state is used only if these, and the block size, are the same.
        self._settings = " ".join(f"{name}={options.get(name)}" for name in sorted(StreamOptions.__annotations__))
        self._turns = Turns()
        with ExitStack() as exits:
            self._store = None if state_dir is None else exits.enter_context(StateStore(state_dir, worker))
            saved = self._load(block_size)
            self._publisher = KvEventPublisher(
                to,
                worker=worker,
                block_size=block_size if saved is None else saved.block_size,
                num_ranks=0,  # the engine's events say which ranks there are
                limits=limits,
                **options,
            )
            self.endpoint = self._publisher.endpoint
            self._exits = exits.pop_all()
        self._feeds = [SidecarFeed(each, self._publisher) for each in engine_endpoints]
        if saved is not None:
            self._restore(saved)

    @property
    def block_size(self) -> int | None:
        """Return the engine's, None while it is neither given, nor saved, nor learnt."""
        return self._publisher.block_size

    async def run(self) -> None:
        """Follow every endpoint until cancelled or publishing fails, as `close` raises; raises InvalidValueError."""
        async with BackgroundTasks() as tasks:
            for feed in self._feeds:
                tasks.create_task(self._follow(feed), name=f"kvist-sidecar-{feed.endpoint.address}")
            if self._store is not None:
                tasks.create_task(self._save_periodically(self._store), name="kvist-sidecar-state")
            # Polled, because the publisher's thread knows nothing of this loop.
            while self._publisher.failure is None:  # noqa: ASYNC110
                await asyncio.sleep(FAILURE_CHECK_INTERVAL_S)

    def statistics(self) -> SidecarStatistics:
        feeds = [feed.feed for feed in self._feeds]
        return SidecarStatistics(
            num_engine_batches=sum(feed.num_batches for feed in feeds),
            num_malformed=sum(feed.num_malformed for feed in feeds),
            num_gaps=sum(feed.session.num_gaps for feed in feeds),
            num_recovered=sum(feed.session.num_recovered for feed in feeds),
            num_lost=sum(feed.session.num_lost for feed in feeds),
            num_restarts=sum(max(0, feed.session.num_epochs - 1) for feed in feeds),
            published=self._publisher.statistics(),
        )

    def close(self) -> None:
        """Publish what was received, then stop; raises what had ended publishing, if any."""
        with self._exits:
            self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _follow(self, feed: SidecarFeed) -> None:
        async with open_subscription(feed.endpoint) as subscription:
            await follow(subscription, feed, clock=time.monotonic, turns=self._turns, replay_gate=asyncio.Semaphore())

    def _load(self, block_size: int | None) -> SidecarState | None:
        """Return the saved state of an earlier sidecar, None unless that was configured like this one."""
        saved = None if self._store is None else self._store.load()
        if saved is None:
            return None
        if saved.settings != self._settings or block_size not in (None, saved.block_size):
            text = "saved state is of a sidecar configured otherwise, starting empty"
            _logger.warning("%s saved=%s block_size=%d now=%s", text, saved.settings, saved.block_size, self._settings)
            return None
        return saved

    def _restore(self, saved: SidecarState) -> None:
        streams = {stream.name: stream for stream in saved.streams}
        for feed in self._feeds:
            stream = streams.get(feed.name)
            if stream is not None:
                ranks = {rank: saved.ranks[rank] for rank in stream.ranks if rank in saved.ranks}
                feed.restore(stream, ranks, time.monotonic())

    async def _save_periodically(self, store: StateStore) -> None:
        saved: list[StreamProgress] = []
        interval_s = SAVE_INTERVAL_S
        while True:
            await asyncio.sleep(interval_s)
            streams = [stream for feed in self._feeds if (stream := feed.progress()) is not None]
            if self.block_size is None or not all(feed.is_settled for feed in self._feeds) or streams == saved:
                continue
            started_s = time.monotonic()
            state = await self._copy(self.block_size, streams)
            try:
                await in_thread(store.save, state)
            except OSError as error:
                _logger.error("state cannot be saved: %s path=%s", error, store.path)
            else:
                saved = streams
            interval_s = max(SAVE_INTERVAL_S, SAVE_COST_FACTOR * (time.monotonic() - started_s))

    async def _copy(self, block_size: int, streams: Sequence[StreamProgress]) -> SidecarState:
        """Return the state after all that these streams brought, and nothing else, is in the publisher's streams."""
        wanted = {rank for stream in streams for rank in stream.ranks}

        def copy(rank_streams: Streams) -> dict[int, RankState]:
            return {rank: rank_streams[rank].state() for rank in wanted & rank_streams.keys()}

        ranks = await asyncio.wrap_future(self._publisher.call_between_batches(copy))
        return SidecarState(block_size, self._settings, tuple(streams), ranks)

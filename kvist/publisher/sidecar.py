"""The sidecar: follows the stream of an engine that knows nothing of Kvist, and publishes a canonical one.

With a state folder it survives its own end: what it knew is saved now and then, and believed again once the engine's
replay proves that it is the same process and brings what came since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, Unpack

from kvist.events import EngineCleared, EngineStored, Tier
from kvist.events.dialects import DecodedEngineBatch
from kvist.events.follow import Question, Turns, follow
from kvist.events.session import NO_REPLAY, SourceState
from kvist.events.transports import Endpoint, Message, open_subscription
from kvist.files import in_thread
from kvist.publisher.buffers import PublisherLimits, PublisherStatistics
from kvist.publisher.engine_feed import EngineFeed
from kvist.publisher.publisher import KvEventPublisher
from kvist.publisher.state import EngineProgress, SidecarState, StateStore
from kvist.publisher.stream import RankState, RankStream, StreamOptions

_logger = logging.getLogger(__name__)

_NUM_FINGERPRINTS = 256
"""Messages by which a saved stream is known again; the last one alone decides nearly always."""
MAX_WAITING_EVENTS = 4096
"""Events that wait for the publisher's thread before no more are taken: what memory holds of them is bounded by that,
and the engine keeps the rest, up to its high-water mark."""
_WAIT_S = 0.001
"""How long the publisher's thread has the interpreter to itself before it is looked for room again."""
LIMITS = PublisherLimits(inbox_capacity=1 << 20, num_events_a_slice=4096)
"""A sidecar's inbox holds more than an engine's: nobody shares this process's memory, and a loss clears a rank.

Nobody waits for its interpreter lock either: offered every 8 events, it costs 2 of 11 µs a block.
"""
FAILURE_CHECK_INTERVAL_S = 0.5
SAVE_INTERVAL_S = 2.0
"""How long after a save the next begins, if anything changed …"""
SAVE_COST_FACTOR = 20
"""… but at least so many times as long as that save took: 1 s for a million blocks, which are 40 MB."""


class SidecarFeed:
    """A `Follower` of one endpoint: reports to the publisher what it says; what is lost is reported as cleared.

    What an earlier sidecar knew waits in here until the engine's replay proves that it is the same process.
    """

    def __init__(self, endpoint: Endpoint, publisher: KvEventPublisher) -> None:
        """Report to `publisher`."""
        self.endpoint = endpoint
        self.feed = EngineFeed(
            endpoint.engine, endpoint.address, self, NO_REPLAY if endpoint.replay_address is None else None
        )
        self.on_reconnect, self.on_departure = self.feed.on_reconnect, self.feed.on_departure
        self.questions = self.feed.questions
        self._is_taking_answer = False
        self._publisher = publisher
        self._ranks: set[int] = set()
        self._num_processes = 1  # of the engine, up to the last clearing
        self._restored: Mapping[int, RankState] | None = None
        # How many events the publisher had lost when the ranks were last known to hold nothing.
        self._num_lost_before = 0
        # The same for each rank that said so itself since the stream, which it may share, was last cleared.
        self._num_lost_before_of: dict[int, int] = {}
        # Ranks that keep blocks beside the GPU, too.
        self._offloading: set[int] = set()
        # What the publisher was told last: which ranks are complete, and how many there were.
        self._published_completeness: tuple[frozenset[int], int] = (frozenset(), 0)

    @property
    def name(self) -> str:
        """Return what stands for the stream in a saved state."""
        return f"{self.endpoint.engine} {self.endpoint.address}"

    @property
    def is_settled(self) -> bool:
        """Return whether nothing waits for the engine's answer, or for the rest of it to be taken."""
        is_asking = self.feed.session.state is SourceState.RESYNCING
        return self._restored is None and not is_asking and not self._is_taking_answer

    @property
    def is_complete(self) -> bool:
        """Return whether nothing was lost on the way into the publisher's streams, so that they lack no block."""
        num_lost = self._publisher.num_lost_events
        return self.feed.session.state is SourceState.LIVE and num_lost == self._num_lost_before

    @property
    def _complete_ranks(self) -> frozenset[int]:
        """Return the ranks that lack no block, once the stream is not asked about any more."""
        if self.is_complete:
            return frozenset(self._ranks)
        num_lost = self._publisher.num_lost_events
        return frozenset(rank for rank, before in self._num_lost_before_of.items() if before == num_lost)

    def progress(self) -> EngineProgress | None:
        """Return how far a settled stream was followed, None before its first message."""
        session = self.feed.session
        if session.epoch is None or session.expected_sequence == 0:
            return None
        known = [pair for pair in self.feed.restarts.remembered() if pair[0] < session.expected_sequence]
        fingerprints = tuple(known[-_NUM_FINGERPRINTS:])
        followed = self.name, session.expected_sequence, self.is_complete, fingerprints
        ranks = (tuple(sorted(each)) for each in (self._ranks, self._complete_ranks, self._offloading))
        return EngineProgress(*followed, *ranks)

    def restore(self, progress: EngineProgress, ranks: Mapping[int, RankState], now_s: float) -> None:
        """Go on from there once that is proven; to be called before anything else."""
        self._restored = ranks
        self._offloading = {*progress.offloading_ranks}
        self._num_lost_before_of = dict.fromkeys(progress.complete_ranks, self._publisher.num_lost_events)
        self.feed.resume(progress.next_sequence, progress.fingerprints, now_s, is_complete=progress.is_complete)
        self.feed.on_reconnect(now_s)  # a live message alone proves nothing: another process may have come as far

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        for message in messages:
            yield from self._wait_for_room()
            self.feed.receive(message, now_s)
            yield
        self._publish_completeness()

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        self._is_taking_answer = True  # which the session takes as a whole, and at once
        try:
            for step in self.feed.judge(question, messages, now_s):
                yield from self._wait_for_room()
                self.feed.apply_step(step)
                yield
        finally:
            self._is_taking_answer = False
        if self.feed.session.state is not SourceState.RESYNCING:
            self._resume_ranks()
        self._publish_completeness()

    def _wait_for_room(self) -> Iterator[None]:
        """Yield until the publisher's thread has caught up: meanwhile nothing is received of this endpoint."""
        while self._publisher.num_waiting_events >= MAX_WAITING_EVENTS:
            if self._publisher.failure is not None:
                return  # nobody takes them any more: they are counted as lost
            time.sleep(_WAIT_S)
            yield

    def apply(self, batch: DecodedEngineBatch) -> None:
        """Report a batch's events to the publisher, once the block size is known (called by the feed)."""
        self._resume_ranks()
        if not self._publisher.learn_block_size(batch.events):
            return
        for event in batch.events:
            self._ranks.add(event.rank)
            self._publisher.report(event)
            if isinstance(event, EngineStored) and event.tier is not Tier.GPU:
                self._offloading.add(event.rank)
            elif isinstance(event, EngineCleared) and (event.tier is None or event.rank not in self._offloading):
                self._note_empty(event.rank, is_alone=batch.rank is None and len(self._ranks) == 1)
                self._publish_completeness()  # before what follows: of a rank that is complete copies are counted

    def clear(self) -> None:
        """Report that every rank of this endpoint holds nothing that is known (called by the feed)."""
        if self._restored is not None:
            _logger.warning("saved state is not believed: the engine did not prove to be the same source=%s", self.name)
            self._ranks |= self._restored.keys()  # said to be empty: the engine may stay silent about them for long
            self._restored = None
        self._num_lost_before_of.clear()
        is_other_process = self.feed.session.num_epochs > self._num_processes
        self._num_processes = self.feed.session.num_epochs
        for rank in self._ranks:
            self._publisher.report(EngineCleared(rank))
        self._num_lost_before = self._publisher.num_lost_events
        if self.feed.session.is_complete:
            self._publish_completeness()  # before what follows: of a rank that is complete copies are counted
        else:
            self._tell_ranks(frozenset())
        if is_other_process:
            self._publisher.between_events(partial(_forget_groups, ranks=tuple(self._ranks)))

    def _note_empty(self, rank: int, *, is_alone: bool) -> None:
        """Note that a rank holds nothing, and its stream if it is alone."""
        self._num_lost_before_of[rank] = self._publisher.num_lost_events
        if is_alone:
            self.feed.session.on_cleared()
            self._num_lost_before = self._publisher.num_lost_events

    def _resume_ranks(self) -> None:
        """Believe what was restored: nothing is applied, and nothing settled, before the engine has proven it."""
        if self._restored is None:
            return
        restored, self._restored = self._restored, None
        self._ranks |= restored.keys()
        self._publisher.resume(restored)
        num_blocks = sum(rank.residency.num_blocks for rank in restored.values())
        _logger.info("went on from saved state source=%s num_blocks=%d", self.name, num_blocks)

    def _publish_completeness(self) -> None:
        """Have the publisher say whether it lacks blocks, unless that depends on an answer."""
        session = self.feed.session
        if session.is_in_step or session.state is not SourceState.RESYNCING:
            self._tell_ranks(self._complete_ranks)

    def _tell_ranks(self, complete_ranks: frozenset[int]) -> None:
        told = (complete_ranks, len(self._ranks))
        if told != self._published_completeness:
            self._published_completeness = told
            self._publisher.between_events(partial(_mark, ranks=tuple(self._ranks), complete_ranks=complete_ranks))


def _mark(streams: Mapping[int, RankStream], *, ranks: Sequence[int], complete_ranks: frozenset[int]) -> None:
    for rank in ranks:
        if rank in streams:
            streams[rank].set_complete(rank in complete_ranks)


def _forget_groups(streams: Mapping[int, RankStream], *, ranks: Sequence[int]) -> None:
    for rank in ranks:
        if rank in streams:
            streams[rank].forget_groups()


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
        # What a saved state depends on beside the block size.
        self._settings = " ".join(f"{name}={options.get(name)}" for name in sorted(StreamOptions.__annotations__))
        self._turns = Turns()
        with ExitStack() as exits:
            self._store = None if state_dir is None else exits.enter_context(StateStore(state_dir, worker))
            saved = self._load(block_size)
            self._publisher = KvEventPublisher(
                to,
                worker=worker,
                block_size=block_size if saved is None else saved.block_size,
                num_ranks=0,  # which ranks there are, the engine's events tell
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
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._follow(feed), name=f"kvist-sidecar-{feed.endpoint.address}")
                    for feed in self._feeds
                ]
                if self._store is not None:
                    running.append(tasks.create_task(self._save_now_and_then(self._store), name="kvist-sidecar-state"))
                # Polled, because the publisher's thread knows nothing of this loop.
                while self._publisher.failure is None:  # noqa: ASYNC110
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
        """Return what an earlier sidecar saved that was configured like this one."""
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

    async def _save_now_and_then(self, store: StateStore) -> None:
        saved: list[EngineProgress] = []
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

    async def _copy(self, block_size: int, streams: Sequence[EngineProgress]) -> SidecarState:
        """Return what is held once all that these streams brought, and nothing else, is in the publisher's."""
        wanted = {rank for stream in streams for rank in stream.ranks}
        ranks: dict[int, RankState] = {}

        def copy(rank_streams: Mapping[int, RankStream]) -> None:
            ranks.update({rank: rank_streams[rank].state() for rank in wanted & rank_streams.keys()})

        await asyncio.wrap_future(self._publisher.between_events(copy))
        return SidecarState(block_size, self._settings, tuple(streams), ranks)

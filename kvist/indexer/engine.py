"""Following an engine's own stream: filtered, hashed and applied here, as a publisher would have done at the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvist.events import EngineCleared, EngineEvent, EngineStored, WorkerRank
from kvist.events.dialects import DecodedEngineBatch
from kvist.events.follow import Question
from kvist.events.session import Session, SessionLimits, SourceState
from kvist.events.transports import Message
from kvist.indexer.statistics import SourceCounters
from kvist.indexer.target import Index
from kvist.publisher.engine_feed import EngineFeed
from kvist.publisher.stream import RankStream


class EngineFollower:
    """Applies one engine's stream to the index under the router's name for it; ranks are the batches'."""

    def __init__(
        self,
        worker: str,
        block_size: int,
        engine: str,
        index: Index,
        resyncing: set[WorkerRank],
        counters: SourceCounters,
        limits: SessionLimits | None = None,
    ) -> None:
        """Keep `resyncing`, shared by all sources, up to date with this worker's ranks."""
        self._worker = worker
        self._block_size = block_size
        self._index = index
        self._resyncing = resyncing
        self._counters = counters
        self._streams: dict[int, RankStream] = {}
        self._now_s = 0.0
        self._has_our_block_size = False
        self._feed = EngineFeed(engine, worker, self, limits)

    @property
    def session(self) -> Session[bytes]:
        """Return the session of the stream, which all its ranks share."""
        return self._feed.session

    def states(self) -> dict[int, SourceState]:
        """Return how far each rank's blocks in the index can be trusted."""
        is_resyncing = not self._resyncing.isdisjoint(self._ranks())
        return dict.fromkeys(self._streams, SourceState.RESYNCING if is_resyncing else self._feed.session.state)

    def progress(self) -> None:
        """Say nothing: what the engine's hashes name is not known elsewhere."""
        return

    def received(self, message: Message, now_s: float) -> None:
        """Take one live message."""
        self._now_s = now_s
        self._feed.received(message, now_s)
        self._note_state()

    def received_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        """Take live messages; yields between them."""
        for message in messages:
            self.received(message, now_s)
            yield

    def reconnected(self, now_s: float) -> None:
        """Trust nothing until a replay proves that it is the same process."""
        self._feed.reconnected(now_s)
        self._note_state()

    def questions(self, now_s: float) -> list[Question]:
        """Return the question that is due, if any."""
        return self._feed.questions(now_s)

    def answered(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Take the answer; yields between batches."""
        self._now_s = now_s
        yield from self._feed.answered(question, messages, now_s)
        self._note_state()

    def apply(self, batch: DecodedEngineBatch) -> None:
        """Filter, hash and apply an engine's batch (called by the feed)."""
        ranks = {event.rank for event in batch.events}
        for event in batch.events:
            self._check_block_size(event)
            self._stream(event.rank).admit(event)
        for rank in ranks:
            for canonical in self._streams[rank].close_batches(0.0):
                result = self._index.apply(WorkerRank(self._worker, rank), canonical.events)
                self._counters.num_refused_events += result.num_parent_not_found + result.num_invalid
        self._counters.num_unknown_events += batch.num_ignored_events
        self._counters.applied(len(batch.events), batch.timestamp_s, self._now_s, time.time())
        if ranks == self._streams.keys() and any(isinstance(event, EngineCleared) for event in batch.events):
            self._feed.session.emptied()

    def clear(self) -> None:
        """Forget what every rank of this stream holds (called by the feed)."""
        for rank in self._streams:
            self._index.clear(self._worker, rank)
            self._streams[rank] = self._new_stream(rank)

    def _check_block_size(self, event: EngineEvent) -> None:
        """Note a block size that the normaliser will leave out; hybrid models have some of them beside ours."""
        if not isinstance(event, EngineStored):
            return
        if event.block_size == self._block_size:
            self._has_our_block_size = True
            self._counters.failure = None
        elif not self._has_our_block_size:
            self._counters.refuse(self._worker, event.block_size, self._block_size)

    def _ranks(self) -> set[WorkerRank]:
        return {WorkerRank(self._worker, rank) for rank in self._streams}

    def _note_state(self) -> None:
        """Tell the router whether the ranks' overlap counts; called once the steps so far are taken."""
        self._counters.num_malformed = self._feed.num_malformed
        if self._feed.session.state is SourceState.RESYNCING:
            self._resyncing |= self._ranks()
        else:
            self._resyncing -= self._ranks()

    def _stream(self, rank: int) -> RankStream:
        stream = self._streams.get(rank)
        if stream is None:
            stream = self._streams[rank] = self._new_stream(rank)
        return stream

    def _new_stream(self, rank: int) -> RankStream:
        return RankStream(WorkerRank(self._worker, rank), self._block_size, epoch=0)

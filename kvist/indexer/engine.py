"""Following an engine's own stream: filtered, hashed and applied here, as a publisher would have done at the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvist.events import EngineCleared, EngineEvent, EngineStored, WorkerRank
from kvist.events.dialects import DecodedEngineBatch
from kvist.events.follow import Question
from kvist.events.session import Apply, Clear, Session, SessionLimits, SourceState, Step
from kvist.events.transports import Message
from kvist.events.transports.block import MessageBlock
from kvist.indexer.progress import EngineProgress, EngineRankProgress
from kvist.indexer.statistics import RankBound, SourceCounters
from kvist.publisher.engine_feed import EngineFeed

if TYPE_CHECKING:
    from kvist.indexer.engine_lane import EngineRank, Taken
    from kvist.indexer.residency import Names
    from kvist.radix import RadixIndex

_JOINED_STEPS = 256
"""Messages of an answer that are copied side by side at a time."""


class EngineFollower:
    """Applies one engine's stream to the index under the router's name for it; ranks are the batches', if they say."""

    def __init__(
        self,
        worker: str,
        block_size: int,
        engine: str,
        index: RadixIndex,
        resyncing: set[WorkerRank],
        counters: SourceCounters,
        limits: SessionLimits | None = None,
        bound: RankBound | None = None,
        has_full_reports: bool = False,
        num_ahead: int = 0,
    ) -> None:
        """Keep `resyncing`, shared by all sources, up to date with this worker's ranks.

        Batches that name no rank are of `bound.own_rank`. What vLLM stores again is one more copy, as long as nothing
        was lost: it reports each. With `has_full_reports`, where others have it report what it holds anew, that is
        told from a copy by what a hit needs, which may be wrong. Hits need `num_ahead` blocks more than they have.
        """
        from kvist.indexer.engine_lane import EngineLane  # compiled, as the index is: not for who only imports this

        self._worker = worker
        self._block_size = block_size
        self._index = index
        self._resyncing = resyncing
        self._counters = counters
        self._bound = bound or RankBound()
        # Ranks that said they hold nothing since anything of the stream, which they may share, was lost.
        self._whole: set[int] = set()
        self._now_s = 0.0
        self._has_our_block_size = False
        self._is_part = False
        self._num_ahead = num_ahead
        self._counts_copies = engine == "vllm"
        self._has_full_reports = has_full_reports and self._counts_copies
        self._feed = EngineFeed(engine, worker, self, limits)
        self._session = self._feed.session
        self._lane = EngineLane(block_size, engine, index, self._bound.own_rank)
        self._ranks = self._lane.ranks

    @property
    def sessions(self) -> tuple[Session[bytes]]:
        """Return that of the stream, which all its ranks share."""
        return (self._session,)

    def states(self) -> dict[int, SourceState]:
        is_resyncing = not self._resyncing.isdisjoint(self._sources())
        followed = SourceState.RESYNCING if is_resyncing else self._session.state
        return {source.rank: self._state(source, followed) for source in self._sources()}

    def _state(self, source: WorkerRank, followed: SourceState) -> SourceState:
        if followed is SourceState.PARTIAL and source.rank in self._whole:
            followed = SourceState.LIVE
        is_short = followed is SourceState.LIVE and (
            self._has_full_reports or self._index.evicted_from(source) or self._ranks[source.rank].is_short
        )
        return SourceState.PARTIAL if is_short else followed

    def counted(self) -> set[int]:
        """Return the ranks of which copies are counted: what they report anew would count as one more."""
        return {number for number, rank in self._ranks.items() if rank.residency.counts_copies}

    def progress(self, *, is_caught_up: bool = True) -> EngineProgress | None:
        """Return how far the stream was followed, None before the first message.

        True whatever is in doubt just now: the index holds what the engine's process, as far as it was that one, held
        before the next message to apply. But not while an answer is taken. Who is not `is_caught_up` with what the
        connection brought, or might have brought, cannot tell whether the engine still is that process.
        """
        session, restarts = self._session, self._feed.restarts
        if session.epoch is None:
            return None
        is_told = all(rank.is_told for rank in self._ranks.values())
        is_short = any(self._index.evicted_from(source) for source in self._sources())
        return EngineProgress(
            session.expected_sequence,
            session.is_complete and is_told and not is_short,
            session.state is SourceState.RESYNCING or session.is_unproven or not is_caught_up,
            tuple(restarts.remembered()),
            tuple(
                EngineRankProgress(
                    number,
                    rank.filter.state,
                    number in self._whole and rank.is_told,
                    rank.residency.told_copies(),
                    dict(rank.splitter.other_rules),
                    rank.is_offloading,
                )
                for number, rank in self._ranks.items()
            ),
        )

    def resume(self, progress: EngineProgress, now_s: float) -> None:
        self._feed.resume(progress.next_sequence, progress.fingerprints, now_s, is_complete=progress.is_complete)
        if progress.is_in_doubt:
            self._feed.on_reconnect(now_s)
        for each in progress.ranks:
            rank = self._rank(each.rank)
            rank.resume(each.filter, each.other_groups, each.copies)
            rank.is_offloading = each.is_offloading
            if each.is_whole:
                self._whole.add(each.rank)
        self._note_state()

    def names(self) -> Iterator[tuple[int, Names]]:
        """Yield, by rank, what the engine's hashes name in the index, some at a time."""
        for number, rank in [*self._ranks.items()]:
            for names in rank.residency.told_names():
                yield number, names

    def resume_names(self, rank: int, names: Names) -> None:
        """Account for blocks of a rank that the index has now."""
        self._ranks[rank].residency.resume(names)

    def receive(self, message: Message, now_s: float) -> None:
        self._now_s = now_s
        self._feed.receive(message, now_s)
        self._note_state()

    def receive_all(self, block: MessageBlock, now_s: float) -> Iterator[None]:
        yield from self._take_all(block, (), now_s)

    def on_reconnect(self, now_s: float) -> None:
        """Trust nothing until a replay proves that it is the same process."""
        self._feed.on_reconnect(now_s)
        self._note_state()

    def on_departure(self) -> None:
        self._feed.on_departure()
        self._note_state()

    def questions(self, now_s: float) -> list[Question]:
        """Return the question that is due, if any; and tidy up, since this is asked all the time."""
        self._lane.tidy()
        return self._feed.questions(now_s)

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        self._now_s = now_s
        for is_clear, run in groupby(self._feed.judge(question, messages, now_s), lambda step: isinstance(step, Clear)):
            steps = list(run)
            if is_clear:
                for step in steps:
                    self._feed.apply_step(step)
                    yield
            else:
                for start in range(0, len(steps), _JOINED_STEPS):
                    some = steps[start : start + _JOINED_STEPS]
                    bodies = [step.body for step in some if isinstance(step, Apply)]
                    block = MessageBlock.of([Message(b"", idx, body) for idx, body in enumerate(bodies)])
                    yield from self._take_all(block, some, now_s)
        self._note_state()

    def apply(self, batch: DecodedEngineBatch) -> None:
        number = self._bound.own_rank if batch.rank is None else batch.rank
        if number not in self._ranks and not self._bound.admits(number, self._worker, self._counters):
            return
        for event in batch.events:
            self._check_block_size(event)
            rank = self._rank(number)
            rank.admit(event)
            # Who offloaded blocks before any were lost may have some that nobody knows of.
            if isinstance(event, EngineCleared) and (event.tier is None or not rank.is_offloading):
                self._whole.add(number)
                self._note_counting()  # before what follows
        self._counters.num_unknown_events += batch.num_ignored_events
        if self._is_part:
            self._counters.num_events += len(batch.events)
        else:
            self._counters.applied(len(batch.events), batch.timestamp_s, self._now_s, time.time())

    def clear(self) -> None:
        self._whole.clear()
        for rank in self._ranks.values():
            rank.clear()
        self._note_counting()

    def _take_all(self, block: MessageBlock, steps: Sequence[Step[bytes]], now_s: float) -> Iterator[None]:
        """Apply messages, received ones or those of steps that were judged, ordinary ones in bulk; yields between."""
        self._lane.begin(block, None if steps else self._feed.restarts)
        message_idx, num_messages = 0, len(block)
        while message_idx < num_messages:
            next_sequence, is_stopped = message_idx if steps else self._feed.next_sequence, True
            if next_sequence is not None:
                taken = self._lane.take(next_sequence, self._has_our_block_size)
                message_idx, is_stopped = taken.message_idx, taken.is_stopped
                if taken.num_batches and steps:
                    self._feed.on_judged_applied(taken.num_batches)
                elif taken.num_batches:
                    self._feed.on_applied(taken.num_batches, now_s)
                self._note_taken(taken, now_s)
            if is_stopped and steps:
                self._feed.apply_step(steps[message_idx])
            elif is_stopped:
                self.receive(block[message_idx], now_s)
            if is_stopped:
                message_idx = self._lane.skip()
            yield

    def _note_taken(self, taken: Taken, now_s: float) -> None:
        """Count what the lane took, as if it had been received, and apply what it stopped at."""
        counters = self._counters
        counters.num_events += taken.num_events
        counters.num_unknown_events += taken.num_ignored_events
        if taken.num_events_of_our_size:
            self._has_our_block_size = True
            counters.failure = None
        if taken.num_batches:
            counters.applied(0, taken.timestamp_s, now_s, time.time(), taken.num_batches)
        if taken.part is not None:
            self._is_part = True
            self._feed.apply_part(taken.part)
            self._is_part = False
        self._counters.num_malformed = self._feed.num_malformed

    def _check_block_size(self, event: EngineEvent) -> None:
        """Note a block size that the normaliser will leave out; hybrid models have some of them beside ours."""
        if not isinstance(event, EngineStored):
            return
        if event.block_size == self._block_size:
            self._has_our_block_size = True
            self._counters.failure = None
        elif not self._has_our_block_size:
            self._counters.refuse(self._worker, event.block_size, self._block_size)

    def _sources(self) -> set[WorkerRank]:
        return {WorkerRank(self._worker, rank) for rank in self._ranks}

    def _note_counting(self) -> None:
        """Have copies counted of ranks that lack nothing: of others, the engine may have been asked to report anew."""
        is_complete = self._session.is_complete
        for number, rank in self._ranks.items():
            has_lost = self._index.evicted_from(WorkerRank(self._worker, number))
            is_known = (is_complete or number in self._whole) and not has_lost
            rank.residency.counts_copies = self._counts_copies and is_known

    def _note_state(self) -> None:
        """Tell the router whether the ranks' overlap counts; called once the steps so far are taken."""
        self._note_counting()
        self._counters.num_malformed = self._feed.num_malformed
        if self._session.state is SourceState.RESYNCING:
            self._resyncing |= self._sources()
        else:
            self._resyncing -= self._sources()

    def _rank(self, number: int) -> EngineRank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._lane.add_rank(WorkerRank(self._worker, number), self._num_ahead, self._has_full_reports)
            self._note_counting()
        return rank

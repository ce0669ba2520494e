"""Following a stream of canonical batches: one session a rank, heartbeats checked against the index."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Cleared, Heartbeat, WorkerRank
from kvist.events.codec import decode_batch, decode_snapshot_part, is_snapshot_part
from kvist.events.follow import Question
from kvist.events.session import (
    NO_REPLAY,
    Apply,
    Clear,
    ClearReason,
    Restore,
    Session,
    SessionLimits,
    SourceState,
    Step,
)
from kvist.events.snapshot import Snapshot, SnapshotAssembly
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import MAX_RANKS, GroupRule, Holding, SnapshotPart
from kvist.indexer.progress import CanonicalProgress, RankProgress
from kvist.indexer.statistics import RankBound, SourceCounters

if TYPE_CHECKING:
    from kvist.radix import RadixIndex

_logger = logging.getLogger(__name__)

NUM_BLOCKS_A_SLICE = 512
"""Blocks of a snapshot put into the index at a time: some 0.15 ms."""


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank of the stream, and what its batches said of it."""

    source: WorkerRank
    session: Session[Batch]
    topic: bytes | None = None
    is_incomplete: bool = False
    """Whether its publisher itself does not know of all that the engine holds."""
    rules: tuple[GroupRule, ...] | None = None
    """What hits need of this rank's blocks and of its companion's, if this is one; None before it has said so."""


class CanonicalFollower:
    """Applies one worker's canonical batches to the index, whatever worker they name: the router's name counts."""

    def __init__(
        self,
        worker: str,
        block_size: int,
        index: RadixIndex,
        resyncing: set[WorkerRank],
        counters: SourceCounters,
        limits: SessionLimits | None = None,
        bound: RankBound | None = None,
    ) -> None:
        """Keep `resyncing`, shared by all sources, up to date with this worker's ranks."""
        self._worker = worker
        self._block_size = block_size
        self._index = index
        self._resyncing = resyncing
        self._counters = counters
        self._limits = limits
        self._bound = bound or RankBound()
        self._ranks: dict[int, _Rank] = {}

    @property
    def sessions(self) -> tuple[Session[Batch], ...]:
        return tuple(rank.session for rank in self._ranks.values())

    def states(self) -> dict[int, SourceState]:
        return {number: self._state(rank) for number, rank in self._ranks.items() if number < MAX_RANKS}

    def counted(self) -> set[int]:
        """Return the ranks of which the publisher may count copies: it knows of all that the engine holds."""
        return {number for number, rank in self._ranks.items() if not rank.is_incomplete}

    def progress(self) -> CanonicalProgress | None:
        """Return how far each rank was followed, None before the first batch.

        True whatever is asked for just now: the index holds what the rank held before the next message to apply. But
        not while an answer is taken.
        """
        ranks = tuple(
            RankProgress(number, rank.session.epoch, rank.session.expected_sequence, self._is_whole(rank))
            for number, rank in self._ranks.items()
            if rank.session.epoch is not None
        )
        return CanonicalProgress(ranks) if ranks else None

    def resume(self, progress: CanonicalProgress) -> None:
        for each in progress.ranks:
            rank = self._add_rank(each.rank)
            rank.session.resume(each.epoch, each.next_sequence, is_complete=each.is_complete)
            self._note_state(rank)

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        for message in messages:
            self._receive(message, now_s)
            yield

    def _receive(self, message: Message, now_s: float) -> None:
        batch = self._decode(message)
        if batch is None:
            return
        rank = self._ranks.get(batch.rank)
        if rank is None:
            if not self._bound.admits(batch.rank % MAX_RANKS, self._worker, self._counters):
                return
            rank = self._add_rank(batch.rank)
        if message.topic:  # replies in the older framing have none
            rank.topic = message.topic
        elif rank.topic is None:
            rank.topic = f"kv/{batch.worker}/{batch.rank}".encode()
        if _is_heartbeat(batch):
            steps = self._heartbeat(rank, batch, now_s)
        else:
            steps = rank.session.receive(batch.epoch, batch.sequence, batch, now_s)
        self._take_all(rank, steps, now_s)

    def on_reconnect(self, now_s: float) -> None:
        """Nothing is in doubt: an epoch tells a restart, and a heartbeat what was lost meanwhile."""

    def on_departure(self) -> None:
        """Count no rank's blocks until it is heard again."""
        for rank in self._ranks.values():
            rank.session.on_departure()
            self._note_state(rank)

    def questions(self, now_s: float) -> list[Question]:
        due = []
        for number, rank in self._ranks.items():
            rank.session.tick(now_s)
            self._note_state(rank)
            start_sequence = rank.session.question(now_s)
            if start_sequence is not None:
                due.append(Question(ReplayRequest(rank.topic, start_sequence, rank.session.epoch), number))
        return due

    def missed(self, since_s: float) -> list[int]:
        """Return the ranks of which nothing was heard since then, or for long."""
        return [number for number, rank in self._ranks.items() if rank.session.is_missed(since_s)]

    def take_names(self, messages: Sequence[Message], since_s: float, now_s: float) -> None:
        """Take which ranks a peer has, from its heartbeats: a missed one that is not among them went with another."""
        named = set()
        for message in messages:
            batch = self._decode(message)
            if batch is None:  # an answer that is damaged may lack what it had
                return
            named.add(batch.rank)
        for number in self.missed(since_s):
            rank = self._ranks[number]
            if number not in named and number < MAX_RANKS:
                self._take_all(rank, rank.session.on_forgotten(now_s), now_s)
            elif number not in named:  # nothing is told of other groups any more
                self._drop(rank)

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        rank = self._ranks.get(question.rank)
        if rank is None:  # an answer to another question had blocks of another size
            return
        answer = None if messages is None else (yield from self._read(messages, question.rank))
        if self._ranks.get(question.rank) is not rank:  # and so had this one
            return
        session, snapshot = rank.session, None
        if answer is None:
            steps = session.on_answer(None, None, now_s)
        else:
            snapshot, batches = answer
            told = ([] if snapshot is None else [snapshot.epoch]) + [batch.epoch for batch in batches[:1]]
            epoch = told[0] if told else session.epoch
            frames = [(batch.sequence, batch) for batch in batches if batch.epoch == epoch]
            snapshot_sequence = None if snapshot is None else snapshot.sequence
            steps = session.on_answer(epoch, frames, now_s, snapshot_sequence=snapshot_sequence)
        for step in steps:
            if not isinstance(step, Restore):
                self._take(rank, step, now_s)
                yield
                continue
            assert snapshot is not None
            if not (yield from self._restore(rank, snapshot)):
                for undoing in session.on_divergence(now_s):
                    self._take(rank, undoing, now_s)
                break
            yield
        self._note_state(rank)

    def _read(
        self, messages: Sequence[Message], number: int
    ) -> Generator[None, None, tuple[Snapshot | None, list[Batch]] | None]:
        """Return what an answer says about a rank, None for one that cannot be believed; yields between messages.

        It is a snapshot or none, and the batches behind it. Heartbeats are signs of life of who prepares a snapshot.
        """
        batches, assembly = list[Batch](), None
        try:
            for message in messages:
                if is_snapshot_part(message.payload):
                    part = decode_snapshot_part(message.payload, self._worker)
                    if part.rank == number:
                        if not self._has_our_block_size(part):
                            reason = f"a snapshot with blocks of {part.block_size} tokens"
                            raise MalformedMessageError(self._worker, reason)
                        assembly = assembly or SnapshotAssembly(self._worker)
                        assembly.add(part)
                elif (batch := self._decode(message)) is not None and batch.rank == number and not _is_heartbeat(batch):
                    batches.append(batch)
                yield
            return None if assembly is None else assembly.snapshot(), batches
        except MalformedMessageError as error:
            self._count_malformed(error)
            return None

    def _restore(self, rank: _Rank, snapshot: Snapshot) -> Generator[None, None, bool]:
        """Have the index hold of a rank what the snapshot says, and nothing else; yields between slices.

        Return whether it does: it does not after a fault of ours, or if a block is twice in the snapshot.
        """
        from kvist.radix import Residencies  # compiled: not for who has no index

        source = rank.source
        self._index.clear(*source)
        self._set_groups(source.rank)
        for held in snapshot.slices:
            for start in range(0, len(held.hashes), NUM_BLOCKS_A_SLICE):
                part = slice(start, start + NUM_BLOCKS_A_SLICE)
                self._index.restore(Residencies((source,), held.hashes[part], held.depths[part], held.tiers[part]))
                yield
        is_exact = self._index.digest(source) == snapshot.holding or self._index.evicted_from(source)
        if is_exact:
            text = "rank restored worker=%s rank=%d num_blocks=%d sequence=%d"
            _logger.info(text, *source, snapshot.holding.num_blocks, snapshot.sequence)
        return is_exact

    def clear(self) -> None:
        for rank in self._ranks.values():
            self._index.clear(*rank.source)

    def _add_rank(self, number: int) -> _Rank:
        session: Session[Batch] = Session(self._limits, has_snapshots=self._limits is not NO_REPLAY)
        rank = self._ranks[number] = _Rank(WorkerRank(self._worker, number), session)
        self._set_groups(number)
        return rank

    def _heartbeat(self, rank: _Rank, batch: Batch, now_s: float) -> list[Step[Batch]]:
        (heartbeat,) = batch.events
        assert isinstance(heartbeat, Heartbeat)
        published, held = Holding(heartbeat.num_blocks, heartbeat.digest), self._index.digest(rank.source)
        is_short = self._index.evicted_from(rank.source)  # and so has another digest, though nothing was lost
        copied = published if is_short else held
        rank.is_incomplete = not heartbeat.is_complete
        self._counters.has_upper_bounds = heartbeat.is_upper_bound
        if batch.rank >= MAX_RANKS and heartbeat.rules != rank.rules:
            rank.rules = heartbeat.rules
            if not rank.rules:
                self._index.clear(*rank.source)  # with which go the rules that there were
            self._set_groups(batch.rank)
        return rank.session.on_heartbeat(batch.epoch, batch.sequence, published, copied, now_s)

    def _set_groups(self, number: int) -> None:
        """Tell the index what hits of a rank need, who or whose companion was cleared, or has other rules now."""
        companion = self._ranks.get(number % MAX_RANKS + MAX_RANKS)
        if companion is not None and companion.rules != ():
            rules = companion.rules or (GroupRule(0),)  # a companion is in no answer, whatever is known of it
            self._index.set_groups(WorkerRank(self._worker, number % MAX_RANKS), rules)

    def _is_short(self, rank: _Rank) -> bool:
        return rank.is_incomplete or self._index.evicted_from(rank.source)

    def _is_whole(self, rank: _Rank) -> bool:
        return rank.session.is_complete and not self._is_short(rank)

    def _state(self, rank: _Rank) -> SourceState:
        if rank.source in self._resyncing:
            return SourceState.RESYNCING
        is_short, companion = self._is_short(rank), self._ranks.get(rank.source.companion.rank)
        if companion is not None:  # what hits need is not known, or not wholly
            is_short |= companion.is_incomplete or companion.rules is None
            is_short |= companion.session.state is not SourceState.LIVE
        state = rank.session.state
        return SourceState.PARTIAL if state is SourceState.LIVE and is_short else state

    def _take_all(self, rank: _Rank, steps: list[Step[Batch]], now_s: float) -> None:
        for step in steps:
            self._take(rank, step, now_s)
        self._note_state(rank)

    def _take(self, rank: _Rank, step: Step[Batch], now_s: float) -> None:
        if isinstance(step, Clear):
            _logger.warning("rank cleared: %s worker=%s rank=%d", step.reason, *rank.source)
            self._index.clear(*rank.source)
            self._set_groups(rank.source.rank)
            if step.reason is ClearReason.LOST:
                rank.session.on_cleared(by_loss=True)
            return
        assert isinstance(step, Apply)
        batch = step.body
        result = self._index.apply(rank.source, batch.events)
        self._counters.num_refused_events += result.num_parent_not_found + result.num_invalid
        self._counters.applied(len(batch.events), batch.timestamp_s, now_s, time.time())
        if Cleared() in batch.events:
            rank.session.on_cleared()
            self._set_groups(rank.source.rank)

    def _note_state(self, rank: _Rank) -> None:
        """Tell the router whether the rank's overlap counts; called once the steps so far are taken."""
        if rank.session.state is SourceState.RESYNCING:
            self._resyncing.add(rank.source)
        else:
            self._resyncing.discard(rank.source)

    def _decode(self, message: Message) -> Batch | None:
        """Return the message's batch; None, counted and once logged, when it is malformed or of another block size."""
        try:
            batch, num_unknown_events = decode_batch(message.payload, self._worker)
        except MalformedMessageError as error:
            self._count_malformed(error)
            return None
        self._counters.num_unknown_events += num_unknown_events
        return batch if self._has_our_block_size(batch) else None

    def _count_malformed(self, error: MalformedMessageError) -> None:
        self._counters.num_malformed += 1
        if self._counters.num_malformed == 1:
            _logger.warning("%s; it is skipped, and further ones are only counted", error)

    def _has_our_block_size(self, batch: Batch | SnapshotPart) -> bool:
        if batch.block_size == self._block_size:
            self._counters.failure = None
            return True
        self._counters.refuse(self._worker, batch.block_size, self._block_size)
        if batch.rank in self._ranks:
            self._drop(self._ranks[batch.rank])
        return False

    def _drop(self, rank: _Rank) -> None:
        """Forget a rank of the stream, and what it holds."""
        del self._ranks[rank.source.rank]
        self._index.clear(*rank.source)
        self._resyncing.discard(rank.source)


def _is_heartbeat(batch: Batch) -> bool:
    """Tell a heartbeat, which takes no number, from a numbered batch."""
    return len(batch.events) == 1 and isinstance(batch.events[0], Heartbeat)

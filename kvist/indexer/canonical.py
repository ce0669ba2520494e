"""Following a stream of canonical batches: one session a rank, heartbeats checked against the index."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
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
from kvist.events.transports.block import MessageBlock
from kvist.events.types import MAX_RANKS, GroupRule, Holding, SnapshotPart
from kvist.indexer.progress import CanonicalProgress, RankProgress
from kvist.indexer.statistics import RankBound, SourceCounters

if TYPE_CHECKING:
    from kvist.indexer.canonical_lane import Taken
    from kvist.radix import RadixIndex

_logger = logging.getLogger(__name__)

_MIN_JOINED, _MAX_JOINED = 4, 256
"""How many messages are joined to a block for the fast lane: for fewer it costs more than it saves, and the answer to a
question may be long."""
NUM_BLOCKS_A_SLICE = 512
"""Blocks of a snapshot put into the index at a time: some 0.15 ms."""


@dataclass(slots=True)
class _Answer:
    """What a publisher answered about one rank: a snapshot or none, and the batches behind it."""

    snapshot: Snapshot | None = None
    batches: list[Batch] = field(default_factory=list)

    @property
    def epoch(self) -> int | None:
        """Return the epoch that it tells of, None if it is empty."""
        if self.snapshot is not None:
            return self.snapshot.epoch
        return self.batches[0].epoch if self.batches else None


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
        from kvist.indexer.canonical_lane import CanonicalLane  # compiled, as the index is: not for who imports this

        self._worker = worker
        self._block_size = block_size
        self._index = index
        self._resyncing = resyncing
        self._counters = counters
        self._limits = limits
        self._bound = bound or RankBound()
        self._lane = CanonicalLane(worker, block_size, index)
        self.sessions: dict[int, Session[Batch]] = {}
        """Of each rank."""
        self._topics: dict[int, bytes] = {}
        # Ranks whose publisher itself does not know of all that the engine holds.
        self._incomplete: set[int] = set()
        # What hits of ranks with companions need.
        self._rules: dict[int, tuple[GroupRule, ...]] = {}

    def states(self) -> dict[int, SourceState]:
        return {
            rank: SourceState.RESYNCING if WorkerRank(self._worker, rank) in self._resyncing else self._state(rank)
            for rank in self.sessions
            if rank < MAX_RANKS
        }

    def progress(self) -> CanonicalProgress | None:
        """Return how far each rank was followed, None before the first batch.

        True whatever is asked for just now: the index holds what the rank held before the next message to apply. But
        not while an answer is taken.
        """
        ranks = tuple(
            RankProgress(rank, session.epoch, session.expected_sequence, self._is_whole(rank))
            for rank, session in self.sessions.items()
            if session.epoch is not None
        )
        return CanonicalProgress(ranks) if ranks else None

    def resume(self, progress: CanonicalProgress) -> None:
        for each in progress.ranks:
            session = self._new_session(each.rank)
            session.resume(each.epoch, each.next_sequence, is_complete=each.is_complete)
            self._note_state(each.rank)

    def receive(self, message: Message, now_s: float) -> None:
        batch = self._decode(message)
        if batch is None:
            return
        session = self.sessions.get(batch.rank)
        if session is None:
            if not self._bound.admits(batch.rank % MAX_RANKS, self._worker, self._counters):
                return
            session = self._new_session(batch.rank)
        if message.topic:  # replies in the older framing have none
            self._topics[batch.rank] = message.topic
        else:
            self._topics.setdefault(batch.rank, f"kv/{batch.worker}/{batch.rank}".encode())
        if _is_heartbeat(batch):
            steps = self._heartbeat(session, batch, now_s)
        else:
            steps = session.receive(batch.epoch, batch.sequence, batch, now_s)
        self._take_all(batch.rank, steps, now_s)

    def receive_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        if len(messages) < _MIN_JOINED and not isinstance(messages, MessageBlock):
            for message in messages:
                self.receive(message, now_s)
                yield
            return
        for block in _blocks(messages):
            position = 0
            while position < len(block):
                taken = self._lane.take(block, position, self.sessions, now_s)
                position = taken.end
                if taken.num_batches:
                    self._note_taken(taken, block, now_s)
                if taken.is_stopped:
                    self.receive(block[position], now_s)
                    position += 1
                yield

    def on_reconnect(self, now_s: float) -> None:
        """Nothing is in doubt: an epoch tells a restart, and a heartbeat what was lost meanwhile."""

    def on_departure(self) -> None:
        """Count no rank's blocks until it is heard again."""
        for rank, session in self.sessions.items():
            session.on_departure()
            self._note_state(rank)

    def questions(self, now_s: float) -> list[Question]:
        due = []
        for rank, session in self.sessions.items():
            session.tick(now_s)
            self._note_state(rank)
            start_sequence = session.question(now_s)
            if start_sequence is not None:
                due.append(Question(ReplayRequest(self._topics.get(rank), start_sequence, session.epoch), rank))
        return due

    def missed(self, since_s: float) -> list[int]:
        """Return the ranks of which nothing was heard since then, or for long."""
        return [rank for rank, session in self.sessions.items() if session.is_missed(since_s)]

    def take_names(self, messages: Sequence[Message], since_s: float, now_s: float) -> None:
        """Take which ranks a peer has, from its heartbeats: a missed one that is not among them went with another."""
        named = set()
        for message in messages:
            batch = self._decode(message)
            if batch is None:  # an answer that is damaged may lack what it had
                return
            named.add(batch.rank)
        for rank in self.missed(since_s):
            if rank not in named:
                self._take_all(rank, self.sessions[rank].on_forgotten(now_s), now_s)

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        rank = question.rank
        session = self.sessions.get(rank)
        if session is None:  # an answer to another question had blocks of another size
            return
        answer = None if messages is None else (yield from self._read(messages, rank))
        if self.sessions.get(rank) is not session:  # and so had this one
            return
        if answer is None:
            steps = session.on_answer(None, None, now_s)
        else:
            epoch = session.epoch if answer.epoch is None else answer.epoch
            frames = [(batch.sequence, batch) for batch in answer.batches if batch.epoch == epoch]
            snapshot_sequence = None if answer.snapshot is None else answer.snapshot.sequence
            steps = session.on_answer(epoch, frames, now_s, snapshot_sequence=snapshot_sequence)
        for step in steps:
            if not isinstance(step, Restore):
                self._take(rank, step, now_s)
                yield
                continue
            assert answer is not None
            assert answer.snapshot is not None
            if not (yield from self._restore(rank, answer.snapshot)):
                for undoing in session.on_divergence(now_s):
                    self._take(rank, undoing, now_s)
                break
            yield
        self._note_state(rank)

    def _read(self, messages: Sequence[Message], rank: int) -> Generator[None, None, _Answer | None]:
        """Return what an answer says about a rank, None for one that cannot be believed; yields between messages.

        Heartbeats are signs of life of a publisher that prepares a snapshot, and no more.
        """
        answer, assembly = _Answer(), None
        try:
            for message in messages:
                if is_snapshot_part(message.payload):
                    part = decode_snapshot_part(message.payload, self._worker)
                    if part.rank == rank:
                        if not self._has_our_block_size(part):
                            reason = f"a snapshot with blocks of {part.block_size} tokens"
                            raise MalformedMessageError(self._worker, reason)
                        assembly = assembly or SnapshotAssembly(self._worker)
                        assembly.add(part)
                elif (batch := self._decode(message)) is not None and batch.rank == rank and not _is_heartbeat(batch):
                    answer.batches.append(batch)
                yield
            answer.snapshot = None if assembly is None else assembly.snapshot()
        except MalformedMessageError as error:
            self._count_malformed(error)
            return None
        return answer

    def _restore(self, rank: int, snapshot: Snapshot) -> Generator[None, None, bool]:
        """Have the index hold of a rank what the snapshot says, and nothing else; yields between slices.

        Return whether it does: it does not after a fault of ours, or if a block is twice in the snapshot.
        """
        from kvist.radix import Residencies  # compiled: not for who has no index

        source = WorkerRank(self._worker, rank)
        self._index.clear(*source)
        for held in snapshot.slices:
            for start in range(0, len(held.hashes), NUM_BLOCKS_A_SLICE):
                part = slice(start, start + NUM_BLOCKS_A_SLICE)
                self._index.restore(Residencies((source,), held.hashes[part], held.depths[part], held.tiers[part]))
                yield
        is_exact = self._index.digest(source) == snapshot.holding or self._index.evicted_from(source)
        self._set_groups(rank)
        if is_exact:
            text = "rank restored worker=%s rank=%d num_blocks=%d sequence=%d"
            _logger.info(text, self._worker, rank, snapshot.holding.num_blocks, snapshot.sequence)
        return is_exact

    def clear(self) -> None:
        for rank in self.sessions:
            self._index.clear(self._worker, rank)

    def _new_session(self, rank: int) -> Session[Batch]:
        session: Session[Batch] = Session(self._limits, has_snapshots=self._limits is not NO_REPLAY)
        self.sessions[rank] = session
        return session

    def _heartbeat(self, session: Session[Batch], batch: Batch, now_s: float) -> list[Step[Batch]]:
        (heartbeat,) = batch.events
        assert isinstance(heartbeat, Heartbeat)
        source = WorkerRank(self._worker, batch.rank)
        published, held = Holding(heartbeat.num_blocks, heartbeat.digest), self._index.digest(source)
        is_short = self._index.evicted_from(source)  # and so has another digest, though nothing was lost on the way
        copied = published if is_short else held
        (self._incomplete.discard if heartbeat.is_complete else self._incomplete.add)(batch.rank)
        if batch.rank >= MAX_RANKS and heartbeat.rules != self._rules.get(batch.rank - MAX_RANKS, ()):
            self._rules[batch.rank - MAX_RANKS] = heartbeat.rules
            self._set_groups(batch.rank)
        return session.on_heartbeat(batch.epoch, batch.sequence, published, copied, now_s)

    def _set_groups(self, rank: int) -> None:
        """Tell the index what hits of a rank need, who or whose companion was cleared, or has other rules now."""
        rules = self._rules.get(rank % MAX_RANKS)
        if rules:
            self._index.set_groups(WorkerRank(self._worker, rank % MAX_RANKS), rules)

    def _is_whole(self, rank: int) -> bool:
        is_short = rank in self._incomplete or self._index.evicted_from(WorkerRank(self._worker, rank))
        return self.sessions[rank].is_complete and not is_short

    def _state(self, rank: int) -> SourceState:
        followed, companion = self.sessions[rank].state, rank + MAX_RANKS
        is_short = rank in self._incomplete or self._index.evicted_from(WorkerRank(self._worker, rank))
        if companion in self.sessions:  # what hits need is not known, or not wholly
            is_short |= companion in self._incomplete or self.sessions[companion].state is not SourceState.LIVE
        return SourceState.PARTIAL if followed is SourceState.LIVE and is_short else followed

    def _take_all(self, rank: int, steps: list[Step[Batch]], now_s: float) -> None:
        for step in steps:
            self._take(rank, step, now_s)
        self._note_state(rank)

    def _take(self, rank: int, step: Step[Batch], now_s: float) -> None:
        if isinstance(step, Clear):
            _logger.warning("rank cleared: %s worker=%s rank=%d", step.reason, self._worker, rank)
            self._index.clear(self._worker, rank)
            self._set_groups(rank)
            if step.reason is ClearReason.LOST:
                self.sessions[rank].on_cleared(by_loss=True)
            return
        assert isinstance(step, Apply)
        batch = step.body
        result = self._index.apply(WorkerRank(self._worker, rank), batch.events)
        self._counters.num_refused_events += result.num_parent_not_found + result.num_invalid
        self._counters.applied(len(batch.events), batch.timestamp_s, now_s, time.time())
        if any(isinstance(event, Cleared) for event in batch.events):
            self.sessions[rank].on_cleared()
            self._set_groups(rank)

    def _note_taken(self, taken: Taken, block: MessageBlock, now_s: float) -> None:
        """Count what the fast lane took, as `receive` does for one message."""
        for rank, message_idx in taken.topic_idxs.items():
            if message_idx is not None and rank not in self._topics:
                self._topics[rank] = block[message_idx].topic
            self._note_state(rank)
        self._counters.failure = None
        self._counters.num_refused_events += taken.num_refused_events
        self._counters.applied(taken.num_events, taken.timestamp_s, now_s, time.time(), taken.num_batches)

    def _note_state(self, rank: int) -> None:
        """Tell the router whether the rank's overlap counts; called once the steps so far are taken."""
        if self.sessions[rank].state is SourceState.RESYNCING:
            self._resyncing.add(WorkerRank(self._worker, rank))
        else:
            self._resyncing.discard(WorkerRank(self._worker, rank))

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
        if self.sessions.pop(batch.rank, None) is not None:
            self._index.clear(self._worker, batch.rank)
            self._resyncing.discard(WorkerRank(self._worker, batch.rank))
        return False


def _is_heartbeat(batch: Batch) -> bool:
    """Tell a heartbeat, which takes no number, from a numbered batch."""
    return len(batch.events) == 1 and isinstance(batch.events[0], Heartbeat)


def _blocks(messages: Sequence[Message]) -> Iterator[MessageBlock]:
    if isinstance(messages, MessageBlock):
        yield messages
        return
    for start in range(0, len(messages), _MAX_JOINED):
        yield MessageBlock.of(messages[start : start + _MAX_JOINED])

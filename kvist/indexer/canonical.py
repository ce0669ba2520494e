"""Following a stream of canonical batches: one session a rank, heartbeats checked against the index."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import msgspec

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
from kvist.events.types import MAX_RANKS, GroupRule, Holding, NonNegative, RankOrCompanion, SnapshotPart
from kvist.indexer.statistics import RankBound, SourceCounters
from kvist.radix import RadixIndex, Residencies

_logger = logging.getLogger(__name__)

NUM_BLOCKS_A_SLICE = 512
"""Blocks of a snapshot put into the index at a time: some 0.15 ms."""


class RankProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank's canonical stream up to, and without, `next_sequence`."""

    rank: RankOrCompanion
    epoch: NonNegative
    next_sequence: NonNegative
    is_complete: bool
    """Whether no event was lost, so that the blocks are all that the rank holds."""


class CanonicalProgress(msgspec.Struct, tag="canonical", array_like=True, frozen=True):
    """A source of canonical batches: its ranks of which a batch was received."""

    ranks: tuple[RankProgress, ...]


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank of the stream, and what its batches say about it."""

    source: WorkerRank
    session: Session[Batch]
    topic: bytes | None = None
    is_incomplete: bool = False
    """Whether its publisher does not know all blocks that the engine holds."""
    version: tuple[int, int] = (0, 0)
    """The epoch of its last batch or heartbeat, and that one's `rules_version`."""
    rules: tuple[GroupRule, ...] | None = None
    """Of a companion: what a hit needs of each group's blocks; None before a heartbeat tells."""
    version_of_rules: tuple[int, int] | None = None
    """The version that these rules have."""

    def on_version(self, batch: Batch) -> None:
        """Record under which rules a batch was closed; of its epoch, only a later one counts."""
        if batch.epoch == self.session.epoch:
            before = self.version[1] if self.version[0] == batch.epoch else 0
            self.version = batch.epoch, max(before, batch.rules_version)


class CanonicalFollower:
    """Applies canonical batches to the index, all under the router's name for the worker, whatever name they bear."""

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
        """Keep this worker's ranks in `resyncing`, which all sources share, up to date."""
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

    def ranks_counting_copies(self) -> set[int]:
        """Return the ranks whose publisher may count copies, because it knows all blocks that the engine holds."""
        return {number for number, rank in self._ranks.items() if not rank.is_incomplete}

    def progress(self) -> CanonicalProgress | None:
        """Return how far each rank was followed, None before the first batch.

        Also valid while a question is open: the index holds what the rank held before the next message to apply. Not
        valid while an answer is applied.
        """
        ranks = []
        for number, rank in self._ranks.items():
            session = rank.session
            if session.epoch is not None:
                is_complete = session.is_complete and not self._is_inexact(rank)
                ranks.append(RankProgress(number, session.epoch, session.expected_sequence, is_complete))
        return CanonicalProgress(tuple(ranks)) if ranks else None

    def resume(self, progress: CanonicalProgress) -> None:
        for each in progress.ranks:
            rank = self._add_rank(each.rank)
            rank.session.resume(each.epoch, each.next_sequence, is_complete=each.is_complete)
            self._update_resyncing(rank)

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
            steps = self._judge_heartbeat(rank, batch, now_s)
        else:
            steps = rank.session.receive(batch.epoch, batch.sequence, batch, now_s)
        self._apply_steps(rank, steps, now_s)
        companion, epoch = self._ranks.get(rank.source.companion.rank), rank.session.epoch
        if companion is not None and epoch is not None and rank.version == (epoch, 0):
            before = companion.session.epoch
            if before is not None and before < epoch:  # of an earlier publisher; this one tells of no other groups
                self._drop_rank(companion)

    def on_reconnect(self, now_s: float) -> None:
        """Do nothing: the epoch shows a restart, and the next heartbeat shows what was lost meanwhile."""

    def on_departure(self) -> None:
        """Let no rank's blocks count until its next message."""
        for rank in self._ranks.values():
            rank.session.on_departure()
            self._update_resyncing(rank)

    def questions(self, now_s: float) -> list[Question]:
        due = []
        for number, rank in self._ranks.items():
            rank.session.tick(now_s)
            self._update_resyncing(rank)
            start_sequence = rank.session.question(now_s)
            if start_sequence is not None:
                due.append(Question(ReplayRequest(rank.topic, start_sequence, rank.session.epoch), number))
        return due

    def silent_ranks(self, since_s: float) -> list[int]:
        """Return the ranks that sent nothing since then, or for so long that they count as silent."""
        return [number for number, rank in self._ranks.items() if rank.session.is_silent_since(since_s)]

    def on_peer_ranks(self, messages: Sequence[Message], since_s: float, now_s: float) -> None:
        """Drop each silent rank that a peer's heartbeats, which name all of its ranks, do not name."""
        named = set()
        for message in messages:
            batch = self._decode(message)
            if batch is None:  # a damaged answer may lack ranks
                return
            named.add(batch.rank)
        for number in self.silent_ranks(since_s):
            rank = self._ranks[number]
            if number not in named and number < MAX_RANKS:
                rank.version = (0, 0)
                self._apply_steps(rank, rank.session.on_rank_gone(now_s), now_s)
            elif number not in named:  # a companion: the publisher no longer tells of other groups
                self._drop_rank(rank)

    def on_answer(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        rank = self._ranks.get(question.rank)
        if rank is None:  # dropped since, for blocks of another size
            return
        answer = None if messages is None else (yield from self._read_answer(messages, question.rank))
        if self._ranks.get(question.rank) is not rank:  # dropped for this answer's block size
            return
        session, snapshot = rank.session, None
        if answer is None:
            steps = session.on_answer(None, None, now_s)
        else:
            snapshot, batches = answer
            epoch = (snapshot or next(iter(batches), session)).epoch
            frames = [(batch.sequence, batch) for batch in batches if batch.epoch == epoch]
            snapshot_sequence = None if snapshot is None else snapshot.sequence
            steps = session.on_answer(epoch, frames, now_s, snapshot_sequence=snapshot_sequence)
        for step in steps:
            if not isinstance(step, Restore):
                self._apply_step(rank, step, now_s)
                yield
                continue
            assert snapshot is not None
            if not (yield from self._restore(rank, snapshot)):
                self._apply_steps(rank, session.on_divergence(now_s), now_s)
                break
            yield
        self._update_resyncing(rank)

    def _read_answer(
        self, messages: Sequence[Message], number: int
    ) -> Generator[None, None, tuple[Snapshot | None, list[Batch]] | None]:
        """Return the snapshot, if any, and the batches that an answer has for a rank; None if it is malformed.

        Yields between messages. Heartbeats are skipped: a publisher sends them while it prepares a snapshot.
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
        """Replace a rank's blocks in the index by those of the snapshot; yields between slices.

        Returns whether the index has the snapshot's digest afterwards: it has not if a block is in the snapshot twice.
        """
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

    def _judge_heartbeat(self, rank: _Rank, batch: Batch, now_s: float) -> list[Step[Batch]]:
        (heartbeat,) = batch.events
        assert isinstance(heartbeat, Heartbeat)
        published, held = Holding(heartbeat.num_blocks, heartbeat.digest), self._index.digest(rank.source)
        if self._index.evicted_from(rank.source):  # the digest differs, though no event was lost
            held = published
        rank.is_incomplete = not heartbeat.is_complete
        self._counters.has_upper_bounds = heartbeat.is_upper_bound
        self._counters.count_lag(batch.timestamp_s, time.time())  # the last batch may have come in an answer, late
        steps = rank.session.on_heartbeat(batch.epoch, batch.sequence, published, held, now_s)
        rank.on_version(batch)
        if batch.rank >= MAX_RANKS and batch.epoch == rank.session.epoch:
            rank.version_of_rules = batch.epoch, batch.rules_version
            if heartbeat.rules != rank.rules:
                rank.rules = heartbeat.rules
                if not rank.rules:
                    self._index.clear(*rank.source)  # which removes its rules, too
                self._set_groups(batch.rank)
        return steps

    def _set_groups(self, number: int) -> None:
        """Set the rules of a rank, or of the rank of a companion, in the index again, after a clear or a change."""
        companion = self._ranks.get(number % MAX_RANKS + MAX_RANKS)
        if companion is not None and companion.rules != ():
            rules = companion.rules or (GroupRule(0),)  # any rule keeps the companion out of answers
            self._index.set_groups(WorkerRank(self._worker, number % MAX_RANKS), rules)

    def _is_inexact(self, rank: _Rank) -> bool:
        return rank.is_incomplete or self._index.evicted_from(rank.source)

    def _state(self, rank: _Rank) -> SourceState:
        if rank.source in self._resyncing:
            return SourceState.RESYNCING
        is_inexact, companion = self._is_inexact(rank), self._ranks.get(rank.source.companion.rank)
        if companion is not None:  # unless it is exact, it is not known what hits need
            is_inexact |= companion.is_incomplete or companion.session.state is not SourceState.LIVE
        state = rank.session.state
        return SourceState.PARTIAL if state is SourceState.LIVE and is_inexact else state

    def _apply_steps(self, rank: _Rank, steps: list[Step[Batch]], now_s: float) -> None:
        for step in steps:
            self._apply_step(rank, step, now_s)
        self._update_resyncing(rank)

    def _apply_step(self, rank: _Rank, step: Step[Batch], now_s: float) -> None:
        if isinstance(step, Clear):
            _logger.warning("rank cleared: %s worker=%s rank=%d", step.reason, *rank.source)
            self._index.clear(*rank.source)
            self._set_groups(rank.source.rank)
            if step.reason is ClearReason.LOST:
                rank.session.on_cleared(by_loss=True)
            return
        assert isinstance(step, Apply)
        batch = step.body
        rank.on_version(batch)
        result = self._index.apply(rank.source, batch.events)
        self._counters.num_refused_events += result.num_parent_not_found + result.num_invalid
        self._counters.count_applied(len(batch.events), batch.timestamp_s, now_s, time.time())
        if Cleared() in batch.events:
            rank.session.on_cleared()
            self._set_groups(rank.source.rank)

    def _update_resyncing(self, rank: _Rank) -> None:
        """Add the rank, or that of a companion, to `resyncing` or remove it; called once the steps so far are applied.

        It counts while its companion, if any, is known as well, and tells of the same rules: they come with heartbeats,
        behind batches that may already need them.
        """
        source = WorkerRank(self._worker, rank.source.rank % MAX_RANKS)
        published, companion = self._ranks.get(source.rank), self._ranks.get(source.companion.rank)
        followed = [each for each in (published, companion) if each is not None]
        is_resyncing = any(each.session.state is SourceState.RESYNCING for each in followed)
        if published is not None and companion is not None:
            is_resyncing |= not companion.version_of_rules == companion.version == published.version
        elif published is not None:
            is_resyncing |= published.version[1] > 0
        if published is not None and is_resyncing:
            self._resyncing.add(source)
        else:
            self._resyncing.discard(source)

    def _decode(self, message: Message) -> Batch | None:
        """Return the message's batch; None for one that is malformed or has another block size, which is counted."""
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
            _logger.warning("%s; skipped, further ones are only counted", error)

    def _has_our_block_size(self, batch: Batch | SnapshotPart) -> bool:
        if batch.block_size == self._block_size:
            self._counters.failure = None
            return True
        self._counters.count_refused(self._worker, batch.block_size, self._block_size)
        if batch.rank in self._ranks:
            self._drop_rank(self._ranks[batch.rank])
        return False

    def _drop_rank(self, rank: _Rank) -> None:
        del self._ranks[rank.source.rank]
        self._index.clear(*rank.source)
        self._update_resyncing(rank)


def _is_heartbeat(batch: Batch) -> bool:
    """Return whether a batch is a heartbeat, which has no sequence of its own."""
    return len(batch.events) == 1 and isinstance(batch.events[0], Heartbeat)

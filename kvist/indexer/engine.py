"""Following an engine's own stream: it is filtered, hashed and applied here, as a publisher does beside an engine.

Compiled code applies ordinary messages, many at a time: the fast lane. Messages and events that are not ordinary are
applied one by one in Python.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import numpy as np

from kvist.events import EngineCleared, EngineEvent, EngineStored, WorkerRank
from kvist.events.dialects import DecodedEngineBatch
from kvist.events.dialects.block_events import FIELD_ORDERS
from kvist.events.follow import Question
from kvist.events.restarts import RestartDetector
from kvist.events.session import Apply, Clear, Session, SessionLimits, SourceState, Step
from kvist.events.transports import Message
from kvist.events.transports.block import PAYLOAD_START, MessageBlock
from kvist.events.types import GroupRule, NonNegative, Rank
from kvist.indexer.compiled import engine_layout as layout
from kvist.indexer.compiled.engine import apply_messages
from kvist.indexer.compiled.names import FIELDS
from kvist.indexer.engine_rank import EngineRank, Names
from kvist.indexer.statistics import RankBound, SourceCounters
from kvist.publisher.engine_feed import EngineFeed
from kvist.publisher.filter import FilterState, largest_windows_first
from kvist.radix import RadixIndex
from kvist.radix.memory import reserved_array

_MAX_STEPS_A_BLOCK = 256
"""Messages of an answer that are copied into one block for the fast lane."""
_MAX_BYTES = 100_000
"""The messages of one call, in bytes, 0.15 ms; it ends with the one that exceeds them."""
_SCRATCH_BYTES = 1 << 22
"""Scratch memory holds what messages up to this size say, a step of a quarter of a million tokens; larger ones are left
to Python. Pages that no message needed cost nothing."""


class EngineRankProgress(msgspec.Struct, array_like=True, frozen=True):
    """One rank of an engine's stream, as docs/index-service.md specifies it ("The dump")."""

    rank: Rank
    filter: FilterState
    is_complete: bool
    copies: bytes
    other_groups: dict[int, GroupRule]
    """What each of the other groups must hold for a hit, by the group's key."""
    is_offloading: bool


class EngineProgress(msgspec.Struct, tag="engine", array_like=True, frozen=True):
    """An engine's own stream, which has no epoch: its last messages identify the process."""

    next_sequence: NonNegative
    is_complete: bool
    is_in_doubt: bool
    """Whether the engine may be another process by now, which only a replay can tell."""
    fingerprints: tuple[tuple[NonNegative, NonNegative], ...]
    """Sequence and XXH3-64 of some of the last messages, oldest first."""
    ranks: tuple[EngineRankProgress, ...]


class EngineFollower:
    """Applies one engine's stream to the index under the router's name for the worker, by the rank each batch names."""

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
        """Keep this worker's ranks in `resyncing`, which all sources share, up to date.

        Batches that name no rank are of `bound.own_rank`. A block that vLLM stores again is one more copy, as long as
        no event was lost: vLLM reports every copy. With `has_full_reports`, other routers have vLLM report its blocks
        anew; such a report is told from a copy by what a hit needs, which may be wrong. The engine needs `num_ahead`
        blocks behind a hit as well.
        """
        self._worker = worker
        self._block_size = block_size
        self._index = index
        self._resyncing = resyncing
        self._counters = counters
        self._bound = bound or RankBound()
        # Ranks that reported an empty cache after the last loss in the stream, which several ranks may share.
        self._complete_ranks: set[int] = set()
        self._now_s = 0.0
        self._is_applying_part = False
        self._num_ahead = num_ahead
        self._counts_copies = engine == "vllm"
        self._has_full_reports = has_full_reports and self._counts_copies
        self._feed = EngineFeed(engine, worker, self, limits)
        self._session = self._feed.session
        self._lane = EngineLane(block_size, engine, index, self._bound.own_rank)
        self._ranks = self._lane.ranks

    @property
    def sessions(self) -> tuple[Session[bytes]]:
        """Return the stream's one session, which all of its ranks share."""
        return (self._session,)

    def states(self) -> dict[int, SourceState]:
        sources = self._sources()
        followed = self._session.state if self._resyncing.isdisjoint(sources) else SourceState.RESYNCING
        return {source.rank: self._state(source, followed) for source in sources}

    def _state(self, source: WorkerRank, followed: SourceState) -> SourceState:
        if followed is SourceState.PARTIAL and source.rank in self._complete_ranks:
            followed = SourceState.LIVE
        is_inexact = followed is SourceState.LIVE and (
            self._has_full_reports or self._index.evicted_from(source) or self._ranks[source.rank].is_inexact
        )
        return SourceState.PARTIAL if is_inexact else followed

    def ranks_counting_copies(self) -> set[int]:
        """Return the ranks whose copies are counted: a block that such a rank reports anew counts as one more copy."""
        return {number for number, rank in self._ranks.items() if rank.residency.counts_copies}

    def progress(self, *, is_caught_up: bool = True) -> EngineProgress | None:
        """Return how far the stream was followed, None before the first message.

        Also valid while a question is open: the index holds what the engine's process held before the next message to
        apply. Not valid while an answer is applied. Unless `is_caught_up` with all that the connection brought, or may
        have brought, it is not known whether the engine still is that process.
        """
        session, restarts = self._session, self._feed.restarts
        if session.epoch is None:
            return None
        is_dumpable = all(rank.is_dumpable for rank in self._ranks.values())
        is_inexact = any(self._index.evicted_from(source) for source in self._sources())
        return EngineProgress(
            session.expected_sequence,
            session.is_complete and is_dumpable and not is_inexact,
            session.state is SourceState.RESYNCING or session.is_unproven or not is_caught_up,
            tuple(restarts.remembered()),
            tuple(
                EngineRankProgress(
                    number,
                    rank.filter.state,
                    number in self._complete_ranks and rank.is_dumpable,
                    rank.dump_copies(),
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
            rank.resume(each.filter, each.other_groups, each.copies, is_offloading=each.is_offloading)
            if each.is_complete:
                self._complete_ranks.add(each.rank)
        self._update_resyncing()

    def dump_names(self) -> Iterator[tuple[int, Names]]:
        """Yield each rank's engine hashes and the blocks they name, some at a time."""
        for number, rank in [*self._ranks.items()]:
            for names in rank.residency.dump_names():
                yield number, names

    def load_names(self, rank: int, names: Names) -> None:
        """Load the engine's hashes for blocks of a rank that the index holds already."""
        self._ranks[rank].residency.load_names(names)

    def receive(self, message: Message, now_s: float) -> None:
        self._now_s = now_s
        self._feed.receive(message, now_s)
        self._update_resyncing()

    def receive_all(self, block: MessageBlock, now_s: float) -> Iterator[None]:
        yield from self._apply_block(block, (), now_s)

    def on_reconnect(self, now_s: float) -> None:
        """Let nothing count until a replay proves that the engine is the same process."""
        self._feed.on_reconnect(now_s)
        self._update_resyncing()

    def on_departure(self) -> None:
        self._feed.on_departure()
        self._update_resyncing()

    def questions(self, now_s: float) -> list[Question]:
        """Return the question that is due, if any; and remove stale names, since this is called regularly."""
        for rank in self._ranks.values():
            rank.residency.remove_stale_names()
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
                for start in range(0, len(steps), _MAX_STEPS_A_BLOCK):
                    some = steps[start : start + _MAX_STEPS_A_BLOCK]
                    bodies = [step.body for step in some if isinstance(step, Apply)]
                    block = MessageBlock.of([Message(b"", idx, body) for idx, body in enumerate(bodies)])
                    yield from self._apply_block(block, some, now_s)
        self._update_resyncing()

    def apply(self, batch: DecodedEngineBatch) -> None:
        number = self._bound.own_rank if batch.rank is None else batch.rank
        if number not in self._ranks and not self._bound.admits(number, self._worker, self._counters):
            return
        is_first = number not in self._ranks or self._ranks[number].is_new
        for event in largest_windows_first(batch.events) if is_first else batch.events:
            self._check_block_size(event)
            rank = self._rank(number)
            rank.admit(event)
            if isinstance(event, EngineCleared):
                self._complete_ranks.add(number)
                self._update_copy_counting()  # for the events that follow
        self._counters.num_unknown_events += batch.num_ignored_events
        if self._is_applying_part:
            self._counters.num_events += len(batch.events)
        else:
            self._counters.count_applied(len(batch.events), batch.timestamp_s, self._now_s, time.time())

    def clear(self) -> None:
        self._complete_ranks.clear()
        for rank in self._ranks.values():
            rank.clear()
        self._update_copy_counting()

    def _apply_block(self, block: MessageBlock, steps: Sequence[Step[bytes]], now_s: float) -> Iterator[None]:
        """Apply live messages, or those of `steps`, which are judged already; ordinary ones in bulk. Yields between."""
        lane = self._lane
        lane.set_block(block, None if steps else self._feed.restarts)
        while lane.message_idx < len(block):
            next_sequence, is_stopped = lane.message_idx if steps else self._feed.next_sequence, True
            if next_sequence is not None:
                is_stopped, event = lane.apply_messages(next_sequence)
                self._record_applied(event, now_s, is_judged=bool(steps))
            if is_stopped:
                if steps:
                    self._feed.apply_step(steps[lane.message_idx])
                else:
                    self.receive(block[lane.message_idx], now_s)
                lane.skip_message()
            yield

    def _record_applied(self, event: bytes | None, now_s: float, *, is_judged: bool) -> None:
        """Count what the lane applied, as if it had been received here, and apply the event at which it stopped."""
        applied, counters = self._lane.stream, self._counters
        counters.num_events += int(applied["num_events"])
        counters.num_unknown_events += int(applied["num_ignored"])
        if applied["has_block_size"]:
            counters.failure = None
        num_batches = int(applied["num_batches"])
        if num_batches:
            if is_judged:
                self._feed.on_judged_applied(num_batches)
            else:
                self._feed.on_applied(num_batches, now_s)
            counters.count_applied(0, float(applied["timestamp_s"]), now_s, time.time(), num_batches)
        if event is not None:
            self._is_applying_part = True
            self._feed.apply_part(event)
            self._is_applying_part = False
        counters.num_malformed = self._feed.num_malformed

    def _check_block_size(self, event: EngineEvent) -> None:
        """Count an event whose block size is not ours until one fits: a hybrid model has blocks of other sizes, too."""
        if not isinstance(event, EngineStored):
            return
        if event.block_size == self._block_size:
            self._lane.stream["has_block_size"] = 1
            self._counters.failure = None
        elif not self._lane.stream["has_block_size"]:
            self._counters.count_refused(self._worker, event.block_size, self._block_size)

    def _sources(self) -> set[WorkerRank]:
        return {WorkerRank(self._worker, rank) for rank in self._ranks}

    def _update_copy_counting(self) -> None:
        """Count copies of complete ranks only: the engine may have been asked to report the others' blocks anew."""
        is_complete = self._session.is_complete
        for number, rank in self._ranks.items():
            has_lost = self._index.evicted_from(WorkerRank(self._worker, number))
            is_rank_complete = (is_complete or number in self._complete_ranks) and not has_lost
            rank.residency.counts_copies = self._counts_copies and is_rank_complete

    def _update_resyncing(self) -> None:
        """Add this worker's ranks to `resyncing` or remove them; called once the steps so far are applied."""
        self._update_copy_counting()
        self._counters.num_malformed = self._feed.num_malformed
        if self._session.state is SourceState.RESYNCING:
            self._resyncing |= self._sources()
        else:
            self._resyncing -= self._sources()

    def _rank(self, number: int) -> EngineRank:
        rank = self._ranks.get(number)
        if rank is None:
            source, options = WorkerRank(self._worker, number), (self._num_ahead, self._has_full_reports)
            rank = self._ranks[number] = EngineRank(source, self._block_size, self._index, *options)
            self._update_copy_counting()
        return rank


class EngineLane:
    """Applies ordinary messages: next in sequence, well-formed, of whole blocks without adapter, salt or image."""

    def __init__(self, block_size: int, engine: str, index: RadixIndex, default_rank: int = 0) -> None:
        """Apply messages of the dialect `engine` to `index`; `default_rank` is that of batches which name none."""
        self._index = index
        self.ranks: dict[int, EngineRank] = {}
        """The ranks that the lane knows, by number; messages of others are left to Python."""
        self._block = MessageBlock.of(())
        self._data = np.empty(0, np.uint8)
        self._streams = np.zeros(1, layout.STREAM)
        self.stream = stream = self._streams[0]
        """The stream's record (`engine_layout.STREAM`), which tells what the last call applied."""
        stream["block_size"], stream["default_rank"] = block_size, default_rank
        for row, tag in enumerate(("BlockStored", "BlockRemoved")):
            order = [FIELDS.get(name, 0) for name in FIELD_ORDERS[engine][tag]]
            stream["field_order"][row, : len(order)] = order
        events = reserved_array(layout.EVENT, _SCRATCH_BYTES // layout.MIN_EVENT_BYTES + 1)
        hashes, chain = (reserved_array(np.dtype(np.uint64), _SCRATCH_BYTES) for _ in range(2))
        tokens = reserved_array(np.dtype(np.uint32), _SCRATCH_BYTES)
        self._scratch = events, hashes, chain, tokens, tokens.view(np.uint8)
        self._fingerprints = np.empty(1, np.uint64), np.empty(1, np.uint64)

    def set_block(self, block: MessageBlock, restarts: RestartDetector | None) -> None:
        """Start at the first message of a block; their fingerprints are recorded in `restarts`, if given."""
        if restarts is None:
            self._fingerprints = np.empty(1, np.uint64), np.empty(1, np.uint64)
        else:
            self._fingerprints = restarts.sequences, restarts.fingerprints
        self._block, self._data = block, np.frombuffer(block.buffer, np.uint8)
        self.stream["message_idx"], self.stream["is_checked"] = 0, 0

    @property
    def message_idx(self) -> int:
        return int(self.stream["message_idx"])

    def skip_message(self) -> None:
        """Go past the current message, which was applied in Python."""
        self.stream["message_idx"], self.stream["is_checked"] = self.message_idx + 1, 0

    def apply_messages(self, next_sequence: int) -> tuple[bool, bytes | None]:
        """Apply messages as long as they are ordinary and in sequence, up to `_MAX_BYTES` and the end of a message.

        Return whether the current message must be applied in Python before the next call; if not, that may be one of
        its events, which is returned encoded as a batch of its own.
        """
        index, stream = self._index, self.stream
        rank = self.ranks.get(int(stream["checked_rank"])) or next(iter(self.ranks.values()), None)
        if rank is None:
            stream["num_batches"] = stream["num_events"] = stream["num_ignored"] = 0
            return True, None
        held, table, memory = rank.residency.sync(), self._block.table, (*self._scratch, *self._fingerprints)
        with index.writing:
            reason = apply_messages(held, self._streams, self._data, table, next_sequence, _MAX_BYTES, *memory)
        index.keep_to_cap()
        is_unknown_rank = reason == layout.OTHER_RANK and int(stream["checked_rank"]) not in self.ranks
        is_stopped = reason in (layout.NOT_NEXT, layout.UNUSUAL_MESSAGE) or is_unknown_rank
        return is_stopped, self._unusual_event() if reason == layout.UNUSUAL_EVENT else None

    def _unusual_event(self) -> bytes:
        """Return the event that the last call stopped at, encoded as a batch of its own."""
        stream, buffer = self.stream, self._block.buffer
        start, rank = int(self._block.table[self.message_idx, PAYLOAD_START]), int(stream["checked_rank"])
        event = bytes(buffer[start + int(stream["stop_start"]) : start + int(stream["stop_end"])])
        return b"\x93%b\x91%b\xcd%b" % (bytes(buffer[start + 1 : start + 10]), event, rank.to_bytes(2))

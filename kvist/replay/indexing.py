"""Playing a recording straight into an index, by the same code that follows streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events import EngineStored, WorkerRank
from kvist.events.codec import is_snapshot_part
from kvist.events.dialects import decode_block_events
from kvist.events.follow import Question
from kvist.events.session import SourceState
from kvist.events.transports import Message, ReplayRequest
from kvist.indexer.source import Source
from kvist.radix import RadixIndex
from kvist.replay.envelope import CanonicalEnvelope, SnapshotEnvelope, read_envelope
from kvist.replay.held import RecordedSnapshot, SnapshotCollector
from kvist.replay.recording import Record, RecordedSource
from kvist.replay.script import Line, Pace, RecordReader, worker_of

_MAX_BEHIND = 10_000  # batches that are taken with a snapshot: as many as a publisher keeps
_SETTLE_S = 1.0  # after which every question that is left is given up: there is nobody to ask


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank holds in the end: (block, tier) pairs, their digest, and how far that can be trusted."""

    source: WorkerRank
    num_blocks: int
    digest: int
    state: SourceState


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What the index holds in the end, and what was wrong with what it was told."""

    ranks: tuple[RankReport, ...]
    num_blocks: int
    num_gaps: int
    """Gaps behind which no snapshot stands."""
    num_snapshots: int
    num_cleared: int
    num_malformed: int
    num_refused_events: int
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as what JSON can say."""
        ranks = [
            {
                **rank.source._asdict(),
                "num_blocks": rank.num_blocks,
                "digest": f"{rank.digest:016x}",
                "state": rank.state,
            }
            for rank in self.ranks
        ]
        return {**{name: getattr(self, name) for name in self.__slots__}, "ranks": ranks}

    def to_text(self) -> str:
        """Return everything as lines of text."""
        lines = [
            f"{rank.source.worker} rank {rank.source.rank}: {rank.num_blocks} blocks, digest {rank.digest:016x}, "
            f"{rank.state}"
            for rank in self.ranks
        ]
        totals = (
            f"{self.num_blocks} distinct blocks in the index; {self.num_gaps} gaps, "
            f"{self.num_snapshots} snapshots, {self.num_cleared} times cleared, "
            f"{self.num_malformed} malformed, {self.num_refused_events} events refused"
        )
        return "\n".join([*lines, totals, *(f"not indexed: {failure}" for failure in self.failures)])


class _Answer:
    """A snapshot, and the batches that follow it: later ones may have been recorded before."""

    def __init__(self, recorded: RecordedSnapshot) -> None:
        self.recorded = recorded
        self.behind: list[Message] = []

    def takes(self, message: Message) -> bool:
        """Take the message if it is the next batch of the rank; return whether it is."""
        envelope, snapshot = read_envelope(message.payload), self.recorded.snapshot
        if not isinstance(envelope, CanonicalEnvelope) or envelope.is_heartbeat:
            return False
        place = envelope.epoch, envelope.sequence
        is_ours = envelope.source == self.recorded.rank and len(self.behind) < _MAX_BEHIND
        if is_ours and place == (snapshot.epoch, snapshot.sequence + len(self.behind)):
            self.behind.append(message)
            return True
        return False


class IndexPlayer:
    """Feeds an index, as an `Indexer` would that heard the streams and had nobody to ask for what is missing.

    A rank that was recorded from its publisher's start without a gap, or with a snapshot behind the last one, is exact
    in the end.
    """

    def __init__(self, index: RadixIndex, block_size: int, names: Mapping[str, str] | None = None) -> None:
        """Feed `index`; an engine's own stream is of the worker that its source is called, or `names` calls it."""
        self._index = index
        self._block_size = block_size
        self._names = names or {}
        self._resyncing: set[WorkerRank] = set()
        self._pace = Pace()
        self._now_s = 0.0
        self._sources: dict[tuple[RecordedSource, str], Source] = {}
        self._snapshots: defaultdict[tuple[RecordedSource, str], SnapshotCollector] = defaultdict(SnapshotCollector)
        self._answers: dict[tuple[RecordedSource, str], _Answer] = {}
        self._num_bridged_gaps = 0

    def apply(self, lines: Iterable[Line]) -> None:
        """Apply some lines."""
        by_source: dict[tuple[RecordedSource, str], list[Message]] = {}
        for run, grouped in groupby(lines, lambda line: (line.round_idx, line.record.session)):
            for line in grouped:
                self._now_s = max(self._now_s, self._pace.due_s(run[0], line.record))
                key, message = (line.record.source, worker_of(line.record)), line.record.message
                if (answer := self._answers.get(key)) is not None:
                    if answer.takes(message):
                        continue
                    self._restore(key, self._answers.pop(key))
                if not is_snapshot_part(message.payload):
                    by_source.setdefault(key, []).append(message)
                elif (recorded := self._snapshots[key].add(message, key[1])) is not None:
                    self._receive(key, by_source.pop(key, []))
                    self._answers[key] = _Answer(recorded)
        for key, messages in by_source.items():
            self._receive(key, messages)

    def report(self) -> IndexReport:
        """Return what the index holds, once nothing more will come."""
        self._now_s += _SETTLE_S
        for key, answer in self._answers.items():
            self._restore(key, answer)
        self._answers.clear()
        for source in self._sources.values():
            self._answer(source)
        while self._index.sweep():
            pass
        statistics = [source.statistics(self._now_s) for source in self._sources.values()]
        ranks = [
            RankReport(rank, held.num_blocks, held.digest, state)
            for source in self._sources.values()
            for rank, state in sorted((WorkerRank(source.worker, n), state) for n, state in source.states().items())
            for held in [self._index.digest(rank)]
        ]
        return IndexReport(
            ranks=tuple(ranks),
            num_blocks=self._index.statistics().num_blocks,
            num_gaps=sum(each.num_gaps for each in statistics) - self._num_bridged_gaps,
            num_snapshots=sum(each.num_snapshots for each in statistics),
            num_cleared=sum(each.num_cleared + each.num_diverged for each in statistics),
            num_malformed=sum(each.num_malformed for each in statistics),
            num_refused_events=sum(each.num_refused_events for each in statistics),
            failures=tuple(f"{each.worker}: {each.failure}" for each in statistics if each.failure is not None),
        )

    def _receive(self, key: tuple[RecordedSource, str], messages: Sequence[Message]) -> None:
        source = self._sources.get(key) or self._add(*key)
        for _ in source.received_all(messages, self._now_s):
            pass
        self._answer(source)

    def _restore(self, key: tuple[RecordedSource, str], answer: _Answer) -> None:
        """Take a snapshot as the answer to what the publisher's heartbeat at that moment makes a subscriber ask."""
        recorded = answer.recorded
        source, beat = self._sources.get(key) or self._add(*key), recorded.heartbeat()
        num_gaps = source.statistics(self._now_s).num_gaps
        for _ in source.received_all([beat], self._now_s):
            pass
        self._num_bridged_gaps += source.statistics(self._now_s).num_gaps - num_gaps
        request = ReplayRequest(beat.topic, 0, recorded.snapshot.epoch)
        messages = [*recorded.messages, *answer.behind]
        for _ in source.answered(Question(request, recorded.rank.rank), messages, self._now_s):
            pass

    def _add(self, recorded: RecordedSource, worker: str) -> Source:
        url = f"tcp://recording:1?replay_port=none&engine={recorded.engine}"
        name = self._names.get(worker, worker)
        source = Source(name, url, self._block_size, self._index, self._resyncing)
        self._sources[recorded, worker] = source
        return source

    def _answer(self, source: Source) -> None:
        """Answer the questions that are due: with silence."""
        for question in source.questions(self._now_s):
            for _ in source.answered(question, None, self._now_s):
                pass


def find_block_size(reader: RecordReader) -> int:
    """Return the tokens per block that the first message with blocks names; raises InvalidValueError if none does."""
    while (records := reader.read()) is not None:
        for record in records:
            if (block_size := _block_size(record)) is not None:
                return block_size
    raise InvalidValueError("block_size", None, "the tokens in a block: nothing in the recording tells")


def _block_size(record: Record) -> int | None:
    payload, source = record.message.payload, record.source
    envelope = read_envelope(payload)
    if isinstance(envelope, CanonicalEnvelope | SnapshotEnvelope):
        return envelope.block_size
    try:
        events = decode_block_events(payload, source.name, source.engine).events
    except (MalformedMessageError, KeyError):
        return None
    return next((event.block_size for event in events if isinstance(event, EngineStored) and event.block_size), None)

"""Plays a recording straight into an index, by the code that follows live streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier, WorkerRank
from kvist.events.session import SourceState
from kvist.events.transports import Message
from kvist.indexer.dumps.format import Blocks, DumpReader, residencies_of
from kvist.indexer.source import Source
from kvist.radix import RadixIndex, Residencies
from kvist.replay.blocks import SentBuffer
from kvist.replay.recording import Record, RecordedSource
from kvist.replay.script import Line, Pace, worker_of

_RETRY_S, _NUM_RETRIES = 0.6, 6  # after which every question is answered or given up
_ASKS_AGAIN_S = 60.0  # after which the index asks about a partial rank again


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank holds in the end: number and digest of (block, tier) pairs, and whether they are exact."""

    source: WorkerRank
    block_size: int
    num_blocks: int
    digest: int
    state: SourceState


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What the index holds in the end, and what was wrong with the messages."""

    ranks: tuple[RankReport, ...]
    num_blocks: int
    num_snapshots: int
    num_cleared: int
    """How often a rank's blocks were dropped because messages were missing."""
    num_malformed: int
    num_refused_events: int
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        report = asdict(self)
        report["ranks"] = [
            {**rank.pop("source")._asdict(), **rank, "digest": f"{rank['digest']:016x}"} for rank in report["ranks"]
        ]
        return report

    def to_text(self) -> str:
        lines = [
            f"{worker} rank {number}: {rank.num_blocks} blocks of {rank.block_size} tokens, "
            f"digest {rank.digest:016x}, {rank.state}"
            for rank in self.ranks
            for worker, number in [rank.source]
        ]
        totals = (
            f"{self.num_blocks} distinct blocks in the index; {self.num_snapshots} snapshots, {self.num_cleared} times "
            f"cleared, {self.num_malformed} malformed, {self.num_refused_events} events refused"
        )
        return "\n".join([*lines, totals, *(f"not indexed: {failure}" for failure in self.failures)])


class _Stream:
    """One worker's messages in one source, and the index's view of them, whose questions are answered at once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sent = SentBuffer()

    def receive(self, messages: Sequence[Message], now_s: float) -> None:
        for _ in self.source.receive_all(messages, now_s):
            pass
        for question in self.source.questions(now_s):
            for _ in self.source.on_answer(question, list(self.sent.replay(question.request)), now_s):
                pass

    def settle(self, now_s: float) -> None:
        """Answer all questions that are left, and those about partial ranks that the index asks after a while."""
        now_s = self._answer_all([], now_s)
        self._answer_all(self.sent.last_messages(), now_s + _ASKS_AGAIN_S)

    def _answer_all(self, messages: Sequence[Message], now_s: float) -> float:
        for _ in range(_NUM_RETRIES):
            self.receive(messages, now_s)
            now_s, messages = now_s + _RETRY_S, []
        return now_s


class IndexPlayer:
    """Feeds a recording to an index, which then holds what that of an `Indexer` behind a `Player` would.

    A rank is exact in the end if it was recorded from its publisher's start without a gap, or with a snapshot after the
    last gap. A stream's block size is the first one that it names.
    """

    def __init__(self, index: RadixIndex) -> None:
        """Feed `index`; the worker of an engine's own stream has the name of its source."""
        self.index = index
        self._resyncing: set[WorkerRank] = set()
        self._pace = Pace()
        self._now_s = 0.0
        self._streams: dict[tuple[RecordedSource, str], _Stream] = {}

    def apply(self, lines: Iterable[Line]) -> None:
        messages: defaultdict[_Stream, list[Message]] = defaultdict(list)
        for line in lines:
            stream = self._stream_of(line.record)
            is_sent = stream.sent.append(line.record.message) and not line.is_early
            if not line.is_early:
                self._now_s = max(self._now_s, self._pace.due_s(line.round_idx, line.record))
            if is_sent:
                messages[stream].append(line.record.message)
        for stream, received in messages.items():
            stream.receive(received, self._now_s)

    @property
    def block_sizes(self) -> dict[str, int]:
        """Return the block size of each worker, in tokens."""
        sources = [stream.source for stream in self._streams.values()]
        return {source.worker: source.block_size for source in sources if source.block_size is not None}

    def report(self) -> IndexReport:
        """Return what the index holds; call it when all lines are applied."""
        sources = [stream.source for stream in self._streams.values()]
        for stream in self._streams.values():
            stream.settle(self._now_s)
        while self.index.sweep():
            pass
        statistics = [source.statistics(self._now_s) for source in sources]
        ranks = [
            RankReport(rank, source.block_size or 0, held.num_blocks, held.digest, state)
            for source in sources
            for rank, state in sorted((WorkerRank(source.worker, n), state) for n, state in source.states().items())
            for held in [self.index.digest(rank)]
        ]
        return IndexReport(
            ranks=tuple(ranks),
            num_blocks=self.index.statistics().num_blocks,
            num_snapshots=sum(each.num_snapshots for each in statistics),
            num_cleared=sum(each.num_cleared + each.num_diverged for each in statistics),
            num_malformed=sum(each.num_malformed for each in statistics),
            num_refused_events=sum(each.num_refused_events for each in statistics),
            failures=tuple(f"{each.worker}: {each.failure}" for each in statistics if each.failure is not None),
        )

    def _stream_of(self, record: Record) -> _Stream:
        worker, recorded = worker_of(record), record.source
        stream = self._streams.get((recorded, worker))
        if stream is None:
            url = f"tcp://recording:1?engine={recorded.engine}"
            source = Source(worker, url, None, self.index, self._resyncing)
            stream = self._streams[recorded, worker] = _Stream(source)
        return stream


Holdings: TypeAlias = Mapping[tuple[WorkerRank, Tier], NDArray[np.uint64]]
"""Hashes of the blocks that a rank holds in a tier, ascending."""


class Difference(NamedTuple):
    """How many blocks of one rank and tier are held in the first, in the second, and in both."""

    worker: str
    rank: int
    tier: str
    only_first: int
    only_second: int
    both: int


def holdings_of(snapshot: Iterable[Residencies]) -> Holdings:
    parts: defaultdict[tuple[WorkerRank, Tier], list[NDArray[np.uint64]]] = defaultdict(list)
    for ranks, hashes, _, members in snapshot:
        for holder, tier in product(np.unique(members >> 4).tolist(), Tier):
            parts[ranks[holder], tier].append(hashes[(members >> 4 == holder) & (members >> tier & 1 == 1)])
    held = {holder: np.unique(np.concatenate(hashes)) for holder, hashes in parts.items()}
    return {holder: hashes for holder, hashes in held.items() if len(hashes)}


def chunks_of_dump(pieces: Iterable[bytes], source: str) -> Iterator[Residencies]:
    """Yield the blocks of a dump, as `GET /dump` and state files have them; raises MalformedMessageError."""
    reader = DumpReader(source)
    for piece in pieces:
        yield from (residencies_of(frame, source) for frame in reader.feed(piece) if isinstance(frame, Blocks))
    reader.close()


def differences(first: Holdings, second: Holdings) -> list[Difference]:
    """Return the difference of each rank and tier, also where there is none."""
    nothing = np.empty(0, np.uint64)
    found = []
    for rank, tier in sorted(first.keys() | second.keys()):
        ours, theirs = first.get((rank, tier), nothing), second.get((rank, tier), nothing)
        both = len(np.intersect1d(ours, theirs, assume_unique=True))
        found.append(Difference(*rank, tier.name.lower(), len(ours) - both, len(theirs) - both, both))
    return found

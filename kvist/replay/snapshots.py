"""Snapshots in recordings: messages like others, put together again by whoever needs to know what was held."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Heartbeat, WorkerRank
from kvist.events.codec import decode_snapshot_part, encode_batch
from kvist.events.snapshot import Snapshot, SnapshotAssembly
from kvist.events.transports import Message
from kvist.events.types import SnapshotPart


@dataclass(frozen=True, slots=True)
class RecordedSnapshot:
    """A whole snapshot, proven by its digest, and the messages that it came in, each part once."""

    rank: WorkerRank
    block_size: int
    snapshot: Snapshot
    messages: tuple[Message, ...]

    def heartbeat(self) -> Message:
        """Return what the publisher's heartbeat said at that moment, of no particular time."""
        of, beat = self.snapshot, Heartbeat(*self.snapshot.holding)
        batch = Batch(*self.rank, of.epoch, of.sequence, self.block_size, 0.0, (beat,))
        return Message(self.messages[0].topic, of.sequence, encode_batch(batch))


class SnapshotCollector:
    """Puts one source's snapshots together; memory is that of one for each rank of which not all parts came yet."""

    def __init__(self) -> None:
        self._begun: dict[WorkerRank, _Begun] = {}
        self.num_malformed = 0
        """Parts that are none, and snapshots that are not what they say."""

    def add(self, message: Message, source: str) -> RecordedSnapshot | None:
        """Take a part; return the snapshot if that makes it whole. Parts of another one begin anew."""
        try:
            part = decode_snapshot_part(message.payload, source)
            rank = WorkerRank(part.worker, part.rank)
            begun = self._begun.get(rank)
            if begun is None or not begun.is_of_same(part):
                begun = self._begun[rank] = _Begun(part, source)
            begun.add(part, message)
            if len(begun.messages) < part.num_parts:
                return None
            del self._begun[rank]
            return RecordedSnapshot(rank, part.block_size, begun.assembly.snapshot(), tuple(begun.messages.values()))
        except MalformedMessageError:
            self.num_malformed += 1
            return None


class _Begun:
    """A snapshot of which some parts came."""

    def __init__(self, first: SnapshotPart, source: str) -> None:
        self._first = _identity(first)
        self.assembly = SnapshotAssembly(source)
        self.messages: dict[int, Message] = {}

    def is_of_same(self, part: SnapshotPart) -> bool:
        return _identity(part) == self._first

    def add(self, part: SnapshotPart, message: Message) -> None:
        self.assembly.add(part)
        self.messages.setdefault(part.part_idx, message)


def _identity(part: SnapshotPart) -> tuple[int, ...]:
    return part.epoch, part.sequence, part.block_size, part.num_parts, part.num_blocks, part.digest

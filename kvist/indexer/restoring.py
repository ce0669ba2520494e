"""Answers of canonical publishers: read message by message, and a snapshot put into the index slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Heartbeat, WorkerRank
from kvist.events.codec import decode_snapshot_part, is_snapshot_part
from kvist.events.snapshot import Snapshot, SnapshotAssembly
from kvist.events.transports import Message
from kvist.events.types import Holding, SnapshotPart

if TYPE_CHECKING:
    from kvist.radix import RadixIndex

NUM_BLOCKS_A_SLICE = 512
"""Blocks put into the index at a time: some 0.15 ms."""


@dataclass(slots=True)
class Answer:
    """What a publisher answered about one rank: a snapshot or none, and the batches behind it."""

    snapshot: Snapshot | None = None
    batches: list[Batch] = field(default_factory=list)

    @property
    def epoch(self) -> int | None:
        """Return the epoch that it tells of, None if it is empty."""
        if self.snapshot is not None:
            return self.snapshot.epoch
        return self.batches[0].epoch if self.batches else None


def read_answer(
    messages: Sequence[Message],
    rank: int,
    source: str,
    decode: Callable[[Message], Batch | None],
    is_ours: Callable[[SnapshotPart], bool],
) -> Generator[None, None, Answer]:
    """Return what an answer says about a rank; yields between messages.

    `decode` returns the batches that count. Raises MalformedMessageError for a snapshot that is not whole, or lies, or
    that is not `is_ours`. Heartbeats are signs of life of a publisher that prepares a snapshot, and no more.
    """
    answer, assembly = Answer(), None
    for message in messages:
        if is_snapshot_part(message.payload):
            part = decode_snapshot_part(message.payload, source)
            if part.rank == rank:
                if not is_ours(part):
                    raise MalformedMessageError(source, f"a snapshot with blocks of {part.block_size} tokens")
                assembly = assembly or SnapshotAssembly(source)
                assembly.add(part)
        else:
            batch = decode(message)
            if batch is not None and batch.rank == rank and not is_heartbeat(batch):
                answer.batches.append(batch)
        yield
    if assembly is not None:
        answer.snapshot = assembly.snapshot()
    return answer


def is_heartbeat(batch: Batch) -> bool:
    """Tell a heartbeat, which takes no number, from a numbered batch."""
    return len(batch.events) == 1 and isinstance(batch.events[0], Heartbeat)


def restore(index: RadixIndex, source: WorkerRank, snapshot: Snapshot) -> Generator[None, None, bool]:
    """Have the index hold of a rank what the snapshot says, and nothing else; yields between slices.

    Return whether it does: it does not after a fault of ours, or if a block is twice in the snapshot.
    """
    from kvist.radix import Residencies  # compiled: not for who has no index

    index.clear(*source)
    for held in snapshot.slices:
        for start in range(0, len(held.hashes), NUM_BLOCKS_A_SLICE):
            part = slice(start, start + NUM_BLOCKS_A_SLICE)
            index.restore(Residencies((source,), held.hashes[part], held.depths[part], held.tiers[part]))
            yield
    now = index.digest(source)
    return Holding(now.num_blocks, now.digest) == snapshot.holding or index.evicted_from(source)

"""What a rank held before the oldest message that is kept of it: a recorded snapshot, and what was let go since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Cleared, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.events.codec import decode_batch, encode_snapshot_part
from kvist.events.engine import EngineHash
from kvist.events.snapshot import HeldBlocks, cut
from kvist.events.transports import Message
from kvist.publisher.residency import Residency, held_blocks
from kvist.replay.holding import hashes_of
from kvist.replay.snapshots import RecordedSnapshot

_DEPTH_SHIFT = 4  # of a residency's places: below it are the tiers


class HeldBefore:
    """The state of one rank before a sequence, known completely; it costs memory once a message was folded into it."""

    def __init__(self, rank: WorkerRank, epoch: int, block_size: int, topic: bytes) -> None:
        """Hold nothing, before sequence 0."""
        self._rank = rank
        self._epoch = epoch
        self._block_size = block_size
        self._topic = topic
        self._recorded: RecordedSnapshot | None = None
        self._residency: Residency | None = None
        self.sequence = 0

    @classmethod
    def of(cls, recorded: RecordedSnapshot) -> HeldBefore:
        """Hold what a snapshot says."""
        before = cls(recorded.rank, recorded.snapshot.epoch, recorded.block_size, recorded.messages[0].topic)
        before._recorded = recorded
        before.sequence = recorded.snapshot.sequence
        return before

    def fold(self, message: Message) -> bool:
        """Take the next message; return whether what is held is still known."""
        try:
            batch, num_unknown_events = decode_batch(message.payload, self._rank.worker)
        except MalformedMessageError:
            return False
        if self._residency is None:
            self._residency = Residency() if self._recorded is None else _residency(self._recorded)
            self._recorded = None
        for event in batch.events:
            if isinstance(event, Stored):
                hashes = hashes_of(event)
                self._residency.hold(hashes, hashes, event.parent, event.tier)
            elif isinstance(event, Removed):
                self._residency.release(hashes_of(event), event.tier)
            elif isinstance(event, Cleared):
                self._residency.clear()
        self.sequence = batch.sequence + 1
        return num_unknown_events == 0

    def copied(self) -> Iterator[Message]:
        """Return it as a snapshot's messages, which are made one by one: what is folded later is not in them."""
        if self._recorded is not None:
            return iter(self._recorded.messages)
        residency = self._residency or Residency()
        beat = Heartbeat(residency.num_blocks, residency.digest)
        state = Batch(*self._rank, self._epoch, self.sequence, self._block_size, 0.0, (beat,))
        return self._parts(state, _joined(list(held_blocks(residency.slices()))))

    def _parts(self, state: Batch, held: HeldBlocks) -> Iterator[Message]:
        for part in cut(state, held):
            yield Message(self._topic, state.sequence, encode_snapshot_part(part))


def _residency(recorded: RecordedSnapshot) -> Residency:
    places: dict[int, int] = {}
    names: dict[Tier, dict[EngineHash, int]] = {tier: {} for tier in Tier}
    for held in recorded.snapshot.slices:
        packed = held.depths.astype(np.uint64) << np.uint64(_DEPTH_SHIFT) | held.tiers
        places.update(zip(held.hashes.tolist(), packed.tolist(), strict=True))
        for tier in Tier:
            hashes = held.hashes[held.tiers >> tier & 1 == 1].tolist()
            names[tier].update(zip(hashes, hashes, strict=True))
    return Residency.of(names, places, {})


def _joined(pieces: Sequence[HeldBlocks]) -> HeldBlocks:
    return HeldBlocks(
        np.concatenate([np.empty(0, np.uint64), *(piece.hashes for piece in pieces)]),
        np.concatenate([np.empty(0, np.uint32), *(piece.depths for piece in pieces)]),
        np.concatenate([np.empty(0, np.uint8), *(piece.tiers for piece in pieces)]),
    )

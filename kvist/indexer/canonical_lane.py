"""The fast lane of one canonical stream: compiled code takes what is ordinary, many messages at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvist.events import Batch, WorkerRank
from kvist.events.session import Session
from kvist.events.transports.block import MessageBlock
from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled import canonical as compiled
from kvist.radix import RadixIndex
from kvist.radix.compiled.layout import OPERATION, PROGRESS

_NUMBERS_END = 1 << 62


class Taken(NamedTuple):
    """What was taken of a block, up to the message at `end`, and what it amounts to.

    `is_stopped` says that the message at `end` is not ordinary. `topic_idxs` has the ranks whose messages were taken,
    each with the last one that has a topic, None where none has.
    """

    is_stopped: bool
    topic_idxs: dict[int, int | None]
    end: int
    num_batches: int
    num_events: int
    num_refused_events: int
    timestamp_s: float


class CanonicalLane:
    """Takes what is ordinary: next in sequence, well-formed, of blocks stored and removed, as if one by one."""

    def __init__(self, worker: str, block_size: int, index: RadixIndex) -> None:
        self._worker = worker
        self._block_size = block_size
        self._index = index
        self._lane = np.zeros(1, compiled.LANE)
        self._ranks = np.zeros(2 * MAX_RANKS, compiled.RANK)  # memory of those that never occur is not touched
        operations, hashes = np.zeros(compiled.MAX_OPERATIONS, OPERATION), np.zeros(compiled.MAX_HASHES, np.uint64)
        self._gathered = operations, hashes, np.zeros(1, PROGRESS)

    def take(self, block: MessageBlock, start: int, sessions: Mapping[int, Session[Batch]], now_s: float) -> Taken:
        """Apply messages of a block from `start` on, for about half a millisecond; their ranks' sessions note it.

        Nothing of the message at which it stops has had an effect.
        """
        index, data = self._index, np.frombuffer(block.buffer, np.uint8)
        for rank, session in sessions.items():
            self._describe(rank, session)
        self._lane[0] = self._block_size, start, 0, 0, 0, 0.0, 0, 0, 0
        state = index.core, index.segments, self._lane, self._ranks
        while True:
            with index.writing:
                reason = compiled.take(*state, data, block.table, *self._gathered)
            if reason != compiled.HELP:
                break
            index.make_room()
        index.keep_to_cap()
        topic_idxs: dict[int, int | None] = {}
        for rank, session in sessions.items():
            self._note(rank, session, now_s, topic_idxs)
        return Taken(reason == compiled.NOT_ORDINARY, topic_idxs, *self._lane.item()[1:6])

    def _describe(self, rank: int, session: Session[Batch]) -> None:
        """Say what the rank's next message must be; none is taken of a rank that is not in step, or unknown."""
        epoch, sequence = session.epoch, session.expected_sequence
        slot = self._index.slot_of(WorkerRank(self._worker, rank))
        if slot is not None and epoch is not None and session.is_in_step and max(epoch, sequence) < _NUMBERS_END:
            self._ranks[rank] = slot + 1, epoch, sequence, 0

    def _note(self, rank: int, session: Session[Batch], now_s: float, topic_idxs: dict[int, int | None]) -> None:
        """Tell the session what was taken of its rank, if anything was, and note its last topic."""
        slot, _, sequence, topic_idx = self._ranks[rank].item()
        num_taken = sequence - session.expected_sequence if slot else 0
        if slot:
            self._ranks[rank] = 0, 0, 0, 0  # until it is described again, which it is not if its session is dropped
        if num_taken:
            session.on_applied(num_taken, now_s)
            topic_idxs[rank] = topic_idx - 1 if topic_idx else None

"""The fast lane of one canonical stream: compiled code takes what is ordinary, many messages at a time."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvist.events import Batch, WorkerRank
from kvist.events.session import Session
from kvist.events.transports.block import MessageBlock, address_of
from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled import canonical as compiled
from kvist.radix import RadixIndex

_NUMBERS_END = 1 << 62
_RANK_WORDS = compiled.RANK_BYTES >> 3
_SLOT, _EPOCH, _SEQUENCE, _TOPIC = (
    field >> 3 for field in (compiled.RANK_SLOT, compiled.RANK_EPOCH, compiled.RANK_SEQUENCE, compiled.RANK_TOPIC)
)


class Taken(NamedTuple):
    """What was taken of a block, up to the message at `end`, and what it amounts to.

    `is_stopped` says that the message at `end` is not ordinary. `topic_idxs` has the ranks whose messages were taken,
    each with the last one that has a topic, None where none has.
    """

    end: int
    is_stopped: bool
    num_batches: int
    num_events: int
    num_refused_events: int
    timestamp_s: float
    topic_idxs: dict[int, int | None]


class CanonicalLane:
    """Takes what is ordinary: next in sequence, well-formed, of blocks stored and removed, as if one by one."""

    def __init__(self, worker: str, block_size: int, index: RadixIndex) -> None:
        """Apply to `index`, as `worker`'s, what has blocks of this size."""
        self._worker = worker
        self._index = index
        self._state = np.zeros(compiled.LANE_BYTES >> 3, np.int64)
        # Anonymous memory: that of ranks which never occur is not touched.
        self._rank_states = mmap.mmap(-1, MAX_RANKS * compiled.RANK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._words = self._state.data
        self._rank_words = memoryview(self._rank_states).cast("q")
        self._address = self._state.ctypes.data
        self._set(compiled.BLOCK_SIZE, block_size)
        self._set(compiled.RANKS, address_of(self._rank_states))
        index.reserve_operations(compiled.MAX_OPERATIONS, compiled.MAX_HASHES)

    def take(self, block: MessageBlock, start: int, sessions: Mapping[int, Session[Batch]], now_s: float) -> Taken:
        """Apply messages of a block from `start` on, for about half a millisecond; their ranks' sessions note it.

        Nothing of the message at which it stops has had an effect.
        """
        for rank, session in sessions.items():
            self._describe(rank, session)
        for field in (compiled.NUM_BATCHES, compiled.NUM_EVENTS, compiled.NUM_REFUSED):
            self._set(field, 0)
        self._set(compiled.BUFFER, block.address)
        self._set(compiled.TABLE, block.table.ctypes.data)
        self._set(compiled.NUM_MESSAGES, len(block))
        self._set(compiled.MESSAGE_IDX, start)
        while (reason := compiled.take(self._index.address, self._address)) == compiled.HELP:
            self._index.help_out()
        return Taken(
            self._get(compiled.MESSAGE_IDX),
            reason == compiled.NOT_ORDINARY,
            self._get(compiled.NUM_BATCHES),
            self._get(compiled.NUM_EVENTS),
            self._get(compiled.NUM_REFUSED),
            float(self._state.view(np.float64)[compiled.TIMESTAMP >> 3]),
            {rank: topic for rank, session in sessions.items() for topic in self._note(rank, session, now_s)},
        )

    def _describe(self, rank: int, session: Session[Batch]) -> None:
        """Say what the rank's next message must be; none is taken of a rank that is not in step, or unknown."""
        slot, epoch, sequence = (
            self._index.slot_of(WorkerRank(self._worker, rank)),
            session.epoch,
            session.expected_sequence,
        )
        words, at = self._rank_words, rank * _RANK_WORDS
        if slot is None or epoch is None or not session.is_in_step or max(epoch, sequence) >= _NUMBERS_END:
            words[at + _SLOT] = 0
        else:
            words[at + _SLOT], words[at + _EPOCH], words[at + _SEQUENCE] = slot + 1, epoch, sequence
            words[at + _TOPIC] = 0

    def _note(self, rank: int, session: Session[Batch], now_s: float) -> list[int | None]:
        """Tell the session what was taken; return the last topic, in a list that is empty if nothing was."""
        words, at = self._rank_words, rank * _RANK_WORDS
        num_taken = words[at + _SEQUENCE] - session.expected_sequence if words[at + _SLOT] else 0
        words[at + _SLOT] = 0  # until it is described again, which it is not if its session is dropped
        if num_taken == 0:
            return []
        session.applied(num_taken, now_s)
        return [words[at + _TOPIC] - 1 if words[at + _TOPIC] else None]

    def _get(self, field: int) -> int:
        return self._words[field >> 3]

    def _set(self, field: int, value: int) -> None:
        self._words[field >> 3] = value

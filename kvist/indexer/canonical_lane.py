"""The fast lane of one canonical stream: compiled code takes what is ordinary, many messages at a time."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from typing import NamedTuple

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
_ASKED = struct.Struct("=qqqqq")  # buffer, first message, and counters that begin at zero
_ANSWER = struct.Struct("=qqqqd")


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
        """Apply to `index`, as `worker`'s, what has blocks of this size."""
        self._worker = worker
        self._index = index
        # Anonymous memory: that of ranks which never occur is not touched.
        self._rank_states = mmap.mmap(-1, MAX_RANKS * compiled.RANK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._rank_words = memoryview(self._rank_states).cast("q")
        self._state = bytearray(compiled.LANE_BYTES)
        self._address = address_of(self._state)
        struct.pack_into("=qq", self._state, compiled.BLOCK_SIZE, block_size, address_of(self._rank_states))
        index.reserve_operations(compiled.MAX_OPERATIONS, compiled.MAX_HASHES)

    def take(self, block: MessageBlock, start: int, sessions: Mapping[int, Session[Batch]], now_s: float) -> Taken:
        """Apply messages of a block from `start` on, for about half a millisecond; their ranks' sessions note it.

        Nothing of the message at which it stops has had an effect.
        """
        index = self._index
        for rank, session in sessions.items():
            self._describe(rank, session)
        _ASKED.pack_into(self._state, compiled.BUFFER, block.address, start, 0, 0, 0)
        while (reason := compiled.take(index.address, self._address, block.table)) == compiled.HELP:
            index.help_out()
        index.keep_to_cap()
        topic_idxs: dict[int, int | None] = {}
        for rank, session in sessions.items():
            self._note(rank, session, now_s, topic_idxs)
        is_stopped = reason == compiled.NOT_ORDINARY
        return Taken(is_stopped, topic_idxs, *_ANSWER.unpack_from(self._state, compiled.MESSAGE_IDX))

    def _describe(self, rank: int, session: Session[Batch]) -> None:
        """Say what the rank's next message must be; none is taken of a rank that is not in step, or unknown."""
        epoch, sequence = session.epoch, session.expected_sequence
        slot = self._index.slot_of(WorkerRank(self._worker, rank))
        words, at = self._rank_words, rank * _RANK_WORDS
        if slot is not None and epoch is not None and session.is_in_step and max(epoch, sequence) < _NUMBERS_END:
            words[at + _SLOT], words[at + _EPOCH], words[at + _SEQUENCE], words[at + _TOPIC] = (
                slot + 1,
                epoch,
                sequence,
                0,
            )

    def _note(self, rank: int, session: Session[Batch], now_s: float, topic_idxs: dict[int, int | None]) -> None:
        """Tell the session what was taken of its rank, if anything was, and note its last topic."""
        words, at = self._rank_words, rank * _RANK_WORDS
        num_taken = words[at + _SEQUENCE] - session.expected_sequence if words[at + _SLOT] else 0
        words[at + _SLOT] = 0  # until it is described again, which it is not if its session is dropped
        if num_taken:
            session.applied(num_taken, now_s)
            topic_idxs[rank] = words[at + _TOPIC] - 1 if words[at + _TOPIC] else None

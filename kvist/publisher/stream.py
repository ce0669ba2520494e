"""One rank's stream: engine events go in, numbered batches come out. No I/O, no clock."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvist.errors import InvalidValueError
from kvist.events.engine import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from kvist.events.types import Batch, Event, Tier, WorkerRank
from kvist.events.windows import KnownWindow
from kvist.publisher.coalescer import Coalescer
from kvist.publisher.filter import FilterState, FilterStatistics, WindowFilter
from kvist.publisher.normaliser import Normaliser, NormaliserStatistics
from kvist.publisher.plain import read_plain
from kvist.publisher.plain_path import PlainPath
from kvist.publisher.residency import Residency
from kvist.publisher.unread import Unread

# A hash of any other type might never be found again, or never be sent; nearly always they are of the first three.
_HASH_TYPES = frozenset((int, bytes, type(None)))
_OTHER_HASH_TYPES = (int, bytes, np.integer, type(None))

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """What one rank's stream did since it was made."""

    num_events: int
    num_malformed: int
    num_batches: int
    filter: FilterStatistics
    normaliser: NormaliserStatistics


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank holds, and how its window filter judges: all that another stream needs to go on."""

    filter: FilterState
    residency: Residency


class RankStream:
    """Filters and normalises one rank's engine events and closes them into batches numbered from 0."""

    def __init__(
        self,
        source: WorkerRank,
        block_size: int,
        epoch: int,
        *,
        window: KnownWindow | None = None,
        lora_names: Mapping[int, str] | None = None,
    ) -> None:
        self._source = source
        self._block_size = block_size
        self._epoch = epoch
        self._lora_names = lora_names
        self._filter = WindowFilter(source.rank, window)
        self._coalescer = Coalescer()
        self._hold(Residency())
        self._num_events = 0
        self._num_malformed = 0
        self._next_sequence = 0
        self.is_complete = True
        """Whether all that the engine holds was reported here, as far as whoever reports knows."""

    def admit(self, event: EngineEvent) -> None:
        """Take one engine event into the batch being built; never raises for what the engine reported.

        For an event whose values are not even of the right types the rank is cleared: it may have been a removal.
        """
        self._num_events += 1
        try:
            _check(event)
            self._admit(event)
        except Exception as error:  # noqa: BLE001 - what an engine's own objects raise when they are compared or read
            self._clear_for(error)

    def admit_malformed(self, error: Exception) -> None:
        """Do as `admit` does for an event that could not even be read."""
        self._num_events += 1
        self._clear_for(error)

    def admit_unread(self, unread: Unread) -> None:
        """Take all events of a message, to the same effect as `admit` one after another."""
        events = read_plain(unread.payload)
        if events is not None:
            num_short = self._plain_path.admit(events, self._source.rank, self.admit)  # which counts the others
            self._num_events += num_short
            return
        for event in unread.decode(unread.payload):
            self.admit(event)

    def _hold(self, residency: Residency) -> None:
        self._residency = residency
        self._normaliser = Normaliser(
            self._block_size, rank=self._source.rank, lora_names=self._lora_names, holdings=residency
        )
        self._plain_path = PlainPath(self._block_size, self._filter, self._normaliser, residency, self._coalescer)

    def _clear_for(self, error: Exception) -> None:
        self._num_malformed += 1
        if self._num_malformed == 1:
            _logger.warning("malformed event: the rank is cleared for it: %r source=%s", error, self._source)
        self._admit(EngineCleared(self._source.rank))

    def _admit(self, event: EngineEvent) -> None:
        for passed in self._filter.admit(event):
            for canonical in self._normaliser.normalise(passed):
                self._coalescer.add(canonical)

    def close_batches(self, timestamp_s: float) -> list[Batch]:
        """Return what was admitted since the last call: nearly always one batch, none when nothing is left of it."""
        batches = []
        for events in self._coalescer.take():
            batches.append(self._batch(timestamp_s, events))
            self._next_sequence += 1
        return batches

    def heartbeat(self, timestamp_s: float) -> Batch:
        """Return a heartbeat about all batches closed so far, which must be all that was admitted."""
        return self._batch(timestamp_s, (self._normaliser.heartbeat(is_complete=self.is_complete),))

    def state(self) -> RankState:
        """Return a copy of what is held, O(blocks), and how events are filtered."""
        return RankState(self._filter.state, self._residency.copy())

    def resume(self, state: RankState) -> None:
        """Hold what another stream held, unless anything was reported here already.

        The batch of number 0 is left out: whoever follows has missed it, asks for it, and gets a snapshot.
        """
        if self._num_events:
            return
        self._filter.resume(state.filter)
        self._hold(state.residency)
        self._next_sequence = 1

    def forget_groups(self) -> None:
        """Learn anew how the engine's layer groups differ: another process may run another model."""
        self._filter.resume(WindowFilter().state)

    @property
    def next_sequence(self) -> int:
        """Return the number of the next batch."""
        return self._next_sequence

    @property
    def residency(self) -> Residency:
        """Return what is held after everything admitted."""
        return self._residency

    @property
    def num_blocks(self) -> int:
        """Return how many (block, tier) pairs are held."""
        return self._residency.num_blocks

    def statistics(self) -> StreamStatistics:
        """Return the counters as they are now."""
        return StreamStatistics(
            num_events=self._num_events,
            num_malformed=self._num_malformed,
            num_batches=self._next_sequence,
            filter=self._filter.statistics(),
            normaliser=self._normaliser.statistics(),
        )

    def _batch(self, timestamp_s: float, events: tuple[Event, ...]) -> Batch:
        return Batch(
            worker=self._source.worker,
            rank=self._source.rank,
            epoch=self._epoch,
            sequence=self._next_sequence,
            block_size=self._block_size,
            timestamp_s=timestamp_s,
            events=events,
        )


def _check(event: EngineEvent) -> None:
    """Raise TypeError for what would be taken, and could not be sent or found again: else, use tells what is wrong."""
    if not isinstance(event, EngineStored | EngineRemoved):
        return
    types = set(map(type, event.block_hashes))
    if not types <= _HASH_TYPES and not all(issubclass(each, _OTHER_HASH_TYPES) for each in types):
        raise TypeError("a block hash is neither an integer nor bytes")
    if event.tier.__class__ is not Tier and event.tier.__class__ is not int and event.tier is not None:
        raise TypeError(f"tier {event.tier!r} is none")


def topic_of(source: WorkerRank) -> bytes:
    """Return the topic of a rank's stream, `kv/<worker>/<rank>`; raises InvalidValueError for an unfit worker name."""
    worker = source.worker
    if not worker or not worker.isprintable() or any(character in " /+#*>" for character in worker):
        raise InvalidValueError("worker", worker, "a printable name without spaces and / + # * >")
    return f"kv/{worker}/{source.rank}".encode()


def new_epoch(now_s: float, rng: random.Random) -> int:
    """Return a u63 that differs between starts and grows with time: milliseconds, then 21 random bits."""
    return (int(now_s * 1000) << 21 | rng.getrandbits(21)) & ((1 << 63) - 1)

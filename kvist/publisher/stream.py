"""One rank's stream: engine events go in, numbered batches come out. No I/O, no clock."""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np

from kvist.errors import InvalidValueError
from kvist.events.codec import encode_batch
from kvist.events.engine_events import EngineCleared, EngineEvent, EngineHash, EngineRemoved, EngineStored
from kvist.events.transports import Message
from kvist.events.types import MAX_RANKS, Batch, Cleared, Event, GroupRule, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.publisher.filter import FilterState, PassedEvent, WindowFilter
from kvist.publisher.groups import MAX_COUNTED, GroupSplitter
from kvist.publisher.normaliser import Normaliser
from kvist.publisher.residency import Residency

# A hash of any other type might never be found again, or never be sent; nearly always they are of the first three.
_HASH_TYPES = frozenset((int, bytes, type(None)))
_OTHER_HASH_TYPES = (int, bytes, np.integer, type(None))

_logger = logging.getLogger(__name__)

MAX_BATCH_HASH_BYTES = 64 << 10
"""Hashes in one batch, 8,192 blocks: about a millisecond to apply, so that no batch holds up the subscriber's loop."""

_HASH_BYTES = 8


class StreamOptions(TypedDict, total=False):
    """How the streams of ranks come to be; left out with their defaults."""

    lora_names: Mapping[int, str] | None
    """The adapters' names, for engines that send only their numbers."""
    counts_copies: bool
    """Whether a block that is stored again is held until it is removed as often: vLLM reports each copy."""
    has_full_reports: bool
    """Whether a block may be reported once more because somebody asked."""
    has_all_groups: bool
    """Whether a second stream of each rank has what its other groups hold of the published one's blocks."""
    num_ahead: int
    """How many blocks behind a hit the engine must have as well: with EAGLE vLLM may compute one again."""


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """What one rank's stream did since it was made; `num_blocks` counts the (block, tier) pairs held now."""

    num_blocks: int
    num_events: int
    num_malformed: int
    num_batches: int
    num_passed: int
    num_filtered: int


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank holds, and how its window filter judges: all that another stream needs to go on."""

    filter: FilterState
    residency: Residency
    others: Mapping[int, GroupRule] = field(default_factory=dict)
    """What each of the other groups must hold for a hit, and what they were told to hold, where that is followed."""
    counted: Sequence[tuple[EngineHash, int, int]] = ()
    is_expressible: bool = True
    in_doubt: Sequence[tuple[Tier, EngineHash]] = ()
    """What of it may be gone."""


class Stream:
    """Closes what comes and goes into batches numbered from 0."""

    def __init__(self, source: WorkerRank, block_size: int, epoch: int) -> None:
        self._source = source
        self._block_size = block_size
        self._epoch = epoch
        self._coalescer = Coalescer()
        self.residency = Residency()
        self.is_complete = True
        """Whether all that the engine holds was reported here, as far as whoever reports knows."""
        self.rules: tuple[GroupRule, ...] = ()
        """Of a companion: what hits of its rank need."""
        self.is_upper_bound = False
        self.next_sequence = 0

    def close_batches(self, timestamp_s: float) -> list[Batch]:
        """Return what was added since the last call: nearly always one batch, none when nothing is left of it."""
        batches = []
        for events in self._coalescer.drain():
            batches.append(self._batch(timestamp_s, events))
            self.next_sequence += 1
        return batches

    def heartbeat(self, timestamp_s: float) -> Batch:
        """Return a heartbeat about all batches closed so far, which must be all that was added."""
        held = self.residency.num_blocks, self.residency.digest
        return self._batch(timestamp_s, (Heartbeat(*held, self.is_exact, self.rules, self.is_upper_bound),))

    @property
    def num_blocks(self) -> int:
        return self.residency.num_blocks

    @property
    def is_exact(self) -> bool:
        """Return whether what is held is what the engine holds, as far as is known."""
        return self.is_complete

    def _batch(self, timestamp_s: float, events: tuple[Event, ...]) -> Batch:
        return Batch(*self._source, self._epoch, self.next_sequence, self._block_size, timestamp_s, events)


class Companion(Stream):
    """A `GroupHolder`: what a rank's other groups hold of what it publishes, kind by kind, as if each were a tier."""

    def __init__(self, source: WorkerRank, block_size: int, epoch: int, published: RankStream) -> None:
        super().__init__(source.companion, block_size, epoch)
        self._published = published
        self._counts: dict[tuple[Any, int], int] = {}
        self._kind_of: list[int] = []
        self._rule_of: list[GroupRule] = []
        self._num_kinds = 0
        self.is_overfull = False
        """Whether some block was not counted, for want of room, since the rank was cleared."""

    def set_groups(self, published: GroupRule, others: Sequence[GroupRule]) -> None:
        kinds = [*dict.fromkeys(others)]
        self._rule_of, self._kind_of, self._num_kinds = [*others], [kinds.index(rule) for rule in others], len(kinds)
        self.rules = (published, *kinds) if others or published != GroupRule(0) else ()
        self._withdraw_all()
        self.on_published({name for name, _ in self._counts})

    def store_in_group(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> None:
        num_believed = len(engine_hashes) if self._published.believes_all else self._rule_of[group].num_needed
        for name in engine_hashes[max(0, len(engine_hashes) - num_believed) :]:
            num_copies = self._counts.get((name, group), 0)
            if name is None or (num_copies and not self._published.counts_copies):
                continue
            if not num_copies and len(self._counts) >= MAX_COUNTED:
                self.is_overfull = True
                continue
            self._counts[name, group] = num_copies + 1
            if not num_copies:
                self._tell(name, self._kind_of[group])

    def remove_from_group(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        for name in engine_hashes:
            num_copies = self._counts.pop((name, group), 0)
            if num_copies > 1 and self._published.counts_copies:
                self._counts[name, group] = num_copies - 1
            elif num_copies and (block_hash := self._find(name)) is not None:
                self._release(self._kind_of[group], (block_hash,))

    def are_held(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> bool:
        if group < 0:
            return all(self._find(name) is not None for name in engine_hashes)
        return all((name, group) in self._counts for name in engine_hashes)

    def counted(self) -> list[tuple[Any, int, int]]:
        return [(*key, number) for key, number in self._counts.items()]

    def count_again(self, counted: Iterable[tuple[Any, int, int]]) -> None:
        self._counts.update({(name, group): number for name, group, number in counted})

    def engine_hashes(self) -> list[Any]:
        return [*self._published.residency.names(Tier.GPU)]

    def on_published(self, names: Iterable[Any]) -> None:
        """Note that the published group may hold the blocks that have these hashes now."""
        for name in names if self._num_kinds else ():
            for kind in range(self._num_kinds):
                self._tell(name, kind)

    def on_withdrawn(self, block_hashes: Sequence[int]) -> None:
        """Note that the published group does not hold blocks any more."""
        for kind in range(self._num_kinds):
            self._release(kind, block_hashes)

    def clear(self) -> None:
        """Hold nothing, and count nothing."""
        self._counts.clear()
        self.is_overfull = False
        self._withdraw_all()

    def _withdraw_all(self) -> None:
        """Hold nothing; what is counted stays."""
        if self.residency.num_blocks:
            self.residency.clear()
            self._coalescer.add(Cleared())

    def _find(self, name: Any) -> int | None:
        return self._published.residency.names(Tier.GPU).get(name)

    def _tell(self, name: Any, kind: int) -> None:
        """Hold a block in a kind if all its groups do, and the published one does."""
        block_hash = self._find(name)
        groups = (group for group, each in enumerate(self._kind_of) if each == kind)
        if block_hash is None or not all((name, group) in self._counts for group in groups):
            return
        if self.residency.hold((block_hash,), (block_hash,), None, Tier(kind)).new_idxs:
            self._coalescer.add(Stored(block_hash.to_bytes(_HASH_BYTES, "little"), None, Tier(kind)))

    def _release(self, kind: int, block_hashes: Sequence[int]) -> None:
        released = self.residency.release(block_hashes, Tier(kind))
        if released:
            self._coalescer.add(Removed(array("Q", released).tobytes(), Tier(kind)))


class RankStream(Stream):
    """Filters and normalises one rank's engine events and closes them into batches."""

    def __init__(
        self,
        source: WorkerRank,
        block_size: int,
        epoch: int,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(source, block_size, epoch)
        self._options = options
        self._has_full_reports = options.get("has_full_reports", False)
        self._is_report = False  # the event at hand
        self._filter = WindowFilter(source.rank)
        self._hold(self.residency)
        self._num_events = 0
        self._num_malformed = 0
        self.companion = Companion(source, block_size, epoch, self) if options.get("has_all_groups") else None
        self._split()

    def set_complete(self, is_complete: bool) -> None:
        self.is_complete = is_complete
        self.residency.counts_copies = self.counts_copies

    def heartbeat(self, timestamp_s: float) -> Batch:
        if self.companion is not None:
            self.companion.is_complete = self.is_complete and self.is_expressible
        else:
            self.is_upper_bound = self._filter.has_more_that_hits_need or self._options.get("num_ahead", 0) > 0
        return super().heartbeat(timestamp_s)

    @property
    def is_exact(self) -> bool:
        return self.is_complete and not self._normaliser.in_doubt and not self._has_full_reports

    @property
    def is_expressible(self) -> bool:
        """Return whether what hits need of all groups that are followed can be told."""
        if self._splitter is None or self.companion is None:
            return True
        return self._splitter.is_expressible and not self.companion.is_overfull

    def admit(self, event: EngineEvent) -> None:
        """Take one engine event, never raising: for one whose values are of wrong types the rank is cleared."""
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

    def state(self) -> RankState:
        """Return a copy of what is held, O(blocks), and how events are filtered."""
        held, in_doubt = (self._filter.state, self.residency.copy()), tuple(self._normaliser.in_doubt)
        if self.companion is None or self._splitter is None:
            return RankState(*held, in_doubt=in_doubt)
        others, counted = dict(self._splitter.others), self.companion.counted()
        return RankState(*held, others, counted, self.is_expressible, in_doubt)

    def resume(self, state: RankState) -> None:
        """Hold what another stream held, unless anything was reported; number 0 is left out, so that followers ask."""
        if self._num_events:
            return
        self._filter.resume(state.filter)
        self._hold(state.residency)
        self._normaliser.in_doubt = frozenset(state.in_doubt)
        self.next_sequence = 1
        if self.companion is not None and self._splitter is not None:
            self.companion.count_again(state.counted)
            self._splitter.resume(state.filter, state.others)
            self._splitter.is_expressible = state.is_expressible
            self.companion.close_batches(0.0)
            self.companion.next_sequence = 1

    def forget_groups(self) -> None:
        """Learn anew how the engine's layer groups differ: another process may run another model."""
        self._filter.resume(WindowFilter().state)
        self._split()

    @property
    def counts_copies(self) -> bool:
        """Whether what is stored again has one more copy, rather than being reported once more."""
        return self._options.get("counts_copies", False) and self.is_complete and not self._is_report

    @property
    def believes_all(self) -> bool:
        """Whether all that is stored is there, rather than perhaps reported by an engine that was asked."""
        return self.counts_copies or not self._options.get("counts_copies", False)

    def _split(self) -> None:
        """Learn from here on which groups there are, if they are followed."""
        self._splitter = None
        if self.companion is not None:
            num_ahead = self._options.get("num_ahead", 0)
            options = num_ahead, self._has_full_reports
            self._splitter = GroupSplitter(self._filter, self._block_size, self.companion, *options)

    def _hold(self, residency: Residency) -> None:
        self.residency = residency
        residency.counts_copies = self.counts_copies
        lora_names = self._options.get("lora_names")
        self._normaliser = Normaliser(
            self._block_size, rank=self._source.rank, lora_names=lora_names, holdings=residency
        )

    def _clear_for(self, error: Exception) -> None:
        self._num_malformed += 1
        if self._num_malformed == 1:
            _logger.warning("malformed event: the rank is cleared for it: %r source=%s", error, self._source)
        self._admit(EngineCleared(self._source.rank))

    def _admit(self, event: EngineEvent) -> None:
        is_report = isinstance(event, EngineStored) and (event.is_report or self._has_full_reports)
        if self._splitter is not None:
            is_report = self._splitter.is_report(event)
        if is_report != self._is_report:
            self._is_report = is_report
            self.residency.counts_copies = self.counts_copies
        if self._splitter is not None:
            self._splitter.admit(event, self._publish)
            return
        for passed in self._filter.admit(event):
            for canonical in self._normaliser.normalise(passed):
                self._coalescer.add(canonical)

    def _publish(self, passed: PassedEvent) -> None:
        """Publish an event, and tell the companion what came and went."""
        assert self.companion is not None
        for canonical in self._normaliser.normalise(passed):
            self._coalescer.add(canonical)
            if isinstance(canonical, Removed) and canonical.tier is Tier.GPU:
                self.companion.on_withdrawn(array("Q", canonical.hashes).tolist())
        if isinstance(passed, EngineCleared):
            self.companion.clear()
        elif isinstance(passed, EngineStored) and passed.tier is Tier.GPU:
            self.companion.on_published(passed.block_hashes)  # what is not found is not published

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            num_blocks=self.num_blocks,
            num_events=self._num_events,
            num_malformed=self._num_malformed,
            num_batches=self.next_sequence,
            num_passed=self._filter.num_passed,
            num_filtered=self._filter.num_filtered,
        )


Streams: TypeAlias = Mapping[int, RankStream]


def with_companions(streams: Streams) -> dict[int, Stream]:
    companions = {rank + MAX_RANKS: each.companion for rank, each in streams.items() if each.companion is not None}
    return {**streams, **companions}


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


def message_of(batch: Batch) -> Message:
    return Message(topic_of(batch.source), batch.sequence, encode_batch(batch))


def new_epoch(now_s: float, rng: random.Random) -> int:
    """Return a u63 that differs between starts and grows with time: milliseconds, then 21 random bits."""
    return (int(now_s * 1000) << 21 | rng.getrandbits(21)) & ((1 << 63) - 1)


class Coalescer:
    """Joins neighbouring events that say the same in one: chains that continue each other, removals of one tier."""

    def __init__(self) -> None:
        self._closed: list[tuple[Event, ...]] = []
        self._events: list[Event] = []
        # The event being extended: its hashes are in pieces, which are joined once, so that a long chain is O(n).
        self._is_chain = False
        self._parent: int | None = None
        self._tier = Tier.GPU
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def add(self, event: Event) -> None:
        if not isinstance(event, Stored) and not isinstance(event, Removed):
            self._settle()
            self._events.append(event)
            return
        for piece in (event,) if len(event.hashes) <= MAX_BATCH_HASH_BYTES else _cut(event):
            self._add(piece)

    def _add(self, event: Stored | Removed) -> None:
        """Put an event behind the others, of no more hashes than a batch has."""
        self._size_bytes += len(event.hashes)
        if self._size_bytes > MAX_BATCH_HASH_BYTES:
            self._close(len(event.hashes))
        is_chain, parent = (True, event.parent) if isinstance(event, Stored) else (False, None)
        if self._pieces:
            is_alike = is_chain == self._is_chain and event.tier == self._tier
            if is_alike and (not is_chain or (parent is not None and parent == _last_hash(self._pieces[-1]))):
                self._pieces.append(event.hashes)
                return
            self._settle()
        self._is_chain, self._parent, self._tier = is_chain, parent, event.tier
        self._pieces.append(event.hashes)

    def drain(self) -> list[tuple[Event, ...]]:
        """Return everything added, in order and cut into batches, and start anew."""
        self._close()
        closed, self._closed = self._closed, []
        return closed

    def _settle(self) -> None:
        pieces = self._pieces
        if not pieces:
            return
        hashes = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._events.append(Stored(hashes, self._parent, self._tier) if self._is_chain else Removed(hashes, self._tier))
        pieces.clear()

    def _close(self, next_bytes: int = 0) -> None:
        """End the batch; the next one begins with an event of so many bytes."""
        self._settle()
        if self._events:
            self._closed.append(tuple(self._events))
        self._events = []
        self._size_bytes = next_bytes


def _cut(event: Stored | Removed) -> Iterator[Stored | Removed]:
    """Yield events of bounded size that amount to a larger one."""
    for start in range(0, len(event.hashes), MAX_BATCH_HASH_BYTES):
        hashes = event.hashes[start : start + MAX_BATCH_HASH_BYTES]
        if isinstance(event, Removed):
            yield Removed(hashes, event.tier)
        else:
            yield Stored(hashes, _last_hash(event.hashes[:start]) if start else event.parent, event.tier)


def _last_hash(hashes: bytes) -> int:
    return int.from_bytes(hashes[-_HASH_BYTES:], "little")

"""One rank's stream: engine events go in, numbered batches come out. No I/O, no clock."""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict, Unpack

import msgspec
import numpy as np

from kvist.errors import InvalidValueError
from kvist.events.codec import encode_batch
from kvist.events.engine_events import EngineCleared, EngineEvent, EngineHash, EngineRemoved, EngineStored
from kvist.events.transports import Message
from kvist.events.types import MAX_RANKS, Batch, Cleared, Event, GroupRule, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.publisher.filter import FilterState, PassedEvent, WindowFilter
from kvist.publisher.groups import MAX_COUNTED, GroupSplitter
from kvist.publisher.normaliser import Normaliser
from kvist.publisher.residency import Chain, Residency

# A hash of any other type might never be found again, or never be sent.
_HASH_TYPES = (int, bytes, np.integer, type(None))

_logger = logging.getLogger(__name__)

MAX_BATCH_HASH_BYTES = 64 << 10
"""Hashes in one batch, 8,192 blocks: about a millisecond to apply, so that no batch holds up the subscriber's loop."""

_HASH_BYTES = 8
_HAS_HASHES = (Stored, Removed)


class StreamOptions(TypedDict, total=False):
    """The options of a rank's stream; each may be left out."""

    lora_names: Mapping[int, str] | None
    """The adapters' names, for engines that send only their numbers."""
    counts_copies: bool
    """Whether a block that is stored again is held until it is removed as often: vLLM reports each copy."""
    has_full_reports: bool
    """Whether the engine may report a block that it holds once more, on request."""
    has_all_groups: bool
    """Whether a second stream, the rank's companion, publishes which of the blocks its other layer groups hold."""
    num_ahead: int
    """How many blocks behind a hit the engine must hold as well: with EAGLE vLLM may compute one again."""


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
    """What one rank holds, and the state of its window filter: all that another stream needs to continue it."""

    filter: FilterState
    residency: Residency
    has_offloaded: bool = False
    """Whether a block was ever stored beside the GPU."""
    has_forgotten: bool = False
    """Whether the engine may still hold blocks beside the GPU that were cleared here with those on it."""
    others: Mapping[int, GroupRule] = field(default_factory=dict)
    """What each of the other layer groups must hold for a hit, by `group_key`; empty if they are not followed."""
    counted: Sequence[tuple[EngineHash, int, int]] = ()
    """What the other groups hold: engine hash, group, number of copies."""
    is_expressible: bool = True


class Stream:
    """Puts canonical events into batches, which it numbers from 0."""

    def __init__(self, source: WorkerRank, block_size: int, epoch: int) -> None:
        self._source = source
        self._block_size = block_size
        self._epoch = epoch
        self._coalescer = Coalescer()
        self.residency = Residency()
        self.is_complete = True
        """Whether no report of the engine was lost, as far as is known."""
        self.rules: tuple[GroupRule, ...] = ()
        """Of a companion: what hits of its rank need."""
        self.rules_version = 0
        """How often those rules were set, for the batches of both; 0 for a rank without a companion."""
        self.is_upper_bound = False
        """Whether hits also need what the stream does not publish."""
        self.next_sequence = 0

    def close_batches(self, timestamp_s: float) -> list[Batch]:
        """Return batches of the events since the last call: nearly always one, none if there were no events."""
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
    def is_exact(self) -> bool:
        """Return whether exactly what the engine holds is published, as far as is known."""
        return self.is_complete

    def _batch(self, timestamp_s: float, events: tuple[Event, ...]) -> Batch:
        place = self.next_sequence, self._block_size
        return Batch(*self._source, self._epoch, *place, timestamp_s, events, self.rules_version)


class Companion(Stream):
    """Publishes which of a rank's blocks its other layer groups hold, as a stream with a tier for each kind of group.

    Implements `GroupHolder`.
    """

    def __init__(self, source: WorkerRank, block_size: int, epoch: int, published: RankStream) -> None:
        super().__init__(source.companion, block_size, epoch)
        self._published = published
        self._counts: dict[tuple[Any, int], int] = {}
        self._kind_of: list[int] = []
        self._rule_of: list[GroupRule] = []
        self._num_kinds = 0
        self.is_overfull = False
        """Whether there was no room to count some block since the rank was cleared."""

    @property
    def counts_copies(self) -> bool:
        return self._published.residency.counts_copies

    @property
    def trusts_stores(self) -> bool:
        return self._published.trusts_stores

    def set_groups(self, published: GroupRule, others: Sequence[GroupRule]) -> None:
        kinds = [*dict.fromkeys(others)]
        self._rule_of, self._kind_of, self._num_kinds = [*others], [kinds.index(rule) for rule in others], len(kinds)
        self.rules = (published, *kinds) if others or published != GroupRule(0) else ()
        self.rules_version = self._published.rules_version = self.rules_version + 1
        self._remove_all()
        self.on_published({name for name, _ in self._counts})

    def store_in_group(self, group: int, engine_hashes: Sequence[EngineHash | None]) -> None:
        num_trusted = len(engine_hashes) if self.trusts_stores else self._rule_of[group].num_needed
        for name in engine_hashes[max(0, len(engine_hashes) - num_trusted) :]:
            num_copies = self._counts.get((name, group), 0)
            if name is None or (num_copies and not self.counts_copies):
                continue
            if not num_copies and len(self._counts) >= MAX_COUNTED:
                self.is_overfull = True
                continue
            self._counts[name, group] = num_copies + 1
            if not num_copies:
                self._store_if_held(name, self._kind_of[group])

    def remove_from_group(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        for name in engine_hashes:
            num_copies = self._counts.pop((name, group), 0)
            if num_copies > 1 and self.counts_copies:
                self._counts[name, group] = num_copies - 1
            elif num_copies and (block_hash := self._find(name)) is not None:
                self._remove(self._kind_of[group], (block_hash,))

    def are_held(self, group: int, engine_hashes: Sequence[EngineHash]) -> bool:
        if group < 0:
            return all(self._find(name) is not None for name in engine_hashes)
        return all((name, group) in self._counts for name in engine_hashes)

    def group_counts(self) -> list[tuple[Any, int, int]]:
        return [(*key, number) for key, number in self._counts.items()]

    def restore_group_counts(self, counts: Iterable[tuple[Any, int, int]]) -> None:
        self._counts.update({(name, group): number for name, group, number in counts})

    def engine_hashes(self) -> list[Any]:
        return [*self._published.residency.names(Tier.GPU)]

    def on_published(self, names: Iterable[Any]) -> None:
        """Store blocks, by their engine hashes, in each kind whose groups and the published group hold them."""
        for name in names if self._num_kinds else ():
            for kind in range(self._num_kinds):
                self._store_if_held(name, kind)

    def on_removed(self, block_hashes: Sequence[int]) -> None:
        """Remove blocks that the published group does not hold any more."""
        for kind in range(self._num_kinds):
            self._remove(kind, block_hashes)

    def clear(self) -> None:
        """Remove all blocks, and forget what the groups hold."""
        self._counts.clear()
        self.is_overfull = False
        self._remove_all()

    def _remove_all(self) -> None:
        """Remove all blocks, and remember what the groups hold."""
        if self.residency.num_blocks:
            self.residency.clear()
            self._coalescer.add(Cleared())

    def _find(self, name: Any) -> int | None:
        return self._published.residency.names(Tier.GPU).get(name)

    def _store_if_held(self, name: Any, kind: int) -> None:
        """Store a block in a kind if all groups of that kind and the published group hold it."""
        block_hash = self._find(name)
        groups = (group for group, each in enumerate(self._kind_of) if each == kind)
        if block_hash is None or not all((name, group) in self._counts for group in groups):
            return
        if self.residency.hold(Chain((block_hash,), (block_hash,), None, Tier(kind))).new_idxs:
            self._coalescer.add(Stored(block_hash.to_bytes(_HASH_BYTES, "little"), None, Tier(kind)))

    def _remove(self, kind: int, block_hashes: Sequence[int]) -> None:
        released = self.residency.release(block_hashes, Tier(kind))
        if released:
            self._coalescer.add(Removed(array("Q", released).tobytes(), Tier(kind)))


class RankStream(Stream):
    """Filters and normalises one rank's engine events and closes them into batches."""

    def __init__(self, source: WorkerRank, block_size: int, epoch: int, **options: Unpack[StreamOptions]) -> None:
        super().__init__(source, block_size, epoch)
        self._options = options
        self._has_full_reports = options.get("has_full_reports", False)
        self._filter = WindowFilter(source.rank)
        self._set_residency(self.residency)
        self._num_events = 0
        self._num_malformed = 0
        self._has_offloaded = self._has_forgotten = False  # see `RankState`
        self.companion = Companion(source, block_size, epoch, self) if options.get("has_all_groups") else None
        self._make_splitter()

    def set_complete(self, is_complete: bool) -> None:
        self.is_complete = is_complete
        self.residency.counts_copies = self.counts_copies

    def heartbeat(self, timestamp_s: float) -> Batch:
        if self.companion is not None:
            self.companion.is_complete = self.is_complete and self.is_expressible
        else:
            self.is_upper_bound = self._filter.is_upper_bound or self._options.get("num_ahead", 0) > 0
        return super().heartbeat(timestamp_s)

    @property
    def is_exact(self) -> bool:
        return self.is_complete and not self._has_forgotten and not self._has_full_reports

    @property
    def is_expressible(self) -> bool:
        """Return whether the companion's rules say exactly what hits need."""
        if self._splitter is None or self.companion is None:
            return True
        return self._splitter.is_expressible and not self.companion.is_overfull

    def admit(self, event: EngineEvent) -> None:
        """Process one engine event. Never raises: an event with values of wrong types clears the rank."""
        self._num_events += 1
        try:
            _check(event)
            self._admit(event)
            if isinstance(event, EngineStored):
                self._has_offloaded |= event.tier != Tier.GPU
            elif isinstance(event, EngineCleared):
                self._has_forgotten = event.tier is not None and self._has_offloaded
        except Exception as error:  # noqa: BLE001 - what an engine's own objects raise when they are compared or read
            self._clear_for(error)

    def admit_malformed(self, error: Exception) -> None:
        """Clear the rank, as `admit` does, for an event that could not be read."""
        self._num_events += 1
        self._clear_for(error)

    def state(self) -> RankState:
        """Return a copy of all that another stream needs to continue this one; O(blocks)."""
        held = self._filter.state, self.residency.copy(), self._has_offloaded, self._has_forgotten
        if self.companion is None or self._splitter is None:
            return RankState(*held)
        others, has_small = dict(self._splitter.other_rules), bool(self._splitter.small)
        counts = () if has_small else self.companion.group_counts()
        return RankState(*held, others, counts, self.is_expressible and not has_small)

    def resume(self, state: RankState) -> None:
        """Continue another stream, unless anything was reported here. Batch 0 is left out, so that subscribers ask."""
        if self._num_events:
            return
        self._filter.state = state.filter
        self._set_residency(state.residency)
        self._has_offloaded, self._has_forgotten = state.has_offloaded, state.has_forgotten
        self.next_sequence = 1
        if self.companion is not None and self._splitter is not None:
            self.companion.restore_group_counts(state.counted)
            self._splitter.resume(state.filter, state.others, is_expressible=state.is_expressible)
            self.companion.close_batches(0.0)
            self.companion.next_sequence = 1

    def forget_groups(self) -> None:
        """Forget which layer groups the engine has: a new process may run another model."""
        self._filter.state = FilterState()
        self._make_splitter()

    @property
    def counts_copies(self) -> bool:
        """Return whether a block that is stored again has one more copy, unless the event is known as a report."""
        return self._options.get("counts_copies", False) and self.is_complete

    @property
    def trusts_stores(self) -> bool:
        """Return whether the blocks of a store are certainly held, rather than perhaps only reported once more."""
        return self.residency.counts_copies or not self._options.get("counts_copies", False)

    def _make_splitter(self) -> None:
        """Begin to learn which layer groups there are, if they are followed."""
        self._splitter = None
        if self.companion is not None:
            num_ahead = self._options.get("num_ahead", 0)
            options = num_ahead, self._has_full_reports
            self._splitter = GroupSplitter(self._filter, self._block_size, self.companion, *options)

    def _set_residency(self, residency: Residency) -> None:
        self.residency = residency
        residency.counts_copies = self.counts_copies
        lora_names = self._options.get("lora_names")
        self._normaliser = Normaliser(
            self._block_size, rank=self._source.rank, lora_names=lora_names, holdings=residency
        )

    def _clear_for(self, error: Exception) -> None:
        self._num_malformed += 1
        if self._num_malformed == 1:
            _logger.warning("rank cleared, malformed event: %r source=%s", error, self._source)
        self._admit(EngineCleared(self._source.rank))

    def _admit(self, event: EngineEvent) -> None:
        is_report = isinstance(event, EngineStored) and (event.is_report or self._has_full_reports)
        if self._splitter is not None:
            is_report = self._splitter.is_report(event)
        self.residency.counts_copies = self.counts_copies and not is_report
        if self._splitter is not None:
            self._splitter.admit(event, self._publish)
            return
        for passed in self._filter.admit(event):
            for canonical in self._normaliser.normalise(passed):
                self._coalescer.add(canonical)

    def _publish(self, passed: PassedEvent) -> None:
        assert self.companion is not None
        for canonical in self._normaliser.normalise(passed):
            self._coalescer.add(canonical)
            if isinstance(canonical, Removed) and canonical.tier is Tier.GPU:
                self.companion.on_removed(array("Q", canonical.hashes).tolist())
        if isinstance(passed, EngineCleared):
            self.companion.clear()
        elif isinstance(passed, EngineStored) and passed.tier is Tier.GPU:
            self.companion.on_published(passed.block_hashes)  # some may not have been published: those are not found

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            num_blocks=self.residency.num_blocks,
            num_events=self._num_events,
            num_malformed=self._num_malformed,
            num_batches=self.next_sequence,
            num_passed=self._filter.num_passed,
            num_filtered=self._filter.num_filtered,
        )


Streams: TypeAlias = Mapping[int, RankStream]


def with_companions(streams: Streams) -> dict[int, Stream]:
    """Return the streams of ranks, and of their companions under the companions' rank numbers."""
    streams = dict(streams)  # the publisher's thread may add one meanwhile
    companions = {rank + MAX_RANKS: each.companion for rank, each in streams.items() if each.companion is not None}
    return {**streams, **companions}


def _check(event: EngineEvent) -> None:
    """Raise TypeError for values that could be stored here, but not be sent or found again.

    Other wrong values raise where they are used.
    """
    if not isinstance(event, EngineStored | EngineRemoved):
        return
    for each in set(map(type, event.block_hashes)):
        if not issubclass(each, _HASH_TYPES):
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
    """Joins neighbouring events into one, chains that continue each other and removals from one tier, and cuts batches.

    Hashes are joined once, when the batches are made: a long chain costs O(n).
    """

    def __init__(self) -> None:
        # Of each batch the runs of events that become one each.
        self._batches: list[list[list[Event]]] = [[]]
        self._size_bytes = 0  # of the hashes in the last batch

    def add(self, event: Event) -> None:
        if not isinstance(event, _HAS_HASHES):
            self._batches[-1].append([event])
            return
        for piece in (event,) if len(event.hashes) <= MAX_BATCH_HASH_BYTES else _cut(event):
            self._size_bytes += len(piece.hashes)
            if self._size_bytes > MAX_BATCH_HASH_BYTES:
                self._batches.append([])
                self._size_bytes = len(piece.hashes)
            runs = self._batches[-1]
            if runs and _continues(piece, runs[-1][-1]):
                runs[-1].append(piece)
            else:
                runs.append([piece])

    def drain(self) -> list[tuple[Event, ...]]:
        """Return everything added, in order and cut into batches, and start anew."""
        batches, self._batches, self._size_bytes = self._batches, [[]], 0
        return [tuple(map(_joined, runs)) for runs in batches if runs]


def _cut(event: Stored | Removed) -> list[Stored | Removed]:
    """Return events of at most a batch's hashes each that amount to this one."""
    starts = range(0, len(event.hashes), MAX_BATCH_HASH_BYTES)
    pieces = [event.hashes[start : start + MAX_BATCH_HASH_BYTES] for start in starts]
    if isinstance(event, Removed):
        return [Removed(piece, event.tier) for piece in pieces]
    parents = [event.parent, *map(_last_hash, pieces)]
    return [Stored(piece, parent, event.tier) for piece, parent in zip(pieces, parents, strict=False)]


def _continues(event: Stored | Removed, previous: Event) -> bool:
    """Return whether an event can be joined to the one before it."""
    if isinstance(event, Removed):
        return isinstance(previous, Removed) and event.tier == previous.tier
    if event.parent is None or not isinstance(previous, Stored) or event.tier != previous.tier:
        return False
    return event.parent == _last_hash(previous.hashes)


def _joined(run: Sequence[Event]) -> Event:
    """Return the event that a run of events amounts to."""
    if len(run) == 1:
        return run[0]
    hashes = b"".join(event.hashes for event in run if isinstance(event, _HAS_HASHES))
    return msgspec.structs.replace(run[0], hashes=hashes)


def _last_hash(hashes: bytes) -> int:
    return int.from_bytes(hashes[-_HASH_BYTES:], "little")

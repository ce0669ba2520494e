"""What ranks hold by the snapshots and events that were recorded of them, and answers to who missed some of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events import Batch, Cleared, Event, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.events.codec import decode_batch, decode_snapshot_part, encode_batch, encode_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.restarts import RestartDetector
from kvist.events.snapshot import HeldBlocks, Snapshot, SnapshotAssembly, blocks_digest, cut, identity
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import Holding, SnapshotPart
from kvist.replay.envelope import CanonicalEnvelope, SnapshotEnvelope, read_envelope

_U64_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class RecordedSnapshot:
    """A whole snapshot, proven by its digest, and the messages that it came in, each part once."""

    heartbeat: Batch
    """What the publisher's heartbeat said at that moment, of no particular time."""
    snapshot: Snapshot
    messages: tuple[Message, ...]

    @property
    def rank(self) -> WorkerRank:
        return self.heartbeat.source


class SnapshotCollector:
    """Puts one source's snapshots together; memory is that of one for each rank of which not all parts came yet."""

    def __init__(self) -> None:
        self._begun: dict[WorkerRank, dict[int, tuple[SnapshotPart, Message]]] = {}
        self.num_malformed = 0

    def add(self, message: Message, source: str) -> RecordedSnapshot | None:
        """Take a part; return the snapshot if that makes it whole. Parts of another one begin anew."""
        try:
            part = decode_snapshot_part(message.payload, source)
            rank = part.source
            begun = self._begun.setdefault(rank, {})
            if begun and identity(next(iter(begun.values()))[0]) != identity(part):
                begun.clear()
            begun.setdefault(part.part_idx, (part, message))
            if len(begun) < part.num_parts:
                return None
            del self._begun[rank]
            assembly = SnapshotAssembly(source)
            for each, _ in begun.values():
                assembly.add(each)
            snapshot, events = assembly.snapshot(), (Heartbeat(part.num_blocks, part.digest),)
        except MalformedMessageError:
            self.num_malformed += 1
            return None
        heartbeat = Batch(*rank, part.epoch, part.sequence, part.block_size, 0.0, events)
        return RecordedSnapshot(heartbeat, snapshot, tuple(message for _, message in begun.values()))


class Change(NamedTuple):
    """What one event changed: blocks that are new to their tier or left it, and how many it named in vain."""

    new: Sequence[int] = ()
    gone: Sequence[int] = ()
    notes: Sequence[int] = ()
    """What was remembered with each block that is gone."""
    num_in_vain: int = 0


class RankBlocks:
    """The exact blocks of one rank by tier, each with a number that the caller gives: a time, or its depth."""

    def __init__(self) -> None:
        self.tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self.digest = 0

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.tiers))

    def apply(self, event: Event, notes: Iterable[int] = ()) -> Change:
        """Apply an event; each block that is new is remembered with the number that stands in its place in `notes`."""
        if isinstance(event, Cleared):
            gone = [block for held in self.tiers for block in held]
            gone_notes = [note for held in self.tiers for note in held.values()]
            self.tiers, self.digest = tuple({} for _ in Tier), 0
            return Change(gone=gone, notes=gone_notes)
        if isinstance(event, Heartbeat):
            return Change()
        held, blocks = self.tiers[event.tier], hashes_of(event)
        if isinstance(event, Stored):
            new = {block: note for block, note in zip(blocks, notes or repeat(0), strict=False) if block not in held}
            held.update(new)
            self.digest = self.digest + blocks_digest(list(new), event.tier) & _U64_MASK
            return Change(new=list(new), num_in_vain=len(blocks) - len(new))
        gone = list(dict.fromkeys(block for block in blocks if block in held))
        self.digest = self.digest - blocks_digest(gone, event.tier) & _U64_MASK
        return Change(gone=gone, notes=[held.pop(block) for block in gone], num_in_vain=len(blocks) - len(gone))

    def restore(self, slices: Iterable[HeldBlocks], note: int | None = None) -> Change:
        """Hold what a snapshot says, and nothing else; blocks that are new get `note`, or their depths if None."""
        before, self.tiers = self.tiers, tuple({} for _ in Tier)
        self.digest = 0
        for held in slices:
            self.digest = self.digest + held.holding().digest & _U64_MASK
            for tier in Tier:
                of_tier = held.tiers >> tier & 1 == 1
                notes = held.depths[of_tier].tolist() if note is None else repeat(note)
                blocks = zip(held.hashes[of_tier].tolist(), notes, strict=False)
                self.tiers[tier].update((block, before[tier].get(block, number)) for block, number in blocks)
        new = [block for was, now in zip(before, self.tiers, strict=True) for block in now if block not in was]
        gone = [block for was, now in zip(before, self.tiers, strict=True) for block in was if block not in now]
        return Change(new, gone)

    def depth_of(self, block: int) -> int:
        """Return a block's depth, if that is the number it has; 0 if it is not held."""
        return next((held[block] for held in self.tiers if block in held), 0)

    def to_arrays(self) -> HeldBlocks:
        """Return every block once, as snapshots have them, if their numbers are depths."""
        depths = {block: depth for held in self.tiers for block, depth in held.items()}
        tiers = np.zeros(len(depths), np.uint8)
        for tier, held in zip(Tier, self.tiers, strict=True):
            if held:
                is_held = np.fromiter((block in held for block in depths), bool, len(depths))
                tiers |= is_held * np.uint8(1 << tier)
        hashes = np.fromiter(depths, np.uint64, len(depths))
        return HeldBlocks(hashes, np.fromiter(depths.values(), np.uint32, len(depths)), tiers)


def hashes_of(event: Stored | Removed) -> list[int]:
    blocks: list[int] = np.frombuffer(event.hashes, "<u8").tolist()
    return blocks


class _Kept:
    """What is kept of one canonical rank, or of an engine's whole stream: messages, and what was held before them."""

    def __init__(self, epoch: int, before: Batch | None = None, slices: Sequence[HeldBlocks] = ()) -> None:
        """Keep what comes behind `before`, a batch that says of whom; None where it is not known what was held then."""
        self.epoch = epoch
        self.before = before
        self.next_sequence = 0 if before is None else before.sequence
        self.messages: deque[Message] = deque()
        self._slices = slices  # of a snapshot, until something is applied to it: a tenth of the memory, and no time
        self._applied = RankBlocks()

    @property
    def blocks(self) -> RankBlocks:
        if self._slices:
            self._applied.restore(self._slices)
            self._slices = ()
        return self._applied

    def append(self, message: Message) -> None:
        if message.sequence > self.next_sequence:
            self.before = None
        self.next_sequence = message.sequence + 1
        self.messages.append(message)

    def drop_oldest(self) -> int:
        """Forget the oldest message but for what it did; return its size."""
        message = self.messages.popleft()
        if self.before is not None:
            self.before = self._apply(message, self.before)
        return len(message.payload)

    def answer(self, request: ReplayRequest, topic: bytes) -> tuple[Iterator[Message], list[Message]]:
        """Return the snapshot to begin with, if one is needed and to be had, and the messages behind it."""
        starts_at = request.start_sequence if request.epoch in (None, self.epoch) else 0
        if request.epoch is None or self.before is None or starts_at >= self.before.sequence:
            return iter(()), [message for message in self.messages if message.sequence >= starts_at]
        slices = self._slices
        held = HeldBlocks(*map(np.concatenate, zip(*slices, strict=True))) if slices else self._applied.to_arrays()
        state = replace(self.before, events=(Heartbeat(*held.holding()),))
        # Parts are made one by one, without what is applied from now on.
        parts = cut(state, held)
        return (Message(topic, state.sequence, encode_snapshot_part(part)) for part in parts), list(self.messages)

    def _apply(self, message: Message, before: Batch) -> Batch | None:
        try:
            batch, num_unknown_events = decode_batch(message.payload, before.worker)
        except MalformedMessageError:
            return None
        blocks = self.blocks
        for event in batch.events:
            parent = event.parent if isinstance(event, Stored) else None
            blocks.apply(event, count(0 if parent is None else blocks.depth_of(parent) + 1))
        return replace(before, sequence=batch.sequence + 1) if num_unknown_events == 0 else None


class SentBuffer:
    """Keeps the newest numbered messages of one publication, up to `max_bytes`; a `ReplaySource`, safe across threads.

    Unlike a publisher's buffer it takes what was recorded: holes, duplicates, and publishers that were started anew,
    whose earlier messages are of no use to anyone. Of a rank that was recorded from its publisher's start, or with a
    snapshot, it knows what was held before the oldest message, and answers with that, as the publisher did: for each
    block held then, some 150 bytes beside `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise InvalidValueError("replay_bytes", max_bytes, "a positive number of bytes")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: dict[bytes | None, _Kept] = {}  # by a canonical rank's topic, None for an engine's whole stream
        self._by_age: deque[_Kept] = deque()
        self._size_bytes = 0
        self._last: dict[bytes, Message] = {}
        self._restarts = RestartDetector()
        self._snapshots = SnapshotCollector()
        self.num_asked = 0

    def append(self, message: Message) -> bool:
        """Keep what is sent, unless its number was taken; return whether to send it: parts of snapshots are not."""
        envelope = read_envelope(message.payload)
        if envelope is None:
            return True
        with self._lock:
            if isinstance(envelope, SnapshotEnvelope):
                if (recorded := self._snapshots.add(message, envelope.worker)) is not None:
                    self._restore(recorded)
                return False
            if isinstance(envelope, EngineEnvelope):
                self._keep(None, message, self._restarts.observe(message.sequence, message.payload))
                return True
            self._last[message.topic] = message
            if not envelope.is_heartbeat:
                self._keep(message.topic, message, envelope.epoch, envelope)
            elif envelope.is_of_no_block:
                self._restore_nothing(message.topic, envelope)
        return True

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        """Yield what is kept of the topic, or of all if empty: of the newest epoch, from the sequence asked for on.

        A request about another epoch is answered from the newest one's beginning. One that names an epoch and a
        sequence before what is kept is answered with a snapshot first, where what was held then is known. Of all ranks
        asked for, each has at least its last message in the answer, which tells how far it is.
        """
        with self._lock:
            self.num_asked += 1
            answers = [
                kept.answer(request, numbering or b"")
                for numbering, kept in self._kept.items()
                if numbering is None or request.topic in (None, b"", numbering)
            ]
            last = {} if request.topic else dict(self._last)
        for snapshot_parts, messages in answers:
            yield from snapshot_parts
            for message in messages:
                if request.topic in (None, b"", message.topic):
                    last.pop(message.topic, None)
                    yield message
        yield from last.values()

    def last_messages(self) -> list[Message]:
        """Return the last message of each rank, and of an engine: sent again, it tells who lost what was before it."""
        with self._lock:
            engine = self._kept.get(None)
            return [*self._last.values(), *([] if engine is None else list(engine.messages)[-1:])]

    def holding(self, topic: bytes) -> Holding | None:
        """Return what a rank held before the oldest message that is kept of it, None where that is not known."""
        kept = self._kept.get(topic)
        if kept is None or kept.before is None:
            return None
        return Holding(kept.blocks.num_blocks, kept.blocks.digest)

    def _restore(self, recorded: RecordedSnapshot) -> None:
        """Let a snapshot stand for all that was before it, also where that had holes."""
        topic, state = recorded.messages[0].topic, recorded.heartbeat
        kept = self._kept.get(topic)
        if kept is None or state.epoch >= kept.epoch:
            self._begin(topic, _Kept(state.epoch, state, recorded.snapshot.slices))
            self._last[topic] = Message(topic, state.sequence, encode_batch(state))

    def _restore_nothing(self, topic: bytes, beat: CanonicalEnvelope) -> None:
        """Know again what a rank holds of which something was missing, since that is nothing."""
        kept = self._kept.get(topic)
        if kept and kept.before is None and (beat.epoch, beat.sequence) >= (kept.epoch, kept.next_sequence):
            self._begin(topic, _Kept(beat.epoch, _nothing_before(beat, beat.sequence)))

    def _begin(self, numbering: bytes | None, kept: _Kept) -> None:
        """Forget what was kept of a numbering, and keep what comes from here on."""
        if (old := self._kept.get(numbering)) is not None:
            self._size_bytes -= sum(len(message.payload) for message in old.messages)
            self._by_age = deque(each for each in self._by_age if each is not old)
        self._kept[numbering] = kept

    def _keep(
        self, numbering: bytes | None, message: Message, epoch: int, envelope: CanonicalEnvelope | None = None
    ) -> None:
        kept = self._kept.get(numbering)
        if kept is None or epoch > kept.epoch:
            kept = _Kept(epoch, None if envelope is None else _nothing_before(envelope, 0))
            self._begin(numbering, kept)
        if epoch < kept.epoch or message.sequence < kept.next_sequence:
            return
        kept.append(message)
        self._by_age.append(kept)
        self._size_bytes += len(message.payload)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._by_age.popleft().drop_oldest()


def _nothing_before(envelope: CanonicalEnvelope, sequence: int) -> Batch:
    """Return a batch that says of whom nothing is held before a number."""
    return Batch(envelope.worker, envelope.rank, envelope.epoch, sequence, envelope.block_size, 0.0, ())

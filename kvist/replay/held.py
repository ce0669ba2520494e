"""What ranks hold by what was recorded of them: by snapshots and events, and before the oldest message that is kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events import Batch, Cleared, Event, Heartbeat, Removed, Stored, Tier, WorkerRank, snapshot
from kvist.events.codec import decode_batch, decode_snapshot_part, encode_batch, encode_snapshot_part
from kvist.events.restarts import RestartDetector
from kvist.events.snapshot import Snapshot, SnapshotAssembly, blocks_digest, cut
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import SnapshotPart
from kvist.replay.envelope import CanonicalEnvelope, EngineEnvelope, SnapshotEnvelope, read_envelope

_MASK = 0xFFFF_FFFF_FFFF_FFFF


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
        self._begun: dict[WorkerRank, dict[int, tuple[SnapshotPart, Message]]] = {}
        self.num_malformed = 0
        """Parts that are none, and snapshots that are not what they say."""

    def add(self, message: Message, source: str) -> RecordedSnapshot | None:
        """Take a part; return the snapshot if that makes it whole. Parts of another one begin anew."""
        try:
            part = decode_snapshot_part(message.payload, source)
            rank = WorkerRank(part.worker, part.rank)
            begun = self._begun.setdefault(rank, {})
            if begun and _identity(next(iter(begun.values()))[0]) != _identity(part):
                begun.clear()
            begun.setdefault(part.part_idx, (part, message))
            if len(begun) < part.num_parts:
                return None
            del self._begun[rank]
            assembly = SnapshotAssembly(source)
            for each, _ in begun.values():
                assembly.add(each)
            messages = tuple(message for _, message in begun.values())
            return RecordedSnapshot(rank, part.block_size, assembly.snapshot(), messages)
        except MalformedMessageError:
            self.num_malformed += 1
            return None


def _identity(part: SnapshotPart) -> tuple[int, ...]:
    return part.epoch, part.sequence, part.block_size, part.num_parts, part.num_blocks, part.digest


class Change(NamedTuple):
    """What one event changed: blocks that are new to their tier or left it, and how many it named in vain.

    `notes` has, for each block that is gone, what was remembered with it.
    """

    new: list[int]
    gone: list[int]
    notes: list[int]
    num_in_vain: int


class HeldBlocks:
    """The blocks of one rank by tier, each with a number that the caller gave with it, such as when it was stored.

    Exact sets, which cost about 100 bytes a block.
    """

    def __init__(self) -> None:
        self.tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self.digest = 0

    @property
    def num_blocks(self) -> int:
        """Return how many (block, tier) pairs are held."""
        return sum(map(len, self.tiers))

    def apply(self, event: Event, note: int = 0) -> Change:
        """Take an event, and remember `note` for the blocks that are new."""
        if isinstance(event, Stored):
            held, blocks = self.tiers[event.tier], hashes_of(event)
            new = list(dict.fromkeys(block for block in blocks if block not in held))
            held.update(dict.fromkeys(new, note))
            self.digest = self.digest + blocks_digest(new, event.tier) & _MASK
            return Change(new, [], [], len(blocks) - len(new))
        if isinstance(event, Removed):
            held, blocks = self.tiers[event.tier], hashes_of(event)
            gone = list(dict.fromkeys(block for block in blocks if block in held))
            notes = [held.pop(block) for block in gone]
            self.digest = self.digest - blocks_digest(gone, event.tier) & _MASK
            return Change([], gone, notes, len(blocks) - len(gone))
        return self.clear() if isinstance(event, Cleared) else Change([], [], [], 0)

    def clear(self) -> Change:
        """Forget everything."""
        gone = [block for held in self.tiers for block in held]
        notes = [note for held in self.tiers for note in held.values()]
        self.tiers, self.digest = tuple({} for _ in Tier), 0
        return Change([], gone, notes, 0)

    def restore(self, slices: Iterable[snapshot.HeldBlocks], note: int = 0) -> Change:
        """Hold what a snapshot says, and nothing else; `note` is for the blocks that are new."""
        before, self.tiers = self.tiers, tuple({} for _ in Tier)
        self.digest = 0
        for held in slices:
            self.digest = self.digest + held.holding().digest & _MASK
            for tier in Tier:
                hashes = held.hashes[held.tiers >> tier & 1 == 1].tolist()
                self.tiers[tier].update((block, before[tier].get(block, note)) for block in hashes)
        new = [block for was, now in zip(before, self.tiers, strict=True) for block in now if block not in was]
        gone = [block for was, now in zip(before, self.tiers, strict=True) for block in was if block not in now]
        return Change(new, gone, [], 0)


def hashes_of(event: Stored | Removed) -> list[int]:
    """Return an event's blocks as numbers."""
    blocks: list[int] = np.frombuffer(event.hashes, "<u8").tolist()
    return blocks


class _HeldBefore:
    """The state of one rank before a sequence, known completely; it costs memory once a message was folded into it."""

    def __init__(self, of: CanonicalEnvelope | RecordedSnapshot, topic: bytes) -> None:
        """Hold what a snapshot says, or nothing: before a publisher's first batch, or a heartbeat that says so."""
        self._recorded: RecordedSnapshot | None = None
        self._blocks, self._depths = HeldBlocks(), dict[int, int]()
        self._topic, self._block_size = topic, of.block_size
        if isinstance(of, RecordedSnapshot):
            self._recorded, self._rank = of, of.rank
            self._epoch, self.sequence = of.snapshot.epoch, of.snapshot.sequence
        else:
            self._rank, self._epoch = of.source, of.epoch
            self.sequence = of.sequence if of.is_heartbeat else 0

    def fold(self, message: Message) -> bool:
        """Take the next message; return whether what is held is still known."""
        try:
            batch, num_unknown_events = decode_batch(message.payload, self._rank.worker)
        except MalformedMessageError:
            return False
        if self._recorded is not None:
            self._blocks.restore(self._recorded.snapshot.slices)
            for held in self._recorded.snapshot.slices:
                self._depths.update(zip(held.hashes.tolist(), held.depths.tolist(), strict=True))
            self._recorded = None
        for event in batch.events:
            change = self._blocks.apply(event)
            if isinstance(event, Stored):
                depth = 0 if event.parent is None else self._depths.get(event.parent, 0) + 1
                for place, block in enumerate(hashes_of(event)):
                    self._depths.setdefault(block, depth + place)
            for block in change.gone:
                if not any(block in held for held in self._blocks.tiers):
                    self._depths.pop(block, None)
        self.sequence = batch.sequence + 1
        return num_unknown_events == 0

    def copied(self) -> Iterator[Message]:
        """Return it as a snapshot's messages, which are made one by one: what is folded later is not in them."""
        if self._recorded is not None:
            return iter(self._recorded.messages)
        hashes = np.fromiter(self._depths, np.uint64, len(self._depths))
        depths = np.fromiter(self._depths.values(), np.uint32, len(self._depths))
        tiers = np.zeros(len(hashes), np.uint8)
        for tier, held in zip(Tier, self._blocks.tiers, strict=True):
            if held:
                is_held = np.fromiter((block in held for block in self._depths), bool, len(hashes))
                tiers |= is_held * np.uint8(1 << tier)
        beat = Heartbeat(self._blocks.num_blocks, self._blocks.digest)
        state = Batch(*self._rank, self._epoch, self.sequence, self._block_size, 0.0, (beat,))
        parts = cut(state, snapshot.HeldBlocks(hashes, depths, tiers))
        return (Message(self._topic, state.sequence, encode_snapshot_part(part)) for part in parts)


class _Kept:
    """The messages kept of one numbering, a canonical rank's or an engine's stream's, by number ascending."""

    def __init__(self, epoch: int, before: _HeldBefore | None = None) -> None:
        self.epoch = epoch
        self.before = before
        """What was held before the first of them, if that is known: then there is no hole among them either."""
        self.next_sequence = 0 if before is None else before.sequence
        self.messages: deque[Message] = deque()

    def answer(self, request: ReplayRequest) -> tuple[Iterator[Message], list[Message]]:
        """Return the snapshot to begin with, if one is needed and to be had, and the messages behind it."""
        starts_at = request.start_sequence if request.epoch in (None, self.epoch) else 0
        if request.epoch is not None and self.before is not None and starts_at < self.before.sequence:
            return self.before.copied(), list(self.messages)
        return iter(()), [message for message in self.messages if message.sequence >= starts_at]

    def let_go(self) -> int:
        """Forget the oldest message but for what it did; return its size."""
        message = self.messages.popleft()
        if self.before is not None and not self.before.fold(message):
            self.before = None
        return len(message.payload)


class SentBuffer:
    """Keeps the newest numbered messages of one publication, up to `max_bytes`; a `ReplaySource`, safe across threads.

    Unlike a publisher's buffer it takes what was recorded: holes, duplicates, and publishers that were started anew,
    whose earlier messages are of no use to anyone. Of a rank that was recorded from its publisher's start, or with a
    snapshot, it knows what was held before the oldest message, and answers with that, as the publisher did: for each
    block held then, 200 bytes beside `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise InvalidValueError("replay_bytes", max_bytes, "a positive number of bytes")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # By numbering: a canonical rank's topic, None for an engine's whole stream.
        self._kept: dict[bytes | None, _Kept] = {}
        self._by_age: deque[_Kept] = deque()
        self._size_bytes = 0
        self._last: dict[bytes, Message] = {}
        self._restarts = RestartDetector()
        self._snapshots = SnapshotCollector()
        self.num_asked = 0
        """Requests answered."""

    def append(self, message: Message) -> bool:
        """Keep what is sent, unless it takes no number or one that was taken; return whether it is to be sent at all.

        Parts of snapshots are not: they are for who asks.
        """
        envelope = read_envelope(message.payload)
        if envelope is None:
            return True
        with self._lock:
            if isinstance(envelope, SnapshotEnvelope):
                if (recorded := self._snapshots.add(message, envelope.worker)) is not None:
                    self._restore(recorded)
                return False
            if isinstance(envelope, EngineEnvelope):
                self._keep(None, self._restarts.received(message.sequence, message.payload), message)
                return True
            self._last[message.topic] = message
            if not envelope.is_heartbeat:
                self._keep(message.topic, envelope.epoch, message, envelope)
            elif envelope.tells_of_nothing:
                self._empty(message.topic, envelope)
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
                kept.answer(request)
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
        """Return the last message of each canonical rank: sent again, it tells who lost what was before it."""
        with self._lock:
            return list(self._last.values())

    def _restore(self, recorded: RecordedSnapshot) -> None:
        """Let a snapshot stand for all that was before it, also where that had holes."""
        topic = recorded.messages[0].topic
        kept = self._kept.get(topic)
        if kept is None or recorded.snapshot.epoch >= kept.epoch:
            self._begin(topic, _Kept(recorded.snapshot.epoch, _HeldBefore(recorded, topic)))
            self._last[topic] = recorded.heartbeat()

    def _empty(self, topic: bytes, beat: CanonicalEnvelope) -> None:
        """Know again what a rank holds of which something was missing, since that is nothing."""
        kept = self._kept.get(topic)
        if kept is not None and kept.before is None and (beat.epoch, beat.sequence) >= (kept.epoch, kept.next_sequence):
            self._begin(topic, _Kept(beat.epoch, _HeldBefore(beat, topic)))

    def _begin(self, numbering: bytes | None, kept: _Kept) -> None:
        """Forget what was kept of a numbering, and keep what comes from here on."""
        if (old := self._kept.get(numbering)) is not None:
            self._size_bytes -= sum(len(message.payload) for message in old.messages)
            self._by_age = deque(each for each in self._by_age if each is not old)
        self._kept[numbering] = kept

    def _keep(
        self, numbering: bytes | None, epoch: int, message: Message, envelope: CanonicalEnvelope | None = None
    ) -> None:
        kept = self._kept.get(numbering)
        if kept is None or epoch > kept.epoch:
            before = None if envelope is None else _HeldBefore(envelope, message.topic)
            self._begin(numbering, kept := _Kept(epoch, before))
        if epoch < kept.epoch or message.sequence < kept.next_sequence:
            return
        if message.sequence > kept.next_sequence:
            kept.before = None
        kept.next_sequence = message.sequence + 1
        kept.messages.append(message)
        self._by_age.append(kept)
        self._size_bytes += len(message.payload)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._by_age.popleft().let_go()

"""What ranks hold by the snapshots and events that were recorded of them, and answers to who missed some of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Cleared, Event, Heartbeat, Removed, Stored, Tier, WorkerRank
from kvist.events.codec import decode_snapshot_part, encode_batch, encode_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.restarts import RestartDetector
from kvist.events.snapshot import HeldBlocks, Snapshot, SnapshotAssembly, blocks_digest, identity
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import SnapshotPart
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
    """What an event changed in one tier: blocks that are new there or left it, and how many it named in vain."""

    tier: Tier
    new: Sequence[int] = ()
    gone: Sequence[int] = ()
    notes: Sequence[int] = ()
    """What was remembered with each block that was removed."""
    num_in_vain: int = 0


class RankBlocks:
    """The exact blocks of one rank by tier, each with a number that the caller gives, such as a time."""

    def __init__(self) -> None:
        self.tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self.digest = 0

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.tiers))

    def apply(self, event: Event, note: int = 0) -> list[Change]:
        """Apply an event; each block that is new is remembered with a number."""
        if isinstance(event, Cleared):
            return self.restore((), note)
        if isinstance(event, Heartbeat):
            return []
        held, blocks = self.tiers[event.tier], hashes_of(event)
        if isinstance(event, Stored):
            new = dict.fromkeys((block for block in blocks if block not in held), note)
            held.update(new)
            self.digest = self.digest + blocks_digest(list(new), event.tier) & _U64_MASK
            return [Change(event.tier, list(new), num_in_vain=len(blocks) - len(new))]
        gone = list(dict.fromkeys(block for block in blocks if block in held))
        self.digest = self.digest - blocks_digest(gone, event.tier) & _U64_MASK
        return [Change(event.tier, (), gone, [held.pop(block) for block in gone], len(blocks) - len(gone))]

    def restore(self, slices: Iterable[HeldBlocks], note: int) -> list[Change]:
        """Hold what a snapshot says, and nothing else; blocks that are new are remembered with a number."""
        before, self.tiers = self.tiers, tuple({} for _ in Tier)
        self.digest = 0
        for held in slices:
            self.digest = self.digest + held.holding().digest & _U64_MASK
            for tier in Tier:
                blocks = held.hashes[held.tiers >> tier & 1 == 1].tolist()
                self.tiers[tier].update((block, before[tier].get(block, note)) for block in blocks)
        return [
            Change(tier, [block for block in now if block not in was], [block for block in was if block not in now])
            for tier, was, now in zip(Tier, before, self.tiers, strict=True)
        ]


def hashes_of(event: Stored | Removed) -> list[int]:
    blocks: list[int] = np.frombuffer(event.hashes, "<u8").tolist()
    return blocks


class _Kept:
    """What is kept of one canonical rank, or of an engine's whole stream: messages, and what was held before them."""

    def __init__(self, epoch: int, next_sequence: int = 0, before: Sequence[Message] | None = None) -> None:
        """Keep what comes from a number on, behind a snapshot of what was held then; None where that is not known."""
        self.epoch = epoch
        self.before = before
        self.first_sequence = self.next_sequence = next_sequence
        self.messages: deque[Message] = deque()

    def append(self, message: Message) -> None:
        if message.sequence > self.next_sequence:
            self.before = None
        self.next_sequence = message.sequence + 1
        self.messages.append(message)

    def drop_oldest(self) -> int:
        """Forget the oldest message, and with it what was held before those that are left; return its size."""
        self.before = None
        return len(self.messages.popleft().payload)

    def answer(self, request: ReplayRequest) -> tuple[Sequence[Message], list[Message]]:
        """Return the snapshot to begin with, if one is needed and to be had, and the messages behind it."""
        starts_at = request.start_sequence if request.epoch in (None, self.epoch) else 0
        if request.epoch is None or self.before is None or starts_at >= self.first_sequence:
            return (), [message for message in self.messages if message.sequence >= starts_at]
        return self.before, list(self.messages)


class SentBuffer:
    """Keeps the newest numbered messages of one publication, up to `max_bytes`; a `ReplaySource`, safe across threads.

    Unlike a publisher's buffer it takes what was recorded: holes, duplicates, and publishers that were started anew,
    whose earlier messages are of no use to anyone. Of a rank that was recorded with a snapshot it answers with that, as
    the publisher did, until messages behind it have to go.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
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
        """Return the last message of each rank, and of an engine: sent again, it tells who lost what was before it."""
        with self._lock:
            engine = self._kept.get(None)
            return [*self._last.values(), *([] if engine is None else list(engine.messages)[-1:])]

    def _restore(self, recorded: RecordedSnapshot) -> None:
        """Let a snapshot stand for all that was before it, also where that had holes."""
        topic, state = recorded.messages[0].topic, recorded.heartbeat
        kept = self._kept.get(topic)
        if kept is None or state.epoch >= kept.epoch:
            self._begin(topic, _Kept(state.epoch, state.sequence, recorded.messages))
            self._last[topic] = Message(topic, state.sequence, encode_batch(state))

    def _restore_nothing(self, topic: bytes, beat: CanonicalEnvelope) -> None:
        """Know again what a rank holds of which something was missing, since that is nothing."""
        kept = self._kept.get(topic)
        if kept and kept.before is None and (beat.epoch, beat.sequence) >= (kept.epoch, kept.next_sequence):
            self._begin(topic, _Kept(beat.epoch, beat.sequence, (nothing_before(beat, topic),)))

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
            kept = _Kept(epoch, 0, None if envelope is None else ())
            self._begin(numbering, kept)
        if epoch < kept.epoch or message.sequence < kept.next_sequence:
            return
        kept.append(message)
        self._by_age.append(kept)
        self._size_bytes += len(message.payload)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._by_age.popleft().drop_oldest()


def nothing_before(envelope: CanonicalEnvelope, topic: bytes) -> Message:
    """Return a snapshot that says of a rank that it held nothing before a batch."""
    of = envelope.worker, envelope.rank, envelope.epoch, envelope.sequence, envelope.block_size
    return Message(topic, envelope.sequence, encode_snapshot_part(SnapshotPart(*of, 0, 1, 0, 0, b"", b"", b"")))

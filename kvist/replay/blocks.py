"""Recorded snapshots, and replays of recorded messages for subscribers that missed some."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Heartbeat, WorkerRank
from kvist.events.codec import decode_snapshot_part, encode_batch, encode_snapshot_part, is_snapshot_part
from kvist.events.dialects import EngineEnvelope
from kvist.events.restarts import RestartDetector
from kvist.events.snapshot import Snapshot, SnapshotAssembly, snapshot_id, snapshot_parts
from kvist.events.transports import Message, ReplayRequest
from kvist.events.types import Holding, SnapshotPart
from kvist.replay.envelope import CanonicalEnvelope, read_envelope


class RecordedSnapshot(NamedTuple):
    """A whole snapshot, verified by its digest, and the messages that it came in, each part once."""

    snapshot: Snapshot
    messages: tuple[Message, ...]


class SnapshotCollector:
    """Assembles the snapshots of one source; memory is that of one unfinished snapshot for each rank."""

    def __init__(self) -> None:
        self._begun: dict[WorkerRank, dict[int, tuple[SnapshotPart, Message]]] = {}
        self.num_malformed = 0

    def add(self, message: Message, source: str) -> RecordedSnapshot | None:
        """Add a part; return the snapshot once it is whole. A part of another snapshot discards the unfinished one."""
        try:
            part = decode_snapshot_part(message.payload, source)
            begun = self._begun.setdefault(part.source, {})
            if begun and snapshot_id(next(iter(begun.values()))[0]) != snapshot_id(part):
                begun.clear()
            begun.setdefault(part.part_idx, (part, message))
            if len(begun) < part.num_parts:
                return None
            del self._begun[part.source]
            assembly = SnapshotAssembly(source)
            for each, _ in begun.values():
                assembly.add(each)
            return RecordedSnapshot(assembly.snapshot(), tuple(message for _, message in begun.values()))
        except MalformedMessageError:
            self.num_malformed += 1
            return None


class _MessageLog:
    """The messages kept of one canonical rank, or of an engine's whole stream, and the snapshot in front of them."""

    def __init__(self, epoch: int, next_sequence: int, snapshot: Sequence[Message] | None) -> None:
        """Keep messages from `next_sequence` on; `snapshot` is of the state before it, None where that is unknown."""
        self.epoch = epoch
        self.snapshot = snapshot
        self.first_sequence = self.next_sequence = next_sequence
        self.messages: deque[Message] = deque()

    def append(self, message: Message) -> None:
        if message.sequence > self.next_sequence:
            self.snapshot = None
        self.next_sequence = message.sequence + 1
        self.messages.append(message)

    def drop_oldest(self) -> int:
        """Drop the oldest message and the snapshot, which those left do not continue; return the message's size."""
        self.snapshot = None
        return len(self.messages.popleft().payload)

    def replay(self, request: ReplayRequest) -> tuple[Sequence[Message], list[Message]]:
        """Return the snapshot, if one is needed and known, and the messages that follow it."""
        starts_at = request.start_sequence if request.epoch in (None, self.epoch) else 0
        if request.epoch is None or self.snapshot is None or starts_at >= self.first_sequence:
            return (), [message for message in self.messages if message.sequence >= starts_at]
        return self.snapshot, list(self.messages)


class SentBuffer:
    """Keeps the newest messages of one publication, up to `max_bytes`, for replays; safe to use from several threads.

    Unlike a publisher's buffer it accepts what was recorded: gaps, duplicates, and publishers that restarted, of which
    it keeps the newest epoch. If a rank was recorded with a snapshot, the buffer answers with it, as the publisher did,
    until a message behind it is dropped.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._logs: dict[bytes | None, _MessageLog] = {}  # by a canonical rank's topic, None for an engine's stream
        self._by_age: deque[_MessageLog] = deque()  # the log of each message that is kept
        self._size_bytes = 0
        self._last: dict[bytes, Message] = {}
        self._restarts = RestartDetector()
        self._snapshots = SnapshotCollector()
        self.num_replays = 0

    def append(self, message: Message) -> bool:
        """Keep a message unless its number was used; return whether to send it: subscribers ask for snapshot parts."""
        envelope = read_envelope(message.payload)
        if envelope is None:
            return not is_snapshot_part(message.payload)
        with self._lock:
            if isinstance(envelope, SnapshotPart):
                if (recorded := self._snapshots.add(message, envelope.worker)) is not None:
                    self._restore(recorded)
                return False
            if isinstance(envelope, EngineEnvelope):
                self._append(None, message, self._restarts.observe(message.sequence, message.payload))
                return True
            self._last[message.topic] = message
            if not envelope.is_heartbeat:
                self._append(message.topic, message, envelope.epoch)
            elif envelope.is_empty_heartbeat:
                self._restore_empty(message.topic, envelope)
        return True

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        """Yield the newest epoch's messages from the requested sequence on, of one topic or, if it is empty, of all.

        A request about another epoch is answered from the newest one's beginning. One that names an epoch and a
        sequence before what is kept is answered with a snapshot first, where that is known. Without a topic, the last
        message of every rank is in the answer, so that it shows how far each rank is.
        """
        with self._lock:
            self.num_replays += 1
            answers = [
                log.replay(request)
                for topic, log in self._logs.items()
                if topic is None or request.topic in (None, b"", topic)
            ]
            last = {} if request.topic else dict(self._last)
        for snapshot, messages in answers:
            yield from snapshot
            for message in messages:
                if request.topic in (None, b"", message.topic):
                    last.pop(message.topic, None)
                    yield message
        yield from last.values()

    def last_messages(self) -> list[Message]:
        """Return the last message of each rank, and of an engine; sent again, it shows subscribers what they missed."""
        with self._lock:
            engine = self._logs.get(None)
            return [*self._last.values(), *([] if engine is None else list(engine.messages)[-1:])]

    def _restore(self, recorded: RecordedSnapshot) -> None:
        """Replace what is kept of a rank by a snapshot, also where messages before it are missing."""
        topic, state = recorded.messages[0].topic, recorded.snapshot
        log = self._logs.get(topic)
        if log is None or state.epoch >= log.epoch:
            self._start_log(topic, _MessageLog(state.epoch, state.sequence, recorded.messages))
            of = *state.source, state.epoch, state.sequence, state.block_size
            heartbeat = Batch(*of, 0.0, (Heartbeat(*state.holding),))
            self._last[topic] = Message(topic, state.sequence, encode_batch(heartbeat))

    def _restore_empty(self, topic: bytes, heartbeat: CanonicalEnvelope) -> None:
        """Start anew at a heartbeat that says that the rank holds nothing, if messages before it are missing."""
        log, position = self._logs.get(topic), (heartbeat.epoch, heartbeat.sequence)
        if log and log.snapshot is None and position >= (log.epoch, log.next_sequence):
            self._start_log(topic, _MessageLog(*position, (empty_snapshot(heartbeat, topic),)))

    def _start_log(self, topic: bytes | None, log: _MessageLog) -> None:
        if (old := self._logs.get(topic)) is not None:
            self._size_bytes -= sum(len(message.payload) for message in old.messages)
            self._by_age = deque(each for each in self._by_age if each is not old)
        self._logs[topic] = log

    def _append(self, topic: bytes | None, message: Message, epoch: int) -> None:
        log = self._logs.get(topic)
        if log is None or epoch > log.epoch:
            log = _MessageLog(epoch, 0, None if topic is None else ())
            self._start_log(topic, log)
        if epoch < log.epoch or message.sequence < log.next_sequence:
            return
        log.append(message)
        self._by_age.append(log)
        self._size_bytes += len(message.payload)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._by_age.popleft().drop_oldest()


def empty_snapshot(envelope: CanonicalEnvelope, topic: bytes) -> Message:
    """Return a snapshot which says that a rank held nothing before a batch."""
    of = envelope.source, envelope.epoch, envelope.sequence, envelope.block_size
    (part,) = snapshot_parts(Snapshot(*of, Holding(0, 0), ()))
    return Message(topic, envelope.sequence, encode_snapshot_part(part))

"""What was played last, and what was held before it, for subscribers that missed some of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.events.restarts import RestartDetector
from kvist.events.transports import Message, ReplayRequest
from kvist.replay.envelope import CanonicalEnvelope, EngineEnvelope, SnapshotEnvelope, read_envelope
from kvist.replay.folding import HeldBefore
from kvist.replay.snapshots import RecordedSnapshot, SnapshotCollector


class _Kept:
    """The messages kept of one numbering, a canonical rank's or an engine's stream's, by number ascending."""

    def __init__(self, epoch: int, before: HeldBefore | None = None) -> None:
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
        for snapshot, messages in answers:
            yield from snapshot
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
        topic, kept = recorded.messages[0].topic, self._kept.get(recorded.messages[0].topic)
        if kept is None or recorded.snapshot.epoch >= kept.epoch:
            self._begin(topic, _Kept(recorded.snapshot.epoch, HeldBefore.of(recorded)))
            self._last[topic] = recorded.heartbeat()

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
            self._begin(numbering, kept := _Kept(epoch, None if envelope is None else _nothing(envelope, message)))
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


def _nothing(envelope: CanonicalEnvelope, message: Message) -> HeldBefore:
    """Return what a rank holds before its publisher's first message."""
    rank = WorkerRank(envelope.worker, envelope.rank)
    return HeldBefore(rank, envelope.epoch, envelope.block_size, message.topic)

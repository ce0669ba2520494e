"""What is altered in messages before they are played, and nothing beside it.

A message is decoded only as far as a field is replaced; the bytes of all other fields stay what they were.

- Left-out events: their batch stays, without them, under its number, since a number that is skipped would be a gap to
  every subscriber. Heartbeats have no number and go. Those that stay, while other kinds do not, say what was played.
  A snapshot's blocks are events that stored them.
- Another worker's name: the name in canonical batches and snapshots, and their topic.
- A further round: canonical epochs become later ones; an engine's numbers go on from the last one, behind a batch that
  clears what it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports import Message
from kvist.publisher.stream import topic_of
from kvist.replay.blocks import SentBuffer
from kvist.replay.envelope import CanonicalEnvelope, EngineEnvelope, SnapshotEnvelope, read_envelope
from kvist.replay.recording import Record, RecordedSource

EVENT_KINDS = ("stored", "removed", "cleared", "heartbeat")

_KINDS = {kind: kind for kind in EVENT_KINDS}
_KINDS |= {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}  # as engines say it
_WORKER, _EPOCH, _EVENTS = 1, 3, 7  # places in a canonical batch, the tag being the first; two are a snapshot's, too
# The one part of a snapshot of nothing: part_idx, num_parts, num_blocks, digest, hashes, depths, tiers.
_EMPTY_SNAPSHOT: dict[int, Any] = {6: 0, 7: 1, 8: 0, 9: 0, 10: b"", 11: b"", 12: b""}
_NUM_BLOCKS, _DIGEST = 1, 2  # places in a heartbeat
_ENGINE_EVENTS = 1
_MAX_EPOCH = (1 << 64) - 1
_EPOCHS_A_ROUND = 1 << 50  # 35 years of the microseconds in which publishers count: more than any recording spans


_fields_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()


class _EngineStream:
    """The numbers of one engine's stream: what was sent last, and how much is added in this round."""

    def __init__(self) -> None:
        self.last_sequence = -1
        self.offset = 0
        self.round_idx = 0
        self.ranks: dict[int | None, bool] = {}
        """For each rank that spoke, whether its events are maps."""


class Rewriter:
    """Alters messages as is asked; without `kinds` and `names`, those of the first round stay as they are."""

    def __init__(
        self, *, kinds: AbstractSet[str] | None = None, names: Mapping[str, str] | None = None, num_rounds: int = 1
    ) -> None:
        """Keep events of some `kinds` only, and call workers what `names` has for them."""
        for name in (names or {}).values():
            topic_of(WorkerRank(name, 0))  # raises for a name that no topic can carry
        self._kinds = kinds
        self._names = names or {}
        self._is_looped = num_rounds > 1
        self._must_count = kinds is not None and "heartbeat" in kinds and not kinds >= set(EVENT_KINDS)
        self._engines: dict[RecordedSource, _EngineStream] = {}
        # What was played of each source; a buffer that keeps next to nothing knows what all of it came to.
        self._played: defaultdict[RecordedSource, SentBuffer] = defaultdict(lambda: SentBuffer(max_bytes=1))

    def rewritten(self, record: Record, round_idx: int = 0) -> list[Message]:
        """Return what is to be sent for a record: nearly always one message."""
        message = record.message
        if self._kinds is None and not self._names and not self._is_looped:
            return [message]
        envelope = read_envelope(message.payload)
        if envelope is None:
            return [message]
        if isinstance(envelope, CanonicalEnvelope):
            return self._canonical(record.source, message, envelope, round_idx)
        if isinstance(envelope, SnapshotEnvelope):
            return self._snapshot(record.source, message, envelope, round_idx)
        return self._engine(record.source, message, envelope, round_idx)

    def _canonical(
        self, source: RecordedSource, message: Message, envelope: CanonicalEnvelope, round_idx: int
    ) -> list[Message]:
        if envelope.is_heartbeat and not self._keeps("heartbeat"):
            return []
        topic, changed = self._renamed(message.topic, envelope, round_idx)
        if self._kinds is not None and not envelope.is_heartbeat:
            kept = [event for event in envelope.events if self._keeps(_kind(event))]
            if len(kept) < len(envelope.events):
                changed[_EVENTS] = kept
        message = Message(topic, message.sequence, _with_fields(message.payload, changed))
        if self._must_count:
            self._played[source].append(message)
            if envelope.is_heartbeat:
                message = self._counted(source, message, envelope.events[0])
        return [message]

    def _snapshot(
        self, source: RecordedSource, message: Message, envelope: SnapshotEnvelope, round_idx: int
    ) -> list[Message]:
        """Return a part of a snapshot, whose blocks count as stored; without those, the last part is an empty one."""
        topic, changed = self._renamed(message.topic, envelope, round_idx)
        if not self._keeps("stored"):
            if not envelope.is_last:
                return []
            changed |= _EMPTY_SNAPSHOT
        message = Message(topic, message.sequence, _with_fields(message.payload, changed))
        if self._must_count:
            self._played[source].append(message)
        return [message]

    def _renamed(
        self, topic: bytes, envelope: CanonicalEnvelope | SnapshotEnvelope, round_idx: int
    ) -> tuple[bytes, dict[int, Any]]:
        """Return the topic, and the fields that are another round's or another worker's."""
        rank = envelope.source
        changed: dict[int, Any] = {}
        if round_idx > 0:
            changed[_EPOCH] = envelope.epoch + round_idx * _EPOCHS_A_ROUND
            if changed[_EPOCH] > _MAX_EPOCH:
                found = f"fewer rounds: there is no epoch after {envelope.epoch}"
                raise InvalidValueError("loop", round_idx + 1, found)
        if (name := self._names.get(rank.worker, rank.worker)) != rank.worker:
            changed[_WORKER] = name
            topic = topic_of(WorkerRank(name, rank.rank)) if topic else topic
        return topic, changed

    def _counted(self, source: RecordedSource, message: Message, heartbeat: msgspec.Raw) -> Message:
        """Return a heartbeat with what the rank holds by what was played of it, where that is known."""
        holding = self._played[source].holding(message.topic)
        if holding is None or len(_fields_decoder.decode(heartbeat)) <= _DIGEST:
            return message
        counted = _with_fields(heartbeat, {_NUM_BLOCKS: holding.num_blocks, _DIGEST: holding.digest})
        return message._replace(payload=_with_fields(message.payload, {_EVENTS: [msgspec.Raw(counted)]}))

    def _engine(
        self, source: RecordedSource, message: Message, envelope: EngineEnvelope, round_idx: int
    ) -> list[Message]:
        stream = self._engines.setdefault(source, _EngineStream())
        before: list[Message] = []
        if round_idx > stream.round_idx:
            stream.round_idx = round_idx
            before = _clearings(stream, message.topic, envelope.timestamp_s)
            stream.offset = stream.last_sequence + len(before) + 1 - message.sequence
        if envelope.rank not in stream.ranks and envelope.events:
            stream.ranks[envelope.rank] = _is_map(envelope.events[0])
        payload = message.payload
        if self._kinds is not None:
            kept = [event for event in envelope.events if self._keeps(_kind(event))]
            if len(kept) < len(envelope.events):
                payload = _with_fields(payload, {_ENGINE_EVENTS: kept})
        stream.last_sequence = message.sequence + stream.offset
        return [*before, Message(message.topic, stream.last_sequence, payload)]

    def _keeps(self, kind: str | None) -> bool:
        return self._kinds is None or kind in self._kinds


def _is_map(event: msgspec.Raw) -> bool:
    return not 0x90 <= bytes(event)[0] <= 0xDD


def _kind(event: msgspec.Raw) -> str | None:
    """Return of which kind an event is, None for one that no index knows."""
    try:
        fields = msgspec.msgpack.decode(event)
    except DECODE_ERRORS:
        return None
    tag = None
    if isinstance(fields, dict):
        tag = fields.get("type")
    elif isinstance(fields, list) and fields:
        tag = fields[0]
    return _KINDS.get(tag) if isinstance(tag, str) else None


def _with_fields(array: bytes | msgspec.Raw, changed: Mapping[int, Any]) -> bytes:
    """Return an array with some fields replaced, and the bytes of all others as they were."""
    if not changed:
        return bytes(array)
    fields: list[Any] = list(_fields_decoder.decode(array))
    for place, value in changed.items():
        fields[place] = value
    return _encoder.encode(fields)


def _clearings(stream: _EngineStream, topic: bytes, timestamp_s: float) -> list[Message]:
    """Return batches that clear an engine's ranks, numbered behind its last one."""
    clearings = []
    for number, (rank, has_maps) in enumerate(stream.ranks.items(), stream.last_sequence + 1):
        event: object = {"type": "AllBlocksCleared"} if has_maps else ["AllBlocksCleared"]
        clearings.append(Message(topic, number, _encoder.encode([timestamp_s, [event], rank])))
    return clearings

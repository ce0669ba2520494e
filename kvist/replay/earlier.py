"""What ranks held where the part of a recording begins that is meant: the rest of it tells."""

from __future__ import annotations

from collections import defaultdict

from kvist.events.transports import ReplayRequest
from kvist.replay.envelope import CanonicalEnvelope, EngineEnvelope, read_envelope
from kvist.replay.format import Record, RecordedSource
from kvist.replay.sent import SentBuffer


class Earlier:
    """Turns the messages that are passed over into snapshots, for ranks of which they tell all; others stay unknown."""

    def __init__(self) -> None:
        # What keeps next to nothing knows what was held before it.
        self._passed_over: defaultdict[RecordedSource, SentBuffer] = defaultdict(lambda: SentBuffer(max_bytes=1))
        self._begun: set[tuple[RecordedSource, bytes]] = set()

    def passed_over(self, record: Record) -> None:
        """Take a record that comes before what is meant."""
        self._passed_over[record.source].append(record.message)

    def told_before(self, record: Record) -> list[Record]:
        """Return what is to be told before a record that is meant: a snapshot, once for each rank."""
        key, passed_over = (record.source, record.message.topic), self._passed_over.get(record.source)
        if passed_over is None or key in self._begun:
            return []
        envelope = read_envelope(record.message.payload)
        if envelope is None or isinstance(envelope, EngineEnvelope):
            return []
        self._begun.add(key)
        if not isinstance(envelope, CanonicalEnvelope):
            return []
        request = ReplayRequest(record.message.topic, 0, envelope.epoch)
        return [record._replace(message=message) for message in passed_over.replay(request)]

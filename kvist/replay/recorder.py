"""Recording: one subscription a source, one file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Subscription, open_subscription, public_url
from kvist.replay.format import RecordedSource
from kvist.replay.numbering import SourceNumbering
from kvist.replay.writer import RecordingWriter

_TICK_S = 0.25  # how often it is seen whether a block is due: well within the writer's second
_MAX_DRIFT_NS = 1_000_000  # between the two clocks: beyond it their difference is taken anew, which begins a block


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A stream to record: its URL, and what to call it in the recording."""

    name: str
    endpoint: Endpoint
    shown_url: str
    """The URL without what is secret in it."""

    @property
    def recorded(self) -> RecordedSource:
        """Return what the recording says of it."""
        return RecordedSource(self.name, self.shown_url, self.endpoint.engine)

    @classmethod
    def parse(cls, text: str) -> SourceSpec:
        """Read `[NAME=]URL`; the name is what stands behind `://` by default. Raises InvalidValueError."""
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        endpoint = Endpoint.parse(url)
        shown_url = public_url(url)
        return cls(name or shown_url.partition("?")[0].partition("://")[2], endpoint, shown_url)


def parse_sources(texts: Sequence[str]) -> list[SourceSpec]:
    """Return the streams of one recording; raises InvalidValueError for a wrong one, or two of one name.

    Raises MissingExtraError for a broker whose client is not installed: before there is a file.
    """
    specs = [SourceSpec.parse(text) for text in texts]
    for spec in specs:
        spec.endpoint.check_client()
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError("source", name, "each name once")
    return specs


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What came of one source."""

    name: str
    num_messages: int
    num_connects: int
    num_gaps: int
    num_missing: int
    num_duplicates: int
    num_restarts: int
    num_malformed: int
    problem: str | None
    """Why nothing could be received just now."""


class _Heard(NamedTuple):
    """What a subscription tells of itself; it can be asked only while it is entered."""

    num_connects: int = 0
    num_malformed: int = 0
    problem: str | None = None

    @classmethod
    def of(cls, subscription: Subscription) -> _Heard:
        return cls(subscription.num_connects, subscription.num_malformed, subscription.problem)


class Recorder:
    """Writes down what the sources say until cancelled: every message, duplicates and malformed ones too.

    Gaps are counted, not repaired. The order in the file is that of arrival here; the messages of one source keep
    theirs.
    """

    def __init__(
        self,
        specs: Sequence[SourceSpec],
        writer: RecordingWriter,
        *,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Record into `writer`, which its owner closes."""
        self._writer = writer
        self._mono_ns = mono_ns
        self._wall_ns = wall_ns
        self.clock_offset_ns = wall_ns() - mono_ns()
        """What is added to the monotonic clock for the wall clock."""
        self._specs = specs
        self._numberings = [SourceNumbering() for _ in specs]
        self._heard = [_Heard() for _ in specs]
        self._subscriptions: dict[int, Subscription] = {}

    async def run(self) -> None:
        """Record until cancelled; raises OSError when the file cannot be written, InvalidValueError for an endpoint."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for idx, spec in enumerate(self._specs):
                    tasks.create_task(self._record(idx, spec), name=f"kvist-record-{spec.name}")
                while True:
                    await asyncio.sleep(_TICK_S)
                    self._tick()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    def reports(self) -> list[SourceReport]:
        """Return what came of each source so far."""
        return [
            SourceReport(
                spec.name,
                sum(numbering.num_messages for numbering in judged.numberings) + judged.num_heartbeats,
                heard.num_connects,
                judged.num_gaps,
                judged.num_missing,
                judged.num_duplicates,
                judged.num_restarts,
                judged.num_malformed + heard.num_malformed,
                heard.problem,
            )
            for spec, judged, heard in zip(self._specs, self._numberings, self._heard, strict=True)
        ]

    def _tick(self) -> None:
        for idx, subscription in self._subscriptions.items():
            self._heard[idx] = _Heard.of(subscription)
        mono_ns = self._mono_ns()
        self._writer.flush_if_due(mono_ns)
        offset_ns = self._wall_ns() - mono_ns
        if abs(offset_ns - self.clock_offset_ns) > _MAX_DRIFT_NS:
            self.clock_offset_ns = offset_ns

    async def _record(self, idx: int, spec: SourceSpec) -> None:
        source_idx = self._writer.add_source(spec.recorded)
        numbering = self._numberings[idx]
        async with open_subscription(spec.endpoint) as subscription:
            self._subscriptions[idx] = subscription
            try:
                while True:
                    messages = await subscription.receive()
                    mono_ns = self._mono_ns()
                    for message in messages:
                        self._writer.add(source_idx, message, mono_ns, mono_ns + self.clock_offset_ns)
                        numbering.seen(message)
                    await asyncio.sleep(0)  # a busy source is never waited for
            finally:
                self._heard[idx] = _Heard.of(self._subscriptions.pop(idx))

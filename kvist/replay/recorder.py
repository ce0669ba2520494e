"""Records streams: one subscription per source, one recording for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvist.contexts import BackgroundTasks
from kvist.errors import InvalidValueError
from kvist.events.follow import Turns, follow
from kvist.events.transports import Endpoint, Message, Subscription, open_subscription, public_url
from kvist.replay.reader import RecordingReader
from kvist.replay.recording import RecordedSource
from kvist.replay.recovery import SourceRecovery
from kvist.replay.writer import RecordingWriter

MAX_QUESTIONS_AT_ONCE = 8
_TICK_S = 0.1  # how often to check for due chunks: well within the writer's second


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A stream to record: what the recording calls it, and where it is."""

    source: RecordedSource
    endpoint: Endpoint

    @classmethod
    def parse(cls, text: str) -> SourceSpec:
        """Parse `[NAME=]URL`; the name defaults to the URL without scheme and query. Raises InvalidValueError."""
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        endpoint, shown_url = Endpoint.parse(url), public_url(url)
        name = name or shown_url.partition("?")[0].partition("://")[2]
        return cls(RecordedSource(name, shown_url, endpoint.engine), endpoint)


def parse_sources(texts: Sequence[str]) -> list[SourceSpec]:
    """Parse the streams of one recording; raises InvalidValueError, or MissingExtraError for a broker's client."""
    specs = [SourceSpec.parse(text) for text in texts]
    for spec in specs:
        spec.endpoint.check_client()
    names = [spec.source.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidValueError("source", name, "each name once")
    return specs


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What was recorded of one source."""

    name: str
    num_messages: int
    """Messages received live; those from answers are `num_recovered`."""
    num_connects: int
    num_gaps: int
    num_duplicates: int
    num_restarts: int
    num_malformed: int
    num_snapshots: int
    num_recovered: int
    partial: tuple[str, ...]
    """The ranks of which the recording lacks something at present; for an engine, the source's name."""
    problem: str | None


class Recorder:
    """Records every message of its sources until cancelled, duplicates and malformed ones too.

    It asks for what a rank held before its first message and for what is missing, and writes the answer in front of the
    next message (`kvist.replay.recovery`). Nothing else of the source is received meanwhile.
    """

    def __init__(
        self,
        specs: Sequence[SourceSpec],
        writer: RecordingWriter,
        *,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Record into `writer`; the caller closes it."""
        self._writer = writer
        self._mono_ns = mono_ns
        # Constant for a session, so that distances between messages stay right when the clock is set.
        self._clock_offset_ns = wall_ns() - mono_ns()
        self._streams = [_Stream(spec, partial(self._write, spec.source)) for spec in specs]
        self._replay_gate = asyncio.Semaphore(MAX_QUESTIONS_AT_ONCE)
        self._turns = Turns()

    def skip(self, earlier: RecordingReader) -> None:
        """Continue behind earlier parts, whose messages are not recorded again; raises RecordingError for damage."""
        streams = {(stream.spec.source.name, stream.spec.source.engine): stream for stream in self._streams}
        try:
            for record in earlier:
                if (stream := streams.get((record.source.name, record.source.engine))) is not None:
                    stream.recovery.skip(record)
        finally:
            for stream in self._streams:
                stream.recovery.resume()

    async def run(self) -> None:
        """Record until cancelled; raises OSError when the file cannot be written, InvalidValueError for an endpoint."""
        async with BackgroundTasks() as tasks:
            for stream in self._streams:
                tasks.create_task(self._record(stream), name=f"kvist-record-{stream.spec.source.name}")
            while True:
                await asyncio.sleep(_TICK_S)
                self._writer.flush_if_due(self._now_ns())

    def reports(self) -> list[SourceReport]:
        return [stream.report() for stream in self._streams]

    async def _record(self, stream: _Stream) -> None:
        def clock() -> float:
            return self._mono_ns() * 1e-9

        async with open_subscription(stream.spec.endpoint) as subscription:
            stream.subscription = subscription
            try:
                await follow(
                    subscription, stream.recovery, clock=clock, turns=self._turns, replay_gate=self._replay_gate
                )
            finally:
                stream.recovery.close(clock())

    def _now_ns(self) -> int:
        return self._mono_ns() + self._clock_offset_ns

    def _write(self, source: RecordedSource, message: Message) -> None:
        self._writer.add(source, message, self._now_ns())


class _Stream:
    """One source while it is recorded."""

    def __init__(self, spec: SourceSpec, write: Callable[[Message], None]) -> None:
        self.spec = spec
        self.recovery = SourceRecovery(spec.source.name, write)
        self.subscription: Subscription | None = None

    def report(self) -> SourceReport:
        recovery, subscription = self.recovery, self.subscription

        def total(*names: str) -> int:
            return sum(getattr(session, name) for session in recovery.sessions for name in names)

        return SourceReport(
            name=self.spec.source.name,
            num_messages=recovery.num_messages,
            num_connects=0 if subscription is None else subscription.num_connects,
            num_gaps=total("num_gaps"),
            num_duplicates=total("num_duplicates", "num_stale"),
            num_restarts=sum(max(0, session.num_epochs - 1) for session in recovery.sessions),
            num_malformed=recovery.num_malformed + (0 if subscription is None else subscription.num_malformed),
            num_snapshots=total("num_snapshots"),
            num_recovered=total("num_recovered"),
            partial=tuple(recovery.partial),
            problem=None if subscription is None else subscription.problem,
        )

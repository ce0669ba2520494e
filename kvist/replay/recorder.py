"""Recording: one subscription a source, one file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvist.errors import InvalidValueError, only_cause
from kvist.events.follow import REPLAY_TIMEOUT_S, Turns
from kvist.events.transports import Endpoint, Message, Subscription, open_subscription, public_url
from kvist.replay.reader import RecordingReader
from kvist.replay.recording import RecordedSource
from kvist.replay.recovery import Question, SourceRecovery, Timed
from kvist.replay.writer import RecordingWriter

MAX_QUESTIONS_AT_ONCE = 8
MAX_WAIT_S = 10.0
_TICK_S = 0.1  # how often it is seen whether a chunk is due, or a question: well within the writer's second


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A stream to record: its URL, and what to call it in the recording."""

    name: str
    endpoint: Endpoint
    shown_url: str

    @property
    def recorded(self) -> RecordedSource:
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
    """Return the streams of one recording; raises InvalidValueError, or MissingExtraError for a broker's client."""
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
    """Messages that came live; those that answers brought are `num_recovered`."""
    num_connects: int
    num_gaps: int
    num_missing: int
    num_duplicates: int
    num_restarts: int
    num_malformed: int
    num_snapshots: int
    num_recovered: int
    num_unanswered: int
    partial: tuple[str, ...]
    """The ranks that a replay will not know completely, as things are; an engine's by the source's name."""
    problem: str | None


class Recorder:
    """Writes down what the sources say until cancelled: every message, duplicates and malformed ones too.

    What a rank held before it was heard, and what a gap took, is asked for and stands in front of what came next
    (`kvist.replay.recovery`). The order in the file is that of arrival here, but that a rank's messages wait for an
    answer, up to `MAX_WAIT_S`, while others' do not.
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
        # One for all of a session: messages keep their distances when the clock is set meanwhile.
        self._clock_offset_ns = wall_ns() - mono_ns()
        self._streams = [_Stream(spec) for spec in specs]
        self._gate = asyncio.Semaphore(MAX_QUESTIONS_AT_ONCE)
        self._turns = Turns()

    def skip(self, earlier: RecordingReader) -> None:
        """Go on behind an earlier part, which is not written nor asked for again; raises RecordingError for damage."""
        streams = {(stream.spec.name, stream.spec.endpoint.engine): stream for stream in self._streams}
        try:
            for record in earlier:
                if (stream := streams.get((record.source.name, record.source.engine))) is not None:
                    stream.recovery.skip(record.message)
        finally:
            for stream in self._streams:
                stream.recovery.resume()

    async def run(self) -> None:
        """Record until cancelled; raises OSError when the file cannot be written, InvalidValueError for an endpoint."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for stream in self._streams:
                    tasks.create_task(self._record(stream), name=f"kvist-record-{stream.spec.name}")
                while True:
                    await asyncio.sleep(_TICK_S)
                    self._writer.flush_if_due(self._mono_ns() + self._clock_offset_ns)
        except BaseExceptionGroup as failed:
            raise only_cause(failed) from failed

    def reports(self) -> list[SourceReport]:
        return [stream.report() for stream in self._streams]

    async def _record(self, stream: _Stream) -> None:
        async with open_subscription(stream.spec.endpoint) as subscription:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._receive(stream, subscription))
                    tasks.create_task(self._ask(stream, subscription))
            finally:
                stream.note(subscription)
                self._write(stream, stream.recovery.give_up(self._mono_ns() * 1e-9))

    async def _receive(self, stream: _Stream, subscription: Subscription) -> None:
        num_connects = 0
        while True:
            messages = await subscription.receive()
            mono_ns = self._mono_ns()
            if subscription.num_connects > num_connects:
                num_connects = subscription.num_connects
                self._write(stream, stream.recovery.on_reconnect(mono_ns * 1e-9))
            self._write(stream, stream.recovery.receive(messages, mono_ns))
            await asyncio.sleep(0)  # a busy source is never waited for

    async def _ask(self, stream: _Stream, subscription: Subscription) -> None:
        """Ask what is due, one question at a time; messages are received meanwhile."""
        while True:
            await asyncio.sleep(_TICK_S)
            stream.note(subscription)
            while (question := stream.recovery.question(self._mono_ns() * 1e-9)) is not None:
                try:
                    async with asyncio.timeout(MAX_WAIT_S), self._gate:
                        messages = await subscription.replay(question.request, REPLAY_TIMEOUT_S)
                        await self._turns.run_in_turns(self._answer(stream, question, messages))
                except TimeoutError:
                    self._write(stream, stream.recovery.give_up(self._mono_ns() * 1e-9))

    def _answer(self, stream: _Stream, question: Question, messages: Sequence[Message] | None) -> Iterator[None]:
        """Write an answer, in one piece with what waited for it; yields before that."""
        ready = yield from stream.recovery.answer(question, messages, self._mono_ns() * 1e-9)
        self._write(stream, ready)

    def _write(self, stream: _Stream, ready: Sequence[Timed]) -> None:
        for timed in ready:
            self._writer.add(stream.recorded, timed.message, timed.mono_ns + self._clock_offset_ns)


class _Stream:
    """One source while it is recorded."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.recorded = spec.recorded
        self.recovery = SourceRecovery(spec.name)
        self._num_connects = self._num_malformed = 0
        self._problem: str | None = None

    def note(self, subscription: Subscription) -> None:
        """Take note of what a subscription tells of itself: it can be asked only while it is entered."""
        self._num_connects, self._num_malformed = subscription.num_connects, subscription.num_malformed
        self._problem = subscription.problem

    def report(self) -> SourceReport:
        recovery, live = self.recovery, self.recovery.numbering
        counted = ("num_gaps", "num_missing", "num_duplicates", "num_restarts")
        return SourceReport(
            name=self.spec.name,
            num_messages=live.total("num_messages") + live.num_heartbeats,
            num_connects=self._num_connects,
            **{name: live.total(name) for name in counted},
            num_malformed=live.num_malformed + self._num_malformed,
            num_snapshots=recovery.total("num_snapshots"),
            num_recovered=recovery.total("num_recovered"),
            num_unanswered=recovery.num_unanswered,
            partial=tuple(recovery.partial),
            problem=self._problem,
        )

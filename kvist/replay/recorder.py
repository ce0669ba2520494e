"""Records streams: one subscription per source, one recording for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvist.contexts import BackgroundTasks
from kvist.errors import InvalidValueError
from kvist.events.follow import REPLAY_TIMEOUT_S, Turns
from kvist.events.transports import Endpoint, Message, Subscription, open_subscription, public_url
from kvist.replay.reader import RecordingReader
from kvist.replay.recording import RecordedSource
from kvist.replay.recovery import Question, SourceRecovery, TimedMessage
from kvist.replay.writer import RecordingWriter

MAX_QUESTIONS_AT_ONCE = 8
MAX_WAIT_S = 10.0
_TICK_S = 0.1  # how often to check for due chunks and questions: well within the writer's second


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
    num_missing: int
    num_duplicates: int
    num_restarts: int
    num_malformed: int
    num_snapshots: int
    num_recovered: int
    num_unanswered: int
    partial: tuple[str, ...]
    """The ranks of which the recording lacks something at present; for an engine, the source's name."""
    problem: str | None


class Recorder:
    """Records every message of its sources until cancelled, duplicates and malformed ones too.

    It asks for what a rank held before its first message and for what is missing, and writes the answer in front of the
    next message (`kvist.replay.recovery`). Messages are written in order of arrival, except that those of a rank wait
    for an answer, up to `MAX_WAIT_S`.
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
        self._streams = [_Stream(spec) for spec in specs]
        self._question_slots = asyncio.Semaphore(MAX_QUESTIONS_AT_ONCE)
        self._turns = Turns()

    def skip(self, earlier: RecordingReader) -> None:
        """Continue behind earlier parts, whose messages are not recorded again; raises RecordingError for damage."""
        streams = {(stream.spec.source.name, stream.spec.source.engine): stream for stream in self._streams}
        try:
            for record in earlier:
                if (stream := streams.get((record.source.name, record.source.engine))) is not None:
                    stream.recovery.skip(record.message)
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
                self._writer.flush_if_due(self._mono_ns() + self._clock_offset_ns)

    def reports(self) -> list[SourceReport]:
        return [stream.report() for stream in self._streams]

    async def _record(self, stream: _Stream) -> None:
        async with open_subscription(stream.spec.endpoint) as subscription:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._receive(stream, subscription))
                    tasks.create_task(self._ask(stream, subscription))
            finally:
                stream.record_state(subscription)
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
            await asyncio.sleep(0)  # `receive` does not yield while a source is busy

    async def _ask(self, stream: _Stream, subscription: Subscription) -> None:
        """Ask due questions, one at a time, while messages are received."""
        while True:
            await asyncio.sleep(_TICK_S)
            stream.record_state(subscription)
            while (question := stream.recovery.question(self._mono_ns() * 1e-9)) is not None:
                try:
                    async with asyncio.timeout(MAX_WAIT_S), self._question_slots:
                        messages = await subscription.replay(question.request, REPLAY_TIMEOUT_S)
                        await self._turns.run_in_turns(self._answer(stream, question, messages))
                except TimeoutError:
                    self._write(stream, stream.recovery.give_up(self._mono_ns() * 1e-9))

    def _answer(self, stream: _Stream, question: Question, messages: Sequence[Message] | None) -> Iterator[None]:
        """Write an answer and all that waited for it, without a yield in between; yields before that."""
        ready = yield from stream.recovery.on_answer(question, messages, self._mono_ns() * 1e-9)
        self._write(stream, ready)

    def _write(self, stream: _Stream, ready: Sequence[TimedMessage]) -> None:
        for timed in ready:
            self._writer.add(stream.spec.source, timed.message, timed.mono_ns + self._clock_offset_ns)


class _Stream:
    """One source while it is recorded."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.recovery = SourceRecovery(spec.source.name)
        self._num_connects = self._num_malformed = 0
        self._problem: str | None = None

    def record_state(self, subscription: Subscription) -> None:
        """Keep the subscription's counts and problem for the report: they can be read only while it is entered."""
        self._num_connects, self._num_malformed = subscription.num_connects, subscription.num_malformed
        self._problem = subscription.problem

    def report(self) -> SourceReport:
        recovery, live = self.recovery, self.recovery.live
        counted = ("num_gaps", "num_missing", "num_duplicates", "num_restarts")
        return SourceReport(
            name=self.spec.source.name,
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

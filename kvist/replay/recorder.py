"""Recording: one subscription a source, one file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvist.errors import InvalidValueError
from kvist.events.follow import REPLAY_TIMEOUT_S, Turns
from kvist.events.transports import Endpoint, Subscription, open_subscription, public_url
from kvist.replay.asking import Answer, Asking, Question, Timed
from kvist.replay.reader import RecordingReader
from kvist.replay.recording import RecordedSource
from kvist.replay.writer import RecordingWriter

_TICK_S = 0.25  # how often it is seen whether a chunk is due: well within the writer's second
MAX_QUESTIONS_AT_ONCE = 8
"""Answers in memory at any moment."""


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

    What a rank held before it was heard, and what a gap took, is asked for and stands in front of what came next
    (`kvist.replay.asking`). The order in the file is that of arrival here, but that a rank's messages wait for an
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

    def recall(self, earlier: RecordingReader) -> None:
        """Go on behind an earlier part: what it has of these sources is neither written nor asked for again.

        Raises RecordingError where it is damaged; what stands before that is recalled.
        """
        streams = {(stream.spec.name, stream.spec.endpoint.engine): stream for stream in self._streams}
        try:
            for record in earlier:
                if (stream := streams.get((record.source.name, record.source.engine))) is not None:
                    stream.asking.recall(record.message)
        finally:
            for stream in self._streams:
                stream.asking.resume()

    async def run(self) -> None:
        """Record until cancelled; raises OSError when the file cannot be written, InvalidValueError for an endpoint."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for stream in self._streams:
                    tasks.create_task(self._record(stream, tasks), name=f"kvist-record-{stream.spec.name}")
                while True:
                    await asyncio.sleep(_TICK_S)
                    self._tick(tasks)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    def reports(self) -> list[SourceReport]:
        """Return what came of each source so far."""
        return [stream.report() for stream in self._streams]

    def _tick(self, tasks: asyncio.TaskGroup) -> None:
        mono_ns = self._mono_ns()
        for stream in self._streams:
            if stream.subscription is not None:
                stream.heard = _Heard.of(stream.subscription)
                self._look_after(stream, tasks)
        self._writer.flush_if_due(mono_ns + self._clock_offset_ns)

    async def _record(self, stream: _Stream, tasks: asyncio.TaskGroup) -> None:
        async with open_subscription(stream.spec.endpoint) as subscription:
            stream.subscription = subscription
            try:
                while True:
                    messages = await subscription.receive()
                    mono_ns = self._mono_ns()
                    if (num_connects := subscription.num_connects) > stream.num_connects:
                        stream.num_connects = num_connects
                        self._write(stream, stream.asking.reconnected(mono_ns * 1e-9))
                    self._write(stream, stream.asking.heard(messages, mono_ns))
                    self._look_after(stream, tasks)
                    await asyncio.sleep(0)  # a busy source is never waited for
            finally:
                stream.heard, stream.subscription = _Heard.of(subscription), None
                self._write(stream, stream.asking.give_up(self._mono_ns() * 1e-9))

    def _write(self, stream: _Stream, ready: Sequence[Timed]) -> None:
        for timed in ready:
            self._writer.add(stream.recorded, timed.message, timed.mono_ns + self._clock_offset_ns)

    def _look_after(self, stream: _Stream, tasks: asyncio.TaskGroup) -> None:
        """Ask what is due, and wait for no answer that takes too long."""
        now_s = self._mono_ns() * 1e-9
        if stream.asking.is_overdue(now_s):
            self._write(stream, stream.asking.give_up(now_s))
        question = stream.asking.question(now_s)
        if stream.question is None and question is not None:
            stream.question = tasks.create_task(self._ask(stream, question), name=f"kvist-ask-{stream.spec.name}")
        elif stream.question is not None and not stream.asking.is_waiting:
            stream.question.cancel()

    async def _ask(self, stream: _Stream, question: Question) -> None:
        """Ask one question and take the answer; messages are received meanwhile."""
        try:
            async with self._gate:
                assert stream.subscription is not None
                messages = await stream.subscription.replay(question.request, REPLAY_TIMEOUT_S)
                answers: list[Answer | None] = []

                def read() -> Iterator[None]:
                    answers.append((yield from stream.asking.read(question, messages or ())))

                await self._turns.work_off(read())
                answer = None if messages is None else answers[0]
                self._write(stream, stream.asking.answered(question, answer, self._mono_ns() * 1e-9))
        finally:
            stream.question = None


class _Stream:
    """One source while it is recorded."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.recorded = spec.recorded
        self.asking = Asking(spec.name)
        self.num_connects = 0
        self.heard = _Heard()
        self.subscription: Subscription | None = None
        self.question: asyncio.Task[None] | None = None

    def report(self) -> SourceReport:
        asking, judged, heard = self.asking, self.asking.numbering, self.heard
        return SourceReport(
            self.spec.name,
            judged.total("num_messages") + judged.num_heartbeats,
            heard.num_connects,
            judged.total("num_gaps"),
            judged.total("num_missing"),
            judged.total("num_duplicates"),
            judged.total("num_restarts"),
            judged.num_malformed + heard.num_malformed,
            asking.num_snapshots,
            asking.num_recovered,
            asking.num_unanswered,
            tuple(asking.partial),
            heard.problem,
        )

"""Following an engine's own stream, which has neither epoch nor heartbeat, and decoding it. No I/O, no clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvist.errors import MalformedMessageError
from kvist.events.dialects import DecodedEngineBatch, sglang, vllm
from kvist.events.follow import Question
from kvist.events.session import Clear, RestartDetector, Session, SessionLimits, SourceState, Step
from kvist.events.transports import Message

_logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""After this much silence the engine is asked whether its last message is still the one we know."""
MAX_IDLE_DOUBLINGS = 6
"""How often that wait doubles while there is no answer: a question in vain holds up the stream for a moment."""

DECODERS: dict[str, Callable[[bytes, str], DecodedEngineBatch]] = {"vllm": vllm.decode, "sglang": sglang.decode}


class EngineFeedTarget(Protocol):
    """What an engine's stream is fed into."""

    def apply(self, batch: DecodedEngineBatch) -> None:
        """Take the next batch of the engine; never raises for what it says."""

    def clear(self) -> None:
        """Forget every rank of the engine: it restarted, or events were lost."""


class EngineFeed:
    """Feeds an engine's batches to the target in order and without a hole; clears it when that cannot be proven.

    A gap, a reconnection and silence for `IDLE_S` lead to a replay from the last message applied, that one
    included. Only if it comes back with the same bytes did the engine go on where it was.
    """

    def __init__(
        self, engine: str, name: str, target: EngineFeedTarget, limits: SessionLimits | None = None
    ) -> None:
        """Decode the dialect `engine`; `name` stands for the stream in logs."""
        self._decode = DECODERS[engine]
        self._name = name
        self._target = target
        self._session: Session[bytes] = Session(limits)
        self._restarts = RestartDetector()
        self._has_replay = False
        self._num_silences = 0
        self._last_heard_s: float | None = None
        self.num_batches = 0
        self.num_malformed = 0

    @property
    def session(self) -> Session[bytes]:
        """Return the judge of this stream, for its state and counters."""
        return self._session

    def received(self, message: Message, now_s: float) -> None:
        """Take one live message."""
        self._last_heard_s = now_s
        epoch = self._restarts.received(message.sequence, message.payload)
        for step in self._session.received(epoch, message.sequence, message.payload, now_s):
            self._take(step)

    def received_all(self, messages: Sequence[Message], now_s: float) -> Iterator[None]:
        """Take live messages; yields between them."""
        for message in messages:
            self.received(message, now_s)
            yield

    def reconnected(self, now_s: float) -> None:
        """Trust nothing until a replay proves that it is the same process."""
        self._last_heard_s = now_s
        self._num_silences = 0
        self._session.doubt(now_s)

    def questions(self, now_s: float) -> list[Question]:
        """Return the question that is due, if any."""
        due = self._session.question(now_s)
        if due is not None:
            return [Question(None, max(0, due - 1))]
        idle_s = IDLE_S * 2 ** min(self._num_silences, MAX_IDLE_DOUBLINGS)
        is_idle = self._last_heard_s is not None and now_s - self._last_heard_s >= idle_s
        if not is_idle or self._session.state is SourceState.RESYNCING:
            return []
        self._last_heard_s = now_s
        return [Question(None, max(0, self._session.expected_sequence - 1))]

    def answered(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> Iterator[None]:
        """Take the answer; yields between batches."""
        self._last_heard_s = now_s
        is_idle = self._session.state is not SourceState.RESYNCING
        if messages is None or (is_idle and not messages and not self._has_replay):
            self._num_silences += 1
            # No evidence either way, or an engine that never keeps anything: while idle it is believed to be the same.
            steps = [] if is_idle else self._session.replayed(None, None, now_s)
        else:
            self._has_replay |= bool(messages)
            self._num_silences = 0
            frames = [(message.sequence, message.payload) for message in messages]
            last_sequence = question.start_sequence if self._session.expected_sequence else None
            epoch = self._restarts.replayed(frames, last_sequence)
            steps = self._session.replayed(epoch, frames, now_s)
        for step in steps:
            self._take(step)
            yield

    def _take(self, step: Step[bytes]) -> None:
        if isinstance(step, Clear):
            _logger.warning("engine stream cleared: %s source=%s", step.reason, self._name)
            self._target.clear()
            return
        try:
            batch = self._decode(step.body, self._name)
        except MalformedMessageError as error:
            self._count_malformed(str(error))
            return
        self._target.apply(batch)
        self.num_batches += 1
        if batch.num_malformed_events:
            self._count_malformed(f"{batch.num_malformed_events} events are not the dialect's")

    def _count_malformed(self, reason: str) -> None:
        self.num_malformed += 1
        if self.num_malformed == 1:
            _logger.warning("malformed batch skipped: %s source=%s", reason, self._name)

"""Follows and decodes an engine's own stream, which has neither epoch nor heartbeat. No I/O, no clock."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvist.errors import MalformedMessageError
from kvist.events.dialects import DecodedEngineBatch, decode_block_events
from kvist.events.follow import Question
from kvist.events.restarts import RestartDetector
from kvist.events.session import MAX_SEQUENCE, Apply, Clear, Session, SessionLimits, SourceState, Step
from kvist.events.transports import Message, ReplayRequest

_logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""After this much silence the engine is asked whether its last message is still the one that we know."""
MAX_IDLE_DOUBLINGS = 6
"""How often that wait doubles while there is no answer, or nothing new in it: each question costs a connection."""

_ALL = Question(ReplayRequest(None, 0))


class EngineFeedTarget(Protocol):
    """What an engine's stream is applied to."""

    def apply(self, batch: DecodedEngineBatch) -> None:
        """Apply the engine's next batch; never raises for its content."""

    def clear(self) -> None:
        """Clear every rank of the engine: it restarted, or events were lost."""


class EngineFeed:
    """Applies an engine's batches to the target in order and without a gap; clears it when that cannot be proven.

    A gap, a reconnection and silence for `IDLE_S` lead to a replay from the last message applied, that one
    included. The engine is the same process only if that message comes back with the same bytes.
    """

    def __init__(self, engine: str, name: str, target: EngineFeedTarget, limits: SessionLimits | None = None) -> None:
        """Follow a stream in the dialect `engine`; `name` is what logs call it."""
        self._engine = engine
        self._name = name
        self._target = target
        self.session: Session[bytes] = Session(limits)
        self.restarts = RestartDetector()
        self.on_departure = self.session.on_departure
        self._has_replay = False
        self._num_silences = 0
        self._num_repetitions = 0
        self._is_malformed_in_part = False
        self._last_message_s: float | None = None
        self.num_batches = 0
        self.num_malformed = 0

    def receive(self, message: Message, now_s: float) -> None:
        self._on_messages(now_s)
        session, restarts = self.session, self.restarts
        if self._proves_same_process(message):
            session.trust()
        # A message that may be of an earlier process than the one that answered cannot show a restart.
        is_unproven = session.is_unproven
        epoch = restarts.epoch if is_unproven else restarts.observe(message.sequence, message.payload)
        for step in session.receive(epoch, message.sequence, message.payload, now_s):
            self.apply_step(step)

    @property
    def next_sequence(self) -> int | None:
        """Return the sequence of the message that would be applied at once, None if none would be.

        Code that applies messages from this one on by itself must write their fingerprints into `restarts`, pass
        single events that it cannot apply to `apply_part`, and then call `on_applied`.
        """
        expected = self.session.expected_sequence
        is_next = self.session.is_in_step and self.restarts.last_sequence < expected <= MAX_SEQUENCE
        return expected if is_next else None

    def on_applied(self, num_messages: int, now_s: float) -> None:
        """Record that so many messages from `next_sequence` on were applied elsewhere."""
        self._on_messages(now_s)
        self.restarts.last_sequence = self.session.expected_sequence + num_messages - 1
        self.session.on_applied(num_messages, now_s)
        self.on_judged_applied(num_messages)

    def on_judged_applied(self, num_messages: int) -> None:
        """Record that so many messages of steps that `judge` returned were applied elsewhere."""
        self.num_batches += num_messages
        self._is_malformed_in_part = False

    def apply_part(self, payload: bytes) -> None:
        """Apply some events, in a batch of their own, of a message whose other events are applied elsewhere."""
        num_malformed_events = self._apply(payload)
        if num_malformed_events and not self._is_malformed_in_part:
            self._is_malformed_in_part = True
            self._count_malformed(f"{num_malformed_events} events are not the dialect's")

    def resume(
        self, next_sequence: int, fingerprints: Iterable[tuple[int, int]], now_s: float, *, is_complete: bool
    ) -> None:
        """Continue from where another feed was; the engine is asked whether it still is the same process."""
        self.restarts.resume(fingerprints, next_sequence - 1)
        self.session.resume(self.restarts.epoch, next_sequence, is_complete=is_complete, asks_at_s=now_s)
        self._last_message_s = now_s

    def on_reconnect(self, now_s: float) -> None:
        self._last_message_s = now_s
        self._num_silences = 0
        self.session.doubt(now_s)

    def questions(self, now_s: float) -> list[Question]:
        if self.session.is_healable(now_s):
            return [_ALL]
        due = self.session.question(now_s)
        if due is not None:
            return [Question(ReplayRequest(None, max(0, due - 1)))]
        idle_s = IDLE_S * 2 ** min(self._num_silences + self._num_repetitions, MAX_IDLE_DOUBLINGS)
        is_idle = self._last_message_s is not None and now_s - self._last_message_s >= idle_s
        if not is_idle or self.session.state is SourceState.RESYNCING:
            return []
        return [Question(ReplayRequest(None, max(0, self.session.expected_sequence - 1)))]

    def judge(self, question: Question, messages: Sequence[Message] | None, now_s: float) -> list[Step[bytes]]:
        """Return the steps that follow from an answer, None for silence; all are to be applied, in order."""
        session = self.session
        if session.is_healable(now_s):  # the question was `_ALL`
            frames = None if messages is None else _frames(messages)
            return session.heal(self.restarts.observe_answer(frames or (), None), frames, now_s)
        self._last_message_s = now_s
        is_idle = session.state is not SourceState.RESYNCING
        suspects = tuple(session.held) if session.is_unproven else ()
        if messages is None or (is_idle and not messages and not self._has_replay):
            self._num_silences += 1
            # No evidence, or an engine that never keeps anything: while idle it is assumed to be the same process.
            steps = [] if is_idle else session.on_answer(None, None, now_s)
        else:
            steps = self._judge_answer(question.request.start_sequence, messages, now_s)
        if not session.is_unproven:
            self.restarts.remember(suspects)
        elif messages is not None and question.is_caught_up:  # an earlier process's connection would be broken
            session.trust()
        return steps

    def _proves_same_process(self, message: Message) -> bool:
        """Return whether a live message shows that the connection is with the process that is followed."""
        if self.session.expected_sequence == 0:  # nothing was applied yet, so any process will do
            return message.sequence == 0 and self.session.state is not SourceState.RESYNCING
        is_past = message.sequence < self.session.expected_sequence
        return is_past and self.restarts.is_known(message.sequence, message.payload)

    def _judge_answer(self, start_sequence: int, messages: Sequence[Message], now_s: float) -> list[Step[bytes]]:
        session = self.session
        is_idle = session.state is not SourceState.RESYNCING
        self._has_replay |= bool(messages)
        self._num_silences = 0
        has_news = not is_idle or any(message.sequence >= session.expected_sequence for message in messages)
        self._num_repetitions = 0 if has_news else self._num_repetitions + 1
        frames = _frames(messages)
        epoch = self.restarts.observe_answer(frames, start_sequence if session.expected_sequence else None)
        return session.on_answer(epoch, frames, now_s)

    def _on_messages(self, now_s: float) -> None:
        self._last_message_s = now_s
        self._num_repetitions = 0

    def apply_step(self, step: Step[bytes]) -> None:
        if isinstance(step, Clear):
            _logger.warning("engine stream cleared: %s source=%s", step.reason, self._name)
            self._target.clear()
            return
        assert isinstance(step, Apply), "engines have no snapshots"
        num_malformed_events = self._apply(step.body)
        if num_malformed_events is not None:
            self.num_batches += 1
            if num_malformed_events:
                self._count_malformed(f"{num_malformed_events} events are not the dialect's")

    def _apply(self, payload: bytes) -> int | None:
        """Decode a batch and apply it; return how many of its events are malformed, None if it is not a batch."""
        try:
            batch = decode_block_events(payload, self._name, self._engine)
        except MalformedMessageError as error:
            self._count_malformed(str(error))
            return None
        self._target.apply(batch)
        return batch.num_malformed_events

    def _count_malformed(self, reason: str) -> None:
        self.num_malformed += 1
        if self.num_malformed == 1:
            _logger.warning("malformed batch skipped: %s source=%s", reason, self._name)


def _frames(messages: Sequence[Message]) -> list[tuple[int, bytes]]:
    return [(message.sequence, message.payload) for message in messages]

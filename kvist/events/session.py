"""A subscriber's decisions about one stream: what to apply, what to drop, when to ask again. No I/O, no clock.

`Session` follows an (epoch, sequence) numbering and returns the steps that keep the subscriber's copy right:
docs/recovery.md has the table. Engines' own streams have no epochs, heartbeats or snapshots: `kvist.events.restarts`
gives them epochs. When an answer starts a new epoch, the stream may still come from the process before: its messages
are held back, and asked about, until an answer contains one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kvist.events.types import Holding

MAX_SEQUENCE = (1 << 63) - 1
"""Messages with larger numbers are ignored: no peer gets there, and the next number must fit in 64 bits."""

T = TypeVar("T")


class SourceState(StrEnum):
    """How exact the copy is: LIVE is exact, PARTIAL may lack blocks but has no wrong ones, RESYNCING may have both."""

    LIVE = "live"
    PARTIAL = "partial"
    RESYNCING = "resyncing"


class ClearReason(StrEnum):
    """Why a copy was dropped."""

    NEW_EPOCH = "new epoch"
    LOST = "lost beyond recovery"
    GONE = "gone with its publisher"
    DIVERGED = "digest differs"
    INCOMPLETE = "incomplete, and learnt from the beginning"


class Clear(NamedTuple):
    """Step: drop everything the copy holds of this stream."""

    reason: ClearReason


class Restore(NamedTuple):
    """Step: replace the copy by the snapshot in the answer."""


class Apply(NamedTuple, Generic[T]):
    """Step: apply this message to the copy."""

    body: T


Step: TypeAlias = Clear | Restore | Apply[T]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The bounds of a session's memory and patience."""

    max_held_messages: int = 1024
    """Messages held back behind a gap; a further one drops the oldest, which the replay brings again."""
    max_asks: int = 3
    """Questions in a row without a complete answer before the missing messages count as lost."""
    max_heals: int = 10
    """How often an engine that could not be asked is asked later for everything it keeps."""
    retry_s: float = 0.5
    """The wait before the second question; doubles with each, up to `max_retry_s`."""
    max_retry_s: float = 30.0
    epoch_grace_s: float = 3.0
    """After this much silence an earlier epoch is accepted: the publisher's clock went back."""
    silence_s: float = 10.0
    """A publisher that sends heartbeats and is silent this long is no longer trusted."""


MAX_LEFT_EPOCHS = 16
"""How many epochs that were left for an earlier one are remembered."""
NO_REPLAY = SessionLimits(max_asks=1, max_heals=0)
"""For a peer that cannot be asked: missing messages are lost at once."""


class QuestionTimer:
    """Decides when to ask the peer: at once, then after ever longer waits, at most `max_asks` times."""

    def __init__(self, limits: SessionLimits) -> None:
        self.ask_at_s: float | None = None
        """When the question may be asked; None while there is none."""
        self.is_healing = False
        """Whether the question is for everything the peer keeps, to complete a partial copy."""
        self.num_unanswered = 0
        self.num_heals_in_a_row = 0
        self._limits = limits
        self._heal_at_s = 0.0

    @property
    def is_asking(self) -> bool:
        return self.ask_at_s is not None

    def ask(self, now_s: float, after_s: float = 0.0) -> None:
        """Schedule a question `after_s` from now."""
        self.ask_at_s = now_s + after_s

    def retry(self, now_s: float) -> bool:
        """Schedule the question again, unless it was asked `max_asks` times or is for everything; return whether."""
        if self.is_healing or self.num_unanswered + 1 >= self._limits.max_asks:
            return False
        self.num_unanswered += 1
        self.ask(now_s, self.backoff_s(self.num_unanswered))
        return True

    def may_heal(self, now_s: float) -> bool:
        """Return whether the last question for everything was long enough ago."""
        return now_s >= self._heal_at_s

    def heal(self, now_s: float) -> None:
        """Schedule a question for everything, if the last one was long enough ago."""
        if self.may_heal(now_s):
            self.delay_heal(now_s)
            self.is_healing = True
            self.ask(now_s)

    def delay_heal(self, now_s: float) -> None:
        """Allow the next question for everything after a wait that grows each time."""
        self.num_heals_in_a_row += 1
        self._heal_at_s = now_s + self.backoff_s(self.num_heals_in_a_row)

    def clear(self) -> None:
        """Drop the question: it was answered, or given up."""
        self.ask_at_s = None
        self.is_healing = False

    def backoff_s(self, num_times: int) -> float:
        """Return the wait after something that happened so many times in a row."""
        delay_s: float = self._limits.retry_s * 2 ** min(num_times - 1, 30)
        return min(delay_s, self._limits.max_retry_s)


class Session(Generic[T]):
    """Decides about one stream; whatever a peer sends, it never raises and never exceeds its limits."""

    def __init__(self, limits: SessionLimits | None = None, *, has_snapshots: bool = False) -> None:
        """Follow a peer; one with `has_snapshots` can always say what it holds, however few messages it keeps."""
        self._limits = SessionLimits() if limits is None else limits
        self._timer = QuestionTimer(self._limits)
        self._has_snapshots = has_snapshots
        self.epoch: int | None = None
        """The epoch being followed; None before the first message."""
        self.expected_sequence = 0
        self.is_complete = True
        """Whether the copy has all that the peer held before the expected message, as far as is known."""
        self.is_unproven = False
        """Whether the stream may still come from a process before the one that answered."""
        self.held: deque[tuple[int, T]] = deque(maxlen=self._limits.max_held_messages)
        """Messages held back behind a gap, with their sequences."""
        self._announced = 0  # the next sequence by a heartbeat: what lies before it exists, even if nothing follows
        self._is_silent = False  # the publisher is gone, or silent for so long that it may be
        self._has_heartbeat = False  # in this epoch: only then does silence mean something
        self._last_message_at_s = 0.0
        self._left_epochs: deque[int] = deque(maxlen=MAX_LEFT_EPOCHS)
        self._is_doubted = False
        self._num_heals_left = 0
        self._num_divergences_in_a_row = 0
        self.num_gaps = self.num_duplicates = self.num_stale = 0
        self.num_replays = self.num_snapshots = self.num_recovered = 0
        self.num_lost = self.num_diverged = self.num_epochs = 0

    @property
    def state(self) -> SourceState:
        """Return how exact the copy is once all steps so far are taken."""
        if self._timer.is_asking or self._is_silent:
            return SourceState.RESYNCING
        return SourceState.LIVE if self.is_complete else SourceState.PARTIAL

    @property
    def is_in_step(self) -> bool:
        """Whether the next message in sequence would simply be applied: nothing is asked for, held back or unproven."""
        return self.epoch is not None and not self._timer.is_asking and not self.is_unproven

    def question(self, now_s: float) -> int | None:
        """Return the sequence to ask from; None while there is no question, or it is too early."""
        ask_at_s = self._timer.ask_at_s
        if ask_at_s is None or now_s < ask_at_s:
            return None
        return 0 if self._timer.is_healing else self.expected_sequence

    def receive(self, epoch: int, sequence: int, body: T, now_s: float) -> list[Step[T]]:
        """Return the steps for a message of the stream."""
        if self._is_beyond(sequence) or not self._accepts(epoch, now_s):
            return []
        steps = self._enter(epoch)
        if not self._timer.is_asking:
            self.num_gaps += sequence > self.expected_sequence
            if sequence > self.expected_sequence or (self.is_unproven and sequence == self.expected_sequence > 0):
                self._timer.ask(now_s)
        if self._timer.is_asking:
            self.held.append((sequence, body))
        elif sequence == self.expected_sequence:
            self.expected_sequence += 1
            steps.append(Apply(body))
        else:
            self.num_duplicates += 1
            if sequence == self.expected_sequence - 1 and not self.is_complete and self._has_snapshots:
                self._timer.heal(now_s)
        return steps

    def on_applied(self, num_messages: int, now_s: float) -> None:
        """Record that the caller applied the next messages in sequence itself, which `is_in_step` allows."""
        assert self.is_in_step
        self.expected_sequence += num_messages
        self._on_sign_of_life(now_s)

    def on_heartbeat(
        self, epoch: int, next_sequence: int, published: Holding, held: Holding, now_s: float
    ) -> list[Step[T]]:
        """Return the steps for a heartbeat: what the publisher holds before `next_sequence`, and the copy now."""
        if self._is_beyond(next_sequence) or not self._accepts(epoch, now_s):
            return []
        steps = self._enter(epoch)
        self._has_heartbeat = True
        self._announced = max(self._announced, next_sequence)
        if self._timer.is_asking:
            return steps
        if next_sequence > self.expected_sequence:
            self.num_gaps += 1
            self._timer.ask(now_s)
        elif next_sequence == self.expected_sequence and not steps:
            return self._compare(published, held, now_s)
        return steps

    def on_answer(
        self,
        epoch: int | None,
        messages: Iterable[tuple[int, T]] | None,
        now_s: float,
        *,
        snapshot_sequence: int | None = None,
    ) -> list[Step[T]]:
        """Return the steps for an answer: the messages that the peer kept, oldest first; None for no answer.

        With a `snapshot_sequence` the answer begins with a snapshot of the state before that message. An answer reaches
        up to the peer's newest message at that time, so what it lacks is lost, unless the peer has snapshots.
        """
        if messages is None or (snapshot_sequence is not None and self._is_beyond(snapshot_sequence)):
            return self._on_no_answer(now_s)
        self.num_replays += 1
        is_about_other_epoch = epoch != self.epoch and self.expected_sequence > 0
        if epoch is None or not self._accepts(epoch, now_s):
            if self._has_snapshots:
                return self._on_no_answer(now_s)
            self._clear_question()
            return self._release_held(None)
        answer = deque((sequence, body) for sequence, body in messages if not self._is_beyond(sequence))
        is_from_start = snapshot_sequence is not None or (len(answer) > 0 and answer[0][0] == 0)
        is_unproven = self._leaves_unproven(epoch, answer)
        steps = self._enter(epoch)
        self.is_unproven = is_unproven
        if is_about_other_epoch and not is_from_start:
            # The question was about another epoch's numbers: ask this one from its beginning.
            self._timer.ask_at_s = now_s
            return steps
        if self._timer.is_healing and not is_from_start:
            return steps + self._on_no_answer(now_s)
        steps += self._restart_copy(snapshot_sequence)
        return steps + self._recover(answer, now_s)

    def on_snapshot(self, epoch: int, sequence: int, now_s: float) -> list[Step[T]]:
        """Return the steps for a snapshot in the stream itself, as recordings have them: messages from there on follow.

        They are not lost before, whatever heartbeats announced.
        """
        if self._is_beyond(sequence) or not self._accepts(epoch, now_s):
            return []
        steps = self._enter(epoch)
        self._announced = 0
        return steps + self._restart_copy(sequence)

    def doubt(self, now_s: float) -> None:
        """Ask whether the stream is still the same process's, after a reconnection; messages held back are dropped."""
        self._is_doubted = True
        self.is_unproven = False
        self.held.clear()
        if not self._timer.is_asking:
            self._timer.ask(now_s)

    def trust(self) -> None:
        """Record proof that the connection is with the process that the copy is of."""
        self._is_doubted = self.is_unproven = False

    def is_healable(self, now_s: float) -> bool:
        """Return whether to ask an engine for all that it keeps: it could not be asked, and the copy is partial."""
        return self._num_heals_left > 0 and self.state is SourceState.PARTIAL and self._timer.may_heal(now_s)

    def heal(self, epoch: int, messages: Sequence[tuple[int, T]] | None, now_s: float) -> list[Step[T]]:
        """Return the steps for the answer to that, None for none: without the stream's beginning it is of no use."""
        if messages and messages[0][0] == 0:
            self._timer.is_healing = True
            return self.on_answer(epoch, messages, now_s)
        # An engine that has forgotten its beginning will not remember it later.
        self._num_heals_left = self._num_heals_left - 1 if messages is None else 0
        self._timer.delay_heal(now_s)
        return []

    def resume(self, epoch: int, next_sequence: int, *, is_complete: bool, asks_at_s: float | None = None) -> None:
        """Continue from where another subscriber was, whose blocks the copy has; call it before anything else.

        The blocks count once a message shows that the stream continues from there, or an answer to the question that is
        asked at `asks_at_s`, if given; if they show that it does not, the copy is cleared.
        """
        self.epoch = epoch
        self._is_silent = True
        self.expected_sequence, self.is_complete = next_sequence, is_complete
        self.num_epochs = 1
        self._timer.ask_at_s = asks_at_s

    def on_cleared(self, *, by_loss: bool = False) -> None:
        """Record that the copy was cleared: by a loss, or by a message after which nothing is missing."""
        self.is_complete = not by_loss

    def on_departure(self) -> None:
        """Record that the peer is known to be gone: nothing is trusted until it, or another, sends something."""
        self._is_silent = True

    def is_silent_since(self, since_s: float) -> bool:
        """Return whether nothing of the followed epoch came since then, or for too long before."""
        return self._is_silent or (self.epoch is not None and self._last_message_at_s < since_s)

    def on_rank_gone(self, now_s: float) -> list[Step[T]]:
        """Return the steps for a peer that is there but does not have this stream any more: the copy is dropped."""
        self._restart_epoch()
        if self.epoch is not None:
            self._left_epochs.append(self.epoch)
        self.epoch = None
        self._on_sign_of_life(now_s)
        return [self._lose(ClearReason.GONE)]

    def on_divergence(self, now_s: float) -> list[Step[T]]:
        """Return the steps for a copy that is wrong: learn it again, after a growing wait if that repeats."""
        self.num_diverged += 1
        num_before = self._num_divergences_in_a_row
        self._num_divergences_in_a_row += 1
        self._restart_numbering()
        self._timer.ask(now_s, self._timer.backoff_s(num_before) if num_before else 0.0)
        return [Clear(ClearReason.DIVERGED)]

    def tick(self, now_s: float) -> None:
        """Notice silence; call it every second or so."""
        self._is_silent |= self._has_heartbeat and now_s - self._last_message_at_s > self._limits.silence_s

    def _on_sign_of_life(self, now_s: float) -> None:
        self._last_message_at_s = now_s
        self._is_silent = False

    def _is_beyond(self, sequence: int) -> bool:
        self.num_stale += (is_beyond := sequence > MAX_SEQUENCE)
        return is_beyond

    def _accepts(self, epoch: int, now_s: float) -> bool:
        """Return whether a message of this epoch counts; one that does also shows that the publisher is alive.

        A straggler of an earlier epoch, or of one that was left for an earlier one, counts only after some silence.
        """
        is_past = epoch in self._left_epochs or (self.epoch is not None and epoch < self.epoch)
        if is_past and epoch != self.epoch and now_s - self._last_message_at_s <= self._limits.epoch_grace_s:
            self.num_stale += 1
            return False
        self._on_sign_of_life(now_s)
        return True

    def _enter(self, epoch: int) -> list[Step[T]]:
        """Follow this epoch from now on; a copy of another one is cleared."""
        if epoch == self.epoch:
            return []
        steps: list[Step[T]] = [] if self.epoch is None else [Clear(ClearReason.NEW_EPOCH)]
        if self.epoch is not None and epoch < self.epoch:
            self._left_epochs.append(self.epoch)
        self.epoch = epoch
        self._restart_epoch()
        self.num_epochs += 1
        return steps

    def _restart_epoch(self) -> None:
        self._restart_numbering()
        self.held.clear()
        self._announced = 0
        self._has_heartbeat = False

    def _restart_numbering(self) -> None:
        self.expected_sequence = 0
        self.is_complete = True
        self.is_unproven = False
        self._timer.num_unanswered = 0
        self._clear_question()

    def _clear_question(self) -> None:
        self._timer.clear()
        self._is_doubted = False

    def _on_no_answer(self, now_s: float) -> list[Step[T]]:
        """Ask again later; after the last attempt, what is missing or could not be proven counts as lost."""
        if self._timer.retry(now_s):
            return []
        was_healing = self._timer.is_healing
        is_unexplained = self._is_doubted or (self.is_unproven and len(self.held) > 0)
        self._clear_question()
        if not was_healing and not self._has_snapshots:
            self._num_heals_left = self._limits.max_heals
            self._timer.delay_heal(now_s)
        steps: list[Step[T]] = []
        if is_unexplained:
            self.is_unproven = False
            steps = [self._lose()] if self.expected_sequence > 0 else []
        return steps + self._release_held(now_s if was_healing else None)

    def _leaves_unproven(self, epoch: int, answer: Iterable[tuple[int, T]]) -> bool:
        """Return whether the stream may be of an earlier process than the answer, which has none of what is held."""
        is_same = epoch == self.epoch and not self.is_unproven and not self._timer.is_healing
        if is_same or self._has_snapshots:
            return False
        answered = dict(answer)
        return not any(sequence in answered and answered[sequence] == body for sequence, body in self.held)

    def _restart_copy(self, snapshot_sequence: int | None) -> list[Step[T]]:
        """Begin the copy anew where an answer does: with its snapshot, or empty if a partial copy is completed."""
        if snapshot_sequence is not None:
            self.num_snapshots += 1
            self.is_complete = True
            self.expected_sequence = snapshot_sequence
            return [Restore()]
        if self._timer.is_healing:
            self.is_complete = True
            self.expected_sequence = 0
            return [Clear(ClearReason.INCOMPLETE)]
        return []

    def _recover(self, answer: deque[tuple[int, T]], now_s: float) -> list[Step[T]]:
        """Apply an answer, then the messages held back behind the gap."""
        retry_at_s = now_s if self._has_snapshots else None
        self._clear_question()
        steps = self._apply_in_order(answer, retry_at_s)
        self.num_recovered += sum(isinstance(step, Apply) for step in steps)
        if answer:
            return steps
        if self.is_unproven:  # messages of the process that answered would be in the answer
            self.held.clear()
        return steps + self._release_held(retry_at_s)

    def _release_held(self, retry_at_s: float | None) -> list[Step[T]]:
        """Apply the messages held back; what is still missing is asked for again at `retry_at_s`, or lost if None."""
        steps = self._apply_in_order(self.held, retry_at_s)
        if self.held or self._retry_gap_before(self._announced, retry_at_s):
            return steps
        self._timer.num_unanswered = 0
        return steps + self._skip_to(self._announced)

    def _apply_in_order(self, messages: deque[tuple[int, T]], retry_at_s: float | None) -> list[Step[T]]:
        """Apply messages, oldest first and removing them, up to a gap that is asked about again."""
        steps: list[Step[T]] = []
        while messages and not self._retry_gap_before(messages[0][0], retry_at_s):
            sequence, body = messages.popleft()
            steps += self._skip_to(sequence)
            if sequence == self.expected_sequence:
                self.expected_sequence += 1
                steps.append(Apply(body))
        return steps

    def _retry_gap_before(self, sequence: int, retry_at_s: float | None) -> bool:
        """Ask again for what is missing before a message, at `retry_at_s` unless that is None; return whether."""
        return sequence > self.expected_sequence and retry_at_s is not None and self._timer.retry(retry_at_s)

    def _skip_to(self, sequence: int) -> list[Step[T]]:
        if sequence <= self.expected_sequence:
            return []
        self.expected_sequence = sequence
        return [self._lose()]

    def _lose(self, reason: ClearReason = ClearReason.LOST) -> Clear:
        self.is_complete = False
        self.num_lost += 1
        return Clear(reason)

    def _compare(self, published: Holding, held: Holding, now_s: float) -> list[Step[T]]:
        """Compare the copy with what a heartbeat says of the same moment."""
        if published == held:
            self.is_complete = True
            self._num_divergences_in_a_row = 0
            self._timer.num_heals_in_a_row = 0
            return []
        if not self.is_complete and held.num_blocks <= published.num_blocks:
            if self._has_snapshots:  # a partial copy is of some use, and kept if there is no answer
                self._timer.heal(now_s)
            return []
        return self.on_divergence(now_s)

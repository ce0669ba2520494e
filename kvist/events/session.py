"""The subscriber's judgement of one stream: what to apply, what to drop, when to ask again. No I/O, no clock.

`Session` follows an (epoch, sequence) numbering and says, step by step, what becomes of the subscriber's copy:
docs/recovery.md has the table. Engines' own streams have neither epoch nor heartbeat nor snapshots:
`kvist.events.restarts` gives them an epoch. An answer of a new one is another process's, of which the stream need not
be yet: what it goes on with is held back and asked about until an answer has it, too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kvist.events.types import Holding

MAX_SEQUENCE = (1 << 63) - 1
"""What has a number beyond it is passed over: no peer gets there, and what follows must fit in 64 bits."""

T = TypeVar("T")


class SourceState(StrEnum):
    """How far the copy can be trusted: LIVE is exact, PARTIAL lacks blocks but invents none, RESYNCING is neither."""

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
    """Step: replace what the copy holds by the snapshot that the answer came with."""


class Apply(NamedTuple, Generic[T]):
    """Step: apply this message to the copy."""

    body: T


Step: TypeAlias = Clear | Restore | Apply[T]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The bounds of a session's memory and patience."""

    max_held_messages: int = 1024
    """Messages kept behind a gap; beyond them the oldest goes, since the replay brings it again."""
    max_asks: int = 3
    """Questions in a row without the whole answer before what is missing counts as lost."""
    max_heals: int = 10
    """Questions for all that an engine keeps, once it could not be asked: it may be able to tell later."""
    jitter_s: float = 0.02
    """The first question waits up to this long, so that the subscribers of one publisher do not ask at once."""
    retry_s: float = 0.5
    """The wait before the second question; doubles with each, up to `max_retry_s`."""
    max_retry_s: float = 30.0
    epoch_grace_s: float = 3.0
    """After this much silence an earlier epoch is believed: the publisher's clock went back."""
    silence_s: float = 10.0
    """A publisher that sends heartbeats and is silent this long is no longer trusted."""


MAX_LEFT_EPOCHS = 16
"""Epochs remembered that were left for an earlier one."""
NO_REPLAY = SessionLimits(max_asks=1, max_heals=0, jitter_s=0.0)
"""For a peer that nobody can ask: what is missing is lost at once."""


class Patience:
    """Knows when to ask: after a random moment, then after ever longer ones, as often as it is worth it."""

    def __init__(self, limits: SessionLimits, rng: random.Random) -> None:
        self.ask_at_s: float | None = None
        """When the question may be put, None while there is none."""
        self.is_healing = False
        """Whether everything is asked for, to make a partial copy whole."""
        self.num_unanswered = 0
        self.num_heals_in_a_row = 0
        self._limits = limits
        self._rng = rng
        self._heal_at_s = 0.0

    @property
    def is_asking(self) -> bool:
        return self.ask_at_s is not None

    def ask(self, now_s: float, after_s: float = 0.0) -> None:
        """Have a question put after a while, and a random moment more."""
        self.ask_at_s = now_s + after_s + self._rng.random() * self._limits.jitter_s

    def ask_again(self, now_s: float) -> bool:
        """Have the question put again later, if patience is left and what is asked for is needed; return whether."""
        if self.is_healing or self.num_unanswered + 1 >= self._limits.max_asks:
            return False
        self.num_unanswered += 1
        self.ask(now_s, self.retry_after_s(self.num_unanswered))
        return True

    def may_heal(self, now_s: float) -> bool:
        """Return whether everything may be asked for: it was not a short while ago."""
        return now_s >= self._heal_at_s

    def heal(self, now_s: float) -> None:
        """Have everything asked for, if it may be."""
        if self.may_heal(now_s):
            self.delay_heal(now_s)
            self.is_healing = True
            self.ask(now_s)

    def delay_heal(self, now_s: float) -> None:
        """Ask for everything after a wait that is longer each time."""
        self.num_heals_in_a_row += 1
        wait_s = self.retry_after_s(self.num_heals_in_a_row)
        self._heal_at_s = now_s + wait_s + self._rng.random() * self._limits.jitter_s

    def settle(self) -> None:
        self.ask_at_s = None
        self.is_healing = False

    def retry_after_s(self, num_times: int) -> float:
        """Return the wait after something that happened so many times in a row."""
        delay_s: float = self._limits.retry_s * 2 ** min(num_times - 1, 30)
        return min(delay_s, self._limits.max_retry_s)


class Presence:
    """Follows the latest epoch, or an earlier one after silence; one that was left for an earlier one is no better."""

    def __init__(self, limits: SessionLimits) -> None:
        self.epoch: int | None = None
        """The epoch being followed, None before the first message."""
        self.is_silent = False
        """Whether the publisher is gone, or silent for so long that it may be."""
        self.has_heartbeat = False
        """Whether there was a heartbeat in this epoch, so that silence means something."""
        self._limits = limits
        self._left_epochs: deque[int] = deque(maxlen=MAX_LEFT_EPOCHS)
        self._heard_at_s = 0.0

    def accepts(self, epoch: int, now_s: float) -> bool:
        """Take note that something of an epoch came; return whether that may be what is followed from here on.

        A straggler of an epoch that came before, by its number or in fact, is not, unless the present one is silent.
        """
        is_past = epoch in self._left_epochs or (self.epoch is not None and epoch < self.epoch)
        if is_past and epoch != self.epoch and now_s - self._heard_at_s <= self._limits.epoch_grace_s:
            return False
        self.on_message(now_s)
        return True

    def on_message(self, now_s: float) -> None:
        self._heard_at_s = now_s
        self.is_silent = False

    def enter(self, epoch: int) -> None:
        if self.epoch is not None and epoch < self.epoch:
            self._left_epochs.append(self.epoch)
        self.epoch = epoch
        self.has_heartbeat = False

    def leave(self, now_s: float) -> None:
        """Follow no epoch until another one is heard, or this one after all."""
        if self.epoch is not None:
            self._left_epochs.append(self.epoch)
        self.epoch = None
        self.has_heartbeat = self.is_silent = False
        self._heard_at_s = now_s

    def is_missed(self, since_s: float) -> bool:
        """Return whether the publisher is silent, or nothing of an epoch that is followed was heard since then."""
        return self.is_silent or (self.epoch is not None and self._heard_at_s < since_s)

    def tick(self, now_s: float) -> None:
        self.is_silent |= self.has_heartbeat and now_s - self._heard_at_s > self._limits.silence_s


class Session(Generic[T]):
    """Judges one stream; nothing a peer sends makes it raise, or hold more than its limits say."""

    def __init__(
        self, limits: SessionLimits | None = None, rng: random.Random | None = None, *, has_snapshots: bool = False
    ) -> None:
        """Follow a peer that, with `has_snapshots`, can always tell what it holds, however little it still keeps."""
        self._limits = SessionLimits() if limits is None else limits
        self._patience = Patience(self._limits, random.Random() if rng is None else rng)
        self._has_snapshots = has_snapshots
        self._presence = Presence(self._limits)
        self.expected_sequence = 0
        self.is_complete = True
        """Whether the copy has all that the peer held before that message, as far as is known."""
        self.is_unproven = False
        """Whether the stream may still be that of an earlier process than the one that answered."""
        self.held: deque[tuple[int, T]] = deque(maxlen=self._limits.max_held_messages)
        self._announced = 0  # by a heartbeat, as the next sequence: what lies before it exists, even if nothing follows
        self._is_doubted = False
        self._num_heals_left = 0
        self._num_divergences_in_a_row = 0
        self.num_gaps = self.num_duplicates = self.num_stale = 0
        self.num_replays = self.num_snapshots = self.num_recovered = 0
        self.num_lost = self.num_diverged = self.num_epochs = 0

    @property
    def state(self) -> SourceState:
        """Return how far the copy can be trusted once all steps so far are taken."""
        if self._patience.is_asking or self._presence.is_silent:
            return SourceState.RESYNCING
        return SourceState.LIVE if self.is_complete else SourceState.PARTIAL

    @property
    def epoch(self) -> int | None:
        """Return the epoch being followed, None before the first message."""
        return self._presence.epoch

    @property
    def is_in_step(self) -> bool:
        """Return whether the next message in sequence would be applied, and nothing else: none is asked for or held."""
        return self._presence.epoch is not None and not self._patience.is_asking and not self.is_unproven

    def question(self, now_s: float) -> int | None:
        """Return the sequence to ask from, None while there is nothing to ask or it is too early."""
        ask_at_s = self._patience.ask_at_s
        if ask_at_s is None or now_s < ask_at_s:
            return None
        return 0 if self._patience.is_healing else self.expected_sequence

    def receive(self, epoch: int, sequence: int, body: T, now_s: float) -> list[Step[T]]:
        if self._is_beyond(sequence) or not self._accepts(epoch, now_s):
            return []
        steps = self._enter(epoch)
        if not self._patience.is_asking:
            self.num_gaps += sequence > self.expected_sequence
            if sequence > self.expected_sequence or (self.is_unproven and sequence == self.expected_sequence > 0):
                self._patience.ask(now_s)
        if self._patience.is_asking:
            self.held.append((sequence, body))
        elif not self._is_due(sequence):
            self.num_duplicates += 1
            if sequence == self.expected_sequence - 1 and not self.is_complete and self._has_snapshots:
                self._patience.heal(now_s)
        else:
            steps.append(Apply(body))
        return steps

    def on_applied(self, num_messages: int, now_s: float) -> None:
        """Take note that so many messages, next in sequence while in step, were applied: `receive` for all of them."""
        assert self.is_in_step
        self.expected_sequence += num_messages
        self._presence.on_message(now_s)

    def on_heartbeat(
        self, epoch: int, next_sequence: int, published: Holding, held: Holding, now_s: float
    ) -> list[Step[T]]:
        """Judge a heartbeat: what the publisher holds before `next_sequence`, against what the copy holds now."""
        if self._is_beyond(next_sequence) or not self._accepts(epoch, now_s):
            return []
        steps = self._enter(epoch)
        self._presence.has_heartbeat = True
        self._announced = max(self._announced, next_sequence)
        if self._patience.is_asking:
            return steps
        if next_sequence > self.expected_sequence:
            self.num_gaps += 1
            self._patience.ask(now_s)
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
        """Judge the answer to a question: the messages kept by the peer, oldest first; None for no answer.

        With a `snapshot_sequence` a snapshot of the state before that message stands in front. An answer reaches up to
        the newest message the peer had sent before, so what it lacks is lost, unless the peer has snapshots.
        """
        if messages is None or (snapshot_sequence is not None and self._is_beyond(snapshot_sequence)):
            return self._unanswered(now_s)
        self.num_replays += 1
        is_beside_the_point = epoch != self._presence.epoch and self.expected_sequence > 0
        if epoch is None or not self._accepts(epoch, now_s):
            if self._has_snapshots:
                return self._unanswered(now_s)
            self._settle()
            return self._release(None)
        answer = [(sequence, body) for sequence, body in messages if not self._is_beyond(sequence)]
        is_from_start = snapshot_sequence is not None or (answer != [] and answer[0][0] == 0)
        is_unproven = self._leaves_unproven(epoch, answer)
        steps = self._enter(epoch)
        self.is_unproven = is_unproven
        if is_beside_the_point and not is_from_start:
            # The question was about another epoch's numbers: ask this one from its beginning.
            self._patience.ask_at_s = now_s
            return steps
        if self._patience.is_healing and not is_from_start:
            return steps + self._unanswered(now_s)
        steps += self._begin_anew(snapshot_sequence)
        return steps + self._recover(answer, now_s)

    def doubt(self, now_s: float) -> None:
        """Trust nothing, and drop what was held, until a replay proves that the stream goes on: the peer was away."""
        self._is_doubted = True
        self.is_unproven = False
        self.held.clear()
        if not self._patience.is_asking:
            self._patience.ask(now_s)

    def trust(self) -> None:
        """Take note that the connection is with the process that the copy is of."""
        self._is_doubted = self.is_unproven = False

    def is_healable(self, now_s: float) -> bool:
        """Return whether to ask an engine for all that it keeps: it could not be asked, and the copy is partial."""
        return self._num_heals_left > 0 and self.state is SourceState.PARTIAL and self._patience.may_heal(now_s)

    def heal(self, epoch: int, messages: Sequence[tuple[int, T]] | None, now_s: float) -> list[Step[T]]:
        """Judge the answer to that, None for none: it is for nothing unless it has the beginning."""
        if messages and messages[0][0] == 0:
            self._patience.is_healing = True
            return self.on_answer(epoch, messages, now_s)
        # What was forgotten is not learnt again.
        self._num_heals_left = self._num_heals_left - 1 if messages is None else 0
        self._patience.delay_heal(now_s)
        return []

    def resume(self, epoch: int, next_sequence: int, *, is_complete: bool, asks_at_s: float | None = None) -> None:
        """Go on from where another subscriber was, whose blocks the copy has; to be called before anything else.

        They count once a message shows that the stream goes on from there, or an answer to the question that is asked
        if `asks_at_s` says when; if they show that it does not, the copy is cleared.
        """
        self._presence.enter(epoch)
        self._presence.is_silent = True
        self.expected_sequence, self.is_complete = next_sequence, is_complete
        self.num_epochs = 1
        self._patience.ask_at_s = asks_at_s

    def on_cleared(self, *, by_loss: bool = False) -> None:
        """Take note that the step just taken cleared the rank: after a message that did, nothing is missing."""
        self.is_complete = not by_loss

    def on_departure(self) -> None:
        """Take note that the peer is known to be gone: nothing is trusted until it, or another, is heard."""
        self._presence.is_silent = True

    def is_missed(self, since_s: float) -> bool:
        """Return whether nothing was heard since then, or for long, of what is followed."""
        return self._presence.is_missed(since_s)

    def on_forgotten(self, now_s: float) -> list[Step[T]]:
        """Judge a peer that is there and knows nothing of this: what was held is gone, and what is held not known."""
        self._forget_epoch()
        self._presence.leave(now_s)
        return [self._lose(ClearReason.GONE)]

    def on_divergence(self, now_s: float) -> list[Step[T]]:
        """Judge a copy that is not what it should be: learn it anew, after an ever longer wait if that repeats."""
        self.num_diverged += 1
        num_before = self._num_divergences_in_a_row
        self._num_divergences_in_a_row += 1
        self._restart_numbering()
        self._patience.ask(now_s, self._patience.retry_after_s(num_before) if num_before else 0.0)
        return [Clear(ClearReason.DIVERGED)]

    def tick(self, now_s: float) -> None:
        """Notice silence; call it every second or so."""
        self._presence.tick(now_s)

    def _is_beyond(self, sequence: int) -> bool:
        self.num_stale += (is_beyond := sequence > MAX_SEQUENCE)
        return is_beyond

    def _accepts(self, epoch: int, now_s: float) -> bool:
        self.num_stale += not (is_heard := self._presence.accepts(epoch, now_s))
        return is_heard

    def _enter(self, epoch: int) -> list[Step[T]]:
        if epoch == self._presence.epoch:
            return []
        steps: list[Step[T]] = [] if self._presence.epoch is None else [Clear(ClearReason.NEW_EPOCH)]
        self._presence.enter(epoch)
        self._forget_epoch()
        self.num_epochs += 1
        return steps

    def _forget_epoch(self) -> None:
        self._restart_numbering()
        self.held.clear()
        self._announced = 0

    def _restart_numbering(self) -> None:
        self.expected_sequence = 0
        self.is_complete = True
        self.is_unproven = False
        self._patience.num_unanswered = 0
        self._settle()

    def _settle(self) -> None:
        """Take the question as answered."""
        self._patience.settle()
        self._is_doubted = False

    def _is_due(self, sequence: int) -> bool:
        if sequence != self.expected_sequence:
            return False
        self.expected_sequence += 1
        return True

    def _unanswered(self, now_s: float) -> list[Step[T]]:
        if self._patience.ask_again(now_s):
            return []
        was_healing = self._patience.is_healing
        is_torn = self._is_doubted or (self.is_unproven and len(self.held) > 0)
        self._settle()
        if not was_healing and not self._has_snapshots:
            self._num_heals_left = self._limits.max_heals
            self._patience.delay_heal(now_s)
        steps: list[Step[T]] = []
        if is_torn:
            self.is_unproven = False
            steps = [self._lose()] if self.expected_sequence > 0 else []
        return steps + self._release(now_s if was_healing else None)

    def _leaves_unproven(self, epoch: int, answer: list[tuple[int, T]]) -> bool:
        """Return whether the stream may be of a process before the one that answered: nothing held is in its answer."""
        is_same = epoch == self._presence.epoch and not self.is_unproven and not self._patience.is_healing
        if is_same or self._has_snapshots:
            return False
        answered = dict(answer)
        return not any(sequence in answered and answered[sequence] == body for sequence, body in self.held)

    def _begin_anew(self, snapshot_sequence: int | None) -> list[Step[T]]:
        """Let the copy be what the snapshot is, or nothing if a partial one is learnt from the beginning."""
        if snapshot_sequence is not None:
            self.num_snapshots += 1
            self.is_complete = True
            self.expected_sequence = snapshot_sequence
            return [Restore()]
        if self._patience.is_healing:
            self.is_complete = True
            self.expected_sequence = 0
            return [Clear(ClearReason.INCOMPLETE)]
        return []

    def _recover(self, answer: list[tuple[int, T]], now_s: float) -> list[Step[T]]:
        """Apply an answer, then what was held behind the gap."""
        asks_again_at_s = now_s if self._has_snapshots else None
        self._settle()
        steps: list[Step[T]] = []
        for sequence, body in answer:
            if self._asks_again_before(sequence, asks_again_at_s):
                return steps
            steps += self._skip_to(sequence)
            if self._is_due(sequence):
                self.num_recovered += 1
                steps.append(Apply(body))
        if self.is_unproven:  # what was held is none of who answered, or it would be in the answer
            self.held.clear()
        return steps + self._release(asks_again_at_s)

    def _release(self, now_s: float | None) -> list[Step[T]]:
        """Apply what was held behind the gap; what is still missing is asked for again at `now_s`, or lost if None."""
        steps: list[Step[T]] = []
        while self.held:
            sequence, body = self.held[0]
            if self._asks_again_before(sequence, now_s):
                return steps
            self.held.popleft()
            steps += self._skip_to(sequence)
            if self._is_due(sequence):
                steps.append(Apply(body))
        if self._asks_again_before(self._announced, now_s):
            return steps
        self._patience.num_unanswered = 0
        return steps + self._skip_to(self._announced)

    def _asks_again_before(self, sequence: int, now_s: float | None) -> bool:
        """Return whether something before a message is missing, and asked for again."""
        return sequence > self.expected_sequence and now_s is not None and self._patience.ask_again(now_s)

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
        if published == held:
            self.is_complete = True
            self._num_divergences_in_a_row = 0
            self._patience.num_heals_in_a_row = 0
            return []
        if not self.is_complete and held.num_blocks <= published.num_blocks:
            if self._has_snapshots:  # a partial copy is good for something, and kept if there is no answer
                self._patience.heal(now_s)
            return []
        return self.on_divergence(now_s)

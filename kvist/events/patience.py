"""What a session knows of time: when to ask, and whether the publisher is still there. No I/O, no clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass


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

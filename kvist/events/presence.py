"""Who speaks on a stream: which start of the publisher is followed, and whether it is still there. No I/O, no clock."""

from __future__ import annotations

from collections import deque

from kvist.events.patience import SessionLimits

MAX_LEFT_EPOCHS = 16
"""Epochs remembered that were left for an earlier one."""


class Presence:
    """Follows the latest epoch, or an earlier one after silence; one that was left for an earlier one is no better."""

    def __init__(self, limits: SessionLimits) -> None:
        """Count as silence what the limits say."""
        self.epoch: int | None = None
        """The epoch being followed, None before the first message."""
        self.is_silent = False
        """Whether the publisher is gone, or silent for so long that it may be."""
        self.has_heartbeat = False
        """Whether there was a heartbeat in this epoch, so that silence means something."""
        self._limits = limits
        self._left_epochs: deque[int] = deque(maxlen=MAX_LEFT_EPOCHS)
        self._heard_at_s = 0.0

    def hears(self, epoch: int, now_s: float) -> bool:
        """Take note that something of an epoch came; return whether that may be what is followed from here on.

        A straggler of an epoch that came before, by its number or in fact, is not, unless the present one is silent.
        """
        is_past = epoch in self._left_epochs or (self.epoch is not None and epoch < self.epoch)
        if is_past and epoch != self.epoch and now_s - self._heard_at_s <= self._limits.epoch_grace_s:
            return False
        self.heard(now_s)
        return True

    def heard(self, now_s: float) -> None:
        """Take note that something of the epoch came."""
        self._heard_at_s = now_s
        self.is_silent = False

    def enter(self, epoch: int) -> None:
        """Follow an epoch."""
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
        """Notice silence."""
        self.is_silent |= self.has_heartbeat and now_s - self._heard_at_s > self._limits.silence_s

"""What the two ends of a transfer have in common: its states, its limits, and a memory of those that ended.

    INIT ──► ACTIVE ──► SCATTERING ──► COMPLETED      SCATTERING only where a write was bounced
      │        │            │
      │        └────────────┴──► QUARANTINED ──► FAILED
      └──────────────────────────────────────────►─┘

A transfer that fails says so at once; its *memory* may still be written to. QUARANTINED is a transfer that has failed
and whose memory must not be used again, FAILED one whose memory is free. Time alone never leads from one to the other:
each writer has to report, or be known to be dead. `kvist.transfer.receiver` and `kvist.transfer.sender` are the two
ends. They do no I/O and have no clock: methods take what happened and return what is to be done, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from enum import Enum
from math import inf
from typing import Generic, TypeVar

from kvist.errors import InvalidValueError

K = TypeVar("K")
V = TypeVar("V")


class TransferState(Enum):
    """How far a transfer is."""

    INIT = "init"
    ACTIVE = "active"
    SCATTERING = "scattering"
    COMPLETED = "completed"
    FAILED = "failed"
    QUARANTINED = "quarantined"

    @property
    def is_ended(self) -> bool:
        """Return whether nothing can happen to it or its memory any more."""
        return self in (TransferState.COMPLETED, TransferState.FAILED)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long either end waits, and how many ended transfers it remembers, to know what comes late."""

    transfer_timeout_s: float = 30.0
    hold_timeout_s: float = 60.0
    cancel_retry_s: float = 1.0
    max_tombstones: int = 4096

    def __post_init__(self) -> None:
        """Raise InvalidValueError for a limit that is not positive, or endless."""
        for field in fields(self):
            if not 0 < getattr(self, field.name) < inf:
                raise InvalidValueError(field.name, getattr(self, field.name), "more than 0, and finite")


class Tombstones(Generic[K, V]):
    """What became of the latest `capacity` ended things; the oldest is forgotten first, and counted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._outcomes: OrderedDict[K, V] = OrderedDict()
        self.num_forgotten = 0

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._outcomes)

    def __contains__(self, key: K) -> bool:
        """Return whether it ended, as far as is remembered."""
        return key in self._outcomes

    def bury(self, key: K, outcome: V) -> None:
        """Remember how something ended; what was said first stays."""
        if key in self._outcomes:
            return
        if len(self._outcomes) == self._capacity:
            self._outcomes.popitem(last=False)
            self.num_forgotten += 1
        self._outcomes[key] = outcome

    def outcome(self, key: K) -> V | None:
        """Return how it ended, None if that is not remembered."""
        return self._outcomes.get(key)

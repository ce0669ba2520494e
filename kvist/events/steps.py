"""What a session says: the steps that turn a subscriber's copy into what the publisher holds, and how good it is."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

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


class Holding(NamedTuple):
    """What one side holds: the number of (block, tier) pairs, and their digest (`kvist.events.digest`)."""

    num_blocks: int
    digest: int


Step: TypeAlias = Clear | Restore | Apply[T]

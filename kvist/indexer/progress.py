"""How far a source was followed: what another indexer needs, beside the blocks, to go on from there."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvist.events.types import NonNegative, Rank


class RankProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank's canonical stream up to, and without, `next_sequence`."""

    rank: Rank
    epoch: NonNegative
    next_sequence: NonNegative
    is_complete: bool
    """Whether nothing was lost, so that the blocks are all there are."""


class CanonicalProgress(msgspec.Struct, tag="canonical", array_like=True, frozen=True):
    """A source of canonical batches: each of its ranks that can be trusted."""

    ranks: tuple[RankProgress, ...]


class EngineProgress(msgspec.Struct, tag="engine", array_like=True, frozen=True):
    """An engine's own stream, which tells no epoch: its last messages prove that it is the same process."""

    next_sequence: NonNegative
    is_complete: bool
    fingerprints: tuple[tuple[NonNegative, NonNegative], ...]
    """Sequence and XXH3-64 of some of the last messages, oldest first."""
    ranks: tuple[Rank, ...]


Progress: TypeAlias = CanonicalProgress | EngineProgress

"""How far a source was followed: what another indexer needs, beside the blocks, to go on from there."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvist.events.types import GroupRule, NonNegative, Rank, RankOrCompanion
from kvist.publisher.filter import FilterState


class RankProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank's canonical stream up to, and without, `next_sequence`."""

    rank: RankOrCompanion
    epoch: NonNegative
    next_sequence: NonNegative
    is_complete: bool
    """Whether nothing was lost, so that the blocks are all there are."""


class CanonicalProgress(msgspec.Struct, tag="canonical", array_like=True, frozen=True):
    """A source of canonical batches: each of its ranks that can be trusted."""

    ranks: tuple[RankProgress, ...]


class EngineRankProgress(msgspec.Struct, array_like=True, frozen=True):
    """One rank of an engine's stream."""

    rank: Rank
    filter: FilterState
    is_whole: bool
    """Whether the rank said that it holds nothing since anything of the stream was lost."""
    copies: bytes
    """Engine hashes, as `fold_hash` has them, each with a tier and the number of its copies there beyond the first.

    Or 4 plus one of `other_groups`, with the number of all of its copies.
    """
    other_groups: dict[int, GroupRule]
    """The key of each, and what it must hold for a hit."""
    is_offloading: bool
    """Whether it keeps blocks beside the GPU, too."""


class EngineProgress(msgspec.Struct, tag="engine", array_like=True, frozen=True):
    """An engine's own stream, which tells no epoch: its last messages prove that it is the same process."""

    next_sequence: NonNegative
    is_complete: bool
    is_in_doubt: bool
    """Whether it may be another process by now, which only a replay can tell."""
    fingerprints: tuple[tuple[NonNegative, NonNegative], ...]
    """Sequence and XXH3-64 of some of the last messages, oldest first."""
    ranks: tuple[EngineRankProgress, ...]


Progress: TypeAlias = CanonicalProgress | EngineProgress

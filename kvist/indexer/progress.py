"""How far a source was followed: what another indexer needs, beside the blocks, to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Self, TypeAlias

import msgspec

from kvist.events.engine_events import FULL, UnsizedWindow
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
    """One rank of an engine's stream, and the state of its window filter. A window of 0 stands for full attention."""

    rank: Rank
    is_created_phase: bool
    window: NonNegative | None
    group: int | None
    is_learning: bool
    shown_groups: tuple[tuple[bool, int], ...]
    """Each a group's number or, where the first is False, a window."""
    has_published: bool
    has_published_unknown: bool
    is_whole: bool = False
    """Whether the rank said that it holds nothing since anything of the stream was lost."""
    copies: bytes = b""
    """Engine hashes, as `fold_hash` has them, each with a tier and the number of its copies there beyond the first.

    Or 4 plus one of `other_groups`, with the number of all of its copies.
    """
    other_groups: tuple[tuple[int, GroupRule], ...] = ()
    """The key of each, and what it must hold for a hit."""
    is_offloading: bool = False
    """Whether it keeps blocks beside the GPU, too."""

    @classmethod
    def of(
        cls,
        rank: int,
        state: FilterState,
        *,
        is_whole: bool = False,
        copies: bytes = b"",
        others: Mapping[int, GroupRule] = MappingProxyType({}),
        is_offloading: bool = False,
    ) -> Self:
        """Return the progress of a rank whose filter is in this state."""
        groups = [
            (True, each[0]) if isinstance(each, tuple) else (False, _written(each)) for each in state.shown_groups
        ]
        window = None if state.window is None else _written(state.window)
        return cls(
            rank,
            state.is_created_phase,
            window,
            state.group,
            state.is_learning,
            tuple(groups),
            state.has_published,
            state.has_published_unknown,
            is_whole,
            copies,
            tuple(others.items()),
            is_offloading,
        )

    @property
    def filter_state(self) -> FilterState:
        """Return the state of the filter."""
        return FilterState(
            self.is_created_phase,
            None if self.window is None else _read(self.window),
            self.group,
            self.is_learning,
            {(number,) if is_group else _read(number) for is_group, number in self.shown_groups},
            self.has_published,
            self.has_published_unknown,
        )


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


def _written(window: int | UnsizedWindow) -> int:
    return window if isinstance(window, int) else 0


def _read(window: int) -> int | UnsizedWindow:
    return window or FULL

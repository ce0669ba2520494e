"""What the index returns: plain values that do not change with the index."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.events import WorkerRank


class ApplyResult(NamedTuple):
    """The outcome of the events of one batch. Blocks count once a tier."""

    num_stored: int = 0
    num_not_found: int = 0  # removed, but not held
    num_parent_not_found: int = 0  # stored events refused
    num_invalid: int = 0  # stored events refused


class Depths(NamedTuple):
    """Leading blocks held in this tier or a faster one: cumulative, so never decreasing from left to right."""

    gpu: int
    host: int
    disk: int
    external: int


@dataclass(frozen=True, slots=True, eq=False)
class Match(Mapping[WorkerRank, Depths]):
    """How many leading blocks each rank holds; ranks that do not hold the first block are absent.

    A mapping for convenience; a policy reads the arrays, whose rows ascend by the last column of `depths`.
    `holder_ids`, `[num_holders]`, are small integers that stand for `ranks`. `depths`, `[num_holders, 4]`,
    are the leading blocks held, one column a tier, cumulative from GPU to EXTERNAL.
    """

    _ranks: list[WorkerRank]
    holder_ids: NDArray[np.uint32]
    depths: NDArray[np.uint32]
    num_blocks: int

    @property
    def ranks(self) -> list[WorkerRank]:
        return [self._ranks[holder] for holder in self.holder_ids.tolist()]

    def __getitem__(self, source: WorkerRank) -> Depths:
        for row, holder in enumerate(self.holder_ids.tolist()):
            if self._ranks[holder] == source:
                return Depths(*self.depths[row].tolist())
        raise KeyError(source)

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self.ranks)

    def items(self) -> ItemsView[WorkerRank, Depths]:
        """Return all in O(num_holders), which looking up a single one takes, too."""
        return dict(zip(self.ranks, map(Depths._make, self.depths.tolist()), strict=True)).items()

    def __len__(self) -> int:
        return len(self.holder_ids)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sizes and counters of an index at one moment."""

    num_blocks: int  # distinct blocks, with those that only swept-later ranks held
    num_held: int  # (block, rank, tier) triples
    num_ranks: int
    num_retired: int  # ranks gone, but not yet swept
    num_evicted: int  # distinct blocks that went because of the cap
    num_sets: int  # distinct sets of two or more holders
    size_bytes: int


class Residencies(NamedTuple):
    """Blocks, one row for each rank that holds one: hash, number of blocks before it (at most 262,143), and member.

    A member is `index into ranks << 4 | tiers`, where bit t of `tiers` stands for Tier t.
    """

    ranks: Sequence[WorkerRank]
    hashes: NDArray[np.uint64]
    depths: NDArray[np.uint32]
    members: NDArray[np.unsignedinteger]

    def part(self, start: int, end: int) -> Residencies:
        rows = slice(start, end)
        return Residencies(self.ranks, self.hashes[rows], self.depths[rows], self.members[rows])

"""What was held when: each stay of a block in a tier of a rank, and the tree of all that was held at a moment.

Blocks, gaps and snapshots count as in `statistics`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.events import Event, Stored, Tier, WorkerRank
from kvist.events.snapshot import Snapshot
from kvist.replay.blocks import Change, hashes_of
from kvist.replay.statistics import FollowedRank, StatisticsCollector

MAX_RUNS, MAX_HOLDERS_SHOWN = 200, 8
_FOREVER = np.iinfo(np.int64).max
_ROOT, _NOT_TOLD = -1, -2  # in place of a parent
_MAX_DOUBLINGS = 32  # of the steps towards a chain's first block: what is not there then goes in circles


class HistoryCollector(StatisticsCollector):
    """Notes, of each block that comes to a holder or leaves it, which is by turns, when that was."""

    def __init__(self) -> None:
        super().__init__()
        self._indices: dict[FollowedRank, int] = {}
        self._parents: dict[int, int | None] = {}  # of blocks that were seen to be stored; None where a prompt begins
        self._blocks, self._holders, self._times_ms = array("Q"), array("i"), array("q")

    def _apply(self, rank: FollowedRank, event: Event) -> None:
        super()._apply(rank, event)
        if isinstance(event, Stored):
            blocks = hashes_of(event)
            self._parents.update(zip(blocks, chain((event.parent,), blocks), strict=False))

    def _restore(self, rank: FollowedRank, snapshot: Snapshot) -> None:
        super()._restore(rank, snapshot)
        for held in snapshot.slices:
            self._parents.update(dict.fromkeys(held.hashes[held.depths == 0].tolist()))

    def _changed(self, rank: FollowedRank, changes: Sequence[Change], *, is_counted: bool = True) -> None:
        super()._changed(rank, changes, is_counted=is_counted)
        for tier, new, gone, *_ in changes:
            num = len(new) + len(gone)
            self._blocks.extend(chain(new, gone))
            self._holders.extend([self._idx(rank) * len(Tier) + tier] * num)
            self._times_ms.extend([self.time_ms] * num)

    def _idx(self, rank: FollowedRank) -> int:
        return self._indices.setdefault(rank, len(self._indices))

    def history(self) -> History:
        """Return what was held when, up to the last message."""
        hashes, blocks = np.unique(np.frombuffer(self._blocks, np.uint64), return_inverse=True)
        holders, times_ms = np.frombuffer(self._holders, np.int32), np.frombuffer(self._times_ms, np.int64)
        order = np.lexsort((holders, blocks))  # of one block and holder it keeps the order of time
        blocks, holders, times_ms = blocks[order].astype(np.int32), holders[order], times_ms[order]
        is_other = np.append(True, (np.diff(blocks) != 0) | (np.diff(holders) != 0))[: len(blocks)]
        firsts = np.flatnonzero(is_other)
        comes = (np.arange(len(blocks)) - np.repeat(firsts, np.diff(np.append(firsts, len(blocks))))) % 2 == 0
        leaves_ms = np.where(np.roll(comes, -1), _FOREVER, np.roll(times_ms, -1))
        after, num = self._parents.values(), len(self._parents)
        places = _places(hashes, np.fromiter(self._parents, np.uint64, num))
        above = _places(hashes, np.fromiter((parent or 0 for parent in after), np.uint64, num))
        above[np.fromiter((parent is None for parent in after), bool, num)] = _ROOT
        parents = np.full(len(hashes), _NOT_TOLD)
        parents[places[places >= 0]] = above[places >= 0]
        ranks = {}
        for source in self._sources.values():
            for rank, known in source.ranks.items():
                ranks[self._idx(known)] = rank, min(source.block_sizes, default=1)
        return History(
            [ranks[idx] for idx in range(len(ranks))],
            hashes,
            parents,
            (blocks[comes], holders[comes], times_ms[comes], leaves_ms[comes]),
        )


def _places(hashes: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where each is among hashes that are in order, _NOT_TOLD for those that are not there."""
    places = np.searchsorted(hashes, wanted)
    is_there = np.append(hashes, np.uint64(0))[places] == wanted
    return np.where(is_there & (places < len(hashes)), places, _NOT_TOLD)


class History:
    """Each block's stays: ask it for any moment, in milliseconds after the first message."""

    def __init__(
        self,
        ranks: Sequence[tuple[WorkerRank, int]],
        hashes: NDArray[np.uint64],
        parents: NDArray[np.int64],
        stays: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]],
    ) -> None:
        """Take ranks with their block sizes, blocks and their parents, and of stays block, holder, from and to when.

        Stays are in order of their blocks. A holder is a rank's index times the number of tiers, plus the tier.
        """
        self.ranks = ranks
        self._hashes, self._parents, self._stays = hashes, parents, stays
        self._secrets = np.random.default_rng(0).integers(1 << 63, size=len(ranks) * len(Tier), dtype=np.uint64)
        self._depths, above = (parents >= 0).astype(np.int64), parents.copy()
        for _ in range(_MAX_DOUBLINGS):
            is_below = above >= 0
            self._depths[is_below] += self._depths[above[is_below]]
            above[is_below] = above[above[is_below]]
        self._is_placed = above == _ROOT

    def _held(self, at_ms: int) -> list[NDArray[Any]]:
        """Return blocks, holders, and since when, of the stays that last at this moment."""
        blocks, holders, comes_ms, leaves_ms = self._stays
        is_held = (comes_ms <= at_ms) & (at_ms < leaves_ms)
        return [each[is_held] for each in (blocks, holders, comes_ms)]

    def blocks(self, at_ms: int) -> tuple[list[list[int]], int, int]:
        """Return each rank's blocks by tier, how many distinct ones there are, and how many of them are in the tree."""
        blocks, holders, _ = self._held(at_ms)
        distinct = np.unique(blocks)
        counts = np.bincount(holders, minlength=len(self._secrets)).reshape(-1, len(Tier))
        return counts.tolist(), len(distinct), int(np.count_nonzero(self._is_placed[distinct]))

    def tree(self, at_ms: int) -> list[dict[str, Any]]:
        """Return the largest runs of blocks that had one parent and the same holders, each behind the run it follows.

        A run is as large as all that is held of it and of what follows it. Blocks are left out of which snapshots
        alone told: what they follow is not known.
        """
        blocks, holders, comes_ms = self._held(at_ms)
        is_placed = self._is_placed[blocks]
        blocks, holders, comes_ms = blocks[is_placed], holders[is_placed], comes_ms[is_placed]
        held, firsts, sizes = np.unique(blocks, return_index=True, return_counts=True)
        if not len(held):
            return []
        holder_sets, num_copies = np.add.reduceat(self._secrets[holders], firsts), sizes.copy()
        indices = np.full(len(self._hashes), -1)
        indices[held] = np.arange(len(held))
        above, depths = self._parents[held], self._depths[held]
        above = np.where(above >= 0, indices[above], -1)
        num_below = np.bincount(above[above >= 0], minlength=len(held))
        begins = (above < 0) | (num_below[above] != 1) | (holder_sets != holder_sets[above])
        order = np.argsort(depths, kind="stable")
        for level in reversed(np.split(order, np.flatnonzero(np.diff(depths[order])) + 1)):
            below = level[above[level] >= 0]
            np.add.at(sizes, above[below], sizes[below])
        runs = np.where(begins, np.arange(len(held)), above)
        while (runs != runs[runs]).any():
            runs = runs[runs]
        ends, newest_ms = np.zeros_like(runs), np.zeros_like(comes_ms)
        ends[runs[order]] = order  # where several go to one place the last stays
        np.maximum.at(newest_ms, np.repeat(runs, num_copies), comes_ms)
        starts = np.flatnonzero(begins)
        shown = starts[np.lexsort((depths[starts], -sizes[starts]))][:MAX_RUNS].tolist()
        places: dict[int | None, int] = {run: place for place, run in enumerate(shown)}
        rows = []
        for run in shown:
            of_run = holders[firsts[run] : firsts[run] + num_copies[run]].tolist()
            tiers = {
                holder // len(Tier): Tier(holder % len(Tier)) for holder in reversed(of_run)
            }  # the fastest of each
            ranks = sorted(self.ranks[idx] for idx in tiers)
            block_size = ranks[0][1]
            rows.append(
                {
                    "prefix": f"{self._hashes[held[ends[run]]]:016x}",
                    "parent": places.get(int(runs[above[run]]) if above[run] >= 0 else None),
                    "from_tokens": int(depths[run]) * block_size,
                    "to_tokens": int(depths[ends[run]] + 1) * block_size,
                    "blocks": int(sizes[run]),
                    "newest_s": round(int(newest_ms[run]) / 1000, 3),
                    "tiers": Counter(tier.name.lower() for tier in tiers.values()),
                    "num_holders": len(ranks),
                    "holders": [f"{rank.worker} {rank.rank}" for rank, _ in ranks[:MAX_HOLDERS_SHOWN]],
                }
            )
        return rows

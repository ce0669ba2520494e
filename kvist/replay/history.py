"""A recording's history: when each block was in which tier of which rank, and the prefix tree of any moment.

Blocks, gaps and snapshots count as in `statistics`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier
from kvist.replay.statistics import RESTORED, STORED, StatisticsCollector, sorted_by_block

MAX_RUNS, MAX_HOLDERS_SHOWN = 200, 8
_FOREVER = np.iinfo(np.int64).max
_ROOT, _UNKNOWN = -1, -2  # in place of a parent's index
_MAX_DOUBLINGS = 32  # of the steps towards a chain's first block: one that is not reached then is in a cycle


def _find_hashes(hashes: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the index of each wanted hash among ascending hashes, _UNKNOWN for one that is not among them."""
    indices = np.searchsorted(hashes, wanted)
    is_found = np.append(hashes, np.uint64(0))[indices] == wanted
    return np.where(is_found & (indices < len(hashes)), indices, _UNKNOWN)


class History:
    """Every block's stays in holders; moments are in milliseconds after the first message."""

    def __init__(self, collector: StatisticsCollector) -> None:
        """Build from all that was collected."""
        self.ranks = collector.ranks()
        changes, is_next = sorted_by_block(collector.changes())
        self._hashes, blocks = np.unique(changes["block"], return_inverse=True)
        is_added = changes["kind"] <= RESTORED
        removed_ms = np.where(np.append(is_next, False)[1:], np.roll(changes["time_ms"], -1), _FOREVER)
        columns = blocks.astype(np.int32), changes["holder"], changes["time_ms"], removed_ms
        self._stays = [column[is_added] for column in columns]
        """Block index, holder, and the times of addition and removal, in order of blocks."""
        is_root = is_added & (changes["parent"] == changes["block"])
        is_placed = is_root | (changes["kind"] == STORED)
        above = np.where(is_root, _ROOT, _find_hashes(self._hashes, changes["parent"]))
        self._parents = parents = np.full(len(self._hashes), _UNKNOWN)
        parents[blocks[is_placed]] = above[is_placed]
        # A set of holders is identified by the sum of their random keys.
        self._holder_keys = np.random.default_rng(0).integers(
            1 << 63, size=len(self.ranks) * len(Tier), dtype=np.uint64
        )
        self._depths, above = (parents >= 0).astype(np.int64), parents.copy()
        for _ in range(_MAX_DOUBLINGS):
            is_below = above >= 0
            self._depths[is_below] += self._depths[above[is_below]]
            above[is_below] = above[above[is_below]]
        self._is_placed = above == _ROOT

    def _held(self, at_ms: int) -> list[NDArray[Any]]:
        """Return block, holder and time of addition of the stays at this moment."""
        blocks, holders, added_ms, removed_ms = self._stays
        is_held = (added_ms <= at_ms) & (at_ms < removed_ms)
        return [each[is_held] for each in (blocks, holders, added_ms)]

    def blocks(self, at_ms: int) -> tuple[list[list[int]], int, int]:
        """Return each rank's number of blocks by tier, and the numbers of distinct blocks and of those in the tree."""
        blocks, holders, _ = self._held(at_ms)
        distinct = np.unique(blocks)
        counts = np.bincount(holders, minlength=len(self._holder_keys)).reshape(-1, len(Tier))
        return counts.tolist(), len(distinct), int(np.count_nonzero(self._is_placed[distinct]))

    def tree(self, at_ms: int) -> list[dict[str, Any]]:
        """Return the tree's largest runs, unbranched chains of blocks with the same holders, each behind its parent.

        The size of a run counts the blocks of all runs below it, too. Blocks known from snapshots alone are left out,
        since their parents are not known.
        """
        blocks, holders, added_ms = self._held(at_ms)
        is_placed = self._is_placed[blocks]
        blocks, holders, added_ms = blocks[is_placed], holders[is_placed], added_ms[is_placed]
        held, firsts, sizes = np.unique(blocks, return_index=True, return_counts=True)
        if not len(held):
            return []
        holder_sets, num_copies = np.add.reduceat(self._holder_keys[holders], firsts), sizes.copy()
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
        ends, newest_ms = np.zeros_like(runs), np.zeros_like(added_ms)
        ends[runs[order]] = order  # of several indices for one run, numpy keeps the last
        np.maximum.at(newest_ms, np.repeat(runs, num_copies), added_ms)
        starts = np.flatnonzero(begins)
        shown = starts[np.lexsort((depths[starts], -sizes[starts]))][:MAX_RUNS].tolist()
        places: dict[int | None, int] = {run: place for place, run in enumerate(shown)}
        rows = []
        for run in shown:
            of_run = holders[firsts[run] : firsts[run] + num_copies[run]].tolist()
            # The fastest tier of each rank.
            tiers = {holder // len(Tier): Tier(holder % len(Tier)) for holder in reversed(of_run)}
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

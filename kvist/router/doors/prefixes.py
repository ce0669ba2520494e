"""A tree of the prefixes of recent prompts: how often each was asked for, how often it was held, and who holds it now.

A node is a run of blocks that all its prompts share. A block's hash covers all blocks before it, so two prompts share a
prefix for as long as their hashes are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvist.events import Tier
from kvist.router.doors.journal import JournalEntry
from kvist.router.index import FleetIndex
from kvist.router.prompts import KnownModels
from kvist.router.regret import Regret

MAX_LEAVES = 512
"""More leaves than this are removed, the least recently used first."""
MAX_SHOWN = 200
MAX_HOLDERS_SHOWN = 8
_QUOTED_TOKENS = 48


@dataclass(slots=True, eq=False)
class _Node:
    """A run of blocks that `uses` prompts have after its parent's; `hits` counts for each block who found it held."""

    hashes: NDArray[np.uint64]
    hits: NDArray[np.uint32]
    tokens: NDArray[np.uint32]
    depth: int
    """Where it ends, in blocks of a prompt."""
    used_at_s: float
    uses: int = 0
    children: dict[int, _Node] = field(default_factory=dict)

    def split(self, num_blocks: int, block_size: int) -> _Node:
        """Move the first blocks to a new node, which becomes the parent of this one, and return that."""
        cut, depth = num_blocks * block_size, self.depth - len(self.hashes) + num_blocks
        first = self.hashes[:num_blocks], self.hits[:num_blocks], self.tokens[:cut]
        upper = _Node(*first, depth, self.used_at_s, self.uses)
        self.hashes, self.hits, self.tokens = self.hashes[num_blocks:], self.hits[num_blocks:], self.tokens[cut:]
        upper.children[int(self.hashes[0])] = self
        return upper


class PrefixTree:
    """Counts prompts by their prefixes; times are arguments, and never decrease."""

    def __init__(self, models: KnownModels, index: FleetIndex | None, regret: Regret) -> None:
        """Quote prompts with the tokenisers of `models`, if tokens are given; name prefixes as `regret` does."""
        self._models, self._index, self._regret = models, index, regret
        self._roots: dict[tuple[str, int], _Node] = {}
        self._num_leaves = 0

    def add(self, entry: JournalEntry, now_s: float) -> None:
        """Count a prompt."""
        hashes, tokens = np.frombuffer(entry.hashes, np.uint64), np.frombuffer(entry.tokens, np.uint32)
        if not len(hashes):
            return
        hits = (np.arange(len(hashes)) < entry.num_held).astype(np.uint32)
        root = _Node(hashes[:0], hits[:0], tokens[:0], 0, now_s)
        node = self._roots.setdefault((entry.model, entry.block_size), root)
        node.used_at_s = now_s
        while node.depth < len(hashes):
            first = int(hashes[node.depth])
            child = node.children.get(first)
            if child is None:
                rest = hashes[node.depth :], np.zeros_like(hits[node.depth :]), tokens[node.depth * entry.block_size :]
                child = _Node(*rest, len(hashes), now_s)
                self._num_leaves += bool(node.children) or node.depth == 0
            else:
                num = min(len(child.hashes), len(hashes) - node.depth)
                same = child.hashes[:num] == hashes[node.depth : node.depth + num]
                num_same = num if same.all() else int(same.argmin())
                if num_same < len(child.hashes):
                    child = child.split(num_same, entry.block_size)
            child.uses, child.used_at_s = child.uses + 1, now_s
            child.hits += hits[node.depth : child.depth]
            node.children[first], node = child, child
        while self._num_leaves > MAX_LEAVES:
            self._remove_leaf()

    def _remove_leaf(self) -> None:
        """Remove a leaf that was not used for long, by descending to the least recently used child each time."""
        place, node = min(self._roots.items(), key=lambda each: each[1].used_at_s)
        above, first = node, 0
        while node.children:
            above, (first, node) = node, min(node.children.items(), key=lambda each: each[1].used_at_s)
        del above.children[first]
        if not self._roots[place].children:
            del self._roots[place]
        self._num_leaves -= bool(above.children) or above.depth == 0  # else its parent has become a leaf

    def explain(self, most: int = MAX_SHOWN) -> list[dict[str, Any]]:
        """Return the most used nodes, each after its parent, which it refers to by its place in the list."""
        found: list[tuple[_Node, str, int, _Node | None]] = [
            (child, *place, None) for place, root in self._roots.items() for child in root.children.values()
        ]
        for node, model, block_size, _ in found:
            found += [(child, model, block_size, node) for child in node.children.values()]
        found = sorted(found, key=lambda each: -each[0].uses)[:most]  # no child is used more than its parent
        places, shown = {node: place for place, (node, *_) in enumerate(found)}, []
        costly = self._regret.costly
        blocks = np.fromiter(costly, np.uint64)
        for node, model, block_size, parent in found:
            last = node.hashes[-1:]
            held = {} if self._index is None else self._index.match(last)
            tiers = Counter(Tier(bisect_left(depths, 1)).name.lower() for depths in held.values())
            shown.append(
                {
                    "prefix": self._regret.name_of(int(last[0])),
                    "costly": [costly[block] for block in node.hashes[np.isin(node.hashes, blocks)].tolist()],
                    "parent": places[parent] if parent else None,
                    "model": model,
                    "from_tokens": (node.depth - len(node.hashes)) * block_size,
                    "to_tokens": node.depth * block_size,
                    "uses": node.uses,
                    "hits": int(node.hits[-1]),
                    "used_at": round(time() - monotonic() + node.used_at_s, 1),
                    "tiers": tiers,
                    "num_holders": len(held),
                    "holders": sorted(f"{rank.worker} {rank.rank}" for rank in held)[:MAX_HOLDERS_SHOWN],
                    "text": self._quote(model, node.tokens),
                }
            )
        return shown

    def _quote(self, model: str, tokens: NDArray[np.uint32]) -> str | None:
        tokenizer = self._models.tokenizer(model) if len(tokens) else None
        return None if tokenizer is None else tokenizer.text(tokens[:_QUOTED_TOKENS].tolist())

"""What vLLM's events alone say about its cache: copies counted, and the rule by which its groups agree on a hit.

It uses the engine's own hashes, and is plain and slow: a reference for what an index can know.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from _vllm_manager import VllmModel


class CountedBlocks:
    """How many copies of each block each group holds, as far as was told."""

    def __init__(self, model: VllmModel) -> None:
        hash_size = model.match_unit or math.gcd(*(size for size, _ in model.groups)) * model.num_context_ranks
        # A state may be kept wherever a hash ends, and so may a part of a block of full attention.
        sizes = [hash_size if window == 0 else size * model.num_context_ranks for size, window in model.groups]
        self._groups = [(size, window) for size, (_, window) in zip(sizes, model.groups, strict=True)]
        self._step, self._hash_size = model.match_unit or math.lcm(*sizes), hash_size
        self._num_dropped = int(model.eagle == "drop")
        self._copies: Counter[tuple[int, Any]] = Counter()

    def receive(self, batch: Any) -> None:
        """Take the events of a step: each store is a copy more, each removal one less."""
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._copies.clear()
            elif event.medium == "GPU":
                is_report = kind == "BlockStored" and event.session_id and event.parent_block_hash is None
                for key in [(event.group_idx, block_hash) for block_hash in event.block_hashes]:
                    if not (is_report and self._copies[key]):
                        self._copies[key] += 1 if kind == "BlockStored" else -1

    def hit(self, hashes: Sequence[Any], num_tokens: int) -> int:
        """Return the longest hit of a prompt, given the engine's hashes of it, in the smallest of its blocks.

        It is a multiple of all groups' block sizes and leaves the last token; each group holds what it needs up to
        there. With EAGLE's last block computed again they hold one block more, which is of the hit itself if there is
        one group alone.
        """
        longest = (num_tokens - 1) // self._step * self._step
        if len(self._groups) == 1:
            longest -= self._num_dropped * self._step
        return next((end for end in range(longest, 0, -self._step) if self._all_hold(hashes, end)), 0)

    def _all_hold(self, hashes: Sequence[Any], end: int) -> bool:
        return all(
            self._holds(group, hashes, place)
            for group, (size, window) in enumerate(self._groups)
            for place in [
                *((idx + 1) * size for idx in self._needed(size, window, end)),
                *([end] if end % size else []),
            ]
        )

    def _needed(self, size: int, window: int | None, end: int) -> range:
        """Return which blocks a group needs for a hit: all, those of its window, or its state at the end."""
        last = end // size + (self._num_dropped if window != 0 else 0)
        if window is None:
            return range(last)
        num_needed = 1 if window == 0 else -(-(window - 1) // size) + self._num_dropped
        return range(max(0, last - num_needed), last)

    def _holds(self, group: int, hashes: Sequence[Any], end: int) -> bool:
        idx = end // self._hash_size - 1  # a larger block has the hash of its last small one
        return idx < len(hashes) and self._copies[group, hashes[idx]] > 0

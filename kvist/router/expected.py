"""Which blocks an engine should still hold, by the prompts that it was sent. No I/O, no clock."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

DEFAULT_TIME_TO_LIVE_S = 3600.0
"""Engines evict nothing by age. But a restart between two health checks, or requests of other routers, can make an
expectation wrong until its prompt comes again, which costs computing it once, at a worker that then has it. An hour is
long enough for users to come back to a conversation, and short enough that a quiet worker's past does not attract
requests for days."""


class ExpectedBlocks:
    """The most recently used blocks: at most `capacity` of them, and none longer than its time to live after its use.

    A chain counts as used from its end to its beginning, so that no block is forgotten before those that follow it: so
    engines free them. Each block costs O(1) when it is used and when it is forgotten, and 141 bytes meanwhile.
    """

    __slots__ = ("_used_at_s", "capacity", "time_to_live_s")

    def __init__(self, capacity: int, time_to_live_s: float) -> None:
        self.capacity = capacity
        self.time_to_live_s = time_to_live_s
        self._used_at_s: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_at_s)

    def use(self, chain: Sequence[int], now_s: float) -> None:
        """Mark the blocks of a chain as used now, from its end on; that of a long one may be marked part by part.

        Times never decrease from one call to the next.
        """
        for block_hash in reversed(chain):
            self._used_at_s[block_hash] = now_s
            self._used_at_s.move_to_end(block_hash)

    def forget(self, now_s: float, most: float = math.inf) -> list[int]:
        """Forget at `most` so many blocks beyond capacity or time to live, and return them, the oldest first."""
        used_at_s, forgotten = self._used_at_s, list[int]()
        while used_at_s and len(forgotten) < most:
            first_used_at_s = next(iter(used_at_s.values()))
            if len(used_at_s) <= self.capacity and now_s - first_used_at_s <= self.time_to_live_s:
                break
            forgotten.append(used_at_s.popitem(last=False)[0])
        return forgotten

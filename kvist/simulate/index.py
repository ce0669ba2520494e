"""What a router knows of simulated caches: exactly what they hold, some time ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from kvist.simulate.trace import Request

INDEX_DELAY_S = 50e-3


class LateIndex:
    """Which worker holds which blocks, as of `delay_s` ago."""

    def __init__(self, num_workers: int, delay_s: float = INDEX_DELAY_S) -> None:
        """Begin with empty caches."""
        self.held = [0] * num_workers
        self._delay_s = delay_s
        self._holders: dict[Hashable, int] = {}
        self._events: deque[tuple[float, int, Sequence[Hashable], bool]] = deque()

    def stored(self, worker_idx: int, blocks: Sequence[Hashable], now_s: float) -> None:
        """Take note that a worker caches blocks."""
        self._events.append((now_s + self._delay_s, worker_idx, blocks, True))

    def removed(self, worker_idx: int, blocks: Sequence[Hashable], now_s: float) -> None:
        """Take note that a worker has forgotten blocks."""
        self._events.append((now_s + self._delay_s, worker_idx, blocks, False))

    def answered(self, worker_idx: int, request: Request, now_s: float) -> None:
        """Take note of a first token, from which an index without events could guess."""

    def depths(self, blocks: Sequence[Hashable], now_s: float) -> list[int]:
        """Return how many leading blocks each worker holds by what is known now."""
        while self._events and self._events[0][0] <= now_s:
            _, worker_idx, changed, is_stored = self._events.popleft()
            self.apply(worker_idx, changed, is_stored=is_stored)
        depths, holders = [0] * len(self.held), (1 << len(self.held)) - 1
        for depth, block in enumerate(blocks):
            there = holders & self._holders.get(block, 0)
            if there != holders:
                gone, holders = holders ^ there, there
                while gone:
                    lowest = gone & -gone
                    depths[lowest.bit_length() - 1] = depth
                    gone ^= lowest
                if not holders:
                    return depths
        return [len(blocks) if holders >> idx & 1 else depth for idx, depth in enumerate(depths)]

    def apply(self, worker_idx: int, blocks: Sequence[Hashable], *, is_stored: bool) -> None:
        """Change what a worker is known to hold."""
        bit = 1 << worker_idx
        for block in blocks:
            before = self._holders.get(block, 0)
            after = before | bit if is_stored else before & ~bit
            if after != before:
                self.held[worker_idx] += 1 if is_stored else -1
                if after:
                    self._holders[block] = after
                else:
                    del self._holders[block]

"""What a router knows of simulated caches: what they held some time ago, but for events that were lost or not sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from math import inf
from random import Random

from kvist.router.expected import ExpectedBlocks
from kvist.simulate.trace import Request

INDEX_DELAY_S = 50e-3


class LateIndex:
    """Which worker holds which blocks, as of `delay_s` ago; of silent workers, what they should hold."""

    def __init__(
        self,
        num_workers: int,
        delay_s: float = INDEX_DELAY_S,
        lost: float = 0.0,
        silent: Mapping[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        """Begin with empty caches. A share of events is lost for good; `silent` workers hold so many blocks."""
        self.held = [0] * num_workers
        self._delay_s = delay_s
        self._lost, self._random = lost, Random(f"lost {seed}")
        self._silent = silent or {}
        self._expected = {idx: ExpectedBlocks(capacity, inf) for idx, capacity in self._silent.items()}
        self._holders: dict[Hashable, int] = {}
        self._events: deque[tuple[float, int, Sequence[Hashable], bool]] = deque()

    def stored(self, worker_idx: int, blocks: Sequence[Hashable], now_s: float) -> None:
        """Take note that a worker caches blocks."""
        self._hear(now_s, worker_idx, blocks, is_stored=True)

    def removed(self, worker_idx: int, blocks: Sequence[Hashable], now_s: float) -> None:
        """Take note that a worker has forgotten blocks."""
        self._hear(now_s, worker_idx, blocks, is_stored=False)

    def _hear(self, now_s: float, worker_idx: int, blocks: Sequence[Hashable], *, is_stored: bool) -> None:
        if worker_idx not in self._silent and (not self._lost or self._random.random() >= self._lost):
            self._events.append((now_s + self._delay_s, worker_idx, blocks, is_stored))

    def answered(self, worker_idx: int, request: Request, now_s: float) -> None:
        """Take note of a first token: a silent worker should hold that prompt now."""
        if (expected := self._expected.get(worker_idx)) is not None:
            self.apply(worker_idx, request.blocks, is_stored=True)
            self.apply(worker_idx, expected.use(request.blocks, now_s), is_stored=False)

    def forget(self, worker_idx: int) -> None:
        """Take note at once that a worker is gone, with all that it held."""
        self._events = deque(event for event in self._events if event[1] != worker_idx)
        held = [block for block, holders in self._holders.items() if holders >> worker_idx & 1]
        self.apply(worker_idx, held, is_stored=False)
        if worker_idx in self._silent:
            self._expected[worker_idx] = ExpectedBlocks(self._silent[worker_idx], inf)

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

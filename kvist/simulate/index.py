"""What a router knows of simulated caches: what they held some time ago, but for events that were lost or not sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from random import Random

from kvist.events import FULL, Tier
from kvist.events.engine_events import KnownWindow
from kvist.kvcache.stale import reusable_prefix
from kvist.router.expected import ExpectedBlocks
from kvist.simulate.trace import Request

INDEX_DELAY_S = 50e-3

Holders = dict[Hashable, int]
"""Which workers hold each block, a bit for each of them."""


class LateIndex:
    """Which worker holds which blocks, as of `delay_s` ago; of silent workers, what they should hold."""

    def __init__(
        self,
        num_workers: int,
        delay_s: float = INDEX_DELAY_S,
        lost: float = 0.0,
        silent: Mapping[int, int] | None = None,
        seed: int = 0,
        *,
        windows: Sequence[KnownWindow] = (FULL,),
        block_size: int = 1,
        tiers: Sequence[Tier] = (Tier.GPU,),
    ) -> None:
        """Begin with empty caches. A share of events is lost for good; `silent` workers hold so many blocks.

        Workers have a group of layers for each window, the widest first, and caches in these tiers.
        """
        self.held = [0] * num_workers
        self._delay_s = delay_s
        self._lost, self._random = lost, Random(f"lost {seed}")
        self._silent = silent or {}
        self._expected = {idx: ExpectedBlocks(capacity, inf) for idx, capacity in self._silent.items()}
        self._windows, self._block_size, self._tiers = windows, block_size, tiers
        self._holders: list[list[Holders]] = [[{} for _ in tiers] for _ in windows]
        self._events: deque[tuple[float, int, int, Tier, Sequence[Hashable], bool]] = deque()

    def hear(
        self,
        worker_idx: int,
        now_s: float,
        group_id: int,
        tier: Tier,
        blocks: Sequence[Hashable],
        *,
        is_stored: bool,
    ) -> None:
        """Take note that a worker's group holds blocks in a tier, or has forgotten them there."""
        if worker_idx not in self._silent and (not self._lost or self._random.random() >= self._lost):
            self._events.append((now_s + self._delay_s, worker_idx, group_id, tier, blocks, is_stored))

    def answered(self, worker_idx: int, request: Request, now_s: float) -> None:
        """Take note of a first token: a silent worker should hold that prompt now."""
        if (expected := self._expected.get(worker_idx)) is not None:
            forgotten = expected.use(request.blocks, now_s)
            for group_id in range(len(self._windows)):
                self._apply(worker_idx, group_id, Tier.GPU, request.blocks, is_stored=True)
                self._apply(worker_idx, group_id, Tier.GPU, forgotten, is_stored=False)

    def forget(self, worker_idx: int) -> None:
        """Take note at once that a worker is gone, with all that it held."""
        self._events = deque(event for event in self._events if event[1] != worker_idx)
        for group_id, by_tier in enumerate(self._holders):
            for tier, holders in zip(self._tiers, by_tier, strict=True):
                held = [block for block, workers in holders.items() if workers >> worker_idx & 1]
                self._apply(worker_idx, group_id, tier, held, is_stored=False)
        if worker_idx in self._silent:
            self._expected[worker_idx] = ExpectedBlocks(self._silent[worker_idx], inf)

    def depths(self, blocks: Sequence[Hashable], now_s: float) -> list[tuple[int, ...]]:
        """Return how many leading blocks each worker holds by what is known now, by tier, with the faster ones."""
        while self._events and self._events[0][0] <= now_s:
            _, worker_idx, group_id, tier, changed, is_stored = self._events.popleft()
            self._apply(worker_idx, group_id, tier, changed, is_stored=is_stored)
        return list(zip(*(self._depths(blocks, num) for num in range(1, len(self._tiers) + 1)), strict=True))

    def _depths(self, blocks: Sequence[Hashable], num_tiers: int) -> list[int]:
        """Return how many leading blocks each worker can serve from the first tiers."""
        published, *others = (by_tier[:num_tiers] for by_tier in self._holders)
        depths = self._unbroken(blocks, published)
        if not others:
            return depths
        return [
            reusable_prefix(
                depth,
                self._block_size,
                [
                    (window, _holds(worker_idx, blocks, holders))
                    for window, holders in zip(self._windows[1:], others, strict=True)
                ],
            )
            for worker_idx, depth in enumerate(depths)
        ]

    def _unbroken(self, blocks: Sequence[Hashable], by_tier: Sequence[Holders]) -> list[int]:
        """Return how many leading blocks each worker holds in some of these tiers."""
        (first, *slower), depths, workers = by_tier, [0] * len(self.held), (1 << len(self.held)) - 1
        for depth, block in enumerate(blocks):
            there = first.get(block, 0)
            for holders in slower:
                there |= holders.get(block, 0)
            there &= workers
            if there != workers:
                gone, workers = workers ^ there, there
                while gone:
                    lowest = gone & -gone
                    depths[lowest.bit_length() - 1] = depth
                    gone ^= lowest
                if not workers:
                    return depths
        return [len(blocks) if workers >> idx & 1 else depth for idx, depth in enumerate(depths)]

    def _apply(
        self, worker_idx: int, group_id: int, tier: Tier, blocks: Sequence[Hashable], *, is_stored: bool
    ) -> None:
        bit, holders = 1 << worker_idx, self._holders[group_id][tier]
        for block in blocks:
            before = holders.get(block, 0)
            after = before | bit if is_stored else before & ~bit
            if after != before:
                if group_id == 0:
                    self.held[worker_idx] += 1 if is_stored else -1
                if after:
                    holders[block] = after
                else:
                    del holders[block]


def _holds(worker_idx: int, blocks: Sequence[Hashable], by_tier: Sequence[Holders]) -> Callable[[int], bool]:
    return lambda ordinal: any(holders.get(blocks[ordinal], 0) >> worker_idx & 1 for holders in by_tier)

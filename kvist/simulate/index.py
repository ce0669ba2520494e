"""What a router knows of simulated caches: what they held some time ago, but for events that were lost or not sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from math import inf
from random import Random

from kvist.events import FULL, Tier
from kvist.events.engine_events import KnownWindow
from kvist.router.expected import ExpectedBlocks
from kvist.simulate.memory import num_leading_blocks
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
        *,
        windows: Sequence[KnownWindow] = (FULL,),
        block_size: int = 1,
        num_tiers: int = 1,
    ) -> None:
        """Begin with empty caches. A share of events is lost for good; `silent` workers hold so many blocks.

        Workers have a group of layers for each window, the widest first, and caches in so many tiers.
        """
        self._delay_s, self._lost, self._random = delay_s, lost, Random(f"lost {seed}")
        self._windows, self._block_size, self._num_tiers = windows, block_size, num_tiers
        self.expected = {idx: ExpectedBlocks(capacity, inf) for idx, capacity in (silent or {}).items()}
        """The blocks of silent workers."""
        self._held: list[list[list[set[Hashable]]]] = [
            [[set() for _ in range(num_tiers)] for _ in windows] for _ in range(num_workers)
        ]
        """Blocks by worker, group and tier."""
        self._events: deque[tuple[float, int, set[Hashable], Sequence[Hashable], bool]] = deque()

    @property
    def held(self) -> list[int]:
        """Return how many blocks each worker holds, of those that all layers have."""
        return [sum(map(len, by_group[0])) for by_group in self._held]

    def receive(
        self, worker_idx: int, now_s: float, group_id: int, tier: Tier, blocks: Sequence[Hashable], is_stored: bool
    ) -> None:
        """Receive a worker's event, which counts `delay_s` later: its group holds blocks in a tier, or no longer."""
        if worker_idx not in self.expected and (not self._lost or self._random.random() >= self._lost):
            held = self._held[worker_idx][group_id][tier]
            self._events.append((now_s + self._delay_s, worker_idx, held, blocks, is_stored))

    def on_first_token(self, worker_idx: int, request: Request, now_s: float) -> None:
        """Expect a silent worker to hold a prompt from its first token on."""
        if (expected := self.expected.get(worker_idx)) is not None:
            expected.use(request.blocks, now_s)
            forgotten = expected.forget(now_s)
            for by_tier in self._held[worker_idx]:
                by_tier[Tier.GPU].update(request.blocks)
                by_tier[Tier.GPU].difference_update(forgotten)

    def clear_worker(self, worker_idx: int) -> None:
        """Drop at once all that a worker holds, and its events that are under way."""
        self._events = deque(event for event in self._events if event[1] != worker_idx)
        for by_tier in self._held[worker_idx]:
            for held in by_tier:
                held.clear()
        if (expected := self.expected.get(worker_idx)) is not None:
            self.expected[worker_idx] = ExpectedBlocks(expected.capacity, inf)

    def depths(self, blocks: Sequence[Hashable], now_s: float) -> list[tuple[int, ...]]:
        """Return how many leading blocks each worker holds by what is known now, by tier, with the faster ones."""
        while self._events and self._events[0][0] <= now_s:
            _, _, held, changed, is_stored = self._events.popleft()
            (held.update if is_stored else held.difference_update)(changed)
        tier_counts = range(1, self._num_tiers + 1)
        return [tuple(self._depth(blocks, groups, num_tiers) for num_tiers in tier_counts) for groups in self._held]

    def _depth(self, blocks: Sequence[Hashable], groups: Sequence[Sequence[set[Hashable]]], num_tiers: int) -> int:
        caches = [(window, held[:num_tiers]) for window, held in zip(self._windows, groups, strict=True)]
        return num_leading_blocks(blocks, self._block_size, caches)

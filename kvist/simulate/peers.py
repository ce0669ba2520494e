"""Other policies behind the driver's interface, for comparison, written anew from what is published of them.

kv            the priced cost, as `make_driver` makes it
kv-blocks     a greedy cost in blocks: queued and new prefill less overlap, a little of what runs and of what was handed
              out of late; ties go to the smallest cache
dynamo        queued and new prefill blocks less overlap, plus distinct active blocks (ai-dynamo-runtime 1.6)
sglang        the gateway's cache_aware: a tree of its own of what it routed; shortest queue where that is uneven
llm-d         workers that hold 80 % of the prompt unless that costs 18 s, else all; fewest tokens in flight
lmetric       queued and new prefill tokens times batch size (arXiv 2603.15202)
hashing       consistent hashing of a prompt's beginning, with bounded loads (arXiv 1608.01350)
least-loaded, power-of-two, round-robin, random
              the router's own code
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvist.events import WorkerRank
from kvist.router.policy.baselines import BASELINES
from kvist.router.policy.decision import Candidate, Load, draw
from kvist.router.policy.settings import DEFAULT_TIER_CREDITS
from kvist.simulate.driver import Among, Counts, Depths, Driver, Hashes, make_driver


class _Query(NamedTuple):
    """A request to choose a worker for."""

    now_s: float
    blocks: tuple[int, ...]
    num_tokens: int
    depths: list[int]
    """Leading blocks at each worker; those in slower tiers count in part, by the credits of Dynamo's and our router."""
    held: Counts
    is_fetched: bool = False


@dataclass(slots=True)
class _Running:
    worker_idx: int
    query: _Query
    num_uncached_tokens: int
    num_output_tokens: int = 0


class _Peer:
    """Counts requests, uncached tokens without a first token, and tokens in flight, by worker; subclasses choose."""

    def __init__(self, *, num_workers: int, block_size: int, seed: int = 0) -> None:
        self.workers: Sequence[int] = range(num_workers)
        """Those to choose from."""
        self.block_size, self.random = block_size, Random(seed)
        self.running, self.prefill_tokens, self.tokens_in_flight = ([0] * num_workers for _ in range(3))
        self._requests: dict[Hashable, _Running] = {}

    def choose(self, query: _Query) -> int:
        """Return the worker for a request; this changes no state but that of `random`."""
        raise NotImplementedError

    def count(self, request: _Running, sign: int) -> None:
        """Count what only this policy needs, as a request begins (`sign` 1) and ends (-1)."""

    def lowest(self, keys: Sequence[Any]) -> int:
        """Return the worker with the lowest key, at random among equals; there is a key for each of the fleet."""
        least = min(keys[idx] for idx in self.workers)
        return self.random.choice([idx for idx in self.workers if keys[idx] == least])

    def prefill_tokens_with(self, query: _Query) -> list[int]:
        """Return the prefill tokens that each worker would have with this request."""
        return [queued + self.new_tokens(query, idx) for idx, queued in enumerate(self.prefill_tokens)]

    def new_tokens(self, query: _Query, idx: int) -> int:
        """Return how many tokens of the prompt a worker would have to compute."""
        return 0 if query.is_fetched else query.num_tokens - query.depths[idx] * self.block_size

    def route(self, now_s: float, request_id: Hashable, *arguments: Any, is_fetched: bool = False) -> int:
        query = self._make_query(now_s, *arguments)._replace(is_fetched=is_fetched)
        idx = self.choose(query)
        request = _Running(idx, query, self.new_tokens(query, idx))
        self._requests[request_id] = request
        self.running[idx] += 1
        self.prefill_tokens[idx] += request.num_uncached_tokens
        self.tokens_in_flight[idx] += query.num_tokens
        self.count(request, 1)
        return idx

    def prefer(self, now_s: float, *arguments: Any) -> int:
        return self.choose(self._make_query(now_s, *arguments))

    def _make_query(
        self, now_s: float, blocks: Hashes, num_tokens: int, depths: Depths, held: Counts, among: Among = None
    ) -> _Query:
        self.workers = among or range(len(depths))
        most = max(0, num_tokens - 1) // self.block_size
        by_tier = np.minimum(np.asarray(depths).reshape(len(depths), -1), most)
        counted = np.diff(by_tier, axis=1, prepend=0) @ np.array(DEFAULT_TIER_CREDITS[: by_tier.shape[1]])
        return _Query(now_s, tuple(blocks), num_tokens, counted.astype(int).tolist(), held)

    def answered(self, now_s: float, request_id: Hashable) -> None:  # noqa: ARG002
        request = self._requests[request_id]
        self.prefill_tokens[request.worker_idx] -= request.num_uncached_tokens
        request.num_uncached_tokens = 0

    def tokens(self, now_s: float, request_id: Hashable, num: int) -> None:  # noqa: ARG002
        request = self._requests[request_id]
        request.num_output_tokens += num
        self.tokens_in_flight[request.worker_idx] += num

    def finished(self, now_s: float, request_id: Hashable) -> None:
        self.answered(now_s, request_id)
        request = self._requests.pop(request_id)
        self.running[request.worker_idx] -= 1
        self.tokens_in_flight[request.worker_idx] -= request.query.num_tokens + request.num_output_tokens
        self.count(request, -1)


class _BlockCost(_Peer):
    def __init__(self, *, num_workers: int, block_size: int, seed: int = 0) -> None:
        super().__init__(num_workers=num_workers, block_size=block_size, seed=seed)
        self._recent = [(0.0, 0.0)] * num_workers

    def choose(self, query: _Query) -> int:
        keys = [
            (
                prefill / self.block_size
                + 0.03 * (self.tokens_in_flight[idx] // self.block_size)
                + 0.03 * self._recent_at(idx, query.now_s) / self.block_size,
                query.held[idx],
            )
            for idx, prefill in enumerate(self.prefill_tokens_with(query))
        ]
        return self.lowest(keys)

    def count(self, request: _Running, sign: int) -> None:
        if sign > 0:
            idx, now_s = request.worker_idx, request.query.now_s
            self._recent[idx] = (self._recent_at(idx, now_s) + request.num_uncached_tokens, now_s)

    def _recent_at(self, idx: int, now_s: float) -> float:
        tokens, at_s = self._recent[idx]
        return tokens * float(2.0 ** ((at_s - now_s) / 60.0))


class _Dynamo(_Peer):
    """Ties go to the smallest cache."""

    def __init__(self, *, num_workers: int, block_size: int, seed: int = 0) -> None:
        super().__init__(num_workers=num_workers, block_size=block_size, seed=seed)
        self._active: list[Counter[int]] = [Counter() for _ in range(num_workers)]

    def choose(self, query: _Query) -> int:
        costs = []
        for active, prefill in zip(self._active, self.prefill_tokens_with(query), strict=True):
            num_new = sum(1 for block in query.blocks if block not in active)
            costs.append(prefill / self.block_size + len(active) + num_new)
        return self.lowest(list(zip(costs, query.held, strict=True)))

    def count(self, request: _Running, sign: int) -> None:
        active = self._active[request.worker_idx]
        for block in request.query.blocks:
            active[block] += sign
            if not active[block]:
                del active[block]


class _CacheAware(_Peer):
    """With the gateway's defaults, match 0.3, imbalance 64 and 1.5; its tree is too large to forget anything here."""

    def __init__(self, *, num_workers: int, block_size: int, seed: int = 0) -> None:
        super().__init__(num_workers=num_workers, block_size=block_size, seed=seed)
        self._tenants: dict[int, list[int]] = {}
        self._sizes = [0] * num_workers

    def choose(self, query: _Query) -> int:
        workers, running, tenants = self.workers, self.running, []
        fewest, most = min(running[idx] for idx in workers), max(running[idx] for idx in workers)
        depth = next((idx for idx, block in enumerate(query.blocks) if block not in self._tenants), len(query.blocks))
        if depth * self.block_size > 0.3 * query.num_tokens:
            tenants = [idx for idx in self._tenants[query.blocks[depth - 1]] if idx in workers]
        if most - fewest > 64 and most > 1.5 * fewest:
            chosen = min(workers, key=running.__getitem__)
        else:
            chosen = tenants[0] if tenants else min(workers, key=self._sizes.__getitem__)
        return chosen

    def count(self, request: _Running, sign: int) -> None:
        for block in request.query.blocks if sign > 0 else ():
            tenants = self._tenants.setdefault(block, [])
            if request.worker_idx not in tenants:
                tenants.append(request.worker_idx)
                self._sizes[request.worker_idx] += 1


class _AffinityThenLoad(_Peer):
    def choose(self, query: _Query) -> int:
        loads = self.tokens_in_flight
        holding = {idx for idx in self.workers if query.depths[idx] * self.block_size >= 0.8 * query.num_tokens}
        lowest = min((loads[idx] for idx in self.workers if idx not in holding), default=inf)
        if holding and (min(loads[idx] for idx in holding) - lowest) / 25_000 > 18.0:
            holding = set()
        return self.lowest([inf if holding and idx not in holding else load for idx, load in enumerate(loads)])


class _LMetric(_Peer):
    def choose(self, query: _Query) -> int:
        return self.lowest(
            [tokens * (self.running[idx] + 1) for idx, tokens in enumerate(self.prefill_tokens_with(query))]
        )


class _BoundedHashing(_Peer):
    """The first 1,024 tokens name a prompt; no worker runs more than 1.25 times the average."""

    def __init__(self, *, num_workers: int, block_size: int, seed: int = 0) -> None:
        super().__init__(num_workers=num_workers, block_size=block_size, seed=seed)
        places = Random(0)
        self._ring = sorted((places.random(), idx) for idx in range(num_workers) for _ in range(100))

    def choose(self, query: _Query) -> int:
        most = ceil(1.25 * (sum(self.running) + 1) / len(self.workers))
        name = query.blocks[: max(1, 1024 // self.block_size)][-1] if query.blocks else self.random.random()
        start = bisect(self._ring, (Random(name).random(), 0))
        walk = (idx for _, idx in self._ring[start:] + self._ring[:start])
        return next(idx for idx in walk if idx in self.workers and self.running[idx] + 1 <= most)


class _Baseline(_Peer):
    def __init__(self, name: str, *, num_workers: int, block_size: int, seed: int = 0) -> None:
        super().__init__(num_workers=num_workers, block_size=block_size, seed=seed)
        self._weigh, self._turn = BASELINES[name], 0

    def choose(self, query: _Query) -> int:  # noqa: ARG002
        loads = [Load(self.running[idx], self.prefill_tokens[idx]) for idx in self.workers]
        candidates = [Candidate(WorkerRank("", idx), load) for idx, load in zip(self.workers, loads, strict=True)]
        return self.workers[draw(self._weigh(candidates, self._turn).probabilities, self.random)]

    def count(self, request: _Running, sign: int) -> None:  # noqa: ARG002
        self._turn += sign > 0


POLICIES: dict[str, Callable[..., Driver]] = {
    "kv": make_driver,
    "kv-blocks": _BlockCost,
    "dynamo": _Dynamo,
    "sglang": _CacheAware,
    "llm-d": _AffinityThenLoad,
    "lmetric": _LMetric,
    "hashing": _BoundedHashing,
    **{name: partial(_Baseline, name) for name in BASELINES},
}
"""Makes a policy's driver from `num_workers`, `block_size` and `seed`."""

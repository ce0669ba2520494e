"""The `kv` policy in seconds: what a request would wait and cost here, recomputed work at a price that load raises.

    cost = wait + (1 + κ) · e · r + context_scale · C · r + recent_scale · R · r          the lowest wins
    e = F(n) − Σ over tiers of tier_credit · (F(to) − F(from)),  F(x) = x + α · x² / 2     work of the prompt here
    κ = min(max_price, price_scale · ρ² / (1 − ρ)),  ρ = min(0.99, utilisation)

n: prompt tokens; from, to: the tokens that a tier alone adds, blocks of prompts in flight there being in the fastest;
r: seconds a unit of work, C: context tokens, R: recent work, ρ: see `work`; α: attention against the rest of the model.

A greedy cost pays 5,000 tokens of recomputation to skip 5,000 tokens of queue. That is right for its request, and
everybody behind it pays: prefixes spread until caches thrash. So recomputation has a price that rises with load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.router.policy.in_flight import Marks, PromptsInFlight
from kvist.router.policy.work import Floats, Work, WorkRows

DEFAULT_ALPHA = 2.9e-5
"""Of an 8B model: a token at position 34,000 costs twice what the first one does."""


@dataclass(frozen=True, slots=True)
class PriceSettings:
    """What the cost weighs; see the module's formula. `tier_credits` are those of the block cost."""

    alpha: float = DEFAULT_ALPHA
    tier_credits: tuple[float, ...] = (1.0, 0.75, 0.25, 0.0)
    price_scale: float = 2.0
    max_price: float = 40.0
    context_scale: float = 0.05
    recent_scale: float = 0.03


class Prices(NamedTuple):
    """What a request would cost each candidate, and of what; arrays with one entry a candidate."""

    cost_s: Floats
    price: float
    """κ: what is computed costs 1 + `price` times its time."""
    compute: Floats
    """e; times `load.unit_s` it is in seconds, as are the terms of `load`."""
    cached_tokens: NDArray[np.int64]
    load: Work
    num_tokens: int
    marks: Marks


@dataclass(slots=True)
class Dispatched:
    """A request that was sent to a rank: what is given back when it is answered and when it ends."""

    rank: int
    work: int
    num_tokens: int
    dispatched_at_s: float
    marks: Marks
    marked_until_s: float
    is_waiting: bool
    """Whether it is streamed and has no first token yet."""
    is_settled: bool = False
    has_ended: bool = False


class PricedPolicy:
    """Decides by the lowest cost, and keeps what it decides from: ranks are small integers. No I/O, no clock."""

    def __init__(self, settings: PriceSettings, work: WorkRows, in_flight: PromptsInFlight, block_size: int) -> None:
        """Decide from these rows and tables, which may be shared with other routers."""
        self._settings = settings
        self._work = work
        self._in_flight = in_flight
        self._block_size = block_size
        self._credits = np.array(settings.tier_credits)
        self.num_ranks = work.num_ranks

    @classmethod
    def for_one(cls, num_ranks: int, block_size: int, settings: PriceSettings | None = None) -> PricedPolicy:
        """Return the policy of a router that is alone."""
        work, in_flight = WorkRows.for_one(num_ranks), PromptsInFlight.for_one(num_ranks, block_size)
        return cls(settings or PriceSettings(), work, in_flight, block_size)

    def weigh(
        self,
        now_s: float,
        num_tokens: int,
        block_hashes: Sequence[int] | Marks,
        depths: ArrayLike,
        ranks: NDArray[np.intp] | None = None,
    ) -> Prices:
        """Return what a prompt would cost these ranks, or all. Nothing is changed.

        `depths` are its leading blocks that each holds, `[num_ranks]`, or `[num_ranks, num_tiers]` counting those of
        the faster tiers too. The block with the last token is computed in any case.
        """
        settings, work = self._settings, self._work.read(now_s, ranks)
        held = np.asarray(depths, np.int64)
        marks, gpu = self._in_flight.marks(block_hashes), held if held.ndim == 1 else held[:, 0]
        running = self._in_flight.depths(now_s, marks, gpu, ranks)
        usable = max(0, num_tokens - 1) // self._block_size
        if held.ndim == 1:
            tokens = np.minimum(running, usable) * self._block_size
            saved = self._work_of(tokens) * settings.tier_credits[0]
        else:
            by_tier = np.minimum(np.maximum(held, running[:, None]), usable) * self._block_size
            added = np.diff(self._work_of(by_tier), axis=1, prepend=0.0)
            tokens, saved = by_tier[:, -1], added @ self._credits[: added.shape[1]]
        compute = self._work_of(num_tokens) - saved
        utilisation = min(0.99, work.utilisation)
        price = min(settings.max_price, settings.price_scale * utilisation**2 / (1.0 - utilisation))
        load = settings.context_scale * work.context_tokens + settings.recent_scale * work.recent
        cost_s = work.wait_s + ((1.0 + price) * compute + load) * work.unit_s
        return Prices(cost_s, price, compute, tokens, work, num_tokens, marks)

    def _work_of(self, num_tokens: Any) -> Any:
        """Return the work of a prompt's first tokens, of one number or many."""
        return num_tokens * (1.0 + self._settings.alpha / 2 * num_tokens)

    @staticmethod
    def choose(prices: Prices, held_blocks: ArrayLike, random: Random) -> int:
        """Return the index of the candidate that costs least; of equals one that holds fewest blocks, then any."""
        costs: list[float] = prices.cost_s.tolist()
        lowest = min(costs)
        if costs.count(lowest) == 1:
            return costs.index(lowest)
        best = np.flatnonzero(prices.cost_s == lowest)
        held = np.asarray(held_blocks)[best]
        best = best[held == held.min()]
        return int(best[random.randrange(len(best))])

    def dispatched(
        self, now_s: float, rank: int, prices: Prices, chosen_idx: int, *, is_streamed: bool = True
    ) -> Dispatched:
        """Take note that the request was sent to this rank, which stands at `chosen_idx` in the prices."""
        work, num_tokens = round(float(prices.compute[chosen_idx])), prices.num_tokens
        self._work.dispatch(now_s, rank, work, float(prices.load.unit_s[chosen_idx]), num_tokens, is_streamed)
        until_s = self._in_flight.add(now_s, rank, prices.marks)
        return Dispatched(rank, work, num_tokens, now_s, prices.marks, until_s, is_waiting=is_streamed)

    def answered(self, now_s: float, request: Dispatched) -> None:
        """Take note of a streamed request's first token; later ones change nothing."""
        if request.is_waiting and not request.has_ended:
            request.is_waiting = False
            self._work.answer(now_s, request.rank, request.work, request.dispatched_at_s)
            self._settle(now_s, request, is_computed=True)

    def tokens(self, request: Dispatched, num: int) -> None:
        """Count what the answer grew by."""
        if not request.has_ended:
            request.num_tokens += num
            self._work.add_context(request.rank, num)

    def finished(self, now_s: float, request: Dispatched) -> None:
        """Take note that the request ended, however it did; further calls change nothing.

        A streamed one without a first token was not computed; of one that is not streamed nobody can tell.
        """
        if request.has_ended:
            return
        if request.is_waiting:
            self._work.withdraw(now_s, request.rank, request.work)
        if not request.is_settled:
            self._settle(now_s, request, is_computed=not request.is_waiting)
        self._work.add_context(request.rank, -request.num_tokens)
        request.is_waiting, request.has_ended = False, True

    def _settle(self, now_s: float, request: Dispatched, *, is_computed: bool) -> None:
        request.is_settled = True
        self._in_flight.settle(now_s, request.rank, request.marks, request.marked_until_s, is_computed=is_computed)

"""The `kv` policy: a request's cost at a rank, in seconds of waiting and computing, at a price that rises with load.

    cost = wait + max(p · r + s, highest s) + CONTEXT_SCALE · C · r + RECENT_SCALE · R · r̄      the lowest wins
    p = e − h + κ · (e − g) + (1 − ρ) · d,  s = SPREAD_SCALE · C · r
    e = F(n) − Σ over tiers of tier_credit · (F(to) − F(from)),  F(x) = x + α · x² / 2     work of the prompt here
    κ = min(MAX_PRICE, PRICE_SCALE · ρ² / (1 − ρ))
    h = Σ over the prompt's marks that are not held here of min(2/3, q / (q + number of ranks)) · (F(to) − F(from))
    g = Σ over those of the same for which q > 1 of (q / Q)² · (F(to) − F(from))

Where that is faster, blocks that another worker holds are fetched: those seconds replace their e · r, but not their
price, as a copy evicts other prefixes whether it was computed or fetched (docs/decisions.md).

n: prompt tokens; from, to: the tokens that each tier adds, prompts in flight there counting as in the fastest; d: the
work of those in flight; q: recent requests for the prefix up to a mark, Q: for all; r: seconds a unit of work, r̄: its
mean over the candidates, C: context tokens, R: recent work, ρ: utilisation, see `work`; α: attention relative to the
rest of the model.

A greedy cost would recompute 5,000 tokens to skip a queue of 5,000 tokens. That is right for the one request, but
later ones pay for it: prefixes spread until caches thrash. So recomputation has a price that rises with load.

A prefix that is requested again while it is being computed will be requested more often. So in an idle fleet other
ranks compute it too, rather than all wait for one: as far as the fleet is idle, d counts as if nothing were in flight.

A rank with a copy of a prefix takes its share of the later requests for it. So they share the computation of the copy,
e: h is the part that they take over. They do not share the price, as a copy evicts other prefixes. But where most
requests have the prefix, little that it evicts will be missed: so g has no price.

The term s makes it worth computing at a rank that runs less, but not waiting in its queue: it saves at most p.

R weighs the same at all ranks: multiplied by r, a rank that seems fast by chance would get all of the next minute's
requests, and seem even faster (docs/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.router.policy.decision import draw, uniform_over_minima
from kvist.router.policy.in_flight import NUM_SLOTS, SLOT, Marks, PromptsInFlight
from kvist.router.policy.settings import PULL_LATENCY_S, PriceSettings
from kvist.router.policy.work import NUM_FIELDS, Floats, Work, WorkRows

PRICE_SCALE: Final = 2.5
MAX_PRICE: Final = 40.0
CONTEXT_SCALE: Final = 0.02
SPREAD_SCALE: Final = 0.03
RECENT_SCALE: Final = 0.03
"""How much each term weighs; docs/decisions.md says what other weights did."""
MAX_SHARE: Final = 2 / 3
"""Later requests take over no more than this of a computation, as this request waits for it. Without a limit, hot
prefixes are copied for a difference of a few running requests (docs/decisions.md)."""


def weigh_ranks(
    work: Floats,
    running: NDArray[np.int64],
    marked: NDArray[np.int64],
    num_requests: Floats,
    num_all_requests: float,
    held: NDArray[np.int64],
    tier_credits: Floats,
    usable: int,
    block_size: int,
    num_tokens: int,
    half_alpha: float,
    compute_scale: float,
    price: float,
    idle: float,
    weighed: Floats,
    cached_tokens: NDArray[np.int64],
) -> None:
    """Write each rank's cost, and its e, d, h and g, into `weighed`, and its tokens cached or in flight.

    `work` is `Work.by_rank`, `marked` the blocks up to each of the prompt's marks. Plain loops, for
    `kvist.router.compiled` to compile.
    """
    shared_to, unpriced_to, before = np.zeros(len(marked) + 1), np.zeros(len(marked) + 1), 0.0
    for idx in range(len(marked)):
        tokens = min(marked[idx], usable) * block_size
        done = tokens * (1.0 + half_alpha * tokens) * compute_scale
        share = min(MAX_SHARE, num_requests[idx] / (num_requests[idx] + len(held)))
        shared_to[idx + 1] = shared_to[idx] + share * (done - before)
        part = num_requests[idx] / max(num_requests[idx], num_all_requests) if num_requests[idx] > 1.0 else 0.0
        unpriced_to[idx + 1] = unpriced_to[idx] + part**2 * (done - before)
        before = done
    recent_unit_s, most_s = RECENT_SCALE * work[1].mean(), SPREAD_SCALE * (work[1] * work[2]).max()
    for idx in range(len(held)):
        before, saved, tokens = 0.0, 0.0, 0
        for tier in range(held.shape[1]):
            tokens = min(max(held[idx, tier], running[idx]), usable) * block_size
            done = tokens * (1.0 + half_alpha * tokens)
            saved += tier_credits[tier] * (done - before)
            before = done
        wait_s, unit_s, context_tokens, recent = work[:, idx]
        compute = (num_tokens * (1.0 + half_alpha * num_tokens) - saved) * compute_scale
        num_held, num_running = min(held[idx, 0], usable) * block_size, min(running[idx], usable) * block_size
        pending = max(0, num_running - num_held) * (1.0 + half_alpha * (num_running + num_held)) * compute_scale
        # Up to the next mark the rank may hold some: that counts for neither.
        next_idx = min(np.searchsorted(marked, tokens // block_size, side="right") + 1, len(marked))
        shared, unpriced = shared_to[-1] - shared_to[next_idx], unpriced_to[-1] - unpriced_to[next_idx]
        priced_s = (
            compute - shared + price * (compute - unpriced) + idle * pending + SPREAD_SCALE * context_tokens
        ) * unit_s
        rest_s = CONTEXT_SCALE * context_tokens * unit_s + recent * recent_unit_s
        weighed[:, idx] = wait_s + max(priced_s, most_s) + rest_s, compute, pending, shared, unpriced
        cached_tokens[idx] = tokens


class Pull(NamedTuple):
    """The leading blocks that candidates can fetch from a worker, and their seconds a token; inf if one cannot."""

    num_blocks: int
    token_s: Floats
    min_tokens: int
    """Fewer are computed rather than fetched."""


class Prices(NamedTuple):
    """What a request would cost at each candidate, and the terms of that; arrays with one entry a candidate."""

    cost_s: Floats
    compute: Floats
    """e; times `load.unit_s` it is in seconds, as are the terms of `load`."""
    pending: Floats
    """d, which counts as far as the fleet is idle."""
    shared: Floats
    """h, the part of `compute` that later requests for the prefix take over."""
    unpriced: Floats
    """g, the part of `compute` that has no price, as most requests have the prefix."""
    price: float
    """κ: computing costs 1 + `price` times its time."""
    cached_tokens: NDArray[np.int64]
    load: Work
    num_tokens: int
    marks: Marks
    policy: PricedPolicy
    fetched_tokens: NDArray[np.int64]
    """Tokens that are fetched from another worker, beyond the cached ones."""
    spared: Floats
    """The work that fetching saves."""
    fetch_s: Floats

    def terms_s(self) -> dict[str, list[float]]:
        """Return the terms of the costs in seconds: by term, one number a candidate."""
        unit_s, compute_s = self.load.unit_s, self.compute * self.load.unit_s
        terms = {
            "wait": self.load.wait_s,
            "compute": compute_s - self.shared * unit_s,
            "price_of_computing": self.price * (compute_s + (self.spared - self.unpriced) * unit_s),
            "in_flight": (1.0 - self.load.utilisation) * self.pending * unit_s,
            "fetch": self.fetch_s,
            "recent": RECENT_SCALE * self.load.recent * unit_s.mean(),
        }
        terms |= {"running": self.cost_s - sum(terms.values()), "cost": self.cost_s}
        return {name: each.tolist() for name, each in terms.items()}


@dataclass(slots=True, eq=False)
class Dispatched:
    """A request that was sent to a rank; its work there is removed when it is answered, its context when it ends."""

    all_work: WorkRows
    in_flight: PromptsInFlight
    rank: int
    work: int
    num_tokens: int
    dispatched_at_s: float
    """From which its time is learnt; inf if nothing is."""
    marks: Marks
    marked_until_s: float
    is_streamed: bool
    is_waiting: bool
    """Whether it is streamed and has no first token yet."""
    has_ended: bool = False

    def answered(self, now_s: float) -> None:
        """Record a streamed request's first token; later ones change nothing."""
        if self.is_waiting:
            self.is_waiting = False
            self.all_work.answer(now_s, self.rank, self.work, self.dispatched_at_s)
            self.in_flight.settle(now_s, self.rank, self.marks, self.marked_until_s, is_computed=True)

    def add_tokens(self, num: int) -> None:
        """Count new tokens of the answer."""
        if not self.has_ended:
            self.num_tokens += num
            self.all_work.add_context(self.rank, num)

    def finish(self, now_s: float, num_output_tokens: int | None = None) -> None:
        """Record that the request ended, however it did; further calls change nothing.

        A streamed one without a first token was not computed; whether one that is not streamed was shows only if its
        answer says how long it is.
        """
        if self.has_ended:
            return
        if self.is_waiting:
            self.all_work.withdraw(now_s, self.rank, self.work)
        elif not self.is_streamed:
            self.all_work.end_unstreamed(now_s, self.rank, self.work, self.dispatched_at_s, num_output_tokens)
        if self.is_waiting or not self.is_streamed:
            is_computed = not self.is_waiting
            self.in_flight.settle(now_s, self.rank, self.marks, self.marked_until_s, is_computed=is_computed)
        self.all_work.add_context(self.rank, -self.num_tokens)
        self.is_waiting, self.has_ended = False, True


class PricedPolicy:
    """Decides by the lowest cost, and keeps the state for that: ranks are small integers. No I/O, no clock."""

    def __init__(self, settings: PriceSettings, work: WorkRows, in_flight: PromptsInFlight, block_size: int) -> None:
        """Use these rows and tables, which may be shared with other routers."""
        self.settings = settings
        self._work = work
        self._in_flight = in_flight
        self.block_size = block_size
        self._credits = np.array(settings.tier_credits)

    @classmethod
    def for_one(cls, num_ranks: int, block_size: int, settings: PriceSettings | None = None) -> PricedPolicy:
        """Return a policy for a single router."""
        work = WorkRows(np.zeros((1, NUM_FIELDS, num_ranks)))
        in_flight = PromptsInFlight(np.zeros((1, NUM_SLOTS), SLOT), num_ranks, block_size)
        return cls(settings or PriceSettings(), work, in_flight, block_size)

    def weigh(
        self,
        now_s: float,
        num_tokens: int,
        block_hashes: Sequence[int] | Marks,
        depths: ArrayLike,
        ranks: NDArray[np.intp] | None = None,
        compute_scale: float = 1.0,
        pull: Pull | None = None,
        room_s: Floats | float = 0.0,
    ) -> Prices:
        """Return what a prompt would cost at these ranks, or at all. Nothing is changed.

        `depths` are the leading blocks that each rank holds, `[num_ranks]`, or `[num_ranks, num_tiers]` counting those
        of the faster tiers too. `compute_scale` is the cost of a token relative to computing it, for prompts that are
        fetched. With `pull`, ranks fetch what they lack of those blocks where that is cheaper. `room_s` is how long the
        request would wait to be sent to each. The block with the last token is computed in any case.
        """
        settings, work = self.settings, self._work.read(now_s, ranks)
        work.by_rank[0] += room_s
        held = np.asarray(depths, np.int64)
        held = held[:, None] if held.ndim == 1 else held
        marks = self._in_flight.marks(block_hashes)
        idle = 1.0 - work.utilisation
        price = min(MAX_PRICE, PRICE_SCALE * work.utilisation**2 / idle)
        weighed, cached_tokens = np.empty((5, len(held))), np.empty(len(held), np.int64)
        weigh_ranks(
            work.by_rank,
            *self._in_flight.read(now_s, marks, held[:, 0], ranks),
            work.num_requests,
            held,
            self._credits,
            max(0, num_tokens - 1) // self.block_size,
            self.block_size,
            num_tokens,
            settings.alpha / 2,
            compute_scale,
            price,
            idle,
            weighed,
            cached_tokens,
        )
        fetched = np.zeros(len(held), np.int64), np.zeros(len(held)), np.zeros(len(held))
        prices = Prices._make((*weighed, price, cached_tokens, work, num_tokens, marks, self, *fetched))
        return prices if pull is None else self._with_pull(prices, pull)

    def _with_pull(self, prices: Prices, pull: Pull) -> Prices:
        num_tokens = min(pull.num_blocks, max(0, prices.num_tokens - 1) // self.block_size) * self.block_size
        missing = np.maximum(num_tokens - prices.cached_tokens, 0)
        spared = self.settings.work_of(num_tokens) - self.settings.work_of(prices.cached_tokens)
        fetch_s = PULL_LATENCY_S + np.maximum(missing, 1) * pull.token_s
        is_pulled = (missing > pull.min_tokens) & (fetch_s < spared * prices.load.unit_s)
        spared, fetch_s = np.where(is_pulled, spared, 0.0), np.where(is_pulled, fetch_s, 0.0)
        unshared = spared - prices.shared  # a copy that is fetched costs no more than one that is computed
        shared = np.where(is_pulled, np.maximum(fetch_s / prices.load.unit_s - unshared, 0.0), prices.shared)
        return prices._replace(
            cost_s=prices.cost_s - (unshared + shared) * prices.load.unit_s + fetch_s,
            compute=prices.compute - spared,
            shared=shared,
            fetched_tokens=np.where(is_pulled, missing, 0),
            spared=spared,
            fetch_s=fetch_s,
        )

    @staticmethod
    def probabilities(prices: Prices, held_blocks: Sequence[int]) -> list[float]:
        """Return each candidate's probability: equal for the cheapest that hold the fewest blocks, else 0."""
        return uniform_over_minima(list(zip(prices.cost_s.tolist(), held_blocks, strict=True)))

    def choose(self, prices: Prices, held_blocks: Sequence[int], random: Random) -> int:
        """Return the index of the candidate that takes the request."""
        return draw(self.probabilities(prices, held_blocks), random)

    def dispatched(
        self,
        now_s: float,
        rank: int,
        prices: Prices,
        chosen_idx: int,
        *,
        is_streamed: bool = True,
        computes: bool = True,
    ) -> Dispatched:
        """Record that the request was sent to this rank, which is at `chosen_idx` in the prices.

        A rank that does not compute the prompt fetches it: no other request waits for that, and nothing is learnt from
        it. Nor from one that fetches a part first: how long that took, or whether it failed, is not known here.
        """
        work = round(float(prices.compute[chosen_idx])) if computes else 0
        unit_s, num_tokens, marks = float(prices.load.unit_s[chosen_idx]), prices.num_tokens, prices.marks
        is_streamed = is_streamed and computes
        self._work.dispatch(now_s, rank, work, unit_s, num_tokens, is_streamed)
        until_s = self._in_flight.add(now_s, rank, marks)
        at_s = math.inf if prices.fetch_s[chosen_idx] else now_s
        return Dispatched(
            self._work, self._in_flight, rank, work, num_tokens, at_s, marks, until_s, is_streamed, is_streamed
        )

"""The work that each rank was given and how fast it is, in rows of fixed size that several routers can share.

Work is counted in units: computing one prompt token without context is one. A row is one router's part of it, by field
and rank; a decision reads all rows. Each router writes only its own row, so no lock is needed:

    field              all rows together      what it is
    QUEUED             sum                    work of streamed requests dispatched and not answered yet
    CONTEXT            sum                    tokens of running requests, prompts and answers
    NUM_LEARNT         sum                    how many first tokens the speed was learnt from
    LEARNT_S           sum, decayed           seconds that finished work took; falls by LEARNT_DECAY each time
    LEARNT             sum, decayed           that work
    LEARNT_AT          (of its own row)       the sum of NUM_LEARNT when these two were last added to
    RECENT             sum, decayed to now    work dispatched; halves every RECENT_HALF_LIFE_S
    DISPATCHED_S       sum, decayed to now    seconds of work dispatched; falls by a factor e every window
    DISPATCHED_AT      (of its own row)       when these two and NUM_REQUESTS were last added to
    ANSWERED_AT        max                    when the rank last answered, or work came to one that had none
    BUSY_UNTIL         max                    when requests that are not streamed should have been computed
    STARTED_AT         min of those not 0     when it was first given work
    UNSTREAMED         sum                    work of requests that are not streamed and have not ended
    UNSTREAMED_S       sum, decayed           seconds a unit of work that such requests took, times UNSTREAMED_WEIGHT
    UNSTREAMED_WEIGHT  sum, decayed           a part of the work of their prompts
    NUM_REQUESTS       sum, decayed to now    requests dispatched; falls by a factor e every REQUESTS_WINDOW_S

A row of zeros is that of a router without any work, so clearing a row removes what its router had in flight. Replicas
send each other these fields (`kvist.router.fleet.replicas`): new ones are appended, and are 0 where they are unknown.

A decision may read a row of which another process has changed some fields and not yet others. It then sees a rank
without its last observation, or with half of it: all prices stay finite, and the next decision reads it whole.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.router.policy.in_flight import REQUESTS_WINDOW_S

QUEUED, CONTEXT, NUM_LEARNT, LEARNT_S, LEARNT, LEARNT_AT, RECENT, DISPATCHED_S, DISPATCHED_AT = range(9)
ANSWERED_AT, BUSY_UNTIL, STARTED_AT, UNSTREAMED, UNSTREAMED_S, UNSTREAMED_WEIGHT, NUM_REQUESTS = range(9, 16)
NUM_FIELDS: Final = 16

RECENT_HALF_LIFE_S: Final = 60.0
WINDOW_S: Final = 10.0
"""Utilisation is averaged over so long. Averaged over 300 s it rises only after the queue that it should prevent."""

WINDOW_WORK: Final = 1e5
"""But at least over the time that a rank takes for so much work. A prompt that takes 45 s would half fill 10 s of eight
ranks: the price of recomputation would leap, and keep others waiting behind that very prompt (docs/decisions.md)."""

LEARNT_DECAY: Final = 0.995
"""The weight that earlier observations keep after each new one."""

MIN_LEARNT_WORK: Final = 256
"""Smaller requests mostly wait for a step of the engine, so that nothing is learnt of its speed from them."""

SHRINKAGE: Final = 2e5
"""A rank's own speed counts as much as the fleet's after so much work: until then differences are mostly chance."""

PRIOR_WORK: Final = 500.0
"""How much work the first estimate of the fleet's speed counts for."""

TOKEN_WORK: Final = 400.0
"""The work that a token of an answer counts as where only the whole answer's time is known: 16 ms at 40 µs a unit. With
100 or 1,000, simulated fleets do as well, to within the differences between seeds."""

UNSTREAMED_SHARE: Final = 0.25
"""The weight of such an answer, relative to a first token. With 1, chance makes simulated fleets of equal workers 15 %
slower."""

MIN_STARTED_S: Final = 3.0
"""A fleet counts as having been idle before its first work, if that is more recent than this."""
MAX_UTILISATION: Final = 0.99

Floats = NDArray[np.float64]


class Work(NamedTuple):
    """The work that ranks have now; arrays with one entry a rank."""

    by_rank: Floats
    """The next four, as its rows."""
    wait_s: Floats
    """Until the rank could begin with another prompt; it rises again when the rank is late with its answer."""
    unit_s: Floats
    """Seconds a unit of work."""
    context_tokens: Floats
    recent: Floats
    utilisation: float
    """The average share of time that these ranks have lately been computing prompts."""
    num_requests: float
    """How many requests these ranks got of late, as `in_flight` counts those for a prefix."""


def learnt_of(rows: Floats) -> Floats:
    """Return the seconds and work learnt in all rows, `[num_rows, NUM_FIELDS, num_ranks]`, as `[2, num_ranks]`."""
    decay = LEARNT_DECAY ** np.maximum(rows[:, NUM_LEARNT].sum(0) - rows[:, LEARNT_AT], 0.0)
    learnt: Floats = (rows[:, LEARNT_S : LEARNT + 1] * decay[:, None]).sum(0)
    return learnt


def read_rows(
    rows: Floats, ranks: NDArray[np.intp], now_s: float, first_unit_s: float, found: Floats
) -> tuple[float, float, float]:
    """Write the arrays of a `Work` into `found`, `[4, num_ranks]`; return the window, and the numbers of a `Work`.

    Plain loops, for `kvist.router.compiled` to compile.
    """
    num_rows, num_ranks = len(rows), len(ranks)
    fleet_s, fleet, fleet_unstreamed_s, fleet_unstreamed_weight = first_unit_s * PRIOR_WORK, PRIOR_WORK, 0.0, 0.0
    for idx in range(num_ranks):
        rank, num_learnt, learnt_s, learnt, unstreamed_s, unstreamed_weight = ranks[idx], 0.0, 0.0, 0.0, 0.0, 0.0
        for row in range(num_rows):
            num_learnt += rows[row, NUM_LEARNT, rank]
        for row in range(num_rows):
            decay = LEARNT_DECAY ** max(num_learnt - rows[row, LEARNT_AT, rank], 0.0)
            learnt_s += rows[row, LEARNT_S, rank] * decay
            learnt += rows[row, LEARNT, rank] * decay
            unstreamed_s += rows[row, UNSTREAMED_S, rank]
            unstreamed_weight += rows[row, UNSTREAMED_WEIGHT, rank]
        found[0, idx], found[1, idx], found[2, idx], found[3, idx] = learnt_s, learnt, unstreamed_s, unstreamed_weight
        fleet_s += learnt_s
        fleet += learnt
        fleet_unstreamed_s += unstreamed_s
        fleet_unstreamed_weight += unstreamed_weight
    fleet_unit_s = fleet_s / fleet
    # Whole answers show how much slower than the others a rank is, but not by themselves how fast they all are.
    unstreamed_scale = fleet_unit_s * fleet_unstreamed_weight / fleet_unstreamed_s if fleet_unstreamed_s > 0.0 else 0.0
    window_s = max(WINDOW_S, WINDOW_WORK * fleet_unit_s)
    dispatched_s, num_requests, started_at_s = 0.0, 0.0, now_s
    for idx in range(num_ranks):
        rank = ranks[idx]
        learnt_s, learnt = found[0, idx] + unstreamed_scale * found[2, idx], found[1, idx] + found[3, idx]
        unit_s = (learnt_s + SHRINKAGE * fleet_unit_s) / (learnt + SHRINKAGE)
        queued, unstreamed, context, recent, answered_at_s, busy_until_s = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for row in range(num_rows):
            queued += rows[row, QUEUED, rank]
            unstreamed += rows[row, UNSTREAMED, rank]
            context += rows[row, CONTEXT, rank]
            since_s = rows[row, DISPATCHED_AT, rank] - now_s
            recent += rows[row, RECENT, rank] * 2.0 ** (since_s / RECENT_HALF_LIFE_S)
            dispatched_s += rows[row, DISPATCHED_S, rank] * math.exp(since_s / window_s)
            num_requests += rows[row, NUM_REQUESTS, rank] * math.exp(since_s / REQUESTS_WINDOW_S)
            answered_at_s = max(answered_at_s, rows[row, ANSWERED_AT, rank])
            busy_until_s = max(busy_until_s, rows[row, BUSY_UNTIL, rank])
            if rows[row, STARTED_AT, rank] > 0.0:
                started_at_s = min(started_at_s, rows[row, STARTED_AT, rank])
        # A rank that is late is expected to be so for as long again: otherwise one that hangs would seem idle.
        wait_s = abs(queued * unit_s + (answered_at_s - now_s)) if queued > 0.0 else 0.0
        # Requests that have ended are not waited for, as where ranks are faster than predicted.
        wait_s += min(max(busy_until_s - now_s, 0.0), unstreamed * unit_s)
        found[0, idx], found[1, idx], found[2, idx], found[3, idx] = wait_s, unit_s, context, recent
    seen_s = max(MIN_STARTED_S, now_s - started_at_s)
    utilisation = dispatched_s / (window_s * (1.0 - math.exp(-seen_s / window_s)) * num_ranks)
    return window_s, min(MAX_UTILISATION, utilisation), num_requests


def merged(rows: Floats, num_learnt: Floats) -> Floats:
    """Return one row that is equivalent to all of these, `[NUM_FIELDS, num_ranks]`, for a window of `WINDOW_S`.

    `num_learnt` is the sum over all rows there are, others included.
    """
    row: Floats = rows.sum(0)
    if len(rows) == 1:
        return row
    at_s, each_at = rows[:, DISPATCHED_AT].max(0), np.minimum(rows[:, LEARNT_AT], num_learnt)  # a row may be gone
    learnt_at = each_at.max(0)
    decay = LEARNT_DECAY ** (learnt_at - each_at)
    since_s = rows[:, DISPATCHED_AT] - at_s
    row[LEARNT_S], row[LEARNT] = ((rows[:, field] * decay).sum(0) for field in (LEARNT_S, LEARNT))
    row[RECENT] = (rows[:, RECENT] * np.exp2(since_s / RECENT_HALF_LIFE_S)).sum(0)
    row[DISPATCHED_S] = (rows[:, DISPATCHED_S] * np.exp(since_s / WINDOW_S)).sum(0)
    row[NUM_REQUESTS] = (rows[:, NUM_REQUESTS] * np.exp(since_s / REQUESTS_WINDOW_S)).sum(0)
    row[LEARNT_AT], row[DISPATCHED_AT] = learnt_at, at_s
    row[ANSWERED_AT], row[BUSY_UNTIL] = rows[:, ANSWERED_AT].max(0), rows[:, BUSY_UNTIL].max(0)
    started_at_s = np.where(rows[:, STARTED_AT] > 0, rows[:, STARTED_AT], np.inf).min(0)
    row[STARTED_AT] = np.where(np.isinf(started_at_s), 0.0, started_at_s)
    return row


class WorkRows:
    """The rows of all routers, `[num_rows, NUM_FIELDS, num_ranks]`; the methods change the own one."""

    def __init__(
        self, rows: Floats, own_idx: int = 0, first_unit_s: float = 40e-6, num_shared: int | None = None
    ) -> None:
        """Use these rows, which may be in shared memory; `first_unit_s` is the speed assumed before any is learnt.

        The first `num_shared` of them, or all, are written by their routers directly; the others later, as messages of
        their routers come.
        """
        self._rows = rows
        self._num_shared = len(rows) if num_shared is None else num_shared
        self._own = rows[own_idx]
        self.num_ranks = rows.shape[2]
        self._first_unit_s = first_unit_s
        self._window_s = WINDOW_S

    def read(self, now_s: float, ranks: NDArray[np.intp] | None = None) -> Work:
        """Return the work that these ranks, or all, have now. O(rows · ranks); no row is changed."""
        ranks = np.arange(self.num_ranks) if ranks is None else ranks
        found = np.empty((4, len(ranks)))
        self._window_s, *of_all = map(float, read_rows(self._rows, ranks, now_s, self._first_unit_s, found))
        return Work._make((found, *found, *of_all))

    def dispatch(self, now_s: float, rank: int, work: int, unit_s: float, num_tokens: int, is_streamed: bool) -> None:
        """Add a request: the work of its prompt at this rank, and how long that should take there."""
        own, seconds = self._own[:, rank], work * unit_s
        passed_s = max(0.0, now_s - own[DISPATCHED_AT])
        own[RECENT] = own[RECENT] * math.exp2(-passed_s / RECENT_HALF_LIFE_S) + work
        own[DISPATCHED_S] = own[DISPATCHED_S] * math.exp(-passed_s / self._window_s) + seconds
        own[NUM_REQUESTS] = own[NUM_REQUESTS] * math.exp(-passed_s / REQUESTS_WINDOW_S) + 1
        own[DISPATCHED_AT] = now_s
        own[STARTED_AT] = own[STARTED_AT] or now_s
        own[CONTEXT] += num_tokens
        rows = self._rows[:, :, rank]
        if is_streamed:
            if sum(rows[:, QUEUED].tolist()) <= 0:
                own[ANSWERED_AT] = now_s
            own[QUEUED] += work
        elif work:
            own[BUSY_UNTIL] = max(now_s, *rows[:, BUSY_UNTIL].tolist()) + seconds
            own[UNSTREAMED] += work

    def answer(self, now_s: float, rank: int, work: int, dispatched_at_s: float) -> None:
        """Record a request's first token: remove the prompt's work, and learn from the time since the last one.

        Nothing is learnt from one dispatched at infinity.
        """
        own, rows = self._own[:, rank], self._rows[:, :, rank]
        since_at_s = max(dispatched_at_s, *rows[:, ANSWERED_AT].tolist())
        own[QUEUED] -= work
        own[ANSWERED_AT] = now_s
        # It is not known how much of the time went to prompts that are not streamed, nor in time how much to those of
        # routers that report later: each router would then count the time of all.
        is_alone = sum(rows[self._num_shared :, QUEUED].tolist()) <= 0
        if work > MIN_LEARNT_WORK and is_alone and max(rows[:, BUSY_UNTIL].tolist()) <= since_at_s < math.inf:
            own[NUM_LEARNT] += 1
            num_learnt = sum(rows[:, NUM_LEARNT].tolist())
            decay = LEARNT_DECAY ** max(0.0, num_learnt - own[LEARNT_AT])
            own[LEARNT_S] = own[LEARNT_S] * decay + max(0.0, now_s - since_at_s)
            own[LEARNT] = own[LEARNT] * decay + work
            own[LEARNT_AT] = num_learnt

    def withdraw(self, now_s: float, rank: int, work: int) -> None:
        """Remove the work of a streamed request that ended without a first token; that counts as the rank's answer."""
        self._own[QUEUED, rank] -= work
        self._own[ANSWERED_AT, rank] = now_s

    def end_unstreamed(
        self, now_s: float, rank: int, work: int, dispatched_at_s: float, num_output_tokens: int | None
    ) -> None:
        """Remove the work of a request that was not streamed, and learn from its time if its length is known."""
        own = self._own[:, rank]
        own[UNSTREAMED] -= work
        if work > MIN_LEARNT_WORK and num_output_tokens is not None and now_s > dispatched_at_s:
            weight = UNSTREAMED_SHARE * work
            unit_s = (now_s - dispatched_at_s) / (work + TOKEN_WORK * num_output_tokens)
            own[UNSTREAMED_S] = own[UNSTREAMED_S] * LEARNT_DECAY + weight * unit_s
            own[UNSTREAMED_WEIGHT] = own[UNSTREAMED_WEIGHT] * LEARNT_DECAY + weight

    def add_context(self, rank: int, num_tokens: int) -> None:
        """Count new tokens of the rank's answers; a negative number is that of a request that ended."""
        self._own[CONTEXT, rank] += num_tokens

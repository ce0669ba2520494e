"""What each rank was given to compute and how fast it is, in rows of fixed size that several routers can share.

Work is counted in units: computing one prompt token without context is one. A row is one router's part of it, by field
and rank; whoever decides reads all rows at once. Each router writes its own row alone, so none needs a lock:

    field         all rows together      what it is
    QUEUED        sum                    work of streamed requests dispatched and not answered yet
    CONTEXT       sum                    tokens of running requests, prompts and answers
    NUM_LEARNT    sum                    how many first tokens were learnt from
    LEARNT_S      sum, decayed           seconds that work took which is done; falls by LEARNT_DECAY with each of them
    LEARNT        sum, decayed           that work
    LEARNT_AT     (of its own row)       the sum of NUM_LEARNT when these two were last added to
    RECENT        sum, decayed to now    work handed out; halves every RECENT_HALF_LIFE_S
    GIVEN_S       sum, decayed to now    seconds of work handed out; falls by a factor e every window
    GIVEN_AT      (of its own row)       when these two were last added to
    ANSWERED_AT   max                    when the rank was last heard of, or work came to one that had none
    BUSY_UNTIL    max                    when requests that are not streamed should have been computed
    STARTED_AT    min of those not 0     when it was first given something
    WHOLE         sum                    work of requests that are not streamed and have not ended
    TOOK_S        sum, decayed           seconds that such requests took a unit, times TOOK
    TOOK          sum, decayed           a part of the work of their prompts

A row of zeros is a router that has done nothing, so a row that is cleared takes with it what its router had in flight.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

QUEUED, CONTEXT, NUM_LEARNT, LEARNT_S, LEARNT, LEARNT_AT, RECENT, GIVEN_S, GIVEN_AT = range(9)
ANSWERED_AT, BUSY_UNTIL, STARTED_AT, WHOLE, TOOK_S, TOOK = range(9, 15)
NUM_FIELDS: Final = 15

RECENT_HALF_LIFE_S: Final = 60.0
WINDOW_S: Final = 10.0
"""Utilisation is an average over so long. Over 300 s it rises after the queue it should have prevented."""

WINDOW_WORK: Final = 1e5
"""But at least over the time that a rank takes for so much work. Where a prompt takes 45 s, it would fill 10 s of eight
ranks by half: the price of recomputation would leap, and hold others behind that very prompt (docs/decisions.md)."""

LEARNT_DECAY: Final = 0.995
"""What earlier observations still count for after each new one."""

MIN_LEARNT_WORK: Final = 256
"""Smaller requests wait for a step of the engine rather than compute, and tell nothing of its speed."""

SHRINKAGE: Final = 2e5
"""A rank's own speed counts as much as the fleet's after so much work: until then differences are mostly chance."""

PRIOR_WORK: Final = 500.0
"""How much work the first guess of the fleet's speed counts for."""

TOKEN_WORK: Final = 400.0
"""What a token of an answer is taken for where only the whole answer's time is known: 16 ms at 40 µs a unit. With 100
or 1,000 simulated fleets do as well, to within what seeds differ by."""

WHOLE_WEIGHT: Final = 0.25
"""Of such an answer, beside a first token's. At 1 chance makes simulated fleets of equal workers 15 % slower."""

MIN_STARTED_S: Final = 3.0
"""A fleet is taken to have idled before it was heard of, for what is left of this."""
MAX_UTILISATION: Final = 0.99

Floats = NDArray[np.float64]


class Work(NamedTuple):
    """What ranks have to do now; arrays with one entry a rank."""

    by_rank: Floats
    """The next four, as its rows."""
    wait_s: Floats
    """Until the rank could begin with another prompt; it rises again when the rank should have been heard of."""
    unit_s: Floats
    """Seconds that a unit of work takes there."""
    context_tokens: Floats
    recent: Floats
    utilisation: float
    """Share of time that these ranks compute prompts of late, on average."""


def learnt_of(rows: Floats) -> Floats:
    """Return what all rows, `[num_rows, NUM_FIELDS, num_ranks]`, have learnt: seconds and work, `[2, num_ranks]`."""
    decay = LEARNT_DECAY ** np.maximum(rows[:, NUM_LEARNT].sum(0) - rows[:, LEARNT_AT], 0.0)
    learnt: Floats = (rows[:, LEARNT_S : LEARNT + 1] * decay[:, None]).sum(0)
    return learnt


def read_rows(
    rows: Floats, ranks: NDArray[np.intp], now_s: float, first_unit_s: float, found: Floats
) -> tuple[float, float]:
    """Write the arrays of a `Work` into `found`, `[4, num_ranks]`; return the window and the utilisation.

    Plain loops, for `kvist.router.compiled` to compile.
    """
    num_rows, num_ranks = len(rows), len(ranks)
    fleet_s, fleet, fleet_took_s, fleet_took = first_unit_s * PRIOR_WORK, PRIOR_WORK, 0.0, 0.0
    for idx in range(num_ranks):
        rank, num_learnt, learnt_s, learnt, took_s, took = ranks[idx], 0.0, 0.0, 0.0, 0.0, 0.0
        for row in range(num_rows):
            num_learnt += rows[row, NUM_LEARNT, rank]
        for row in range(num_rows):
            decay = LEARNT_DECAY ** max(num_learnt - rows[row, LEARNT_AT, rank], 0.0)
            learnt_s += rows[row, LEARNT_S, rank] * decay
            learnt += rows[row, LEARNT, rank] * decay
            took_s += rows[row, TOOK_S, rank]
            took += rows[row, TOOK, rank]
        found[0, idx], found[1, idx], found[2, idx], found[3, idx] = learnt_s, learnt, took_s, took
        fleet_s += learnt_s
        fleet += learnt
        fleet_took_s += took_s
        fleet_took += took
    fleet_unit_s = fleet_s / fleet
    # Whole answers tell how much slower than the others a rank is, but not by themselves how fast they are.
    took_scale = fleet_unit_s * fleet_took / fleet_took_s if fleet_took_s > 0.0 else 0.0
    window_s = max(WINDOW_S, WINDOW_WORK * fleet_unit_s)
    given_s, started_at_s = 0.0, now_s
    for idx in range(num_ranks):
        rank = ranks[idx]
        learnt_s, learnt = found[0, idx] + took_scale * found[2, idx], found[1, idx] + found[3, idx]
        unit_s = (learnt_s + SHRINKAGE * fleet_unit_s) / (learnt + SHRINKAGE)
        queued, whole, context, recent, answered_at_s, busy_until_s = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for row in range(num_rows):
            queued += rows[row, QUEUED, rank]
            whole += rows[row, WHOLE, rank]
            context += rows[row, CONTEXT, rank]
            since_s = rows[row, GIVEN_AT, rank] - now_s
            recent += rows[row, RECENT, rank] * 2.0 ** (since_s / RECENT_HALF_LIFE_S)
            given_s += rows[row, GIVEN_S, rank] * math.exp(since_s / window_s)
            answered_at_s = max(answered_at_s, rows[row, ANSWERED_AT, rank])
            busy_until_s = max(busy_until_s, rows[row, BUSY_UNTIL, rank])
            if rows[row, STARTED_AT, rank] > 0.0:
                started_at_s = min(started_at_s, rows[row, STARTED_AT, rank])
        # Behind its time, a rank is expected to be so for as long again: one that hangs would seem idle otherwise.
        wait_s = abs(queued * unit_s + (answered_at_s - now_s)) if queued > 0.0 else 0.0
        # What has ended is not waited for, as where ranks are faster than was foretold.
        wait_s += min(max(busy_until_s - now_s, 0.0), whole * unit_s)
        found[0, idx], found[1, idx], found[2, idx], found[3, idx] = wait_s, unit_s, context, recent
    seen_s = max(MIN_STARTED_S, now_s - started_at_s)
    return window_s, min(MAX_UTILISATION, given_s / (window_s * (1.0 - math.exp(-seen_s / window_s)) * num_ranks))


def merged(rows: Floats) -> Floats:
    """Return one row that says what all of these do, `[NUM_FIELDS, num_ranks]`; a window is taken for `WINDOW_S`."""
    row: Floats = rows.sum(0)
    if len(rows) == 1:
        return row
    at_s, num_learnt = rows[:, GIVEN_AT].max(0), row[NUM_LEARNT]
    decay = LEARNT_DECAY ** np.maximum(num_learnt - rows[:, LEARNT_AT], 0.0)
    since_s = rows[:, GIVEN_AT] - at_s
    row[LEARNT_S], row[LEARNT] = ((rows[:, field] * decay).sum(0) for field in (LEARNT_S, LEARNT))
    row[RECENT] = (rows[:, RECENT] * np.exp2(since_s / RECENT_HALF_LIFE_S)).sum(0)
    row[GIVEN_S] = (rows[:, GIVEN_S] * np.exp(since_s / WINDOW_S)).sum(0)
    row[LEARNT_AT], row[GIVEN_AT] = num_learnt, at_s
    row[ANSWERED_AT], row[BUSY_UNTIL] = rows[:, ANSWERED_AT].max(0), rows[:, BUSY_UNTIL].max(0)
    started_at_s = np.where(rows[:, STARTED_AT] > 0, rows[:, STARTED_AT], np.inf).min(0)
    row[STARTED_AT] = np.where(np.isinf(started_at_s), 0.0, started_at_s)
    return row


class WorkRows:
    """The rows of all routers, `[num_rows, NUM_FIELDS, num_ranks]`, and what one of them, the own, is changed by."""

    def __init__(
        self, rows: Floats, own_idx: int = 0, first_unit_s: float = 40e-6, num_shared: int | None = None
    ) -> None:
        """Keep the rows where they lie; `first_unit_s` is the speed of a fleet not heard of.

        The first `num_shared` of them, or all, are in memory that their routers share; the others are told of later.
        """
        self._rows = rows
        self._num_shared = len(rows) if num_shared is None else num_shared
        self._own = rows[own_idx]
        self.num_ranks = rows.shape[2]
        self._first_unit_s = first_unit_s
        self._window_s = WINDOW_S

    def read(self, now_s: float, ranks: NDArray[np.intp] | None = None) -> Work:
        """Return what these ranks, or all, have to do now. O(rows · ranks); no row is changed."""
        ranks = np.arange(self.num_ranks) if ranks is None else ranks
        found = np.empty((4, len(ranks)))
        self._window_s, utilisation = map(float, read_rows(self._rows, ranks, now_s, self._first_unit_s, found))
        return Work._make((found, *found, utilisation))

    def dispatch(self, now_s: float, rank: int, work: int, unit_s: float, num_tokens: int, is_streamed: bool) -> None:
        """Add a request: the work that its prompt is at this rank, and how long it should take there."""
        own, seconds = self._own[:, rank], work * unit_s
        passed_s = max(0.0, now_s - own[GIVEN_AT])
        own[RECENT] = own[RECENT] * math.exp2(-passed_s / RECENT_HALF_LIFE_S) + work
        own[GIVEN_S] = own[GIVEN_S] * math.exp(-passed_s / self._window_s) + seconds
        own[GIVEN_AT] = now_s
        own[STARTED_AT] = own[STARTED_AT] or now_s
        own[CONTEXT] += num_tokens
        rows = self._rows[:, :, rank]
        if is_streamed:
            if sum(rows[:, QUEUED].tolist()) <= 0:
                own[ANSWERED_AT] = now_s
            own[QUEUED] += work
        elif work:
            own[BUSY_UNTIL] = max(now_s, *rows[:, BUSY_UNTIL].tolist()) + seconds
            own[WHOLE] += work

    def answer(self, now_s: float, rank: int, work: int, dispatched_at_s: float) -> None:
        """Take a request's first token: its prompt is computed, and its time since the last one is learnt from.

        Nothing is learnt from one dispatched at infinity.
        """
        own, rows = self._own[:, rank], self._rows[:, :, rank]
        since_at_s = max(dispatched_at_s, *rows[:, ANSWERED_AT].tolist())
        own[QUEUED] -= work
        own[ANSWERED_AT] = now_s
        # Of prompts that are not streamed and were computed meanwhile, nobody knows what part of the time they took; of
        # those whose answers are told of later it is known too late, and each router would count the time of all.
        is_alone = sum(rows[self._num_shared :, QUEUED].tolist()) <= 0
        if work > MIN_LEARNT_WORK and is_alone and max(rows[:, BUSY_UNTIL].tolist()) <= since_at_s < math.inf:
            own[NUM_LEARNT] += 1
            num_learnt = sum(rows[:, NUM_LEARNT].tolist())
            decay = LEARNT_DECAY ** max(0.0, num_learnt - own[LEARNT_AT])
            own[LEARNT_S] = own[LEARNT_S] * decay + max(0.0, now_s - since_at_s)
            own[LEARNT] = own[LEARNT] * decay + work
            own[LEARNT_AT] = num_learnt

    def withdraw(self, now_s: float, rank: int, work: int) -> None:
        """Take back the work of a streamed request that ended without a first token; the rank was heard of by that."""
        self._own[QUEUED, rank] -= work
        self._own[ANSWERED_AT, rank] = now_s

    def end_whole(
        self, now_s: float, rank: int, work: int, dispatched_at_s: float, num_output_tokens: int | None
    ) -> None:
        """Take back the work of a request that was not streamed; learn from its answer, if that is so long."""
        own = self._own[:, rank]
        own[WHOLE] -= work
        if work > MIN_LEARNT_WORK and num_output_tokens is not None and now_s > dispatched_at_s:
            weight = WHOLE_WEIGHT * work
            unit_s = (now_s - dispatched_at_s) / (work + TOKEN_WORK * num_output_tokens)
            own[TOOK_S] = own[TOOK_S] * LEARNT_DECAY + weight * unit_s
            own[TOOK] = own[TOOK] * LEARNT_DECAY + weight

    def add_context(self, rank: int, num_tokens: int) -> None:
        """Count tokens that the rank's answers grew by, or, below 0, those of a request that ended."""
        self._own[CONTEXT, rank] += num_tokens

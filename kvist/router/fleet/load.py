"""The load of each rank, counted by the router from the requests that it dispatched and that have not ended.

    dispatch ──────────── first byte of the answer ──────────────── end, error or disconnect
    running_requests +1                                             −1
    prefill_tokens  +uncached    −uncached                          (−uncached, if no byte came)

An event of a stream counts as one token. Answers that are not streamed keep their prefill tokens to the end, for
nothing shows when prefill ended.

If the router is several processes, each counts its own requests on a board that all read (`board`), and loads are sums
over all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from kvist.events import WorkerRank
from kvist.router.fleet.board import (
    MAX_COLUMNS,
    NUM_QUEUES,
    QUEUES_WORD,
    TENANTS_WORD,
    FrontField,
    LoadBoard,
    RankField,
)
from kvist.router.policy.decision import Load, Prompt
from kvist.router.policy.in_flight import PromptsInFlight
from kvist.router.policy.priced import Dispatched, PricedPolicy
from kvist.router.policy.settings import PriceSettings
from kvist.router.policy.work import QUEUED, WorkRows, learnt_of
from kvist.router.tenants.rows import TenantRows

_IDLE_INTERVAL_S = 0.05
_ALIVE_S = 1.0
"""A front that has not updated its queue head for so long may have stopped."""
_MIN_LEARNT_WORK = 50_000.0
"""A first request that waits half a minute for its worker's kernels to be compiled hides its speed until then."""
_RUNNING, _PREFILL, _ENDED, _ANSWERED, _LAST_BYTE_AT = map(int, RankField)


class ActiveRequest:
    """One dispatched request. Its load is released when it ends; `priced` is its share of a priced policy's load."""

    __slots__ = ("_cell", "_prefill_tokens", "_priced", "_tracker", "num_tokens")

    def __init__(self, tracker: LoadTracker, cell: int, uncached_tokens: int, priced: Dispatched | None) -> None:
        self._tracker, self._priced = tracker, priced
        self._cell: int | None = cell
        self._prefill_tokens = uncached_tokens
        self.num_tokens = 0
        tracker.ints[cell + _RUNNING] += 1
        tracker.ints[cell + _PREFILL] += uncached_tokens

    def end_prefill(self) -> None:
        """Release the prefill tokens: the first byte of the answer has come."""
        if self._cell is not None:
            self._tracker.ints[self._cell + _PREFILL] -= self._prefill_tokens
            self._tracker.ints[self._cell + _ANSWERED] += 1
            self._prefill_tokens = 0
            self._tracker.on_freed()

    def on_first_token(self, now_s: float) -> None:
        """Let a priced policy learn from the time that the first token took."""
        if self._priced is not None:
            self._priced.answered(now_s)

    def add_tokens(self, num_tokens: int) -> None:
        """Count further tokens of the answer."""
        self.num_tokens += num_tokens
        if self._priced is not None:
            self._priced.add_tokens(num_tokens)

    def finish(self, now_s: float, num_output_tokens: int | None = None) -> None:
        """Release all load, once; a priced policy learns from an answer whose length is known."""
        if self._priced is not None:
            self._priced.finish(now_s, num_output_tokens)
        cell, self._cell = self._cell, None
        if cell is not None:
            tracker, ints = self._tracker, self._tracker.ints
            ints[cell + _RUNNING] -= 1
            ints[cell + _PREFILL] -= self._prefill_tokens
            ints[cell + _ENDED] += 1
            ints[tracker.own_row + FrontField.RUNNING] -= 1
            tracker.on_freed()


class LoadTracker:
    """The load of every rank. Not thread-safe: it belongs to the event loop."""

    def __init__(self, board: LoadBoard | None = None, front: int = 0) -> None:
        """Count in this front's row of a board; by default it is the only front."""
        self.board = board or LoadBoard()
        self.ints, self._floats = self.board.ints, self.board.floats
        self._front = front
        self.own_row = self.board.row_starts[front]
        rows = self.board.row_starts[: self.board.num_fronts]
        self._other_rows = [(number, row) for number, row in enumerate(rows) if number != front]
        starts = [row + TENANTS_WORD for row in rows]
        self.tenants = TenantRows(self.ints, self._floats, starts, front)
        self._cells: dict[str, dict[WorkerRank, range]] = {}
        """Those of each worker's ranks."""
        self.on_freed: Callable[[], None] = lambda: None
        """Is called when a request of this process has ended, or its prefill has."""

    def begin(
        self, target: WorkerRank, prompt: Prompt, overlap_tokens: int, priced: Dispatched | None = None
    ) -> ActiveRequest:
        """Count a request as dispatched."""
        cells = self.register(target)
        assert cells is not None, target  # it was registered before it could be chosen
        self.ints[self.own_row + FrontField.RUNNING] += 1
        return ActiveRequest(self, cells[self._front], max(0, prompt.num_tokens - overlap_tokens), priced)

    def pricing(self, settings: PriceSettings, block_size: int) -> PricedPolicy:
        """Return a policy that prices requests by the load of all processes."""
        in_flight = PromptsInFlight(self.board.in_flight, MAX_COLUMNS, block_size, self._front)
        work = WorkRows(self.board.work, self._front, num_shared=self.board.num_fronts)
        return PricedPolicy(settings, work, in_flight, block_size)

    def column(self, target: WorkerRank) -> int:
        """Return the rank's column on the board, which is its number in priced policies."""
        column = self.board.column(target)
        assert column is not None, target  # it was registered before it could be chosen
        return column

    def register(self, target: WorkerRank) -> range | None:
        """Count a rank among its worker's from now on, and return its cells.

        Returns None where the process that assigns columns has not given it one yet. Raises InvalidValueError if the
        board has no room for it.
        """
        cells = self._cells.get(target.worker, {}).get(target)
        if cells is None and (cells := self.board.cells(target)) is not None:
            self._cells.setdefault(target.worker, {})[target] = cells
        return cells

    def load(self, target: WorkerRank) -> Load:
        ints, running, prefill = self.ints, 0, 0
        for cell in self.register(target) or ():
            running += ints[cell + _RUNNING]
            prefill += ints[cell + _PREFILL]
        return Load(running, prefill)

    def running_requests(self, worker: str) -> int:
        """Return how many requests of the worker, over all its ranks, have not ended."""
        return self._sum(worker, _RUNNING)

    def prefill_tokens(self, worker: str) -> int:
        """Return the uncached tokens of the worker's requests that are not answered yet, over all its ranks."""
        return self._sum(worker, _PREFILL)

    def prefill_work(self, worker: str) -> float:
        """Return the work of the worker's streamed prompts without a first token, in units of `policy.work`."""
        return float(self.board.work[:, QUEUED, self._columns(worker)].sum())

    def work_a_second(self, worker: str) -> float:
        """Return how much of that its ranks do in a second together; inf until that is learnt from enough of it."""
        columns = self._columns(worker)
        seconds, work = learnt_of(self.board.work[:, :, columns]).sum(1).tolist()
        return float(len(columns) * work / seconds) if work >= _MIN_LEARNT_WORK else math.inf

    def all_prefill_tokens(self) -> int:
        """Return those of all workers."""
        return sum(map(self.prefill_tokens, self._cells))

    def prompt_speeds(self) -> dict[str, float]:
        """Return how many prompt tokens a second each worker's ranks compute, learnt from times to first tokens."""
        totals: dict[str, tuple[float, float]] = {}
        for target, (seconds, work) in self.board.learnt_speeds().items():
            before = totals.get(target.worker, (0.0, 0.0))
            totals[target.worker] = before[0] + seconds, before[1] + work
        return {worker: round(work / seconds, 1) for worker, (seconds, work) in totals.items()}

    def ended_requests(self, worker: str) -> list[int]:
        """Return how many requests of the worker have ended so far at each front, and at each other router."""
        ranks = self._cells.get(worker, {}).values()
        return [sum(self.ints[cell + _ENDED] for cell in cells) for cells in zip(*ranks, strict=True)]

    def num_steps(self, worker: str) -> int:
        """Return how many answers of the worker have begun so far plus how many have ended."""
        return self._sum(worker, _ANSWERED) + self._sum(worker, _ENDED)

    def set_last_byte_at(self, worker: str, at_s: float) -> None:
        """Record when this process last received a byte from the worker."""
        for cells in self._cells.get(worker, {}).values():
            self._floats[cells[self._front] + _LAST_BYTE_AT] = at_s

    def last_byte_at_s(self, worker: str) -> float:
        """Return when any front last recorded that it received a byte from the worker; 0.0 if none did."""
        every = self._cells.get(worker, {}).values()
        return max((self._floats[cell + _LAST_BYTE_AT] for cells in every for cell in cells), default=0.0)

    @property
    def num_running(self) -> int:
        """Return how many requests of all workers have not ended."""
        return sum(self.ints[row + FrontField.RUNNING] for row in self.board.row_starts)

    @property
    def num_dispatched(self) -> int:
        """Return how many times a worker was asked for an answer."""
        return sum(self.ints[row + FrontField.DISPATCHED] for row in self.board.row_starts)

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait for a worker, for any model, at all fronts."""
        return int(self.board.queues.sum())

    def set_listening(self) -> None:
        self.ints[self.own_row + FrontField.LISTENING] = 1

    def count_dispatch(self) -> None:
        """Count that a worker was asked for an answer."""
        self.ints[self.own_row + FrontField.DISPATCHED] += 1

    def set_queue_head(self, model: int, priority: int, start: float, since_s: float, now_s: float) -> None:
        """Publish the first request of this front's queue; its model has a number, which is 0 if none waits.

        Others may read a part of it with a part of the last one, and then take a turn, or leave it to this front, once:
        all look again when a request ends, and every 50 ms.
        """
        ints, floats, row = self.ints, self._floats, self.own_row
        ints[row + FrontField.HEAD_PRIORITY] = priority
        floats[row + FrontField.HEAD_START], floats[row + FrontField.HEAD_SINCE] = start, since_s
        floats[row + FrontField.ALIVE_AT] = now_s
        ints[row + FrontField.HEAD] = model

    def add_queued(self, model: int, num: int) -> None:
        """Add to the number of requests that wait at this front for a model, which is given by its number."""
        self.ints[self.own_row + QUEUES_WORD + model % NUM_QUEUES] += num

    def num_queued(self, model: int) -> int:
        """Return how many requests wait for the model of this number, at all fronts."""
        return sum(self.ints[row + QUEUES_WORD + model % NUM_QUEUES] for row in self.board.row_starts)

    def other_queue_head(self, now_s: float, model: int | None = None) -> tuple[int, float, float, int] | None:
        """Return priority, start, arrival and front of the request that is first among other fronts' queue heads.

        Only requests for `model` count, if it is given.
        """
        heads = [
            (
                self.ints[row + FrontField.HEAD_PRIORITY],
                self._floats[row + FrontField.HEAD_START],
                self._floats[row + FrontField.HEAD_SINCE],
                front,
            )
            for front, row in self._other_rows
            if (number := self.ints[row + FrontField.HEAD])
            and (model is None or number == model)
            and now_s - self._floats[row + FrontField.ALIVE_AT] < _ALIVE_S
        ]
        return min(heads, default=None)

    async def wait_idle(self, worker: str) -> None:
        """Return once no request of the worker is running."""
        while self.running_requests(worker):  # noqa: ASYNC110 - other processes count, too
            await asyncio.sleep(_IDLE_INTERVAL_S)

    def forget(self, worker: str) -> None:
        """Drop the worker's history, so that a later worker of the same name starts afresh."""
        self._cells.pop(worker, None)
        self.board.forget(worker)

    def _columns(self, worker: str) -> list[int]:
        return [self.column(target) for target in self._cells.get(worker, ())]

    def _sum(self, worker: str, field: int) -> int:
        ints = self.ints
        return sum(ints[cell + field] for cells in self._cells.get(worker, {}).values() for cell in cells)

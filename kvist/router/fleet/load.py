"""What each rank has to do now, counted by the router from the requests it dispatched and has not seen end.

    dispatch ──────────── first byte of the answer ──────────────── end, error or disconnect
    running_requests +1                                             −1
    prefill_tokens  +uncached    −uncached                          (−uncached, if no byte came)
    recent_prefill_tokens +uncached, then halves every half-life: it outlives the request

An event of a stream is taken for one token. Answers that are not streamed keep their prefill tokens to the end, for
nothing shows where prefill stopped.

Where several processes are the router, each counts its own on a board that all read (`board`): loads are those of all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import numpy as np

from kvist.events import WorkerRank
from kvist.router.fleet.board import MAX_COLUMNS, NUM_QUEUES, QUEUES_WORD, TENANTS_WORD, Cell, LoadBoard, Whole
from kvist.router.policy.decision import Load, Prompt
from kvist.router.policy.in_flight import PromptsInFlight
from kvist.router.policy.priced import Dispatched, PricedPolicy
from kvist.router.policy.settings import PriceSettings
from kvist.router.policy.work import RECENT_HALF_LIFE_S, WorkRows
from kvist.router.tenants.rows import TenantRows

_IDLE_INTERVAL_S = 0.05
_ALIVE_S = 1.0
_RUNNING, _PREFILL, _ENDED, _ANSWERED, _RECENT, _RECENT_AT, _HEARD_AT = map(int, Cell)


class ActiveRequest:
    """One dispatched request, which gives back everything it counts once it ends; priced, where decisions are."""

    __slots__ = ("_cell", "_prefill_tokens", "_priced", "_tracker", "num_tokens")

    def __init__(self, tracker: LoadTracker, cell: int, uncached_tokens: int, priced: Dispatched | None) -> None:
        self._tracker, self._priced = tracker, priced
        self._cell: int | None = cell
        self._prefill_tokens = uncached_tokens
        self.num_tokens = 0
        tracker.ints[cell + _RUNNING] += 1
        tracker.ints[cell + _PREFILL] += uncached_tokens

    def end_prefill(self) -> None:
        """Take the first byte of the answer: its prefill is done."""
        if self._cell is not None:
            self._tracker.ints[self._cell + _PREFILL] -= self._prefill_tokens
            self._tracker.ints[self._cell + _ANSWERED] += 1
            self._prefill_tokens = 0
            self._tracker.on_freed()

    def answered(self, now_s: float) -> None:
        """Learn from the first token when it came."""
        if self._priced is not None:
            self._priced.answered(now_s)

    def add_tokens(self, num_tokens: int) -> None:
        """Count what the answer grew by."""
        self.num_tokens += num_tokens
        if self._priced is not None:
            self._priced.add_tokens(num_tokens)

    def finish(self, now_s: float, num_output_tokens: int | None = None) -> None:
        """Give back what is still counted, and learn from an answer that says how long it is; once."""
        if self._priced is not None:
            self._priced.finish(now_s, num_output_tokens)
        cell, self._cell = self._cell, None
        if cell is not None:
            ints = self._tracker.ints
            ints[cell + _RUNNING] -= 1
            ints[cell + _PREFILL] -= self._prefill_tokens
            ints[cell + _ENDED] += 1
            self._tracker.on_ended()


class LoadTracker:
    """The load of every rank. Not thread-safe: it belongs to the event loop."""

    def __init__(self, board: LoadBoard | None = None, front: int = 0) -> None:
        """Count in this front's row of a board; by default there is no other."""
        self.board = board or LoadBoard()
        self.ints, self._floats = self.board.ints, self.board.floats
        self._front = front
        self._whole = self.board.wholes[front]
        starts = [whole + TENANTS_WORD for whole in self.board.wholes[: self.board.num_fronts]]
        self.tenants = TenantRows(self.ints, self._floats, starts, front)
        self._cells: dict[WorkerRank, range] = {}
        self._workers: dict[str, list[range]] = {}
        self.on_freed: Callable[[], None] = lambda: None
        """Is called when a worker has less to do than it had, as far as this process knows."""

    def begin(
        self, target: WorkerRank, prompt: Prompt, overlap_tokens: int, now_s: float, priced: Dispatched | None = None
    ) -> ActiveRequest:
        """Count a request from its dispatch on."""
        cells = self.name(target)
        assert cells is not None, target  # who is decided for was named before
        cell, floats = cells[self._front], self._floats
        uncached_tokens = max(0, prompt.num_tokens - overlap_tokens)
        floats[cell + _RECENT] = self._decayed(cell, now_s) + uncached_tokens
        floats[cell + _RECENT_AT] = now_s
        self.ints[self._whole + Whole.RUNNING] += 1
        return ActiveRequest(self, cell, uncached_tokens, priced)

    def pricing(self, settings: PriceSettings, block_size: int) -> PricedPolicy:
        """Return a policy that prices requests by what all processes have under way."""
        in_flight = PromptsInFlight(self.board.in_flight, MAX_COLUMNS, block_size, self._front)
        work = WorkRows(self.board.work, self._front, num_shared=self.board.num_fronts)
        return PricedPolicy(settings, work, in_flight, block_size)

    def column(self, target: WorkerRank) -> int:
        """Return what the rank is called in prices."""
        column = self.board.column(target)
        assert column is not None, target  # who is decided for was named before
        return column

    def name(self, target: WorkerRank) -> range | None:
        """Know a rank from now on, so that its worker's numbers are those of all its ranks, whoever counted them.

        Return its cells, None where another process is to name it first. Raises InvalidValueError for one that has no
        place on the board.
        """
        cells = self._cells.get(target)
        if cells is None and (cells := self.board.cells(target)) is not None:
            self._cells[target] = cells
            self._workers.setdefault(target.worker, []).append(cells)
        return cells

    def load(self, target: WorkerRank, now_s: float) -> Load:
        """Return what the rank has to do now."""
        ints, running, prefill, recent = self.ints, 0, 0, 0.0
        for cell in self.name(target) or ():
            running += ints[cell + _RUNNING]
            prefill += ints[cell + _PREFILL]
            recent += self._decayed(cell, now_s)
        return Load(running, prefill, recent)

    def running_requests(self, worker: str) -> int:
        """Return how many requests of the worker, over all its ranks, have not ended."""
        return self._sum(worker, _RUNNING)

    def prefill_tokens(self, worker: str) -> int:
        """Return the uncached tokens of the worker's requests that are not answered yet, over all its ranks."""
        return self._sum(worker, _PREFILL)

    def prompt_speeds(self) -> dict[str, float]:
        """Return how many prompt tokens a second each worker's ranks compute, as first tokens have told."""
        totals: dict[str, tuple[float, float]] = {}
        for target, (seconds, work) in self.board.learnt().items():
            before = totals.get(target.worker, (0.0, 0.0))
            totals[target.worker] = before[0] + seconds, before[1] + work
        return {worker: round(work / seconds, 1) for worker, (seconds, work) in totals.items()}

    def ended_requests(self, worker: str) -> int:
        """Return how many requests of the worker have ended so far."""
        return self._sum(worker, _ENDED)

    def num_steps(self, worker: str) -> int:
        """Return how many answers of the worker have begun so far and how many have ended, together."""
        return self._sum(worker, _ANSWERED) + self._sum(worker, _ENDED)

    def heard(self, worker: str, at_s: float) -> None:
        """Note when this process last had a byte from the worker."""
        for cells in self._workers.get(worker, ()):
            self._floats[cells[self._front] + _HEARD_AT] = at_s

    def heard_at_s(self, worker: str) -> float:
        """Return when any process said that it last had a byte from the worker."""
        every = self._workers.get(worker, ())
        return max((self._floats[cell + _HEARD_AT] for cells in every for cell in cells), default=0.0)

    @property
    def num_running(self) -> int:
        """Return how many requests of all workers have not ended."""
        return sum(self.ints[whole + Whole.RUNNING] for whole in self.board.wholes)

    @property
    def num_dispatched(self) -> int:
        """Return how many decisions were acted on."""
        return sum(self.ints[whole + Whole.DISPATCHED] for whole in self.board.wholes)

    @property
    def num_waiting(self) -> int:
        """Return how many wait for a worker, for whichever model, at whichever front."""
        ends = ((whole + QUEUES_WORD, whole + QUEUES_WORD + NUM_QUEUES) for whole in self.board.wholes)
        return sum(int(np.asarray(self.ints[begin:end]).sum()) for begin, end in ends)

    def show_listening(self) -> None:
        """Note that this process takes requests."""
        self.ints[self._whole + Whole.LISTENING] = 1

    def dispatched(self) -> None:
        """Note that a decision was acted on."""
        self.ints[self._whole + Whole.DISPATCHED] += 1

    def show_head(self, model: int, priority: int, start: float, since_s: float, now_s: float) -> None:
        """Show other fronts the first that waits here: the number of its model, 0 if nobody waits."""
        ints, floats, whole = self.ints, self._floats, self._whole
        ints[whole + Whole.HEAD_PRIORITY] = priority
        floats[whole + Whole.HEAD_START], floats[whole + Whole.HEAD_SINCE] = start, since_s
        floats[whole + Whole.ALIVE_AT] = now_s
        ints[whole + Whole.HEAD] = model

    def show_queued(self, model: int, num: int) -> None:
        """Note that so many more wait here for the model of this number, or, below 0, that they left."""
        self.ints[self._whole + QUEUES_WORD + model % NUM_QUEUES] += num

    def num_queued(self, model: int) -> int:
        """Return how many wait for the model of this number, at whichever front."""
        return sum(self.ints[whole + QUEUES_WORD + model % NUM_QUEUES] for whole in self.board.wholes)

    def first_elsewhere(self, now_s: float, model: int | None = None) -> tuple[int, float, float, int] | None:
        """Return priority, start, arrival and front of who is the first of those that other fronts show to wait.

        Of one model only, if given. A front that has shown nothing for long may have stopped.
        """
        if self.board.num_fronts == 1:
            return None
        heads = [
            (
                self.ints[whole + Whole.HEAD_PRIORITY],
                self._floats[whole + Whole.HEAD_START],
                self._floats[whole + Whole.HEAD_SINCE],
                front,
            )
            for front, whole in enumerate(self.board.wholes)
            if front != self._front
            and (number := self.ints[whole + Whole.HEAD])
            and (model is None or number == model)
            and now_s - self._floats[whole + Whole.ALIVE_AT] < _ALIVE_S
        ]
        return min(heads, default=None)

    async def wait_idle(self, worker: str) -> None:
        """Return once no request of the worker is running."""
        while self.running_requests(worker):  # noqa: ASYNC110 - other processes count, too
            await asyncio.sleep(_IDLE_INTERVAL_S)

    def forget(self, worker: str) -> None:
        """Drop the worker's history, so that a later worker of the same name starts afresh."""
        for target in [target for target in self._cells if target.worker == worker]:
            del self._cells[target]
        self._workers.pop(worker, None)
        self.board.forget(worker)

    def on_ended(self) -> None:
        """Take the end of a request."""
        self.ints[self._whole + Whole.RUNNING] -= 1
        self.on_freed()

    def _sum(self, worker: str, field: int) -> int:
        ints = self.ints
        return sum(ints[cell + field] for cells in self._workers.get(worker, ()) for cell in cells)

    def _decayed(self, cell: int, now_s: float) -> float:
        recent = self._floats[cell + _RECENT]
        if recent == 0.0:
            return 0.0
        return recent * math.exp2(-max(0.0, now_s - self._floats[cell + _RECENT_AT]) / RECENT_HALF_LIFE_S)

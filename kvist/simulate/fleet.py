"""A fleet of simulated workers behind a policy, and what its clients saw; what a load is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from statistics import fmean

from kvist.simulate.driver import Driver
from kvist.simulate.index import INDEX_DELAY_S, LateIndex
from kvist.simulate.trace import Request, Trace
from kvist.simulate.worker import MAX_STEP_TOKENS, Job, Machine, Worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fleet's clients saw; times in seconds."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    end_to_end_p99_s: float
    cached: float
    """Share of the prompt tokens that were found."""
    reuse: float
    """That share by what one cache of the whole fleet's size would have found."""
    busy: float
    """Share of time that a worker computed, on average."""
    left: float
    """What was left to compute of what the fleet could in that time: a load by what this policy found. Of the middle
    eight tenths of requests, as caches fill at first, and sessions trickle out in the end."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a fleet is up against."""

    index_delay_s: float = INDEX_DELAY_S
    lost_events: float = 0.0
    """Share of events that the index never hears of."""
    num_silent: int = 0
    """The fleet's last workers send no events: they are known by what they were given."""
    outage: tuple[float, float] | None = None
    """From when to when the first worker is gone, as shares of the trace's time; it comes back empty."""


class Simulation:
    """One run of a trace; a policy is told of everything in the order of time."""

    def __init__(
        self, trace: Trace, machines: Sequence[Machine], driver: Driver, index: LateIndex | None = None
    ) -> None:
        """Prepare a fleet of these machines, empty."""
        self.index = index or LateIndex(len(machines))
        self.jobs: list[Job] = []
        self._trace = trace
        self._machines = machines
        self._driver = driver
        self._workers = [self._worker(idx) for idx in range(len(machines))]
        self._gone: int | None = None
        self._number = count()
        self._due: list[tuple[float, int, Callable[[float], None]]] = []  # a heap, in the order of time and of calls
        self._turns: dict[int, list[Request]] = {}
        for request in trace.requests:
            if request.follows is None:
                self.call_at(request.at_s, partial(self._arrive, request))
            else:
                self._turns.setdefault(request.follows, []).append(request)

    def call_at(self, at_s: float, call: Callable[[float], None]) -> None:
        """Have something done at a time, which it is handed."""
        heappush(self._due, (at_s, next(self._number), call))

    def run(self) -> Outcome:
        """Serve the whole trace."""
        due, workers = self._due, self._workers
        while True:
            step_s = min(worker.next_s for worker in workers)
            if due and due[0][0] < step_s:
                at_s, _, call = heappop(due)
                call(at_s)
            elif step_s < inf:
                for worker in workers:
                    if worker.next_s == step_s:
                        worker.advance(step_s)
            else:
                return self._outcome()

    def lose(self, worker_idx: int, now_s: float) -> None:
        """Take a worker away: its requests begin anew elsewhere, and what it cached is gone."""
        lost, self._gone = self._workers[worker_idx], worker_idx
        self._workers[worker_idx] = self._worker(worker_idx)
        self._workers[worker_idx].busy_s = lost.busy_s
        self.index.forget(worker_idx)
        for job in lost.jobs():
            self._driver.finished(now_s, job.request_id)
            self._route(job, now_s)

    def regain(self, now_s: float) -> None:  # noqa: ARG002
        """Bring the worker back, empty."""
        self._gone = None

    def _worker(self, idx: int) -> Worker:
        return Worker(idx, self._trace.block_size, self._machines[idx], self.index, self._driver, self._finish)

    def _arrive(self, request: Request, now_s: float) -> None:
        job = Job(len(self.jobs), request, now_s)
        self.jobs.append(job)
        self._route(job, now_s)

    def _finish(self, job: Job, now_s: float) -> None:
        for turn in self._turns.pop(job.request.idx, ()):
            self.call_at(now_s + (turn.pause_s or 0.0), partial(self._arrive, turn))

    def _route(self, job: Job, now_s: float) -> None:
        request = job.request
        depths = self.index.depths(request.blocks, now_s)
        among = None if self._gone is None else [idx for idx in range(len(self._workers)) if idx != self._gone]
        worker_idx = self._driver.route(
            now_s, job.request_id, request.blocks, request.num_tokens, depths, self.index.held, among
        )
        self._workers[worker_idx].take(job, now_s)

    def _outcome(self) -> Outcome:
        jobs = self.jobs
        ttfts = sorted(job.answered_at_s - job.at_s for job in jobs)
        ends = sorted(job.done_at_s - job.at_s for job in jobs)
        cached = sum(job.num_cached_tokens for job in jobs)
        shared, _ = work_left([job.request for job in jobs], self._trace.block_size, self._machines)
        middle = jobs[len(jobs) // 10 : -max(1, len(jobs) // 10)] or jobs
        left_s = sum(work_s(job.request, job.num_cached_tokens, self._machines[0]) for job in middle)
        return Outcome(
            fmean(ttfts),
            ttfts[int(0.5 * len(jobs))],
            ttfts[int(0.9 * len(jobs))],
            ttfts[int(0.99 * len(jobs))],
            ends[int(0.99 * len(jobs))],
            cached / sum(job.request.num_tokens for job in jobs),
            cached / max(1, shared),
            fmean(worker.busy_s for worker in self._workers) / (max(job.done_at_s for job in jobs) - jobs[0].at_s),
            left_s / speed(self._machines) / max(1e-9, middle[-1].at_s - middle[0].at_s),
        )


def speed(machines: Sequence[Machine]) -> float:
    """Return how many of the first machine compute prompts as fast as all."""
    return sum(machines[0].prefill_s / machine.prefill_s for machine in machines)


def work_s(request: Request, num_cached_tokens: int, machine: Machine) -> float:
    """Return the seconds that are left to compute of a request.

    They are prefill with its part of each step's fixed time, and reading the context for each token of the answer.
    """
    num_tokens, num_output_tokens = request.num_tokens, request.num_output_tokens
    prefill_s = machine.prefill_time_s(num_cached_tokens, num_tokens)
    steps_s = machine.step_s * (num_tokens - num_cached_tokens) / MAX_STEP_TOKENS
    return prefill_s + steps_s + machine.context_s * num_output_tokens * (num_tokens + num_output_tokens / 2)


def work_left(requests: Sequence[Request], block_size: int, machines: Sequence[Machine]) -> tuple[int, float]:
    """Return what one LRU cache of the fleet's size finds of these prompts, in tokens, and what is left to compute.

    What is left is in seconds of the first machine.
    """
    capacity = sum(machine.cache_tokens for machine in machines) // block_size
    cache: OrderedDict[Hashable, None] = OrderedDict()
    num_found, left_s = 0, 0.0
    for request in requests:
        usable = min(len(request.blocks), max(0, request.num_tokens - 1) // block_size)
        found = 0
        while found < usable and request.blocks[found] in cache:
            found += 1
        num_found += found * block_size
        left_s += work_s(request, found * block_size, machines[0])
        for block in reversed(request.blocks + request.answer_blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return num_found, left_s


def at_load(trace: Trace, machines: Sequence[Machine], load: float, seed: int, burstiness: float = 1.0) -> Trace:
    """Return the trace at the pace that leaves the fleet this load, its arrivals drawn by `seed`.

    A load of 1 is work for all of the time, after what one shared cache of the fleet's size finds: a policy that finds
    less is overloaded earlier.
    """
    _, left_s = work_left(trace.requests, trace.block_size, machines)
    return trace.spread(seed, left_s / speed(machines) / load / trace.span_s, burstiness)


def measure(
    trace: Trace,
    make: Callable[..., Driver],
    machines: Sequence[Machine],
    seed: int,
    conditions: Conditions = Conditions(),
) -> Outcome:
    """Return what a policy's fleet does with a trace as it is; `seed` is the policy's."""
    num_workers, block_size = len(machines), trace.block_size
    silent = range(num_workers - conditions.num_silent, num_workers)
    capacities = {idx: machines[idx].cache_tokens // block_size for idx in silent}
    index = LateIndex(num_workers, conditions.index_delay_s, conditions.lost_events, capacities, seed)
    driver = make(num_workers=num_workers, block_size=block_size, seed=seed)
    simulation = Simulation(trace, machines, driver, index)
    if conditions.outage is not None:
        first_s, last_s = trace.requests[0].at_s, trace.requests[-1].at_s
        gone_at_s, back_at_s = (first_s + share * (last_s - first_s) for share in conditions.outage)
        simulation.call_at(gone_at_s, partial(simulation.lose, 0))
        simulation.call_at(back_at_s, simulation.regain)
    return simulation.run()

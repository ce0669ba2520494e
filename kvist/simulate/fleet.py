"""A fleet of simulated workers behind a policy, open loop, and what its clients saw; what a load is."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
        self._workers = [
            Worker(idx, trace.block_size, machine, self.index, driver) for idx, machine in enumerate(machines)
        ]

    def run(self) -> Outcome:
        """Serve the whole trace, whose requests are in the order of their arrival."""
        arrivals, workers = deque(self._trace.requests), self._workers
        while True:
            step_s = min(worker.next_s for worker in workers)
            if arrivals and arrivals[0].at_s < step_s:
                self._route(arrivals.popleft())
            elif step_s < inf:
                for worker in workers:
                    if worker.next_s == step_s:
                        worker.advance(step_s)
            else:
                return self._outcome()

    def _route(self, request: Request) -> None:
        now_s = request.at_s
        depths = self.index.depths(request.blocks, now_s)
        job = Job(len(self.jobs), request, now_s)
        self.jobs.append(job)
        worker_idx = self._driver.route(
            now_s, job.request_id, request.blocks, request.num_tokens, depths, self.index.held
        )
        self._workers[worker_idx].take(job, now_s)

    def _outcome(self) -> Outcome:
        jobs = self.jobs
        ttfts = sorted(job.answered_at_s - job.at_s for job in jobs)
        ends = sorted(job.done_at_s - job.at_s for job in jobs)
        cached = sum(job.num_cached_tokens for job in jobs)
        shared, _ = work_left([job.request for job in jobs], self._trace.block_size, self._machines)
        return Outcome(
            fmean(ttfts),
            ttfts[int(0.5 * len(jobs))],
            ttfts[int(0.9 * len(jobs))],
            ttfts[int(0.99 * len(jobs))],
            ends[int(0.99 * len(jobs))],
            cached / sum(job.request.num_tokens for job in jobs),
            cached / max(1, shared),
            fmean(worker.busy_s for worker in self._workers) / (max(job.done_at_s for job in jobs) - jobs[0].at_s),
        )


def work_left(requests: Sequence[Request], block_size: int, machines: Sequence[Machine]) -> tuple[int, float]:
    """Return what one LRU cache of the fleet's size finds of these prompts, in tokens, and what is left to compute.

    What is left is in seconds of the first machine: prefill with its part of each step's fixed time, and reading the
    context for each token of the answer.
    """
    capacity = sum(machine.cache_tokens for machine in machines) // block_size
    cache: OrderedDict[Hashable, None] = OrderedDict()
    num_found, left_s, machine = 0, 0.0, machines[0]
    for request in requests:
        usable = min(len(request.blocks), max(0, request.num_tokens - 1) // block_size)
        found = 0
        while found < usable and request.blocks[found] in cache:
            found += 1
        num_found += found * block_size
        left_s += machine.prefill_time_s(found * block_size, request.num_tokens)
        left_s += machine.step_s * (request.num_tokens - found * block_size) / MAX_STEP_TOKENS
        context_tokens = request.num_output_tokens * (request.num_tokens + request.num_output_tokens / 2)
        left_s += machine.context_s * context_tokens
        for block in reversed(request.blocks + request.answer_blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return num_found, left_s


def at_load(trace: Trace, machines: Sequence[Machine], load: float, seed: int) -> Trace:
    """Return the trace at the pace that leaves the fleet this load, its arrivals drawn by `seed`.

    A load of 1 is work for all of the time, after what one shared cache of the fleet's size finds: a policy that finds
    less is overloaded earlier.
    """
    _, left_s = work_left(trace.requests, trace.block_size, machines)
    speed = sum(machines[0].prefill_s / machine.prefill_s for machine in machines)
    span_s = trace.requests[-1].at_s - trace.requests[0].at_s
    return trace.spread(seed, left_s / speed / load / max(1e-9, span_s))


def measure(
    trace: Trace, make: Callable[..., Driver], machines: Sequence[Machine], seed: int, delay_s: float = INDEX_DELAY_S
) -> Outcome:
    """Return what a policy's fleet does with a trace as it is; `seed` is the policy's."""
    driver = make(num_workers=len(machines), block_size=trace.block_size, seed=seed)
    return Simulation(trace, machines, driver, LateIndex(len(machines), delay_s)).run()

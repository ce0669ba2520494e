"""A fleet of simulated workers behind a policy, what its clients saw, and how much work a load is."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, chain, count
from math import inf
from statistics import fmean

from kvist.router.policy.decision import Prompt, is_worth_handing_over, usable_tokens
from kvist.router.policy.settings import DEFAULT_MAX_LOCAL_PREFILL_TOKENS, FETCH_SCALE
from kvist.simulate.driver import Driver
from kvist.simulate.index import INDEX_DELAY_S, LateIndex
from kvist.simulate.memory import MAX_STEP_TOKENS, PLAIN_MEMORY, Memory, find_prefix
from kvist.simulate.trace import Request, Trace
from kvist.simulate.worker import Job, Machine, Worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fleet's clients saw; times in seconds."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    end_to_end_p99_s: float
    itl_p99_s: float
    """Between one token of an answer and the next."""
    cached: float
    """Share of the prompt tokens that were found in caches."""
    pooled_cache_share: float
    """What was found, as a share of what one cache as large as all of the fleet's would have found."""
    regret_s: float
    """Seconds of computing per request that such a cache would have saved."""
    regret_held_elsewhere_s: float
    """Those that sending each request to the worker that held most of it would have saved."""
    load_after_hits: float
    """What was left to compute, as a share of what the fleet can compute in that time. Of the middle eight tenths of
    requests, as caches fill at first, and sessions trickle out in the end."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The circumstances of a run: how the index errs, what fails, and how the fleet is set up."""

    index_delay_s: float = INDEX_DELAY_S
    lost_events: float = 0.0
    """Share of events that never reach the index."""
    num_silent: int = 0
    """So many of the fleet's last workers send no events: the index expects them to hold what they answered."""
    outage: tuple[float, float] | None = None
    """From when to when the first worker is gone, as shares of the trace's time; it comes back empty."""
    memory: Memory = PLAIN_MEMORY
    num_prefill: int = 0
    """So many of the fleet's last workers compute prompts for the others."""


class Simulation:
    """One run of a trace; the policy's driver is called in the order of time."""

    def __init__(
        self,
        trace: Trace,
        machines: Sequence[Machine],
        driver: Driver,
        conditions: Conditions = Conditions(),
        seed: int = 0,
    ) -> None:
        """Prepare a fleet of these machines, empty; `seed` says which events are lost."""
        num_workers, block_size, memory = len(machines), trace.block_size, conditions.memory
        silent = range(num_workers - conditions.num_silent, num_workers)
        self.index = LateIndex(
            num_workers,
            conditions.index_delay_s,
            conditions.lost_events,
            {idx: machines[idx].cache_tokens // block_size for idx in silent},
            seed,
            windows=[group.window for group in memory.groups(trace.longest)],
            block_size=block_size,
            num_tiers=2 if memory.host_tokens else 1,
        )
        self.jobs: list[Job] = []
        self._trace = trace
        self._machines = machines
        self._driver = driver
        self._conditions = conditions
        self._prefill_workers = range(num_workers - conditions.num_prefill, num_workers)
        self._workers = [self._make_worker(idx) for idx in range(len(machines))]
        self._failed_idx: int | None = None
        self._ordinals = count()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []  # a heap, in the order of time and of calls
        self._next_turns: dict[int, list[Request]] = {}
        """The requests that wait for an answer, by the request that it answers."""
        for request in trace.requests:
            if request.follows is None:
                self.call_at(request.at_s, partial(self._arrive, request))
            else:
                self._next_turns.setdefault(request.follows, []).append(request)
        if conditions.outage is not None:
            first_s, last_s = trace.requests[0].at_s, trace.requests[-1].at_s
            fails_at_s, returns_at_s = (first_s + share * (last_s - first_s) for share in conditions.outage)
            self.call_at(fails_at_s, partial(self.fail_worker, 0))
            self.call_at(returns_at_s, self.restore_worker)

    def call_at(self, at_s: float, call: Callable[[float], None]) -> None:
        """Call a function at this time, with the time."""
        heappush(self._timers, (at_s, next(self._ordinals), call))

    def run(self) -> Outcome:
        timers, workers = self._timers, self._workers
        while True:
            step_s = min(worker.next_s for worker in workers)
            if timers and timers[0][0] < step_s:
                at_s, _, call = heappop(timers)
                call(at_s)
            elif step_s < inf:
                for worker in workers:
                    if worker.next_s == step_s:
                        worker.advance(step_s)
            else:
                return self._outcome()

    def fail_worker(self, worker_idx: int, now_s: float) -> None:
        """Remove a worker: its requests are routed again to others, and its cache is lost."""
        failed, self._failed_idx = self._workers[worker_idx], worker_idx
        self._workers[worker_idx] = self._make_worker(worker_idx)
        self.index.clear_worker(worker_idx)
        for job in failed.jobs():
            self._driver.finished(now_s, job.request_id)
            self._route(job.computes_for or job, now_s)

    def restore_worker(self, now_s: float) -> None:  # noqa: ARG002
        """Bring the failed worker back, with an empty cache."""
        self._failed_idx = None

    def _make_worker(self, idx: int) -> Worker:
        trace, machine, memory = self._trace, self._machines[idx], self._conditions.memory
        on_event = partial(self.index.receive, idx)
        pools = memory.pools(machine.cache_tokens, trace.block_size, trace.longest, on_event)
        on_first_token = partial(self.index.on_first_token, idx)
        return Worker(trace.block_size, machine, pools, self._driver, on_first_token, self._finish)

    def _arrive(self, request: Request, now_s: float) -> None:
        job = Job(len(self.jobs), request, now_s)
        self.jobs.append(job)
        self._route(job, now_s)

    def _finish(self, job: Job, now_s: float) -> None:
        if job.computes_for is not None:
            self._hand_over(job, job.computes_for, now_s)
            return
        for turn in self._next_turns.pop(job.request.idx, ()):
            self.call_at(now_s + (turn.pause_s or 0.0), partial(self._arrive, turn))

    def _route(self, job: Job, now_s: float) -> None:
        """Send a request to the worker that does all of it, or its prompt to one that computes it for another."""
        request, driver, job.computed_by = job.request, self._driver, None
        prompt = Prompt(request.num_tokens, self._trace.block_size)
        depths = self.index.depths(request.blocks, now_s)
        by_worker = [usable_tokens(depth, prompt) for depth in depths]
        job.num_held_tokens = max(by_worker)
        query = (request.blocks, request.num_tokens, depths, self.index.held)
        sent, among = job, self._available()
        if self._prefill_workers:
            local_idx = driver.prefer(now_s, *query, among)
            if is_worth_handing_over(prompt, by_worker[local_idx], DEFAULT_MAX_LOCAL_PREFILL_TOKENS):
                sent = Job(("prefill", job.request_id), request, now_s, computes_for=job)
                among = list(self._prefill_workers)
        worker_idx = driver.route(now_s, sent.request_id, *query, among)
        self._workers[worker_idx].submit(sent, now_s)

    def _hand_over(self, computed: Job, job: Job, now_s: float) -> None:
        """Have another worker fetch a prompt that was computed, and answer it."""
        request, job.computed_by = job.request, computed
        depths = self.index.depths(request.blocks, now_s)
        query = (request.blocks, request.num_tokens, depths, self.index.held, self._available())
        worker_idx = self._driver.route(now_s, job.request_id, *query, is_fetched=True)
        num_cached_tokens = depths[worker_idx][-1] * self._trace.block_size
        fetch_s = FETCH_SCALE * self._machines[worker_idx].prefill_time_s(num_cached_tokens, request.num_tokens)
        self._submit_at(now_s + fetch_s, worker_idx, job)

    def _submit_at(self, at_s: float, worker_idx: int, job: Job) -> None:
        """Submit a request to a worker once it has fetched the prompt, or route it again if the worker fails before."""
        worker = self._workers[worker_idx]

        def submit(now_s: float) -> None:
            if self._workers[worker_idx] is worker:
                worker.submit(job, now_s)
            else:
                self._driver.finished(now_s, job.request_id)
                self._route(job, now_s)

        self.call_at(at_s, submit)

    def _available(self) -> list[int] | None:
        """Return the workers that have not failed and answer clients; None if all do."""
        if self._failed_idx is None and not self._prefill_workers:
            return None
        return [idx for idx in range(len(self._workers) - len(self._prefill_workers)) if idx != self._failed_idx]

    def _outcome(self) -> Outcome:
        jobs = self.jobs
        ttfts = sorted(job.answered_at_s - job.at_s for job in jobs)
        ends = sorted(job.done_at_s - job.at_s for job in jobs)
        computed = [job.computed_by or job for job in jobs]
        num_tokens = sum(job.request.num_tokens for job in jobs)
        cached = sum(job.num_cached_tokens for job in computed)
        held = [max(job.num_held_tokens, at.num_cached_tokens) for job, at in zip(jobs, computed, strict=True)]
        memory, block_size, first = self._conditions.memory, self._trace.block_size, self._machines[0]
        shared, shared_s = work_left([job.request for job in jobs], block_size, self._machines, memory)
        left_s = [work_s(job.request, job.num_gpu_tokens, job.num_cached_tokens, first) for job in computed]
        held_s = (
            work_s(at.request, at.num_gpu_tokens + num - at.num_cached_tokens, num, first)
            for at, num in zip(computed, held, strict=True)
        )
        middle = slice(len(jobs) // 10, len(jobs) - max(1, len(jobs) // 10)) if len(jobs) > 2 else slice(None)
        gaps_s = sorted(chain.from_iterable(worker.gaps_s for worker in self._workers))
        num_gaps = list(accumulate(num for _, num in gaps_s))
        return Outcome(
            fmean(ttfts),
            ttfts[int(0.5 * len(jobs))],
            ttfts[int(0.9 * len(jobs))],
            ttfts[int(0.99 * len(jobs))],
            ends[int(0.99 * len(jobs))],
            gaps_s[bisect(num_gaps, int(0.99 * num_gaps[-1]))][0],
            cached / num_tokens,
            cached / max(1, shared),
            (sum(left_s) - shared_s) / len(jobs),
            (sum(left_s) - sum(held_s)) / len(jobs),
            sum(left_s[middle]) / speed(self._machines) / max(1e-9, jobs[middle][-1].at_s - jobs[middle][0].at_s),
        )


def speed(machines: Sequence[Machine]) -> float:
    """Return how many machines like the first compute prompts as fast as all of these together."""
    return sum(machines[0].prefill_s / machine.prefill_s for machine in machines)


def work_s(request: Request, num_gpu_tokens: int, num_cached_tokens: int, machine: Machine) -> float:
    """Return how many seconds a machine computes for a request, beyond what is cached.

    They are prefill with its part of each step's fixed time, fetching what is not on the GPU, and reading the context
    for each token of the answer.
    """
    num_tokens, num_output_tokens = request.num_tokens, request.num_output_tokens
    prefill_s = machine.prefill_time_s(num_cached_tokens, num_tokens)
    prefill_s += machine.fetch_time_s(num_gpu_tokens, num_cached_tokens)
    steps_s = machine.step_s * (num_tokens - num_cached_tokens) / MAX_STEP_TOKENS
    return prefill_s + steps_s + machine.context_s * num_output_tokens * (num_tokens + num_output_tokens / 2)


def work_left(
    requests: Sequence[Request], block_size: int, machines: Sequence[Machine], memory: Memory = PLAIN_MEMORY
) -> tuple[int, float]:
    """Return how many tokens of these prompts one LRU cache of the fleet's size finds, and the work that is left.

    The work is in seconds of the first machine.
    """
    longest = max(request.num_tokens + request.num_output_tokens for request in requests)
    pools, *others = (memory.pools(machine.cache_tokens, block_size, longest) for machine in machines)
    for pool, *same in zip(pools, *others, strict=True):
        pool.num_blocks += sum(each.num_blocks for each in same)
        pool.num_on_host += sum(each.num_on_host for each in same)
    num_found, left_s = 0, 0.0
    for request in requests:
        blocks = request.blocks
        num_gpu_tokens, num_tokens = find_prefix(pools, blocks, request.num_tokens, block_size)
        num_found += num_tokens
        left_s += work_s(request, num_gpu_tokens, num_tokens, machines[0])
        for pool in pools:
            first = pool.first_needed(request.num_tokens)
            pool.cache(blocks[pool.first_needed(num_tokens) : first], 0.0)
            pool.cache_answer(blocks, request.answer_blocks, 0.0)
            pool.cache(blocks[first:][::-1], 0.0)
            pool.evict(0.0)
    return num_found, left_s


def at_load(
    trace: Trace,
    machines: Sequence[Machine],
    load: float,
    seed: int,
    burstiness: float = 1.0,
    memory: Memory = PLAIN_MEMORY,
) -> Trace:
    """Return the trace at the pace that leaves the fleet this load, its arrivals drawn by `seed`.

    A load of 1 is work for all of the time, after what one shared cache of the fleet's size finds: a policy that finds
    less is overloaded earlier.
    """
    _, left_s = work_left(trace.requests, trace.block_size, machines, memory)
    return trace.redraw_arrivals(seed, left_s / speed(machines) / load / trace.span_s, burstiness)


def measure(
    trace: Trace,
    make: Callable[..., Driver],
    machines: Sequence[Machine],
    seed: int,
    conditions: Conditions = Conditions(),
) -> Outcome:
    """Return how a policy's fleet serves a trace at its own pace; `seed` is the policy's."""
    driver = make(num_workers=len(machines), block_size=trace.block_size, seed=seed)
    return Simulation(trace, machines, driver, conditions, seed).run()

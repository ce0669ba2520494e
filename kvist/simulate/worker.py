"""A simulated worker: continuous batching, chunked prefill, and a prefix cache that forgets what was used longest ago.

A step computes up to MAX_STEP_TOKENS prompt tokens, first come, first served, and one token of each running answer. It
takes a fixed time, time for each prompt token, more the further back it looks, and time for each token of context read:

    step_s + prefill_s · Σ (1 + α · position) + context_s · Σ context

Running requests hold their blocks, and those that their answers will fill; a prompt waits until there is room. Prompts
are cached step by step, as vLLM and SGLang do: the next request finds them in the same step. Answers are cached, too,
and found again by requests that name their blocks.
What is found on the host is fetched in the step that begins with its prompt, at the price that the policy expects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from kvist.events import Tier
from kvist.router.policy.settings import DEFAULT_TIER_CREDITS
from kvist.simulate.driver import Driver
from kvist.simulate.memory import MAX_RUNNING, MAX_STEP_TOKENS, Hold, Pool, find_prefix
from kvist.simulate.trace import Request

REPORT_STEPS = 64
"""How many tokens an answer grows by before the router is told of them, here."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step costs and how many tokens are cached; the default is an 8B model on one H100.

    16 GB of weights and 131 kB of KV cache a token at 3 TB/s, 25,000 tokens of prefill a second.
    """

    step_s: float = 6e-3
    prefill_s: float = 40e-6
    context_s: float = 0.044e-6
    alpha: float = 2.9e-5
    cache_tokens: int = 400_000

    def times_as_fast(self, speed: float) -> Machine:
        prefill_s, context_s = self.prefill_s / speed, self.context_s / speed
        return replace(self, step_s=self.step_s / speed, prefill_s=prefill_s, context_s=context_s)

    def prefill_time_s(self, begin: int, end: int) -> float:
        """Return how long it takes to compute these tokens of a prompt."""
        return self.prefill_s * (end - begin) * (1.0 + self.alpha * (begin + end) / 2)

    def fetch_time_s(self, begin: int, end: int) -> float:
        """Return how long it takes to fetch them from the host's memory."""
        return (1.0 - DEFAULT_TIER_CREDITS[Tier.HOST]) * self.prefill_time_s(begin, end)


@dataclass(eq=False, slots=True)
class Job:
    """A request at a worker."""

    request_id: Hashable
    request: Request
    at_s: float
    computes_for: Job | None = None
    """The request that another worker answers once this job has computed its prompt."""
    computed_by: Job | None = None
    """The job that computed this prompt at another worker, from where it was fetched."""
    num_held_tokens: int = 0
    """The most that any worker was known to hold when it was routed."""
    num_gpu_tokens: int = 0
    num_cached_tokens: int = 0
    """Cached on this worker's GPU, and in either tier, when it began."""
    num_computed_tokens: int = -1
    holds: Sequence[Hold] = ()
    """Its blocks, a pool."""
    answered_at_s: float = inf
    done_at_s: float = inf

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens this worker generates behind the prompt."""
        return self.request.num_output_tokens if self.computes_for is None else 0


class Worker:
    """Steps through prefill and decode; `advance` must be called at `next_s`."""

    def __init__(
        self,
        block_size: int,
        machine: Machine,
        pools: Sequence[Pool],
        driver: Driver,
        on_first_token: Callable[[Request, float], None],
        on_finished: Callable[[Job, float], None],
    ) -> None:
        self.next_s = inf
        self.gaps_s: list[tuple[float, int]] = []
        """How long steps took, with the number of tokens in each that were not the first of an answer."""
        self._block_size, self._machine, self._pools = block_size, machine, pools
        self._driver, self._on_first_token, self._on_finished = driver, on_first_token, on_finished
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # a heap: by the step that ends the answer
        self._ordinals = count()
        self._began_s = self._step_s = 0.0
        self._num_steps = self._steps_done = self._steps_reported = 0
        self._context_tokens = 0
        self._finishing: list[Job] = []

    def jobs(self) -> list[Job]:
        return [*(job for _, _, job in self._decoding), *self._finishing, *self._prefilling, *self._waiting]

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a request; a run of decode steps ends with the current one."""
        job.holds = [Hold()] * len(self._pools)
        self._waiting.append(job)
        if self._num_steps == 0:
            self._plan_step(now_s)
        elif self._num_steps > 1:
            self._num_steps = min(self._num_steps, int((now_s - self._began_s) / self._step_s) + 1)
            self.next_s = self._began_s + self._num_steps * self._step_s

    def advance(self, now_s: float) -> None:
        """Finish the steps that end now, and plan the next."""
        num_steps, self._num_steps = self._num_steps, 0
        self._steps_done += num_steps
        self._context_tokens += num_steps * len(self._decoding)
        if self._decoding:
            self.gaps_s.append((self._step_s, num_steps * len(self._decoding)))
        if (num := self._steps_done - self._steps_reported) >= REPORT_STEPS:
            self._steps_reported = self._steps_done
            for _, _, job in self._decoding:
                self._driver.tokens(now_s, job.request_id, num)
        while self._decoding and self._decoding[0][0] <= self._steps_done:
            job = heappop(self._decoding)[2]
            self._context_tokens -= job.request.num_tokens + max(1, job.num_output_tokens - 1)
            self._finish(job, now_s)
        for job in self._finishing:
            self._start_answer(job, now_s)
        self._finishing.clear()
        self._plan_step(now_s)

    def _plan_step(self, now_s: float) -> None:
        budget, prefill_s, machine = MAX_STEP_TOKENS, 0.0, self._machine
        while budget > 0:
            if not self._prefilling:
                if (fetch_s := self._start_next(now_s)) is None:
                    break
                prefill_s += fetch_s
            job = self._prefilling[0]
            num = min(budget, job.request.num_tokens - job.num_computed_tokens)
            prefill_s += machine.prefill_time_s(job.num_computed_tokens, job.num_computed_tokens + num)
            job.num_computed_tokens += num
            budget -= num
            self._cache_computed(job, job.num_computed_tokens - num, now_s)
            if job.num_computed_tokens == job.request.num_tokens:
                self._finishing.append(self._prefilling.popleft())
        is_prefilling = bool(self._prefilling or self._finishing)
        if not is_prefilling and not self._decoding:
            self.next_s = inf
            return
        self._began_s = now_s
        self._step_s = machine.step_s + prefill_s + self._context_tokens * machine.context_s
        self._num_steps = 1
        if not is_prefilling:  # nothing changes until an answer ends or a request comes
            self._num_steps = min(self._decoding[0][0] - self._steps_done, REPORT_STEPS)
        self.next_s = now_s + self._num_steps * self._step_s

    def _start_next(self, now_s: float) -> float | None:
        """Start the first request in the queue, and return how long fetching takes; None if none can start."""
        is_running = bool(self._decoding or self._finishing)
        if not self._waiting or len(self._decoding) + len(self._finishing) >= MAX_RUNNING:
            return None
        job = self._waiting[0]
        request = job.request
        num_gpu_tokens, num_tokens = find_prefix(self._pools, request.blocks, request.num_tokens, self._block_size)
        longest = request.num_tokens + job.num_output_tokens
        holds = [pool.plan_hold(request.blocks, num_tokens, longest, MAX_STEP_TOKENS) for pool in self._pools]
        if is_running and not all(pool.has_room(hold) for pool, hold in zip(self._pools, holds, strict=True)):
            return None
        self._replace_holds(job, holds, now_s)
        self._prefilling.append(self._waiting.popleft())
        job.num_gpu_tokens, job.num_cached_tokens = num_gpu_tokens, num_tokens
        job.num_computed_tokens = num_tokens if job.computed_by is None else request.num_tokens
        return self._machine.fetch_time_s(num_gpu_tokens, num_tokens)

    def _cache_computed(self, job: Job, begin: int, now_s: float) -> None:
        """Cache what a step computes of a prompt; other requests can find it from this step on."""
        blocks, num_tokens = job.request.blocks, job.num_computed_tokens
        longest = job.request.num_tokens + job.num_output_tokens
        step_tokens = MAX_STEP_TOKENS if num_tokens < job.request.num_tokens else 1
        for pool in self._pools:
            pool.cache(blocks[begin // self._block_size : pool.first_needed(num_tokens)], now_s)
        holds = [pool.plan_hold(blocks, num_tokens, longest, step_tokens) for pool in self._pools]
        self._replace_holds(job, holds, now_s)

    def _replace_holds(self, job: Job, holds: Sequence[Hold], now_s: float) -> None:
        befores, job.holds = job.holds, holds
        for pool, before, hold in zip(self._pools, befores, holds, strict=True):
            pool.replace_hold(before, hold, now_s)
            pool.evict(now_s)

    def _start_answer(self, job: Job, now_s: float) -> None:
        """Report the first token of a prompt that is computed, and decode the others, if this worker does."""
        request = job.request
        job.answered_at_s = min(job.answered_at_s, now_s)
        self._on_first_token(request, now_s)
        self._driver.answered(now_s, job.request_id)
        if job.computes_for is not None:
            self._finish(job, now_s)
            return
        last_step = self._steps_done + max(1, request.num_output_tokens - 1)
        heappush(self._decoding, (last_step, next(self._ordinals), job))
        self._context_tokens += request.num_tokens

    def _finish(self, job: Job, now_s: float) -> None:
        request = job.request
        num_full = (request.num_tokens + job.num_output_tokens) // self._block_size - len(request.blocks)
        answer: list[Hashable] = list(request.answer_blocks[:num_full])
        answer += [(request.idx, number) for number in range(len(answer), num_full)]  # no request names these
        for pool in self._pools:
            pool.cache_answer(request.blocks, answer, now_s)
        self._replace_holds(job, [Hold()] * len(self._pools), now_s)
        job.done_at_s = now_s
        self._driver.finished(now_s, job.request_id)
        self._on_finished(job, now_s)

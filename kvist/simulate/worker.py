"""A simulated worker: continuous batching, chunked prefill, and a prefix cache that forgets what was used longest ago.

A step computes up to MAX_STEP_TOKENS prompt tokens, first come, first served, and one token of each running answer. It
takes a fixed time, time for each prompt token, more the further back it looks, and time for each token of context read:

    step_s + prefill_s · Σ (1 + α · position) + context_s · Σ context

Running requests hold their blocks, and those that their answers will fill; a prompt waits until there is room. Prompts
are cached from their first token on. Answers take room, too, and are found again by requests that name their blocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from kvist.simulate.driver import Driver
from kvist.simulate.index import LateIndex
from kvist.simulate.trace import Request

MAX_STEP_TOKENS = 2048
MAX_RUNNING = 256
REPORT_STEPS = 64
"""How many tokens an answer grows by before the router hears of them, here."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step costs and how much is cached; the default is an 8B model on one H100.

    16 GB of weights and 131 kB of KV cache a token at 3 TB/s, 25,000 tokens of prefill a second.
    """

    step_s: float = 6e-3
    prefill_s: float = 40e-6
    context_s: float = 0.044e-6
    alpha: float = 2.9e-5
    cache_tokens: int = 400_000

    def times_as_fast(self, speed: float) -> Machine:
        """Return a machine that takes as much less time for everything."""
        prefill_s, context_s = self.prefill_s / speed, self.context_s / speed
        return replace(self, step_s=self.step_s / speed, prefill_s=prefill_s, context_s=context_s)

    def prefill_time_s(self, begin: int, end: int) -> float:
        """Return what computing these tokens of a prompt takes."""
        return self.prefill_s * (end - begin) * (1.0 + self.alpha * (begin + end) / 2)


@dataclass(eq=False, slots=True)
class Job:
    """A request at a worker."""

    request_id: int
    request: Request
    at_s: float
    num_cached_tokens: int = 0
    num_computed_tokens: int = -1
    num_own_blocks: int = 0
    """Blocks that it holds and nobody else can find."""
    last_step: int = 0
    answered_at_s: float = inf
    done_at_s: float = inf


class Worker:
    """Steps through prefill and decode; `next_s` is when `advance` has something to do."""

    def __init__(
        self,
        idx: int,
        block_size: int,
        machine: Machine,
        index: LateIndex,
        driver: Driver,
        on_finished: Callable[[Job, float], None],
    ) -> None:
        """Begin with nothing to do and an empty cache."""
        self.next_s = inf
        self.busy_s = 0.0
        self._idx, self._block_size, self._machine = idx, block_size, machine
        self._index, self._driver, self._on_finished = index, driver, on_finished
        self._capacity = machine.cache_tokens // block_size
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # a heap: by the step that ends the answer
        self._num_started = 0
        self._began_s = self._step_s = 0.0
        self._num_steps = self._steps_done = self._steps_reported = 0
        self._context_tokens = 0
        self._finishing: list[Job] = []
        self._pinned: dict[Hashable, int] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._num_own_blocks = 0

    def jobs(self) -> list[Job]:
        """Return the requests that have not ended."""
        return [*(job for _, _, job in self._decoding), *self._finishing, *self._prefilling, *self._waiting]

    def take(self, job: Job, now_s: float) -> None:
        """Queue a request; a run of decode steps ends with the one under way."""
        self._waiting.append(job)
        if self._num_steps == 0:
            self._plan(now_s)
        elif self._num_steps > 1:
            self._num_steps = min(self._num_steps, int((now_s - self._began_s) / self._step_s) + 1)
            self.next_s = self._began_s + self._num_steps * self._step_s

    def advance(self, now_s: float) -> None:
        """Finish the steps that end now, and plan what comes next."""
        num_steps, self._num_steps = self._num_steps, 0
        self._steps_done += num_steps
        self._context_tokens += num_steps * len(self._decoding)
        self.busy_s += num_steps * self._step_s
        self._report(now_s)
        while self._decoding and self._decoding[0][0] <= self._steps_done:
            self._finish(heappop(self._decoding)[2], now_s)
        for job in self._finishing:
            self._answer(job, now_s)
        self._finishing.clear()
        self._plan(now_s)

    def _report(self, now_s: float) -> None:
        num = self._steps_done - self._steps_reported
        if num >= REPORT_STEPS:
            self._steps_reported = self._steps_done
            for _, _, job in self._decoding:
                self._driver.tokens(now_s, job.request_id, num)

    def _plan(self, now_s: float) -> None:
        budget, prefill_s, machine = MAX_STEP_TOKENS, 0.0, self._machine
        while budget > 0:
            if not self._prefilling and not self._start(now_s):
                break
            job = self._prefilling[0]
            num = min(budget, job.request.num_tokens - job.num_computed_tokens)
            prefill_s += machine.prefill_time_s(job.num_computed_tokens, job.num_computed_tokens + num)
            job.num_computed_tokens += num
            budget -= num
            if job.num_computed_tokens == job.request.num_tokens:
                self._finishing.append(self._prefilling.popleft())
        if budget == MAX_STEP_TOKENS and not self._decoding:
            self.next_s = inf
            return
        self._began_s = now_s
        self._step_s = machine.step_s + prefill_s + self._context_tokens * machine.context_s
        self._num_steps = 1
        if budget == MAX_STEP_TOKENS:  # nothing changes until an answer ends or a request comes
            self._num_steps = min(self._decoding[0][0] - self._steps_done, REPORT_STEPS)
        self.next_s = now_s + self._num_steps * self._step_s

    def _start(self, now_s: float) -> bool:
        """Begin with the first that waits; False if there is none, or no room for it."""
        num_running = len(self._decoding) + len(self._finishing)
        if not self._waiting or num_running >= MAX_RUNNING:
            return False
        job = self._waiting[0]
        request, blocks = job.request, job.request.blocks
        usable = min(len(blocks), max(0, request.num_tokens - 1) // self._block_size)
        found = 0
        while found < usable and (blocks[found] in self._idle or blocks[found] in self._pinned):
            found += 1
        num_blocks = -(-(request.num_tokens + request.num_output_tokens) // self._block_size) - found
        newly_pinned = sum(1 for block in blocks[:found] if block not in self._pinned)
        if num_running and len(self._pinned) + newly_pinned + self._num_own_blocks + num_blocks > self._capacity:
            return False
        for block in blocks[:found]:
            self._pin(block)
        self._prefilling.append(self._waiting.popleft())
        job.num_cached_tokens = job.num_computed_tokens = found * self._block_size
        job.num_own_blocks = num_blocks
        self._num_own_blocks += num_blocks
        self._evict(now_s)
        return True

    def _pin(self, block: Hashable) -> bool:
        """Keep a cached block; False if it is not cached."""
        if block in self._pinned:
            self._pinned[block] += 1
            return True
        if block in self._idle:
            del self._idle[block]
            self._pinned[block] = 1
            return True
        return False

    def _evict(self, now_s: float) -> None:
        removed = []
        while self._idle and len(self._pinned) + len(self._idle) + self._num_own_blocks > self._capacity:
            removed.append(self._idle.popitem(last=False)[0])
        if removed:
            self._index.removed(self._idx, removed, now_s)

    def _answer(self, job: Job, now_s: float) -> None:
        stored = []
        blocks = job.request.blocks[job.num_cached_tokens // self._block_size :]
        for block in blocks:
            if not self._pin(block):
                self._pinned[block] = 1
                stored.append(block)
        job.num_own_blocks -= len(blocks)
        self._num_own_blocks -= len(blocks)
        if stored:
            self._index.stored(self._idx, stored, now_s)
        job.answered_at_s = min(job.answered_at_s, now_s)
        self._index.answered(self._idx, job.request, now_s)
        self._driver.answered(now_s, job.request_id)
        job.last_step = self._steps_done + max(1, job.request.num_output_tokens - 1)
        self._num_started += 1
        heappush(self._decoding, (job.last_step, self._num_started, job))
        self._context_tokens += job.request.num_tokens

    def _finish(self, job: Job, now_s: float) -> None:
        request = job.request
        self._context_tokens -= request.num_tokens + max(1, request.num_output_tokens - 1)
        self._num_own_blocks -= job.num_own_blocks
        num_full = (request.num_tokens + request.num_output_tokens) // self._block_size - len(request.blocks)
        answer: list[Hashable] = list(request.answer_blocks[:num_full])
        stored = [block for block in answer if block not in self._pinned and block not in self._idle]
        answer += [(request.idx, number) for number in range(len(answer), num_full)]  # nobody names these
        for block in reversed(answer):
            if block not in self._pinned:
                self._idle[block] = None
                self._idle.move_to_end(block)
        for block in reversed(request.blocks):  # the end of a prompt is forgotten first
            self._pinned[block] -= 1
            if self._pinned[block] == 0:
                del self._pinned[block]
                self._idle[block] = None
        if stored:
            self._index.stored(self._idx, stored, now_s)
        self._evict(now_s)
        job.done_at_s = now_s
        self._driver.finished(now_s, job.request_id)
        self._on_finished(job, now_s)

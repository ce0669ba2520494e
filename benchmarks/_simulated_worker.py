"""A simulated worker, on a virtual clock: continuous batching, chunked prefill, a prefix cache that forgets the oldest.

Its clients give up after 30 s without a token; the router's index hears of a block 5 ms late.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvist.router.fleet.load import ActiveRequest

MAX_PREFILL_TOKENS = 2048
INDEX_DELAY_S = 5e-3
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker's step costs and how much it caches."""

    step_s: float = 6e-3
    prefill_s: float = 40e-6
    context_s: float = 0.044e-6
    cache_tokens: int = 400_000


H100 = Machine()
TWO_CORES = Machine(step_s=10e-3, prefill_s=600e-6, context_s=1e-6)
"""The bundled model of `kvist up`, roughly."""


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """A request; `then` comes after it was answered, `at_s` later."""

    at_s: float
    blocks: tuple[Hashable, ...] = field(compare=False)
    num_tokens: int = field(compare=False)
    num_output_tokens: int = field(compare=False)
    then: Arrival | None = field(default=None, compare=False)


@dataclass(eq=False, slots=True)
class Job:
    arrival: Arrival
    at_s: float
    active: ActiveRequest
    num_cached_tokens: int = -1
    num_context_tokens: int = 0
    num_missing_tokens: int = 0
    ttft_s: float = PATIENCE_S
    done_s: float | None = None


@dataclass
class Worker:
    """Steps through prefill and decode on its own clock."""

    block_size: int
    machine: Machine
    on_done: Callable[[Job], None]
    now_s: float = 0.0
    step_s: float = 0.0
    num_steps: int = 0
    prefilling_s: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    decoding: list[Job] = field(default_factory=list)
    cache: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    index: set[Hashable] = field(default_factory=set)
    events: deque[tuple[float, Hashable, bool]] = field(default_factory=deque)
    finishing: list[Job] = field(default_factory=list)

    def overlap(self, blocks: Sequence[Hashable], now_s: float) -> int:
        while self.events and self.events[0][0] <= now_s:
            _, block, is_stored = self.events.popleft()
            (self.index.add if is_stored else self.index.discard)(block)
        return sum(1 for _ in takewhile(self.index.__contains__, blocks))

    def advance(self, until_s: float) -> None:
        while True:
            if self.num_steps == 0:
                if not self.waiting and not self.decoding:
                    self.now_s = until_s
                    return
                self._plan(until_s)
            if self.now_s + self.step_s * self.num_steps > until_s:
                return
            self._finish_steps()

    def _plan(self, until_s: float) -> None:
        budget = MAX_PREFILL_TOKENS
        while self.waiting and budget > 0:
            job = self.waiting[0]
            if job.num_cached_tokens < 0 and not self._start(job):
                self.waiting.popleft()
                continue
            taken = min(budget, job.num_missing_tokens)
            job.num_missing_tokens -= taken
            budget -= taken
            if job.num_missing_tokens == 0:
                self.finishing.append(self.waiting.popleft())
        machine, context_tokens = self.machine, sum(job.num_context_tokens for job in self.decoding)
        prefill_s = (MAX_PREFILL_TOKENS - budget) * machine.prefill_s
        self.step_s, self.num_steps = machine.step_s + prefill_s + context_tokens * machine.context_s, 1
        if prefill_s > 0:
            self.prefilling_s += self.step_s
        elif self.decoding:  # nothing changes until an answer ends or a request arrives
            num_left = min(job.num_missing_tokens for job in self.decoding)
            self.num_steps = max(1, min(num_left, int(min(1e9, (until_s - self.now_s) / self.step_s))))

    def _start(self, job: Job) -> bool:
        """Look the prompt up in the cache; False when its client is gone."""
        arrival = job.arrival
        if self.now_s - job.at_s > PATIENCE_S:
            job.active.finish()
            self.on_done(job)
            return False
        num_cached = sum(1 for _ in takewhile(self.cache.__contains__, arrival.blocks))
        num_cached = min(num_cached, (arrival.num_tokens - 1) // self.block_size)
        for block in reversed(arrival.blocks[:num_cached]):
            self.cache.move_to_end(block)
        job.num_cached_tokens = num_cached * self.block_size
        job.num_missing_tokens = arrival.num_tokens - job.num_cached_tokens
        return True

    def _finish_steps(self) -> None:
        self.now_s += self.step_s * self.num_steps
        num_steps, self.num_steps = self.num_steps, 0
        for job in self.decoding:
            job.num_context_tokens += num_steps
            job.num_missing_tokens -= num_steps
            job.active.add_tokens(num_steps)
            if job.num_missing_tokens <= 0:
                self._finish(job)
        self.decoding = [job for job in self.decoding if job.num_missing_tokens > 0]
        for job in self.finishing:
            self._first_token(job)
            job.num_context_tokens, job.num_missing_tokens = job.arrival.num_tokens, job.arrival.num_output_tokens
            self.decoding.append(job)
        self.finishing.clear()

    def _first_token(self, job: Job) -> None:
        self._store(job.arrival.blocks)
        job.ttft_s = self.now_s - job.at_s
        job.active.end_prefill()

    def _store(self, blocks: Sequence[Hashable]) -> None:
        for block in reversed(blocks):  # the end of a prompt is forgotten first
            if block not in self.cache:
                self.events.append((self.now_s + INDEX_DELAY_S, block, True))
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) * self.block_size > self.machine.cache_tokens:
            block, _ = self.cache.popitem(last=False)
            self.events.append((self.now_s + INDEX_DELAY_S, block, False))

    def _finish(self, job: Job) -> None:
        if job.arrival.then is not None:  # its prompt repeats this prompt and answer
            num_blocks = (job.arrival.num_tokens + job.arrival.num_output_tokens) // self.block_size
            self._store(job.arrival.then.blocks[:num_blocks])
        job.done_s = self.now_s
        job.active.finish()
        self.on_done(job)

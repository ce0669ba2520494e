"""What each rank has to do now, counted by the router from the requests it dispatched and has not seen end.

    dispatch ──────────── first byte of the answer ──────────────── end, error or disconnect
    running_requests +1                                             −1
    prefill_tokens  +uncached    −uncached                          (−uncached, if no byte came)
    decode_blocks   +⌈prompt/B⌉  +1 for every B tokens streamed     −all of them
    recent_prefill_tokens +uncached, then halves every half-life: it outlives the request

Decode blocks are those a step must read, so shared blocks count once a request. An event of a stream is taken for one
token. Answers that are not streamed keep their prefill tokens to the end, for nothing shows where prefill stopped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kvist.events import WorkerRank
from kvist.router.policy.decision import Load, Prompt

NO_LOAD = Load()


class _RankLoad:
    """The counters of one rank."""

    __slots__ = ("decode_blocks", "prefill_tokens", "recent_at_s", "recent_prefill_tokens", "running_requests")

    def __init__(self) -> None:
        self.running_requests = 0
        self.prefill_tokens = 0
        self.decode_blocks = 0
        self.recent_prefill_tokens = 0.0
        self.recent_at_s = 0.0

    def decayed(self, now_s: float, half_life_s: float) -> float:
        """Return the recent prefill tokens as of now."""
        if self.recent_prefill_tokens == 0.0:
            return 0.0
        return self.recent_prefill_tokens * math.exp2(-max(0.0, now_s - self.recent_at_s) / half_life_s)


@dataclass(slots=True)
class _WorkerLoad:
    """What all ranks of a worker have to do together."""

    running_requests: int = 0
    prefill_tokens: int = 0


_NOTHING = _WorkerLoad()


class ActiveRequest:
    """One dispatched request. As a context manager it gives back everything it counts, on every way out, once."""

    __slots__ = (
        "_block_size",
        "_decode_blocks",
        "_prefill_tokens",
        "_rank_load",
        "_tracker",
        "_worker_load",
        "num_tokens",
        "target",
    )

    def __init__(
        self,
        tracker: LoadTracker,
        target: WorkerRank,
        rank_load: _RankLoad,
        worker_load: _WorkerLoad,
        prompt: Prompt,
        uncached_tokens: int,
    ) -> None:
        self.target = target
        self._tracker = tracker
        self._rank_load: _RankLoad | None = rank_load
        self._worker_load = worker_load
        self._block_size = prompt.block_size
        self._prefill_tokens = uncached_tokens
        self._decode_blocks = -(-prompt.num_tokens // prompt.block_size)
        self.num_tokens = 0
        rank_load.running_requests += 1
        rank_load.prefill_tokens += self._prefill_tokens
        rank_load.decode_blocks += self._decode_blocks
        worker_load.running_requests += 1
        worker_load.prefill_tokens += self._prefill_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def end_prefill(self) -> None:
        """Take the first byte of the answer: its prefill is done."""
        if self._rank_load is not None:
            self._rank_load.prefill_tokens -= self._prefill_tokens
            self._worker_load.prefill_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            self._tracker.on_freed()

    def add_tokens(self, num_tokens: int) -> None:
        """Count what the answer grew by."""
        if self._rank_load is None:
            return
        num_blocks = self.num_tokens // self._block_size
        self.num_tokens += num_tokens
        num_new_blocks = self.num_tokens // self._block_size - num_blocks
        self._decode_blocks += num_new_blocks
        self._rank_load.decode_blocks += num_new_blocks

    def finish(self) -> None:
        """Give back what is still counted; further calls do nothing."""
        rank_load, self._rank_load = self._rank_load, None
        if rank_load is None:
            return
        rank_load.running_requests -= 1
        rank_load.prefill_tokens -= self._prefill_tokens
        rank_load.decode_blocks -= self._decode_blocks
        self._worker_load.running_requests -= 1
        self._worker_load.prefill_tokens -= self._prefill_tokens
        self._tracker._finished(self.target.worker, self._worker_load)


class LoadTracker:
    """The load of every rank. Not thread-safe: it belongs to the event loop."""

    def __init__(self, recent_half_life_s: float = 60.0) -> None:
        self._half_life_s = recent_half_life_s
        self._ranks: dict[WorkerRank, _RankLoad] = {}
        self._workers: dict[str, _WorkerLoad] = {}
        self.num_running = 0
        """Requests of all workers that have not ended."""
        self.on_freed: Callable[[], None] = lambda: None
        """Is called when a worker has less to do than it had."""
        self._idle: dict[str, asyncio.Event] = {}

    def begin(self, target: WorkerRank, prompt: Prompt, overlap_tokens: int, now_s: float) -> ActiveRequest:
        """Count a request from its dispatch on."""
        rank_load = self._ranks.setdefault(target, _RankLoad())
        uncached_tokens = max(0, prompt.num_tokens - overlap_tokens)
        rank_load.recent_prefill_tokens = rank_load.decayed(now_s, self._half_life_s) + uncached_tokens
        rank_load.recent_at_s = now_s
        self.num_running += 1
        worker_load = self._workers.setdefault(target.worker, _WorkerLoad())
        return ActiveRequest(self, target, rank_load, worker_load, prompt, uncached_tokens)

    def load(self, target: WorkerRank, now_s: float) -> Load:
        """Return what the rank has to do now."""
        rank_load = self._ranks.get(target)
        if rank_load is None:
            return NO_LOAD
        return Load(
            rank_load.running_requests,
            rank_load.prefill_tokens,
            rank_load.decode_blocks,
            rank_load.decayed(now_s, self._half_life_s),
        )

    def running_requests(self, worker: str) -> int:
        """Return how many requests of the worker, over all its ranks, have not ended."""
        return self._workers.get(worker, _NOTHING).running_requests

    def prefill_tokens(self, worker: str) -> int:
        """Return the uncached tokens of the worker's requests that are not answered yet, over all its ranks."""
        return self._workers.get(worker, _NOTHING).prefill_tokens

    async def wait_idle(self, worker: str) -> None:
        """Return once no request of the worker is running."""
        while self.running_requests(worker):
            await self._idle.setdefault(worker, asyncio.Event()).wait()

    def forget(self, worker: str) -> None:
        """Drop the worker's history, so that a later worker of the same name starts afresh."""
        for target in [target for target in self._ranks if target.worker == worker]:
            del self._ranks[target]

    def _finished(self, worker: str, worker_load: _WorkerLoad) -> None:
        self.num_running -= 1
        self.on_freed()
        if worker_load.running_requests == 0:
            del self._workers[worker]
            idle = self._idle.pop(worker, None)
            if idle is not None:
                idle.set()

"""Decides what the next step computes: decodes and chunks of prompts, first come first served."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvist.engine.request import Request
from kvist.kvcache import KvCacheManager, PrefixHit, can_resume
from kvist.kvcache.stale import num_blocks_for
from kvist.openai.requests import RemotePrefill

logger = logging.getLogger(__name__)


class ScheduledRequest(NamedTuple):
    """A request and how many of its tokens the step computes, from its `num_computed_tokens` on."""

    request: Request
    num_new_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Return whether the step reaches the request's last token, so that the next one can be picked."""
        return self.num_new_tokens == self.request.num_new_tokens

    @property
    def prompt_rows(self) -> range:
        """Return which of the new tokens give a log probability of the prompt that was asked for and is missing."""
        request = self.request
        if not request.num_prompt_logprobs_missing:
            return range(0)
        first = len(request.prompt_logprobs) - request.num_computed_tokens
        return range(first, min(self.num_new_tokens, len(request.prompt_token_ids) - 1 - request.num_computed_tokens))


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Numbers of requests now, and of preemptions since the start; another worker fills receiving ones' blocks."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_receiving: int


class Scheduler:
    """Fills each step with at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests.

    Running requests come first, oldest first; then waiting ones are admitted in order, each with what the prefix cache
    does not serve. When memory runs out, the youngest running request gives its blocks back and starts over from the
    head of the queue. A request whose prompt another worker computes is receiving from when its blocks are reserved
    until they are filled; it counts towards `max_num_seqs`, but is not scheduled.
    """

    def __init__(self, kv_cache: KvCacheManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.receiving: dict[str, Request] = {}
        """Requests that are receiving, by id: whoever takes one out starts it, adds it or forgets it."""
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Return whether any request is running or waiting; requests that are receiving do not count."""
        return bool(self._waiting or self._running)

    @property
    def next_waiting(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def add(self, request: Request) -> None:
        """Queue a request; its caller has checked that it fits into the memory when it is alone."""
        self._waiting.append(request)

    def schedule(self) -> list[ScheduledRequest]:
        """Return the next step's requests, with blocks for their new tokens; empty if nothing can be computed."""
        scheduled: list[ScheduledRequest] = []
        budget = self._max_num_batched_tokens
        num_preempted_before = self.num_preemptions
        for request in list(self._running):
            if request.blocks is None:  # preempted in this loop, for an older request
                continue
            num_new = min(request.num_new_tokens, budget)
            if num_new and self._grow(request, num_new):
                scheduled.append(ScheduledRequest(request, num_new))
                budget -= num_new
        if self.num_preemptions == num_preempted_before:
            scheduled += self._admit(budget)
        return scheduled

    @property
    def can_look_ahead(self) -> bool:
        """Return whether pending tokens can be computed, without a preemption, as soon as the device knows them.

        Only where each running request has one token to compute.
        """
        num_running = len(self._running)
        return (
            any(each.num_pending_tokens and each.num_new_tokens for each in self._running)
            and all(each.num_new_tokens <= 1 and each.is_foreseeable for each in self._running)
            and all(pool.num_free >= num_running for pool in self._kv_cache.pools)
        )

    def commit(self, scheduled: Sequence[ScheduledRequest]) -> None:
        for request, num_new in scheduled:
            request.num_computed_tokens += num_new
        self._kv_cache.settle()

    def reserve(self, request: Request) -> bool:
        """Give a request blocks for the part of its prompt that another worker computes; False if it has to wait."""
        assert isinstance(request.handoff, RemotePrefill)
        if self._num_admitted >= self._max_num_seqs:
            return False
        prompt = request.token_ids[: request.handoff.num_tokens]
        hit = self._kv_cache.match(request.chain, prompt, is_next_known=True)
        request.blocks = self._kv_cache.reserve(hit, request.chain, prompt, len(prompt))
        if request.blocks is None:
            return False
        request.num_cached_tokens = hit.num_tokens
        self.receiving[request.request_id] = request
        return True

    def start_received(self, request: Request) -> None:
        """Add a request that was receiving to the running ones: its blocks hold its whole prompt."""
        self._running.append(request)
        request.num_computed_tokens = len(request.prompt_token_ids)

    def remove(self, request: Request) -> None:
        """Forget a running or waiting request and give back its blocks."""
        if request.blocks is None:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._release(request)

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(len(self._running), len(self._waiting), self.num_preemptions, len(self.receiving))

    @property
    def _num_admitted(self) -> int:
        return len(self._running) + len(self.receiving)

    def _admit(self, budget: int) -> list[ScheduledRequest]:
        admitted: list[ScheduledRequest] = []
        while self._waiting and budget and self._num_admitted < self._max_num_seqs:
            request = self._waiting[0]
            # Reused tokens have no logits, and so no log probabilities.
            reusable = request.token_ids[:1] if request.num_prompt_logprobs_missing else request.token_ids
            hit = self._kv_cache.match(request.chain, reusable)
            num_new = min(len(request.token_ids) - hit.num_tokens, budget)
            if request.num_cached_tokens is not None and not self._has_room_to_resume(hit, num_new):
                break
            request.blocks = self._kv_cache.open(
                hit,
                request.chain,
                request.token_ids,
                hit.num_tokens + num_new,
                is_scratch_allowed=request.is_scratch_allowed,
            )
            if request.blocks is None:
                break
            request.num_computed_tokens = hit.num_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = hit.num_tokens
                request.times.scheduled_s = time.monotonic()
            self._running.append(self._waiting.popleft())
            admitted.append(ScheduledRequest(request, num_new))
            budget -= num_new
        return admitted

    def _has_room_to_resume(self, hit: PrefixHit, num_new: int) -> bool:
        """Return whether the running requests keep room to grow if a preempted one is admitted again."""
        if not self._running:
            return True
        num_blocks = num_blocks_for(hit.num_tokens + num_new, self._kv_cache.block_size)
        return all(
            can_resume(pool.num_blocks - pool.num_free, num_blocks - first_held, pool.num_blocks)
            for pool, first_held in zip(self._kv_cache.pools, hit.first_held, strict=True)
        )

    def _grow(self, request: Request, num_new: int) -> bool:
        """Give the request blocks for its new tokens, preempting younger ones; False if it was preempted itself."""
        assert request.blocks is not None
        while not self._kv_cache.grow(request.blocks, request.token_ids, request.num_computed_tokens + num_new):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        logger.info("preempted request_id=%s num_tokens=%d", request.request_id, len(request.token_ids))
        self._release(request)
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        assert request.blocks is not None
        self._kv_cache.close(request.blocks)
        request.blocks = None
        request.num_computed_tokens = 0

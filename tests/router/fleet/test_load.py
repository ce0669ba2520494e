"""Load is given back on every way out, exactly once."""

from __future__ import annotations

import asyncio

from kvist.events import WorkerRank
from kvist.router.fleet.load import LoadTracker
from kvist.router.policy.decision import Load, Prompt

RANK = WorkerRank("http://w", 0)
OTHER_RANK = WorkerRank("http://w", 1)
PROMPT = Prompt(num_tokens=100, block_size=16)


def test_a_request_counts_from_dispatch_to_its_end() -> None:
    tracker = LoadTracker()
    request = tracker.begin(RANK, PROMPT, overlap_tokens=64)
    assert tracker.load(RANK) == Load(1, 36)
    request.end_prefill()
    assert tracker.load(RANK) == Load(1, 0)
    request.finish(0.0)
    assert tracker.load(RANK) == Load(0, 0)


def test_a_request_that_fails_before_its_first_byte_gives_back_its_prefill() -> None:
    tracker = LoadTracker()
    tracker.begin(RANK, PROMPT, 0).finish(0.0)
    load = tracker.load(RANK)
    assert (load.running_requests, load.prefill_tokens) == (0, 0)


def test_finishing_twice_and_tokens_after_the_end_change_nothing() -> None:
    tracker = LoadTracker()
    first, second = tracker.begin(RANK, PROMPT, 0), tracker.begin(RANK, PROMPT, 0)
    first.finish(0.0)
    first.finish(0.0)
    first.end_prefill()
    first.add_tokens(160)
    assert tracker.load(RANK) == Load(1, 100)
    assert tracker.running_requests("http://w") == 1
    second.finish(0.0)
    assert tracker.running_requests("http://w") == 0


def test_ranks_are_counted_apart_and_their_worker_together() -> None:
    tracker = LoadTracker()
    tracker.begin(RANK, PROMPT, 0)
    tracker.begin(OTHER_RANK, PROMPT, 0)
    assert tracker.load(RANK).running_requests == 1
    assert tracker.load(OTHER_RANK).running_requests == 1
    assert tracker.running_requests("http://w") == 2


def test_a_rank_never_seen_has_no_load() -> None:
    assert LoadTracker().load(RANK) == Load()


def test_forgetting_a_worker_drops_its_history_but_not_the_bookkeeping_of_running_requests() -> None:
    tracker = LoadTracker()
    request = tracker.begin(RANK, PROMPT, 0)
    tracker.forget("http://w")
    assert tracker.load(RANK) == Load()
    request.finish(0.0)
    assert tracker.load(RANK) == Load()
    assert tracker.running_requests("http://w") == 0


async def test_waiting_for_idle_ends_with_the_last_request() -> None:
    tracker = LoadTracker()
    first, second = tracker.begin(RANK, PROMPT, 0), tracker.begin(OTHER_RANK, PROMPT, 0)
    waiting = asyncio.create_task(tracker.wait_idle("http://w"))
    await asyncio.sleep(0)
    first.finish(0.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    second.finish(0.0)
    async with asyncio.timeout(60):
        await waiting
    await tracker.wait_idle("http://never-seen")

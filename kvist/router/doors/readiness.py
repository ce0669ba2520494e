"""What `/readiness` says: whether requests can be taken, why not, and which event streams are not as they should be.

Ready means that some worker is healthy. Streams have no say in it, nor has an index that is being compiled: a worker
whose caches are not known is routed to by load, so that a broker or a stream that is away costs overlap, not requests.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any

from kvist.events.session import SourceState
from kvist.indexer import SourceStatistics
from kvist.router.fleet.fleet import Fleet
from kvist.router.index import FleetIndex
from kvist.router.fleet.worker import Worker, WorkerState

MAX_TOLD = 20
"""Workers and streams that are named; the rest is counted."""


class Condition(StrEnum):
    """How well one stream tells what its worker holds; anything but LIVE has a reason."""

    LIVE = "live"
    PARTIAL = "partial"
    RESYNCING = "resyncing"
    UNHEARD = "unheard"
    GONE = "gone"
    FAILED = "failed"


_REASONS = {
    Condition.PARTIAL: "events were lost: blocks may be missing until they are reported again",
    Condition.RESYNCING: "not known just now: asking, or waiting to hear that it goes on",
    Condition.UNHEARD: "nothing was received yet",
    Condition.GONE: "the publisher ended or died",
}


def condition_of(source: SourceStatistics) -> tuple[Condition, str | None]:
    """Return how a stream is, and why it is not live."""
    states = set(source.states.values())
    if source.failure is not None:
        return Condition.FAILED, source.failure
    if source.is_peer_gone:
        condition = Condition.GONE
    elif not states:
        condition = Condition.UNHEARD
    elif SourceState.RESYNCING in states:
        condition = Condition.RESYNCING
    else:
        condition = Condition.PARTIAL if SourceState.PARTIAL in states else Condition.LIVE
    return condition, _REASONS.get(condition)


def explain_readiness(fleet: Fleet, index: FleetIndex | None) -> dict[str, Any]:
    """Return the page; `ready` decides about its status."""
    workers = fleet.workers
    states = [worker.state for worker in workers]
    is_ready = WorkerState.HEALTHY in states
    page: dict[str, Any] = {
        "ready": is_ready,
        "reason": None if is_ready else _why_not_ready(workers),
        "workers": {state.value: states.count(state) for state in WorkerState},
    }
    if index is not None:
        page["index"] = "joined" if index.has_joined else "compiling"
        page["event_sources"] = _explain_sources(workers, index)
        state = index.state_statistics()
        if state is not None:
            page["state"] = state.described()
    return page


def _why_not_ready(workers: list[Worker]) -> str:
    if not workers:
        return "there are no workers"
    told = [
        f"{worker.url} is {worker.state}: {worker.error or worker.last_failure or 'no verdict yet'}"
        for worker in workers[:MAX_TOLD]
    ]
    return "no worker is healthy; " + "; ".join(told)


def _explain_sources(workers: list[Worker], index: FleetIndex) -> dict[str, Any]:
    """Return how many streams are in each condition, and what is wrong with those that are not live."""
    counts: Counter[Condition] = Counter()
    problems: list[dict[str, Any]] = []
    for source in index.every_source():
        condition, reason = condition_of(source)
        counts[condition] += 1
        if condition is not Condition.LIVE:
            age_s = None if source.last_event_age_s is None else round(source.last_event_age_s, 3)
            problems.append(
                {
                    "worker": source.worker,
                    "url": source.url,
                    "condition": condition,
                    "reason": reason,
                    "last_event_age_s": age_s,
                }
            )
    unfollowed = [{"worker": worker.url, "reason": worker.event_error} for worker in workers if worker.event_error]
    return {
        **{condition.value: counts[condition] for condition in Condition},
        "problems": problems[:MAX_TOLD],
        "unfollowed_workers": unfollowed[:MAX_TOLD],
    }

"""Explains decisions, workers, loads and readiness to operators, as plain values for JSON."""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest
from typing import Any

import msgspec

from kvist.events import Tier, WorkerRank
from kvist.indexer import SourceStatistics
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.rendering import RenderingState
from kvist.router.fleet.worker import Worker, WorkerState
from kvist.router.index import FleetIndex
from kvist.router.policy.decision import Candidate, Decision, Load
from kvist.router.prefill.handover import Plan
from kvist.router.prompts import ParsedRequest
from kvist.router.regret import Regret

MAX_NAMED = 20
"""How many workers or streams with a problem are named; the others are only counted."""
HITS_WINDOW_S = 120.0
"""A worker's hits are those of so many last seconds."""
_COUNTERS = ("batches", "gaps", "restarts", "refused_batches", "refused_ranks", "malformed")
_PROBLEM = ("url", "condition", "reason", "last_event_age_s")
_HITS = ("prompt_tokens", "routed_tokens", "prompt_tokens_with_report", "predicted_tokens", "reported_tokens")


CONDITIONS = {
    "live": None,
    "no_events": "nothing received yet",
    "partial": "part of the cache is unknown: events were lost, or cannot be followed (docs/engines.md)",
    "resyncing": "asking for what is missing; until then its ranks count as holding nothing",
    "gone": "the publisher has closed the stream or died",
    "failed": None,
}
"""How completely a stream tells what its ranks hold, the worst last, and why where that is always the same."""
_UPPER_BOUNDS = "overlaps are upper bounds: hits also need other layer groups; publish them with --groups all"
_UNTOLD = "overlaps are upper bounds: hits also need windows or states, of which SGLang's events do not tell"


def condition_of(source: SourceStatistics) -> tuple[str, str | None]:
    """Return a stream's condition, and why it is not live or, if it is, that its overlaps are upper bounds."""
    states = set(source.states.values())
    if source.failure is not None:
        return "failed", source.failure
    if source.is_peer_gone:
        condition = "gone"
    elif not states:
        condition = "no_events"
    else:
        condition = max((state.value for state in states), key=[*CONDITIONS].index)
    is_estimate = condition == "live" and source.has_upper_bounds
    return condition, _UPPER_BOUNDS if is_estimate else CONDITIONS[condition]


def explain_plan(plan: Plan, parsed: ParsedRequest, load: LoadTracker) -> dict[str, Any]:
    """Explain which worker answers the request, and which one computes its prompt or gives a prefix of it."""
    page = explain_decision(plan.answer, parsed, load)
    if plan.pulled_tokens:
        page["pull"] = explain_pull(plan)
    elif plan.prefill is not None:
        page["prefill"] = explain_decision(plan.prefill, parsed, load)
    elif plan.local_reason is not None:
        page["local_prefill_reason"] = plan.local_reason.value
    return page


def explain_pull(plan: Plan) -> dict[str, Any]:
    """Explain from which worker a prefix is fetched, and how many tokens of it."""
    assert plan.prefill is not None
    return {"worker": plan.prefill.chosen.target.worker, "tokens": plan.pulled_tokens}


def explain_decision(decision: Decision, parsed: ParsedRequest, load: LoadTracker) -> dict[str, Any]:
    """Explain which worker was chosen, by which rule, and the cost and load of every candidate."""
    page = explain_choice(decision, parsed)
    for candidate, explained in zip(decision.candidates, page["candidates"], strict=True):
        explained |= explain_load(candidate.target, load.load(candidate.target))
    return page


def explain_choice(decision: Decision, parsed: ParsedRequest, most: int | None = None) -> dict[str, Any]:
    """Explain a decision without loads, with the `most` best candidates, among them the chosen one."""
    candidates, weighing = decision.weighed()
    page: dict[str, Any] = {
        "worker": decision.chosen.target.worker,
        "rank": decision.chosen.target.rank,
        "policy": decision.policy,
        "rule": weighing.rule,
        "overlap_tokens": decision.overlap_tokens,
        "prompt_tokens": decision.prompt.num_tokens,
        "block_size": decision.prompt.block_size,
        "untokenized_reason": parsed.untokenized_reason,
        "num_candidates": len(candidates),
    }
    prices, probabilities = decision.prices, weighing.probabilities
    shown = list(range(len(candidates)))
    if most is not None and len(shown) > most:
        costs = [-each for each in probabilities] if prices is None else prices.cost_s.tolist()
        shown = sorted({decision.chosen_idx, *nsmallest(most - 1, shown, key=costs.__getitem__)})
    page["candidates"] = [_explain_candidate(candidates[idx], probabilities[idx]) for idx in shown]
    if prices is not None:
        page |= {"utilisation": prices.load.utilisation, "price_of_computing": prices.price}
        terms = prices.terms_s()
        for idx, candidate in zip(shown, page["candidates"], strict=True):
            candidate["tokens_cached_or_in_flight"] = int(prices.cached_tokens[idx])
            candidate["tokens_to_fetch"] = int(prices.fetched_tokens[idx])
            candidate["seconds"] = {term: seconds[idx] for term, seconds in terms.items()}
    return page


def _explain_candidate(candidate: Candidate, probability: float) -> dict[str, Any]:
    depths = candidate.overlap_blocks or (0,) * len(Tier)
    return {
        "worker": candidate.target.worker,
        "rank": candidate.target.rank,
        "overlap_blocks": {tier.name.lower(): blocks for tier, blocks in zip(Tier, depths, strict=False)},
        "total_cached_blocks": candidate.num_cached_blocks,
        "approximate": candidate.is_approximate,
        "probability": probability,
    }


def explain_load(target: WorkerRank, load: Load) -> dict[str, Any]:
    return target._asdict() | msgspec.structs.asdict(load)


def explain_workers(
    fleet: Fleet, load: LoadTracker, index: FleetIndex | None, regret: Regret, now_s: float
) -> list[dict[str, Any]]:
    sources: dict[str, list[dict[str, Any]]] = {}
    for source in index.source_statistics() if index is not None else ():
        sources.setdefault(source.worker, []).append(_explain_source(source, fleet))
    speeds, hits = load.prompt_speeds(), regret.by_worker(now_s, HITS_WINDOW_S, _HITS)
    return [
        _explain_worker(worker, fleet, load, index, now_s)
        | {
            "prompt_tokens_per_s": speeds.get(worker.url),
            "hits": hits.get(worker.url),
            "kv_events": {
                "error": worker.event_error,
                "sources": sources.get(worker.url, []),
                "ranks": [
                    {"rank": status.target.rank, "state": status.display_state, "blocks": status.num_blocks}
                    for status in (index.ranks(worker.url) if index is not None else ())
                ],
            },
        }
        for worker in fleet.workers
    ]


def _explain_worker(
    worker: Worker, fleet: Fleet, load: LoadTracker, index: FleetIndex | None, now_s: float
) -> dict[str, Any]:
    identity = worker.identity
    return {
        "url": worker.url,
        "state": worker.state.value,
        "registered_by": list(worker.registered_by),
        "unavailable_reason": _unavailable_reason(worker, fleet, now_s),
        "role": worker.role.value,
        "circuit": worker.breaker.state.value,
        "running_requests": load.running_requests(worker.url),
        "ended_requests": sum(load.ended_requests(worker.url)),
        "prefill_tokens": load.prefill_tokens(worker.url),
        "max_requests": worker.capacity.bound(load.num_steps(worker.url)),
        "max_prefill_work": worker.capacity.max_prefill_work,
        "warming": worker.capacity.warms_from is not None,
        "last_failure": worker.last_failure,
        "engine": identity.engine,
        "version": identity.version,
        "block_size": (index.block_sizes.get(worker.url) if index else None) or identity.cache_block[0],
        "cache_size_tokens": identity.cache_size_tokens,
        "kv_transfer_endpoints": list(identity.transfer_endpoints),
        "models": [model.id for model in identity.models] if identity.models is not None else None,
        "rendering": msgspec.to_builtins(worker.rendering),
    }


def _unavailable_reason(worker: Worker, fleet: Fleet, now_s: float) -> str | None:
    """Return why the worker gets no requests now, None if it may get some."""
    if worker.state is not WorkerState.HEALTHY:
        return f"{worker.state}: {worker.last_failure or 'no health check has ended yet'}"
    if not worker.breaker.allows(now_s):
        return f"circuit open: {worker.breaker.failures_in_a_row} requests failed in a row"
    if worker.capacity.paused_until_s > now_s:
        return f"overloaded, as it answered: paused for {worker.capacity.paused_until_s - now_s:.1f} s more"
    if fleet.engines is not None and worker.engine not in fleet.engines:
        return f"engine {worker.engine or 'unknown'}, expected one that isolates tenants' caches by salt"
    return "it serves no model" if worker.model_ids == frozenset() else None


def _explain_source(source: SourceStatistics, fleet: Fleet) -> dict[str, Any]:
    condition, reason = condition_of(source)
    worker = fleet.get(source.worker)
    is_hybrid = worker is not None and worker.identity.has_upper_bounds
    if is_hybrid and condition == "live":
        reason = _UNTOLD
    age_s = source.last_event_age_s
    return {
        "url": source.url,
        "condition": condition,
        "reason": reason,
        "failure": source.failure,
        "overlap_is_upper_bound": source.has_upper_bounds or is_hybrid,
        "last_event_age_s": None if age_s is None else round(age_s, 3),
        "lag_s": source.lag_s,
        **{name: getattr(source, f"num_{name}") for name in _COUNTERS},
    }


def explain_readiness(fleet: Fleet, models: Models, index: FleetIndex | None, *, is_draining: bool) -> dict[str, Any]:
    """Explain whether the router can serve requests, why not, and which event streams have problems.

    `ready` means that some worker is healthy and the router does not drain. Streams do not matter, nor does an index
    that is being compiled: workers whose caches are not known get requests by load, so that a broker or a stream that
    is away costs overlap, not requests.
    """
    workers = fleet.workers
    states = [worker.state for worker in workers]
    is_ready = WorkerState.HEALTHY in states and not is_draining
    page: dict[str, Any] = {
        "ready": is_ready,
        "reason": "draining" if is_draining else None if is_ready else _why_not_ready(workers),
        "workers": {state.value: states.count(state) for state in WorkerState},
        "models": models.explain(),
    }
    renderings = [(worker.url, worker.rendering) for worker in workers if worker.rendering is not None]
    if renderings:
        counts = Counter(rendering.state for _, rendering in renderings)
        page["rendering"] = {state.value: counts[state] for state in RenderingState} | {
            "problems": [
                {"worker": url, "state": rendering.state.value, "reason": rendering.reason}
                for url, rendering in renderings
                if rendering.reason is not None
            ][:MAX_NAMED]
        }
    if index is not None:
        page["index"] = "ready" if index.has_joined else "compiling"
        page["event_sources"] = _explain_sources(fleet, index)
    return page


def _why_not_ready(workers: list[Worker]) -> str:
    if not workers:
        return "there are no workers"
    reasons = [
        f"{worker.url} is {worker.state}: {worker.last_failure or 'no health check has ended yet'}"
        for worker in workers[:MAX_NAMED]
    ]
    return "no worker is healthy; " + "; ".join(reasons)


def _explain_sources(fleet: Fleet, index: FleetIndex) -> dict[str, Any]:
    """Explain how many streams are in each condition, and the problems of those that are not live."""
    counts = Counter[str]()
    num_upper_bounds = 0
    problems: list[dict[str, Any]] = []
    for source in index.source_statistics():
        page = _explain_source(source, fleet)
        counts[page["condition"]] += 1
        num_upper_bounds += page["overlap_is_upper_bound"]
        if page["condition"] != "live":
            problems.append({"worker": source.worker, **{name: page[name] for name in _PROBLEM}})
    without_events = [
        {"worker": worker.url, "reason": worker.event_error, "approximate": index.is_expecting(worker.url)}
        for worker in fleet.workers
        if worker.event_error
    ]
    return {
        **{condition: counts[condition] for condition in CONDITIONS},
        "overlap_is_upper_bound": num_upper_bounds,
        "problems": problems[:MAX_NAMED],
        "workers_without_events": without_events[:MAX_NAMED],
    }

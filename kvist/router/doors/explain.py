"""Decisions, workers and loads as an operator reads them: plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvist.events import Tier, WorkerRank
from kvist.indexer import SourceStatistics
from kvist.router.prefill.handover import Plan
from kvist.router.index import FleetIndex
from kvist.router.fleet.load import LoadTracker
from kvist.router.policy import Candidate, Decision, Load
from kvist.router.prompts import Ask
from kvist.router.doors.readiness import condition_of
from kvist.router.fleet.worker import Worker


def explain_plan(plan: Plan, ask: Ask) -> dict[str, Any]:
    """Return who answers the request and, in a fleet that has prefill workers, who computes its prompt."""
    page = explain_decision(plan.answer, ask)
    if plan.prefill is not None:
        page["prefill"] = explain_decision(plan.prefill, ask)
    elif plan.local is not None:
        page["local"] = plan.local.value
    return page


def explain_decision(decision: Decision, ask: Ask) -> dict[str, Any]:
    """Return who takes the request, by which rule, and what every candidate would have cost."""
    costs: Sequence[float | None] = decision.weighing.costs or [None] * len(decision.candidates)
    candidates = zip(decision.candidates, decision.weighing.probabilities, costs, strict=True)
    return {
        "worker": decision.chosen.target.worker,
        "rank": decision.chosen.target.rank,
        "policy": decision.policy,
        "rule": decision.weighing.rule,
        "overlap_tokens": decision.overlap_tokens,
        "prompt_tokens": decision.prompt.num_tokens,
        "block_size": decision.prompt.block_size,
        "untokenized_reason": ask.untokenized_reason,
        "candidates": [_explain_candidate(*candidate) for candidate in candidates],
    }


def _explain_candidate(candidate: Candidate, probability: float, cost: float | None) -> dict[str, Any]:
    depths = candidate.overlap_blocks or (0,) * len(Tier)
    return {
        **explain_load(candidate.target, candidate.load),
        "overlap_blocks": {tier.name.lower(): blocks for tier, blocks in zip(Tier, depths, strict=False)},
        "cached_blocks": candidate.num_cached_blocks,
        "cost": cost,
        "probability": probability,
    }


def explain_load(target: WorkerRank, load: Load) -> dict[str, Any]:
    """Return a rank's load under its name."""
    return {
        "worker": target.worker,
        "rank": target.rank,
        "running_requests": load.running_requests,
        "prefill_tokens": load.prefill_tokens,
        "decode_blocks": load.decode_blocks,
        "recent_prefill_tokens": round(load.recent_prefill_tokens, 1),
    }


def explain_worker(worker: Worker, load: LoadTracker, index: FleetIndex | None) -> dict[str, Any]:
    """Return a worker's state and what it follows from."""
    identity = worker.identity
    return {
        "url": worker.url,
        "state": worker.state.value,
        "role": worker.role.value,
        "circuit": worker.breaker.state.value,
        "running_requests": load.running_requests(worker.url),
        "error": worker.error,
        "last_failure": worker.last_failure,
        "engine": identity.engine,
        "version": identity.version,
        "block_size": identity.block_size,
        "kv_transfer_endpoints": list(identity.transfer_endpoints),
        "models": [model.id for model in identity.models] if identity.models is not None else None,
        "kv_events": {
            "error": worker.event_error,
            "sources": [_explain_source(source) for source in index.sources(worker.url)] if index else [],
            "ranks": [
                {"rank": status.target.rank, "state": status.state, "blocks": status.num_blocks}
                for status in (index.ranks(worker.url) if index else ())
            ],
        },
    }


def _explain_source(source: SourceStatistics) -> dict[str, Any]:
    condition, reason = condition_of(source)
    return {
        "url": source.url,
        "condition": condition,
        "reason": reason,
        "failure": source.failure,
        "batches": source.num_batches,
        "last_event_age_s": source.last_event_age_s,
        "gaps": source.num_gaps,
        "restarts": source.num_restarts,
        "refused_batches": source.num_refused_batches,
        "refused_ranks": source.num_refused_ranks,
        "malformed": source.num_malformed,
    }

"""The attributes of a request's spans in the router, under OpenTelemetry's names where it has them.

POST /v1/completions        the request, until its last byte has gone out
├─ read                     reading its prompt's tokens
├─ match                    finding who holds how much of it
├─ choose                   choosing the worker that answers, and the one that computes the prompt, if another does
├─ prefill                  that worker's answer; its own spans are below
├─ choose                   choosing the worker that generates
├─ decode                   that worker's answer; generate, if one worker does all
├─ retry                    a worker failed, and why
└─ fallback                 a prefill or a transfer failed, and why
"""

from __future__ import annotations

from urllib.parse import urlsplit

from kvist.http import Request
from kvist.router.policy.decision import Decision
from kvist.router.prefill.handover import Plan
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, ParsedRequest
from kvist.router.usage import ReportedUsage
from kvist.tracing import Attributes

_OPERATIONS = {CHAT_PATH: "chat", COMPLETION_PATH: "text_completion"}


def name_of(request: Request) -> str:
    """Return the name of a request's span; only known paths are in it, so that clients cannot make up names."""
    return f"{request.method} {request.path}" if request.path in _OPERATIONS else request.method


def of_request(request: Request, request_id: bytes) -> Attributes:
    return {
        "http.request.method": request.method,
        "url.path": request.path,
        "gen_ai.operation.name": _OPERATIONS.get(request.path),
        "kvist.request_id": request_id.decode("latin-1"),
    }


def of_prompt(parsed: ParsedRequest) -> Attributes:
    return {
        "gen_ai.request.model": parsed.model,
        "kvist.prompt_tokens": parsed.num_tokens,
        "kvist.untokenized_reason": parsed.untokenized_reason,
    }


def of_plan(plan: Plan) -> Attributes:
    """Describe which worker was chosen for what, and why one does all where two could."""
    chosen = dict(of_decision(plan.answer))
    if plan.prefill is not None:
        chosen["kvist.prefill_worker"] = plan.prefill.chosen.target.worker
        chosen["kvist.prefill_overlap_tokens"] = plan.prefill.overlap_tokens
    if plan.local_reason is not None:
        chosen["kvist.local"] = plan.local_reason.value
    return chosen


def of_decision(decision: Decision | None) -> Attributes:
    if decision is None:
        return {"kvist.worker": "none"}
    return {
        "kvist.policy": decision.policy,
        "kvist.rule": decision.weighing.rule,
        "kvist.candidates": len(decision.candidates),
        "kvist.worker": decision.chosen.target.worker,
        "kvist.rank": decision.chosen.target.rank,
        "kvist.overlap_tokens": decision.overlap_tokens,
    }


def of_answer(status: int, first_byte_s: float | None = None) -> Attributes:
    return {"http.response.status_code": status, "gen_ai.response.time_to_first_chunk": first_byte_s}


def of_usage(usage: ReportedUsage) -> Attributes:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }


def of_call(decision: Decision) -> Attributes:
    target = decision.chosen.target
    place = urlsplit(target.worker)
    return {"server.address": place.hostname, "server.port": place.port, "kvist.rank": target.rank}

"""What is written down of a request that has ended: its tenant's usage, the access log, the recording of requests."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from kvist.router.access_log import MAX_CHARS
from kvist.router.attempts import CLIENT_LEFT_STATUS, OK, AnswerAttempt
from kvist.router.prefill.split import SplitAttempt
from kvist.router.recording import SESSION_HEADERS, Recorded
from kvist.router.usage import ReportedUsage

if TYPE_CHECKING:
    from kvist.router.forward import Forwarding
    from kvist.router.prompts import ParsedRequest


def charge(request: Forwarding) -> None:
    """Add the request to its tenant's usage, and correct what its limits were charged when it was sent."""
    usage = charged_usage(request)
    if usage is None:
        return
    account = request.router.accounts[request.tenant.name, request.router.fleet.label_of(request.parsed.model)]
    num_cached_tokens = usage.cached_tokens or 0
    account.requests += 1
    account.prompt_tokens += usage.prompt_tokens
    account.cached_tokens += num_cached_tokens
    account.output_tokens += usage.completion_tokens or 0
    if request.spending is not None:
        request.spending.charge(usage.prompt_tokens - num_cached_tokens)


def charged_usage(request: Forwarding) -> ReportedUsage | None:
    """Return what a tenant pays of an answer that has begun: as its worker reports or else as the router knows."""
    attempt, computed_by = request.attempt, request.computed_by
    if request.responder.status != OK:
        return None
    if isinstance(attempt, SplitAttempt):
        return attempt.usage
    if not isinstance(attempt, AnswerAttempt) or computed_by is None:
        return None
    usage = attempt.usage or ReportedUsage(request.parsed.num_tokens, None)
    reported = usage.cached_tokens if attempt.computes else None  # what was handed over was computed, too
    num_cached_tokens = min(usage.prompt_tokens, computed_by.overlap_tokens if reported is None else reported)
    return ReportedUsage(usage.prompt_tokens, num_cached_tokens, attempt.num_output_tokens)


def log(request: Forwarding, error: Exception | None) -> None:
    """Write the request to the access log and the recording, as far as there are any."""
    router, attempt = request.router, request.attempt
    if router.access_log is None and router.recorder is None:
        return
    ended_s, status = router.now_s(), request.responder.status or CLIENT_LEFT_STATUS
    parsed: ParsedRequest | None = getattr(request, "parsed", None)  # None if the prompt could not be read
    num_tokens = None if parsed is None or parsed.token_ids is None else parsed.num_tokens
    decision, usage = (None, None) if attempt is None else (attempt.decision, attempt.usage)
    fields: dict[str, object] = {
        "tenant": request.tenant.name,
        "worker": None if decision is None else decision.chosen.target.worker,
        "num_attempts": len(request.tried),
        "queue_s": 0.0 if request.place is None else round(request.place.waited_s, 6),
        "first_byte_s": None if attempt is None else attempt.first_byte_s,
        "total_s": round(ended_s - request.started_s, 6),
        "predicted_cached_tokens": None if decision is None or num_tokens is None else decision.overlap_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
    }
    if router.access_log is not None:
        cause = "answered by the worker" if status >= HTTPStatus.BAD_REQUEST else None
        router.access_log.write(
            request.request,
            request.request_id,
            status,
            cause if error is None else str(error),
            model=None if parsed is None or parsed.model is None else parsed.model[:MAX_CHARS],
            input_tokens=num_tokens if usage is None else usage.prompt_tokens,
            output_tokens=None if usage is None else usage.completion_tokens,
            **fields,
        )
    if router.recorder is not None and (parsed is None or parsed.num_tokens):  # some requests are about earlier answers
        hashes, num_blocks, fields["block_size"] = router.routing.recorded_blocks(parsed, request.prefix)
        fields["status"], fields["streamed"] = status, attempt is not None and attempt.is_event_stream
        if fields["predicted_cached_tokens"] is not None and decision is not None:
            fields["held_tokens"] = request.prefix.held_tokens(decision.prompt)
        if (routed := request.routed) is not None:
            fields["in_flight_tokens"] = routed.in_flight_tokens
            fields["held_or_in_flight_tokens"] = routed.held_or_in_flight_tokens
            fields["exact_cache"] = routed.is_exact
            fields["identically_rendered_tokens"] = routed.identically_rendered_tokens
        fields["model"] = None if parsed is None else router.fleet.label_of(parsed.model)
        fields["input_length"] = (usage and usage.prompt_tokens) or (parsed and parsed.num_tokens)
        fields["output_length"] = 0 if attempt is None else attempt.num_output_tokens
        session = next(filter(None, map(request.request.header, SESSION_HEADERS)), None)
        router.recorder.write(Recorded(request.started_s, ended_s, session, hashes, fields), num_blocks)

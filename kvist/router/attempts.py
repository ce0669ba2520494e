"""One exchange with one worker on behalf of a request, which is accounted for however it ends.

    _Attempt        what both have in common: load, circuit, metrics and span
    PrefillAttempt  has a worker compute a prompt for another; its answer names the blocks it holds, unless both are
                    asked at once: then it may outlast the beginning of the other's answer
    AnswerAttempt   has a worker answer the client: its bytes are relayed as they come, from the first of the body on

An attempt reports to its owner, the `Forwarding` (`kvist.router.forward`), which decides what happens next.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from kvist.http import Deadline, Headers, Request, ResponseReceiver, UpstreamError, UpstreamTimeoutError
from kvist.openai.chats import MESSAGES_PATH, RESPONSES_PATH
from kvist.openai.errors import RequestError, error_event
from kvist.openai.requests import with_fields
from kvist.router import spans
from kvist.router.admission import with_priority
from kvist.router.config import RouterConfig
from kvist.router.policy.decision import Decision
from kvist.router.prefill.dialect import MAX_KEPT_BYTES, LocalReason
from kvist.router.prefill.handover import Plan, begins_with_failure
from kvist.router.prefill.sglang import with_input_logprobs
from kvist.router.prompts import GENERATE_PATH
from kvist.router.usage import ReportedUsage, UsageReader

if TYPE_CHECKING:
    from kvist.router.forward import Forwarding

logger = logging.getLogger(__name__)

# With these a worker says that it cannot take the request now; any other answer is relayed to the client.
RETRIED_STATUSES = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE})
_BUSY_STATUSES = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""After these the worker gets no requests for a while."""

OK, _NOT_FOUND, _SERVER_ERROR = 200, 404, 500  # in Python 3.11 each look-up in HTTPStatus is a call

# What metrics show where a worker has sent no status.
WORKER_FAILED_STATUS = 0
CLIENT_LEFT_STATUS = 499  # nginx's number; also for a worker that was stopped as the other of its pair had failed

_NO_ENDPOINT = re.compile(rb'"(?:detail|message)" ?: ?"Not Found"')
"""In the 404 of engines for a path that they do not have; for a model or a response they say more."""
_NO_MODEL = re.compile(rb'"message" ?: ?"The model `')
"""In vLLM's 404 for an adapter that was unloaded since it was last asked for its models."""

_ROUTER_HEADERS = (b"x-request-id", b"x-kvist-", b"access-control-")
"""Prefixes of headers that clients get from the router alone."""

PULL_TIMEOUT_S = 1.0
"""How long a worker that holds a prefix may take to say how it is fetched: a step of its batch."""


class _Attempt(ResponseReceiver):
    """However it ends, its load is given back, the worker's circuit updated, and the request counted."""

    first_byte_s: float | None = None
    usage: ReportedUsage | None = None
    is_event_stream = False
    computes = True
    """Whether this worker computes the prompt, or what is left of it behind a prefix that it fetches."""

    def __init__(self, owner: Forwarding, decision: Decision, step: str, body: bytes, *, is_streamed: bool) -> None:
        router, request, target = owner.router, owner.request, decision.chosen.target
        worker = router.fleet.get(target.worker)
        assert worker is not None
        self.owner = owner
        self.decision = decision
        self._worker = worker
        self._model = router.fleet.label_of(owner.parsed.model)
        self._is_trial = worker.breaker.begin()
        self.sent_s = router.now_s()
        self._load = owner.reserved or router.routing.begin(
            self.sent_s, decision, is_streamed=is_streamed, computes=self.computes
        )
        owner.reserved = None
        worker.on_silence.add(self.on_silence)
        self._call = owner.trace.call(step)
        self._call.set(spans.of_call, decision)
        forwarded = forwarded_headers(request, router.config, target.worker, owner.request_id)
        by_default = router.config.workers_use_priority
        body = with_priority(body, owner.parsed, owner.priority, worker, by_default=by_default)
        headers = self._call.headers(forwarded) + router.routing.rank_headers(target)
        client = request.client[0] if request.client else None
        self.exchange = router.pool.send(
            self, target.worker, request.method, request.target, headers, body, forwarded_for=client
        )

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens the answer has: as the worker says or, of a stream where it does not, its events."""
        num_tokens = None if self.usage is None else self.usage.completion_tokens
        return self._load.num_tokens if num_tokens is None else num_tokens

    def on_head(self, status: int, headers: Headers) -> None:
        self._call.set(spans.of_answer, status)
        if status >= _SERVER_ERROR:
            self._call.fail(f"answered {status}")
        self.status, self.headers = status, headers

    def on_failure(self, error: UpstreamError) -> None:
        """Count the failure against the worker, unless the router caused it."""
        if not error.is_ours:
            self._worker.breaker.fail(self.owner.router.now_s())
            self._is_trial = False
        self._end(WORKER_FAILED_STATUS, error)

    def on_silence(self, silent_s: float) -> None:
        """Move the request to another worker, if there is one, as this one has gone silent.

        It is moved only once, as the request itself may be what stops workers.
        """
        if not self.owner.was_moved and self.owner.has_alternative():
            self.owner.was_moved = True
            self.exchange.close()
            worker = self.decision.chosen.target.worker
            self.on_failure(UpstreamError(worker, f"sent no byte for {silent_s:g} s"))

    def stop(self, status: int, error: Exception | None = None) -> None:
        """Close the exchange, as nobody waits for the rest of the answer any more."""
        self.exchange.close()
        self._end(status, error)

    def _limit_length(self, num_bytes: int) -> None:
        """End the exchange if the worker sends more than is kept of its answer."""
        if num_bytes > MAX_KEPT_BYTES:
            self.exchange.close()
            self.on_failure(UpstreamError(self._worker.url, f"answered more than {MAX_KEPT_BYTES} bytes"))

    def _count_tokens(self) -> None:
        counts, labels = self.owner.router.metrics.counts, (self._worker.url, self._model)
        counts["prompt_tokens", *labels] += self.decision.prompt.num_tokens
        counts["overlap_tokens", *labels] += self.decision.overlap_tokens

    def _judge_worker(self) -> None:
        """Update the worker's circuit by its status, and pause it if it says that it is busy."""
        router = self.owner.router
        if self.status in _BUSY_STATUSES:
            retry_after = next((value for name, value in self.headers if name == b"retry-after"), None)
            router.admission.pause(self._worker, retry_after)
        if self.status >= _SERVER_ERROR:
            self._worker.breaker.fail(router.now_s())
        else:
            self._worker.breaker.succeed(is_trial=self._is_trial)
        self._is_trial = False

    def _end(self, status: int, error: Exception | None = None) -> None:
        has_usage = status == OK and self.usage is not None
        self._load.finish(self.owner.router.now_s(), self.num_output_tokens if has_usage else None)
        self._worker.on_silence.discard(self.on_silence)
        if self._is_trial:
            self._worker.breaker.abandon()
        self._call.end(error)
        self.owner.router.metrics.counts["requests", self._worker.url, str(status), self.decision.policy] += 1


class PrefillAttempt(_Attempt):
    """Reports to its owner by `on_prefilled` or `on_prefill_failed`; by the former again once all is computed."""

    def __init__(self, owner: Forwarding, decision: Decision, plan: Plan) -> None:
        self.answer = bytearray()
        self.is_done = False
        self.is_pair = plan.handoff is not None
        """Whether the answering worker is asked at the same time."""
        self._dialect = plan.dialect
        self._deadline = Deadline(owner.router.pool.clock, self._on_pull_timeout)
        super().__init__(owner, decision, "prefill", with_fields(owner.body, plan.fields), is_streamed=True)
        if owner.pull is None:
            self._count_tokens()
        else:
            self._deadline.set("pull", PULL_TIMEOUT_S)

    def on_data(self, piece: bytes) -> None:
        """Keep the answer, and hand over early if its beginning already names the blocks."""
        self.answer += piece
        self._limit_length(len(self.answer))
        if self._dialect.hands_over_early and self.owner.handover is None and self.status == OK:
            handoff = self._dialect.read_handoff(self.owner.parsed, bytes(self.answer))
            if handoff is not None:
                self.owner.on_prefilled(self, handoff)

    def on_end(self) -> None:
        """Report what was computed, or why nothing was."""
        if not self.is_pair or self.status != _SERVER_ERROR:
            self._judge_worker()  # else the other of the pair may be at fault
        if self.status == OK:
            self._load.on_first_token(self.owner.router.now_s())
        self._end(self.status)
        is_ok = self.status == OK
        if self.status >= _SERVER_ERROR or (self.is_pair and self.status in RETRIED_STATUSES):
            self.owner.on_prefill_failed(self, f"answered {self.status}")
            return
        handoff = self._dialect.read_handoff(self.owner.parsed, bytes(self.answer)) if is_ok else None
        if self.owner.pull is None and (handoff is not None or (self.is_pair and is_ok)):
            self.owner.router.routing.record_computed(self.owner.parsed, self.decision)
            self.owner.router.routing.record_unreported(self.owner.parsed, self.decision)
        self.owner.on_prefilled(self, handoff)

    def on_failure(self, error: UpstreamError) -> None:
        super().on_failure(error)
        self.owner.on_prefill_failed(self, error.reason)

    def _on_pull_timeout(self, _: str) -> None:
        """Stop waiting for a busy worker that holds a prefix: computing it may be faster."""
        error = UpstreamError(self._worker.url, f"handed nothing over within {PULL_TIMEOUT_S:g} s")
        self.stop(CLIENT_LEFT_STATUS, error)
        self.owner.on_prefill_failed(self, error.reason)

    def _end(self, status: int, error: Exception | None = None) -> None:
        self._deadline.close()
        self.is_done = True
        super()._end(status, error)


class AnswerAttempt(_Attempt):
    """Sends the client the worker's answer, or reports to its owner that there is none.

    Nothing is sent before the first byte of the body, so until then another worker may be tried.
    """

    def __init__(self, owner: Forwarding, decision: Decision) -> None:
        router, handover = owner.router, owner.handover
        router.load.count_dispatch()
        self.has_begun = False
        self._buffer = bytearray() if handover is not None and handover.handoff.is_merged else None
        """Keeps an answer that part of the prefill worker's is to be merged into, until both have ended."""
        self._is_buffer_complete = False
        self._first_events = b""
        """Kept until they show whether the prompt was fetched."""
        self.computes = handover is None or owner.pull is not None
        body, chosen = owner.body, decision.chosen
        if handover is not None:
            handover.sent_s = router.now_s()
            body = with_fields(owner.body, handover.handoff.fields)
        elif not chosen.is_exact:
            body = router.healer.body_for(chosen.target, owner.parsed, body)
        step, is_streamed = "generate" if self.computes else "decode", self.computes and owner.is_streamed
        super().__init__(owner, decision, step, body, is_streamed=is_streamed)
        if self.computes:
            self._count_tokens()

    def on_head(self, status: int, headers: Headers) -> None:
        """Accept the answer, unless its status is one after which another worker may be tried."""
        super().on_head(status, headers)
        owner = self.owner
        if owner.handover is not None and status == _SERVER_ERROR:
            self._report_failed_transfer()
            return
        self._judge_worker()
        if status in RETRIED_STATUSES and owner.may_retry():
            self.stop(status)
            owner.on_answer_failed(self.decision, f"answered {status}")

    def on_data(self, piece: bytes) -> None:
        if not self.has_begun:
            if self.status == _NOT_FOUND and _NO_ENDPOINT.search(piece, 0, 512):
                self.stop(self.status)
                self.owner.on_no_endpoint(self.decision)
                return
            if self.status == _NOT_FOUND and _NO_MODEL.search(piece, 0, 512) and self.owner.may_retry():
                self.stop(self.status)
                self.owner.on_answer_failed(self.decision, "has no such model")
                return
            if self._buffer is not None and self.status == OK:
                self._buffer += piece
                self._limit_length(len(self._buffer))
                return
            if self.owner.handover is not None and self.status == OK:
                piece = self._first_events = self._first_events + piece
                has_failed = begins_with_failure(piece)
                if has_failed is None or (has_failed and self._report_failed_transfer()):
                    return
            self._begin(is_empty=False)
        self._load.add_tokens(self._usage.feed(piece))
        self.owner.responder.send(piece)

    def on_end(self) -> None:
        """End the client's answer, and learn from the usage that it reported."""
        if self._buffer and not self._is_buffer_complete:
            self._is_buffer_complete = True
            if self.owner.prefill is not None and self.owner.prefill.is_done:
                self.on_peer_prefilled(self.owner.prefill)
            return
        if not self.has_begun:
            self._begin(is_empty=not self._first_events)
            if self._first_events:
                self.owner.responder.send(self._first_events)
        owner, router, decision = self.owner, self.owner.router, self.decision
        if self._is_stored and self.status == OK:
            worker, is_event = decision.chosen.target.worker, self.is_event_stream
            router.reader.conversations.record(worker, owner.parsed.chat, self._usage.answer(), is_event=is_event)
        usage = self.usage = self._usage.usage()
        self._end(self.status)
        if usage is not None:
            owner.trace.set(spans.of_usage, usage)
        handover = owner.handover
        if handover is None and usage is not None:
            router.metrics.reported(decision, usage)
        if handover is None and not decision.chosen.is_exact:
            block_hashes = partial(router.routing.block_hashes, owner.parsed, decision.chosen.target.worker)
            router.healer.on_answer(decision, usage, block_hashes)
        if self.status == OK:
            self._count_output()
            router.routing.record_unreported(owner.parsed, decision)
            if handover is not None and owner.pull is not None:
                self._count_pulled(handover.handoff.num_tokens)
            known = usage if self.computes else None  # else vLLM's reports what the prefill worker found
            owner.routed = router.routing.outcome(owner.tenant.name, owner.parsed, owner.prefix, decision, known)
            if owner.routed is not None:
                router.on_routed(owner.routed)
        owner.responder.end()
        owner.end()

    def _report_failed_transfer(self) -> bool:
        """Have the owner ask another worker, and return whether it may."""
        owner = self.owner
        may_ask = not owner.is_pair or owner.may_retry()
        if may_ask:
            self.stop(_SERVER_ERROR)
            owner.on_transfer_failed(self.decision)
        return may_ask

    def _count_output(self) -> None:
        """Count the answer's tokens, and the time that it took."""
        metrics, num_tokens = self.owner.router.metrics, self.num_output_tokens
        total_s = self.owner.router.now_s() - self.owner.started_s
        metrics.observe(total_s, "request_seconds", self._model)
        metrics.counts["output_tokens", self._worker.url, self._model] += num_tokens
        if self.is_event_stream and num_tokens > 1:  # those after the first came evenly, as far as is known
            each_s = (total_s - (self.first_byte_s or 0.0)) / (num_tokens - 1)
            metrics.observe(each_s, "inter_token_seconds", self._model)

    def _count_pulled(self, num_tokens: int) -> None:
        """Count the tokens that were fetched: a worker that reports fewer cached ones had to compute the rest."""
        counts, usage = self.owner.router.metrics.counts, self.usage
        if usage is not None and usage.cached_tokens is not None:
            num_tokens = min(num_tokens, usage.cached_tokens)
        num_fetched = max(0, num_tokens - self.decision.overlap_tokens)
        counts["pulls", "pulled" if num_fetched else LocalReason.TRANSFER_FAILED] += 1
        counts["pulled_tokens",] += num_fetched

    def on_peer_prefilled(self, prefill: PrefillAttempt) -> None:
        """Send the client the prefill worker's error, or merge its answer into the one that is kept here."""
        answer = bytes(prefill.answer)
        if prefill.status != OK:
            self.exchange.close()
            self.on_head(prefill.status, prefill.headers)
        elif self._is_buffer_complete:
            answer, self._buffer = with_input_logprobs(bytes(self._buffer or b""), answer), None
            self.headers = [field for field in self.headers if field[0] != b"content-length"]
        else:
            return
        self.on_data(answer)
        if self.has_begun:  # else another worker is asked, as this one has no such endpoint
            self.on_end()

    def on_failure(self, error: UpstreamError) -> None:
        """End an answer that has begun; else another worker may be tried."""
        super().on_failure(error)
        owner, request_id = self.owner, self.owner.request_id.decode("latin-1")
        logger.warning("worker failed worker=%s reason=%s request_id=%s", error.worker, error.reason, request_id)
        if self.abort(worker_failure(error)):
            owner.end(error)
        else:
            owner.on_no_answer(self.decision, error)

    def abort(self, error: RequestError) -> bool:
        """End an answer that has begun, and return whether it had.

        Between two events of a stream the client is sent one that says why. Then, as after anything else, the answer is
        cut: many clients take a stream that ends as it should for a whole one, whatever its events say.
        """
        if not self.has_begun:
            return False
        if self._usage.is_between_events:
            is_named = self.owner.parsed.path in (MESSAGES_PATH, RESPONSES_PATH)
            self.owner.responder.send(error_event(error, is_named=is_named))
            self.owner.responder.break_off()
        else:
            self.owner.responder.cut()
        return True

    def pause(self) -> None:
        if self.has_begun:
            self.exchange.pause()

    def resume(self) -> None:
        if self.exchange.is_paused:
            self.exchange.resume()

    def _begin(self, *, is_empty: bool) -> None:
        """Begin the client's answer, at the first byte of the worker's."""
        self.has_begun = True
        owner, router, decision = self.owner, self.owner.router, self.decision
        content_types = [value for name, value in self.headers if name == b"content-type"]
        self.is_event_stream = any(value.startswith(b"text/event-stream") for value in content_types)
        self._is_stored = owner.parsed.path == RESPONSES_PATH and owner.parsed.fields.get("store") is not False
        is_cumulative = self._is_stored or owner.parsed.path == GENERATE_PATH
        self._usage = UsageReader(is_event_stream=self.is_event_stream, is_last_event_long=is_cumulative)
        self._load.end_prefill()
        self._worker.on_silence.discard(self.on_silence)
        now_s = router.now_s()
        first_byte_s = round(now_s - owner.started_s, 6)
        self.first_byte_s = first_byte_s
        router.metrics.observe(first_byte_s, "time_to_first_byte_seconds", self._worker.url, self._model)
        if not is_empty and self.status == OK:
            self._load.on_first_token(now_s)
            router.routing.record_computed(owner.parsed, decision)
        owner.trace.set(spans.of_answer, self.status, first_byte_s)
        if owner.handover is not None:
            owner.handover.transfer_s = now_s - owner.handover.sent_s
            if owner.pull is None:
                router.metrics.counts["disaggregated",] += 1
                router.metrics.observe(owner.handover.prefill_s, "prefill_seconds")
                router.metrics.observe(owner.handover.transfer_s, "transfer_seconds")
        headers = [field for field in self.headers if not field[0].startswith(_ROUTER_HEADERS)]
        owner.responder.start(self.status, headers + owner.client_headers(decision))
        owner.forget_body()
        if owner.is_client_slow:
            self.exchange.pause()


def worker_failure(error: UpstreamError) -> RequestError:
    """Return the error that a client gets when a worker failed before its answer began."""
    is_timeout = isinstance(error, UpstreamTimeoutError)
    status = HTTPStatus.GATEWAY_TIMEOUT if is_timeout else HTTPStatus.BAD_GATEWAY
    return RequestError(status, str(error), code="worker_failed")


def forwarded_headers(request: Request, config: RouterConfig, worker: str, request_id: bytes) -> Headers:
    """Return the request's headers as a worker gets them, under the request's id and with the worker's own key.

    The client's key is passed on only where the router asks for none and has no key for the worker.
    """
    authorization = config.authorization(worker)
    dropped = {b"x-request-id"}
    if authorization or config.asks_for_keys:
        dropped |= {b"authorization", b"x-api-key"}
    elif config.admin_key:
        given = {b"authorization": request.bearer_token, b"x-api-key": request.header(b"x-api-key")}
        dropped |= {name for name, key in given.items() if key == config.admin_key.encode()}
    headers = [field for field in request.headers if field[0] not in dropped]
    return [*headers, (b"x-request-id", request_id), *authorization]

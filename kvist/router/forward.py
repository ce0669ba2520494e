"""The life of one request, top to bottom: read, match, choose, send, relay, account.

    read    the prompt's tokens, as the worker will see them          prompts
    match   which ranks hold how many of its leading blocks           routing
    choose  a rank, by overlap and load                               policy
    prefill where that is worth it, by another worker first           prefill
    send    the same bytes; another worker if this one fails          here
            before the first byte of its answer. A vLLM worker
            that is known in part is asked to report all it finds     healing
    relay   the answer's bytes as they come, unchanged                here
    account for load, circuit, metrics and the cached tokens reported here

Whatever ends a request, its load is given back; when the client leaves, the worker's connection closes at once. Each
step can be told to a trace (`spans`); untold, it costs what telling nobody costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvist.http import (
    ClientDisconnectedError,
    Headers,
    Request,
    Responder,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
    UpstreamTimeoutError,
)
from kvist.openai.chats import RESPONSES_PATH
from kvist.openai.errors import RequestError, error_body
from kvist.router import spans
from kvist.router.config import RouterConfig
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import ActiveRequest, LoadTracker
from kvist.router.healing import Healer, without_report_mode
from kvist.router.index import Overlaps
from kvist.router.metrics import RouterMetrics
from kvist.router.policy.decision import Decision
from kvist.router.prefill.handover import (
    FALLBACKS,
    MAX_HANDOFF_BYTES,
    Handover,
    Local,
    Plan,
    decode_body,
    obstacle,
    prefill_body,
    read_handoff,
)
from kvist.router.prefill.releases import Releases
from kvist.router.prompts import Ask, PromptReader
from kvist.router.routing import Routing
from kvist.router.usage import UsageReader
from kvist.tracing import NO_SPAN, Span

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

logger = logging.getLogger(__name__)

# The worker says it cannot take the request now; any other answer is the request's own and is passed on.
RETRIED_STATUSES = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE})

# What metrics show instead of a worker's status, for want of one.
WORKER_FAILED_STATUS = 0
CLIENT_LEFT_STATUS = 499  # nginx's number for it

RANK_HEADER = b"x-data-parallel-rank"
"""By which vLLM's front end takes the data-parallel rank to use."""

_RELEASE_HEADERS = frozenset({b"authorization", b"traceparent", b"tracestate", b"x-request-id"})


@dataclass(frozen=True, slots=True)
class Forwarder:
    """Sends each request to the worker that its routing chooses, and relays the answer as it comes."""

    config: RouterConfig
    fleet: Fleet
    pool: UpstreamPool
    load: LoadTracker
    reader: PromptReader
    routing: Routing
    healer: Healer
    releases: Releases
    metrics: RouterMetrics
    now_s: Callable[[], float]
    tracing: Tracing | None = None

    async def forward(
        self, request: Request, responder: Responder, request_id: bytes, *, shows_worker: bool = False
    ) -> None:
        """Answer the request from a worker; raises RequestError when no answer has begun and none will come.

        `shows_worker`: the answer's headers say which worker that was, and how much of the prompt it held.
        """
        if self.tracing is None:
            await _Forwarding(self, request, responder, request_id, NO_SPAN, shows_worker, self.now_s()).run()
            return
        attributes = spans.of_request(request, request_id)
        with self.tracing.request(spans.name_of(request), request.headers, attributes) as trace:
            try:
                await _Forwarding(self, request, responder, request_id, trace, shows_worker, self.now_s()).run()
            except RequestError as error:
                trace.set(spans.of_answer, error.status)
                raise


@dataclass(slots=True, eq=False)
class _Forwarding:
    """One request, from its body to the last byte of its answer. Until that it is in one of two states:

        alone        `_plan` has one worker do all of it         `_answer`; if the worker fails: alone, by another
                     or one compute the prompt for another       `_prefill`: handed over; if it fails: alone
        handed over  `_choose_decode` says who goes on           `_answer`; if the worker fails: handed over, to another
                                                                 if the transfer fails, or nobody is left: alone

    `handover` is the prompt that was computed, `local` why none will be, `tried` whom not to ask again.
    """

    router: Forwarder
    request: Request
    responder: Responder
    request_id: bytes
    trace: Span
    shows_worker: bool
    started_s: float
    ask: Ask = field(init=False)
    body: bytes = field(init=False)
    overlaps: Overlaps = field(init=False)
    is_healing: bool = False
    handover: Handover | None = None
    local: Local | None = None
    tried: set[str] = field(default_factory=set)

    async def run(self) -> None:
        router, path = self.router, self.request.path
        with self.trace.step("read"):
            self.ask = await router.reader.read(path, self.request.body)
            self.body = without_report_mode(self.request.body, self.ask.fields)
        router.metrics.read(path, self.ask)
        self.trace.set(spans.of_ask, self.ask)
        with self.trace.step("match"):
            self.overlaps = router.routing.overlaps(self.ask)
        if router.fleet.has_prefill_workers:
            self.local = obstacle(path, self.ask)
        is_answered = False
        try:
            while not is_answered:
                if self.handover is None:
                    plan = self._plan()
                    if plan.prefill is None:
                        is_answered = await self._answer(plan.answer)
                    else:
                        await self._prefill(plan.prefill)
                elif (decode := self._choose_decode()) is not None:
                    is_answered = await self._answer(decode)
                else:
                    self._fall_back(Local.DECODE_FAILED)
        finally:
            self._release()

    def _plan(self) -> Plan:
        """Return who answers and who computes the prompt; why nobody does that for another is noted the first time."""
        with self.trace.step("choose") as choice:
            plan = self.router.routing.plan(self.ask, self.overlaps, self.tried, self.local)
            choice.set(spans.of_plan, plan)
        if plan.local is not None and plan.local not in FALLBACKS:
            if not self.tried:
                self.local = plan.local
                self.router.metrics.kept_local(plan.local)
            elif self.local is None:  # so those that were tried are prefill workers
                self._fall_back(Local.PREFILL_FAILED)
        return plan

    def _choose_decode(self) -> Decision | None:
        """Return who goes on with the prompt that was computed, if anybody can."""
        with self.trace.step("choose") as choice:
            decision = self.router.routing.decode_decision(self.ask, self.overlaps, self.tried)
            choice.set(spans.of_decision, decision)
        return decision

    async def _prefill(self, decision: Decision) -> None:
        """Have the prompt computed. If that fails, another prefill worker may follow while attempts are left."""
        router, worker, started_s = self.router, decision.chosen.target.worker, self.router.now_s()
        router.metrics.dispatched(decision)
        answer, failure = b"", None
        try:
            with _Attempt(router, decision, decision.overlap_tokens) as attempt:
                async with self._exchange("prefill", decision, prefill_body(self.body)) as response:
                    async for piece in response.body():
                        answer += piece
                        if len(answer) > MAX_HANDOFF_BYTES:
                            break
                    attempt.judge(response.status)
            if attempt.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                failure = f"answered {attempt.status}"
        except UpstreamError as error:
            failure = error.reason
            logger.warning("prefill failed worker=%s reason=%s", error.worker, failure)
        if failure is not None:
            self.tried.add(worker)
            self._note_retry(decision, failure)
            if len(self.tried) + 1 >= router.config.max_attempts:  # the last one is for who answers
                self._fall_back(Local.PREFILL_FAILED)
        elif attempt.status == HTTPStatus.OK and (handoff := read_handoff(answer)) is not None:
            self.handover = Handover(handoff, worker, router.now_s() - started_s)
            router.routing.computed(self.ask, worker)
        else:
            self._fall_back(Local.PREFILL_REFUSED)

    async def _answer(self, decision: Decision) -> bool:
        """Return whether the client has its answer; if not, the worker failed, and another may be tried."""
        router, request, handover, target = self.router, self.request, self.handover, decision.chosen.target
        self.tried.add(target.worker)
        router.routing.dispatched()
        if handover is None:
            router.metrics.dispatched(decision)
            step, num_spared_tokens = "generate", decision.overlap_tokens
            body = router.healer.body_for(target, request.path, self.body, self.ask.fields)
            self.is_healing = body is not self.body
        else:
            handover.sent_s = router.now_s()
            step, num_spared_tokens = "decode", decision.prompt.num_tokens
            body = decode_body(self.body, handover.handoff.params)
        failure = None
        try:
            with _Attempt(router, decision, num_spared_tokens) as attempt:
                async with self._exchange(step, decision, body) as response:
                    if handover is not None and response.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                        attempt.status, failure = response.status, "the transfer failed"
                        self._fall_back(Local.TRANSFER_FAILED)  # which is not the worker's fault: it may do all
                        self.tried.discard(target.worker)
                    else:
                        attempt.judge(response.status)
                        if response.status in RETRIED_STATUSES and self._may_retry():
                            failure = f"answered {response.status}"
                        else:
                            await self._relay(response, decision, attempt.load)
        except UpstreamError as error:
            failure = self._failure_before_answer(error)
        if failure is not None:
            self._note_retry(decision, failure)
        return failure is None

    def _exchange(self, step: str, decision: Decision, body: bytes) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a body with the client's headers, and which rank was chosen; the worker goes on with the trace."""
        request, target, call = self.request, decision.chosen.target, self.trace.call(step)
        headers = call.headers(forwarded_headers(request, self.router.config, target.worker, self.request_id))
        if self.router.routing.is_one_of_several_ranks(target):
            headers.append((RANK_HEADER, b"%d" % target.rank))
        client = request.client[0] if request.client else None
        exchange = self.router.pool.exchange(
            target.worker, request.method, request.target, headers, body, forwarded_for=client
        )
        return spans.traced(exchange, call, decision)

    async def _relay(self, response: UpstreamResponse, decision: Decision, active: ActiveRequest) -> None:
        """Pass the answer on as it comes. Nothing is sent before its first byte, so until then another may be tried."""
        router, responder, handover = self.router, self.responder, self.handover
        metrics = router.metrics
        is_event_stream = _is_event_stream(response.headers)
        is_kept = self.request.path == RESPONSES_PATH and self.ask.fields.get("store") is not False
        usage_reader = UsageReader(is_event_stream=is_event_stream, is_last_event_long=is_kept)
        body = response.body()
        piece = await anext(body, b"")
        active.end_prefill()
        first_byte_at_s = self.router.now_s()
        first_byte_s = first_byte_at_s - self.started_s
        metrics.first_byte(decision, first_byte_s)
        if piece and response.status == HTTPStatus.OK:
            self.router.routing.computed(self.ask, decision.chosen.target.worker)
        self.trace.set(spans.of_answer, response.status, first_byte_s)
        if handover is not None:
            handover.transfer_s = first_byte_at_s - handover.sent_s
            handover.is_fetched = response.status == HTTPStatus.OK
            metrics.handed_over(handover.prefill_s, handover.transfer_s)
        theirs = [field for field in response.headers if not field[0].startswith((b"x-request-id", b"x-kvist-"))]
        responder.start(response.status, theirs + self._own_headers(decision))
        try:
            while piece:
                usage_reader.feed(piece)
                if is_event_stream:
                    active.add_tokens(piece.count(b"\n\n"))
                await responder.write(piece)
                piece = await anext(body, b"")
        except UpstreamError as error:
            if not usage_reader.is_between_events:
                raise
            await responder.write(b"data: " + error_body(worker_failure(error)) + b"\n\n")
            await responder.finish()
            raise
        if is_kept and response.status == HTTPStatus.OK:
            answer, worker = usage_reader.answer(), decision.chosen.target.worker
            router.reader.conversations.remember(worker, self.ask.chat, answer, is_event=is_event_stream)
        await responder.finish()
        usage = usage_reader.usage()
        if usage is not None:
            self.trace.set(spans.of_usage, usage)
        if handover is not None:
            handover.log(decision, self.router.now_s(), self.request_id)
        elif usage is not None:
            metrics.reported(decision, usage)
        if self.is_healing:
            block_hashes = partial(self.router.routing.block_hashes, self.ask, decision.chosen.target.worker)
            self.router.healer.answered(decision, usage, block_hashes)

    def _own_headers(self, decision: Decision) -> Headers:
        """Return what the client is told. Who knows what a worker held may learn what others have asked."""
        told = [(b"x-request-id", self.request_id)]
        if self.shows_worker:
            told.append((b"x-kvist-worker", decision.chosen.target.worker.encode()))
            told.append((b"x-kvist-overlap-tokens", b"%d" % decision.overlap_tokens))
            if self.handover is not None:
                told += self.handover.headers()
        return told

    def _failure_before_answer(self, error: UpstreamError) -> str | None:
        """Return the failure where another worker may follow, None where the answer was whole; raises it elsewhere."""
        request_id = self.request_id.decode("latin-1")
        logger.warning("worker failed worker=%s reason=%s request_id=%s", error.worker, error.reason, request_id)
        if self.responder.is_finished:
            return None
        if self.responder.has_started:
            raise error
        # A worker that was silent too long may still be busy with it: trying another would double the work.
        if not isinstance(error, UpstreamTimeoutError) and self._may_retry():
            return error.reason
        raise worker_failure(error) from error

    def _may_retry(self) -> bool:
        is_allowed = len(self.tried) < self.router.config.max_attempts
        return is_allowed and self.router.routing.has_alternative(self.ask, self.tried)

    def _note_retry(self, decision: Decision, reason: str) -> None:
        """Count that another worker gets what this one failed."""
        worker = decision.chosen.target.worker
        self.router.metrics.retried(worker)
        self.trace.mark("retry", {"kvist.worker": worker, "kvist.reason": reason})

    def _fall_back(self, reason: Local) -> None:
        """Do without what a prefill worker computed, or was to: one worker does all."""
        self._release()
        self.handover, self.local = None, reason
        self.router.metrics.fell_back(reason)
        self.trace.mark("fallback", {"kvist.reason": reason.value})
        logger.warning("prefill is local again reason=%s request_id=%s", reason, self.request_id.decode("latin-1"))

    def _release(self) -> None:
        """Tell the prefill worker that nobody will fetch the prompt, unless whoever should has begun to answer."""
        handover = self.handover
        if handover is None or handover.is_fetched or handover.handoff.remote_request_id is None:
            return
        worker = self.router.fleet.get(handover.prefill_worker)
        if worker is not None and worker.identity.engine == "kvist":
            theirs = forwarded_headers(self.request, self.router.config, worker.url, self.request_id)
            headers = [field for field in self.trace.headers(theirs) if field[0] in _RELEASE_HEADERS]
            self.router.releases.release(worker.url, handover.handoff.remote_request_id, headers)


class _Attempt:
    """One worker's part in a request: on every way out its load is given back, its circuit judged, its end counted."""

    __slots__ = ("_breaker", "_decision", "_is_trial", "_router", "load", "status")

    def __init__(self, router: Forwarder, decision: Decision, num_spared_tokens: int) -> None:
        target, now_s = decision.chosen.target, router.now_s()
        worker = router.fleet.get(target.worker)
        assert worker is not None
        self._router, self._decision, self._breaker = router, decision, worker.breaker
        self._is_trial = worker.breaker.begin()
        self.load = router.load.begin(target, decision.prompt, num_spared_tokens, now_s)
        self.status = WORKER_FAILED_STATUS

    def judge(self, status: int) -> None:
        """Take the status of the worker's answer, which is a success or a failure of the worker."""
        self.status = status
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._breaker.fail(self._router.now_s())
        else:
            self._breaker.succeed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.load.finish()
        if isinstance(error, UpstreamError):
            self.status = WORKER_FAILED_STATUS
            self._breaker.fail(self._router.now_s())
        elif isinstance(error, asyncio.CancelledError | ClientDisconnectedError):
            self.status = CLIENT_LEFT_STATUS
        if self._is_trial:
            self._breaker.abandon()
        self._router.metrics.ended(self._decision, self.status)


def forwarded_headers(request: Request, config: RouterConfig, worker: str, request_id: bytes) -> Headers:
    """Return the request's headers as a worker gets them, under the request's id and with the worker's own key.

    What a client shows is passed on only where nobody here asks for it and the worker has no key from us.
    """
    authorization = config.authorization(worker)
    dropped = {b"x-request-id"}
    if authorization or config.api_key is not None or (config.admin_key and request.bears(config.admin_key)):
        dropped.add(b"authorization")
    headers = [field for field in request.headers if field[0] not in dropped]
    return [*headers, (b"x-request-id", request_id), *authorization]


def worker_failure(error: UpstreamError) -> RequestError:
    """Return what a client is told of a worker that failed before its answer began."""
    is_timeout = isinstance(error, UpstreamTimeoutError)
    status = HTTPStatus.GATEWAY_TIMEOUT if is_timeout else HTTPStatus.BAD_GATEWAY
    return RequestError(status, str(error), code="worker_failed")


def _is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)

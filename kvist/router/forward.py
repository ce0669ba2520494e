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
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

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
from kvist.http.access import bears
from kvist.openai.errors import RequestError, error_body
from kvist.router import spans
from kvist.router.config import RouterConfig
from kvist.router.prefill.handover import (
    FALLBACKS,
    MAX_HANDOFF_BYTES,
    Local,
    decode_body,
    obstacle,
    prefill_body,
    read_handoff,
)
from kvist.router.fleet.fleet import Fleet
from kvist.router.prefill.handover import Handover
from kvist.router.healing import Healer
from kvist.router.fleet.load import ActiveRequest, LoadTracker
from kvist.router.metrics import RouterMetrics
from kvist.router.policy import Decision
from kvist.router.prompts import PromptReader
from kvist.router.prefill.releases import Releases
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
        self, request: Request, responder: Responder, request_id: bytes, *, is_told: bool = False
    ) -> None:
        """Answer the request from a worker; raises RequestError when no answer has begun and none will come.

        `is_told`: the client hears which worker that was, and how much of the prompt it held.
        """
        if self.tracing is None:
            await _Passage(self, request, responder, request_id, NO_SPAN, is_told).run()
            return
        attributes = spans.of_request(request, request_id)
        with self.tracing.request(spans.name_of(request), request.headers, attributes) as trace:
            try:
                await _Passage(self, request, responder, request_id, trace, is_told).run()
            except RequestError as error:
                trace.set(spans.of_answer, error.status)
                raise


class _Passage:
    """One request on its way."""

    __slots__ = (
        "_ask",
        "_handover",
        "_is_healing",
        "_is_told",
        "_obstacle",
        "_overlaps",
        "_request",
        "_request_id",
        "_responder",
        "_router",
        "_started_s",
        "_trace",
        "_tried",
    )

    def __init__(
        self, router: Forwarder, request: Request, responder: Responder, request_id: bytes, trace: Span, is_told: bool
    ) -> None:
        self._router = router
        self._request = request
        self._responder = responder
        self._request_id = request_id
        self._trace = trace
        self._is_told = is_told
        self._started_s = router.now_s()
        self._tried: set[str] = set()
        self._is_healing = False
        self._obstacle: Local | None = None
        self._handover: Handover | None = None

    async def run(self) -> None:
        router, path, body = self._router, self._request.path, self._request.body
        with self._trace.step("read"):
            self._ask = await router.reader.read(path, body)
        self._trace.set(spans.of_ask, self._ask)
        with self._trace.step("match"):
            self._overlaps = router.routing.overlaps(self._ask)
        if router.fleet.has_prefill_workers:
            self._obstacle = obstacle(path, self._ask)
        try:
            while True:
                decision = await self._next()
                self._tried.add(decision.chosen.target.worker)
                failure = await self._attempt(decision)
                if failure is None:
                    return
                self._retry(decision, failure)
        finally:
            self._release()

    async def _next(self) -> Decision:
        """Return who is to answer, after another worker has computed the prompt where one should."""
        routing = self._router.routing
        while True:
            if self._handover is not None:
                with self._trace.step("choose") as choice:
                    decode = routing.decode_decision(self._ask, self._overlaps, self._tried)
                    choice.set(spans.of_decision, decode)
                if decode is not None:
                    return decode
                self._fall_back(Local.DECODE_FAILED)
            with self._trace.step("choose") as choice:
                plan = routing.plan(self._ask, self._overlaps, self._tried, self._obstacle)
                choice.set(spans.of_plan, plan)
            if plan.prefill is None:
                if plan.local is not None and plan.local not in FALLBACKS:
                    if not self._tried:
                        self._router.metrics.kept_local(plan.local)
                    elif self._obstacle is None:
                        self._fall_back(Local.PREFILL_FAILED)
                    self._obstacle = self._obstacle or plan.local
                return plan.answer
            await self._prefill(plan.prefill)

    def _fall_back(self, reason: Local) -> None:
        """Do without what a prefill worker computed: one worker does all."""
        self._release()
        self._handover, self._obstacle = None, reason
        self._router.metrics.fell_back(reason)
        self._trace.mark("fallback", {"kvist.reason": reason.value})
        logger.warning("prefill is local again reason=%s request_id=%s", reason, self._request_id.decode("latin-1"))

    def _retry(self, decision: Decision, reason: str) -> None:
        """Take note that another worker gets what this one failed."""
        worker = decision.chosen.target.worker
        self._router.metrics.retried(worker)
        self._trace.mark("retry", {"kvist.worker": worker, "kvist.reason": reason})

    def _release(self) -> None:
        """Tell the prefill worker that nobody will fetch the prompt, unless whoever should has begun to answer."""
        handover = self._handover
        if handover is None or handover.is_taken or handover.handoff.remote_request_id is None:
            return
        worker = self._router.fleet.get(handover.prefill_worker)
        if worker is not None and worker.identity.engine == "kvist":
            theirs = passed_on(self._request, self._router.config, worker.url, self._request_id)
            headers = [field for field in self._trace.headers(theirs) if field[0] in _RELEASE_HEADERS]
            self._router.releases.release(worker.url, handover.handoff.remote_request_id, headers)

    async def _prefill(self, decision: Decision) -> None:
        """Have the prompt computed. If that fails, another prefill worker may follow while attempts are left."""
        router, target, started_s = self._router, decision.chosen.target, self._router.now_s()
        worker = router.fleet.get(target.worker)
        assert worker is not None
        is_trial = worker.breaker.begin()
        router.metrics.dispatched(decision)
        status, answer, failure = WORKER_FAILED_STATUS, b"", ""
        try:
            with router.load.begin(target, decision.prompt, decision.overlap_tokens, started_s):
                async with self._exchange("prefill", decision, prefill_body(self._request.body)) as response:
                    async for piece in response.body():
                        answer += piece
                        if len(answer) > MAX_HANDOFF_BYTES:
                            break
                    status = response.status
        except UpstreamError as error:
            failure = error.reason
            logger.warning("prefill failed worker=%s reason=%s", error.worker, failure)
        except asyncio.CancelledError:
            status = CLIENT_LEFT_STATUS
            raise
        finally:
            if is_trial:
                worker.breaker.abandon()
            router.metrics.ended(decision, status)
        if status == WORKER_FAILED_STATUS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            worker.breaker.fail(router.now_s())
            self._tried.add(target.worker)
            self._retry(decision, failure or f"answered {status}")
            if len(self._tried) + 1 >= router.config.max_attempts:  # the last one is for who answers
                self._fall_back(Local.PREFILL_FAILED)
            return
        worker.breaker.succeed()
        handoff = read_handoff(answer) if status == HTTPStatus.OK else None
        if handoff is None:
            self._fall_back(Local.PREFILL_REFUSED)
        else:
            self._handover = Handover(handoff, target.worker, router.now_s() - started_s)

    async def _attempt(self, decision: Decision) -> str | None:
        """Return None once the client has its answer; else how the worker failed, and another should be tried."""
        router, target = self._router, decision.chosen.target
        worker = router.fleet.get(target.worker)
        assert worker is not None
        is_trial = worker.breaker.begin()
        router.routing.dispatched()
        handover, num_spared_tokens = self._handover, decision.overlap_tokens
        if handover is None:
            router.metrics.dispatched(decision)
            body = router.healer.body_for(target, self._request.path, self._request.body)
            self._is_healing = body is not self._request.body
        else:
            handover.sent_s, num_spared_tokens = router.now_s(), decision.prompt.num_tokens
            body = decode_body(self._request.body, handover.handoff.params)
        status = WORKER_FAILED_STATUS
        try:
            with router.load.begin(target, decision.prompt, num_spared_tokens, router.now_s()) as active:
                async with self._exchange("generate" if handover is None else "decode", decision, body) as response:
                    status = response.status
                    if handover is not None and status == HTTPStatus.INTERNAL_SERVER_ERROR:
                        self._fall_back(Local.TRANSFER_FAILED)  # which is not the worker's fault: it may do all
                        self._tried.discard(target.worker)
                        return "the transfer failed"
                    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                        worker.breaker.fail(router.now_s())
                    else:
                        worker.breaker.succeed()
                    if status in RETRIED_STATUSES and self._may_retry():
                        return f"answered {status}"
                    await self._relay(response, decision, active)
        except UpstreamError as error:
            status = WORKER_FAILED_STATUS
            worker.breaker.fail(router.now_s())
            return await self._worker_failed(error)
        except (asyncio.CancelledError, ClientDisconnectedError):
            status = CLIENT_LEFT_STATUS
            raise
        finally:
            if is_trial:
                worker.breaker.abandon()
            router.metrics.ended(decision, status)
        return None

    def _exchange(self, step: str, decision: Decision, body: bytes) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a body with the client's headers, and which rank was chosen; the worker goes on with the trace."""
        request, target, call = self._request, decision.chosen.target, self._trace.call(step)
        headers = call.headers(passed_on(request, self._router.config, target.worker, self._request_id))
        if self._router.routing.is_one_of_several_ranks(target):
            headers.append((RANK_HEADER, b"%d" % target.rank))
        client = request.client[0] if request.client else None
        exchange = self._router.pool.exchange(
            target.worker, request.method, request.target, headers, body, forwarded_for=client
        )
        return spans.traced(exchange, call, decision)

    async def _relay(self, response: UpstreamResponse, decision: Decision, active: ActiveRequest) -> None:
        """Pass the answer on as it comes. Nothing is sent before its first byte, so until then another may be tried."""
        responder, metrics = self._responder, self._router.metrics
        is_event_stream = _is_event_stream(response.headers)
        usage_reader = UsageReader(is_event_stream=is_event_stream)
        body = response.body()
        piece = await anext(body, b"")
        active.answered()
        first_byte_s = self._router.now_s() - self._started_s
        metrics.first_byte(decision, first_byte_s)
        self._trace.set(spans.of_answer, response.status, first_byte_s)
        theirs = [field for field in response.headers if not field[0].startswith((b"x-request-id", b"x-kvist-"))]
        responder.start(response.status, theirs + self._own_headers(decision))
        if self._handover is not None:
            self._handover.is_taken = response.status == HTTPStatus.OK
            metrics.handed_over(self._handover.prefill_s, self._handover.transfer_s)
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
        await responder.finish()
        usage = usage_reader.usage()
        if usage is not None:
            self._trace.set(spans.of_usage, usage)
        if self._handover is not None:
            self._handover.log(decision, self._router.now_s(), self._request_id)
        elif usage is not None:
            metrics.reported(decision, usage)
        if self._is_healing:
            self._router.healer.answered(decision, usage, partial(self._router.routing.block_hashes, self._ask))

    async def _worker_failed(self, error: UpstreamError) -> str | None:
        """Return the failure where another worker follows, None where the answer was whole; raises it elsewhere."""
        request_id = self._request_id.decode("latin-1")
        logger.warning("worker failed worker=%s reason=%s request_id=%s", error.worker, error.reason, request_id)
        if self._responder.is_finished:
            return None
        if self._responder.has_started:
            raise error
        # A worker that was silent too long may still be busy with it: trying another would double the work.
        if not isinstance(error, UpstreamTimeoutError) and self._may_retry():
            return error.reason
        raise worker_failure(error) from error

    def _may_retry(self) -> bool:
        is_allowed = len(self._tried) < self._router.config.max_attempts
        return is_allowed and self._router.routing.has_alternative(self._ask, self._tried)

    def _own_headers(self, decision: Decision) -> Headers:
        """Return what the client is told. Who knows what a worker held may learn what others have asked."""
        told = [
            (b"x-kvist-worker", decision.chosen.target.worker.encode()),
            (b"x-kvist-overlap-tokens", b"%d" % decision.overlap_tokens),
        ]
        if self._handover is not None:
            told += self._handover.answered(self._router.now_s())
        return [(b"x-request-id", self._request_id), *(told if self._is_told else ())]


def passed_on(request: Request, config: RouterConfig, worker: str, request_id: bytes) -> Headers:
    """Return the request's headers as a worker gets them, under the request's id and with the worker's own key.

    What a client shows is passed on only where nobody here asks for it and the worker has no key from us.
    """
    authorization = config.authorization(worker)
    dropped = {b"x-request-id"}
    if authorization or config.api_key is not None or (config.admin_key and bears(request, config.admin_key)):
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

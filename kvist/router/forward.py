"""The life of one request, top to bottom: read, wait, match, choose, send, relay, account.

    read     parse and tokenise the prompt, as the worker will         prompts
    wait     in a queue, where no worker has room                      admission
    match    find which ranks hold how many of its leading blocks      routing
    choose   pick a rank, by overlap and load                          policy
    prefill  have another worker compute the prompt first, where that  prefill
             is worth it
    send     the client's bytes to the worker, and to another one if   here, attempts
             it fails before the first byte of its answer; a vLLM
             worker whose cache is known only in part is asked to
             report the blocks it finds                                healing
    relay    the answer's bytes as they come, unchanged                attempts
    account  update load, circuit, metrics and predicted hits          attempts
             charge the tenant, write the logs                         accounting

All of it runs in the callbacks of the client's and the workers' sockets, without a task; only a prompt that takes long
to read is read on a thread. However a request ends, its load is given back; when the client leaves, the worker's
connection is closed at once. Each step can be traced (`spans`); without tracing that costs next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from math import inf
from random import Random
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from kvist.http import (
    ClientDisconnectedError,
    ConnectError,
    Deadline,
    Headers,
    Request,
    Responder,
    UpstreamError,
    UpstreamPool,
    UpstreamTimeoutError,
)
from kvist.openai.errors import RequestError
from kvist.openai.requests import with_fields, without_field
from kvist.router import accounting, spans
from kvist.router.access_log import AccessLog
from kvist.router.admission import ANY_STANDALONE, Admission, Place, priority_of, timeout_of
from kvist.router.attempts import CLIENT_LEFT_STATUS, OK, AnswerAttempt, PrefillAttempt, worker_failure
from kvist.router.config import RouterConfig
from kvist.router.fleet.load import ActiveRequest
from kvist.router.healing import REPORT_MODE, Healer
from kvist.router.metrics import PREFIX, RouterMetrics, gauge_of
from kvist.router.policy.decision import Decision
from kvist.router.prefill.dialect import FALLBACKS, Handoff, LocalReason
from kvist.router.prefill.handover import Handover, Plan
from kvist.router.prefill.split import SplitAttempt, SplitPart, single_answer, split_bodies
from kvist.router.prompts import APIS, COMPLETION_PATH, ParsedRequest, PromptReader, Reading, with_model
from kvist.router.recording import RequestRecorder
from kvist.router.regret import Routed
from kvist.router.routing import MODEL_NOT_FOUND, FleetView, Prefix, Routing
from kvist.router.tenants.accounts import Account, Accounts, account_metrics
from kvist.router.tenants.isolation import salt_of, takes_salt
from kvist.router.tenants.limits import LIMITED, Limits, Spending
from kvist.router.tenants.tenant import UNRESOLVED, Tenant
from kvist.tracing import NO_SPAN, Span

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

logger = logging.getLogger(__name__)

_MODEL_WAIT_S, _MODEL_POLL_S = 0.25, 0.01
"""How long a request waits whose model nobody is known to serve, while all workers are asked what they serve now."""
_MATCH_RETRY_S, _MAX_MATCH_RETRIES = 0.001, 20
"""How often matching is retried while the index is being written to, before a request is routed by load alone."""

_PEER_ENDED = ConnectionAbortedError("the other of its pair has ended")

Refuse = Callable[[Responder, RequestError, bytes], None]
"""Answers with an error, under the request's id."""


class Forwarder:
    """Sends each request to the worker that its routing chooses, and relays the answer as it comes."""

    def __init__(
        self,
        config: RouterConfig,
        view: FleetView,
        pool: UpstreamPool,
        metrics: RouterMetrics,
        resolve_tenant: Callable[[Request], Awaitable[Tenant]],
        refuse: Refuse,
        on_routed: Callable[[Routed], None],
        on_ended: Callable[[Forwarding, Exception | None], None],
        tracing: Tracing | None = None,
        access_log: AccessLog | None = None,
        recorder: RequestRecorder | None = None,
    ) -> None:
        """Decide from `view`; call `on_routed` for each request that was answered, `on_ended` for each that ended."""
        fleet, load, index = view.fleet, view.load, view.index
        self.config, self.fleet, self.load, self.pool, self.metrics = config, fleet, load, pool, metrics
        self.resolve_tenant, self.refuse, self.on_routed, self.on_ended = resolve_tenant, refuse, on_routed, on_ended
        self.tracing, self.access_log, self.recorder = tracing, access_log, recorder
        self.now_s = time.monotonic
        self.routing = Routing(view, Random(), self.now_s)
        limits = config.max_worker_prefill_tokens, config.max_fleet_requests, config.max_fleet_prefill_tokens
        self.admission = Admission(fleet, load, self.now_s, pool.clock, config.max_queued, *limits)
        self.admission.can_do_all = partial(self.routing.can_do_all, COMPLETION_PATH)
        self.reader = PromptReader(
            view.models,
            has_index=lambda: index is not None and index.has_joined,
            needs_tokens=lambda: index is not None or fleet.has_prefill_workers or recorder is not None,
        )
        self.healer = Healer(fleet, metrics)
        self.accounts, self.limits = Accounts(Account), Limits(load.tenants, self.now_s)

    def forward(
        self,
        request: Request,
        responder: Responder,
        request_id: bytes,
        tenant: Tenant,
        *,
        is_administrator: bool = False,
    ) -> Forwarding:
        """Answer the request from a worker, or refuse it; return what the server calls when the client does something.

        An administrator may jump the queue, and learns which worker answered and how much of the prompt it held.
        """
        trace = NO_SPAN
        if self.tracing is not None:
            attributes = spans.of_request(request, request_id)
            trace = self.tracing.request(spans.name_of(request), request.headers, attributes)
        forwarding = Forwarding(self, request, responder, request_id, tenant, trace, is_administrator, self.now_s())
        forwarding.start()
        return forwarding

    def gauges(self) -> Iterator[Metric]:
        """Yield the metrics of clients: requests that wait, what tenants have used, log lines that were lost."""
        queued = gauge_of("queued_requests", "Requests that wait for a worker with room", "model")
        num_queued = Counter[str]()
        for model, number in self.admission.queued.items():
            num_queued[self.fleet.label_of(model)] += number
        for label, number in num_queued.items():
            queued.add_metric([label], number)
        text = "Requests that no worker had room for, by why they wait no longer"
        rejections = CounterMetricFamily(f"{PREFIX}_rejections", text, labels=["cause"])
        for cause, count in self.admission.rejections.items():
            rejections.add_metric([cause], count)
        yield from (queued, rejections)
        yield from account_metrics(self.accounts)
        for name, writer in (("access_log", self.access_log), ("recording", self.recorder)):
            if writer is not None:
                text = "Lines that were dropped, as they could not be written in time or at all"
                yield CounterMetricFamily(f"{PREFIX}_{name}_dropped", text, writer.num_dropped)


@dataclass(slots=True, eq=False)
class Forwarding:
    """One request, from its body to the last byte of its answer. It is a `Producer`, and in one of these states:

    reading      the prompt, on a thread, once the tenant is   then: waiting
                 known
    waiting      for a worker with room, if none has, or for   then: alone
                 a full one that is worth it (`place`)
    alone        `_plan` has one worker do all of it          `AnswerAttempt`; if it fails: alone, by another
                 or fetch a prefix that another holds         `PrefillAttempt`, then `AnswerAttempt`; if either
                                                              fails: alone, without a `pull`
                 or one compute the prompt for another        `PrefillAttempt`: handed over; if it fails: alone
                 or a pair do so at once                      `AnswerAttempt`, and a `PrefillAttempt` beside it;
                                                              if either fails: alone, by another pair
                 or splits it into one request for each       `SplitAttempt`
                 answer
    handed over  `_choose_decode` picks who generates         `AnswerAttempt`; if it fails: handed over, to another
                                                              if the transfer fails, or nobody is left: alone
    """

    router: Forwarder
    request: Request
    responder: Responder
    request_id: bytes
    tenant: Tenant
    trace: Span
    is_administrator: bool
    started_s: float
    parsed: ParsedRequest = field(init=False)
    body: bytes = field(init=False)
    """What workers are sent, before an attempt adds its own fields."""
    prefix: Prefix = field(default_factory=Prefix)
    is_client_slow: bool = False
    handover: Handover | None = None
    """The prompt that another worker has computed, or is computing, for the one that answers."""
    local_reason: LocalReason | None = None
    """Why no other worker will compute the prompt."""
    pull: Plan | None = None
    """The plan under which the answering worker fetches a prefix from one that holds it."""
    reserved: ActiveRequest | None = None
    """The answering worker's load, which is counted while the holder of a prefix is still being asked for it."""
    computed_by: Decision | None = None
    """Which worker computes the prompt."""
    tried: set[str] = field(default_factory=set)
    """URLs of workers not to ask again."""
    was_moved: bool = False
    """Whether it was taken away from a worker that had gone silent; that is done once."""
    place: Place | None = None
    spending: Spending | None = None
    attempt: PrefillAttempt | AnswerAttempt | SplitAttempt | None = None
    """The worker that is asked now."""
    prefill: PrefillAttempt | None = None
    """The worker that has handed the prompt over, maybe before it is computed, or the prefill worker of a pair that is
    asked at once; `attempt` is the other."""
    routed: Routed | None = None
    _enter_queue: Callable[..., Place | None] = field(init=False)
    _has_waited_for_model: bool = False
    _match_retry: asyncio.TimerHandle | None = None
    _deadline: Deadline | None = None
    _reading: asyncio.Task[ParsedRequest] | None = None
    _reading_step: Span = NO_SPAN
    _waiting_step: Span = NO_SPAN

    @property
    def is_streamed(self) -> bool:
        return self.parsed.fields.get("stream") is True

    @property
    def priority(self) -> int:
        """Return the request's priority, lower first."""
        return priority_of(self.parsed.fields, self.tenant.priority, is_administrator=self.is_administrator)

    @property
    def is_pair(self) -> bool:
        """Return whether two workers were asked at once: neither is of use without the other."""
        return self.prefill is not None and self.prefill.is_pair

    # What the client does.

    def pause(self) -> None:
        self.is_client_slow = True
        if isinstance(self.attempt, AnswerAttempt | SplitAttempt):
            self.attempt.pause()

    def resume(self) -> None:
        self.is_client_slow = False
        if isinstance(self.attempt, AnswerAttempt | SplitAttempt):
            self.attempt.resume()

    def stop(self) -> None:
        error = ClientDisconnectedError("the client left")
        self._cancel(CLIENT_LEFT_STATUS, error)
        self.end(error)

    def shut_down(self) -> None:
        """End the request, as the router shuts down; the client is told if its answer allows that."""
        message = "the router is shutting down; ask again"
        self.abort(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="shutting_down"))

    def abort(self, error: RequestError) -> None:
        """End the request, whatever its state, with an error that the client is sent if it still can be."""
        attempt = self.attempt
        self._cancel(error.status, error)
        if isinstance(attempt, AnswerAttempt | SplitAttempt) and attempt.abort(error):
            self.end(error)
        else:
            self._refuse(error)

    def _cancel(self, status: int, error: Exception) -> None:
        """Stop whatever is under way: reading, waiting, matching, workers."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self.place is not None:
            self.router.admission.leave(self.place)
            self._waiting_step.end(error)
        if self._match_retry is not None:
            self._match_retry.cancel()
        if self.attempt is not None:
            self.attempt.stop(status, error)
        self._cancel_prefill(error)

    # Read.

    def start(self) -> None:
        """Read the prompt; the time for the whole request runs from now on, if it is limited."""
        timeout_s = self.router.config.request_timeout_s
        if timeout_s is not None:
            message = f"the request was not answered within {timeout_s:g} s"
            error = RequestError(HTTPStatus.GATEWAY_TIMEOUT, message, code="request_timeout")
            self._deadline = Deadline(self.router.pool.clock, lambda _: self.abort(error))
            self._deadline.set("request", timeout_s)
        self._reading_step = self.trace.step("read")
        path, body = self.request.path, self.request.body
        self._read_with(lambda: None if self.tenant is UNRESOLVED else self.router.reader.read_now(path, body))

    def _read_with(self, read: Callable[[], ParsedRequest | Reading | None]) -> None:
        """Continue with what `read` returns; where it returns no prompt, have a task read that first."""
        self._reading = None
        try:
            parsed = read()
        except RequestError as error:
            self._reading_step.end(error)
            self._refuse(error)
            return
        if isinstance(parsed, ParsedRequest):
            self._on_read(parsed)
        else:
            reading = self._read_in_task() if parsed is None else self.router.reader.finish(parsed)
            self._reading = asyncio.get_running_loop().create_task(reading, name="kvist-read-prompt")
            self._reading.add_done_callback(self._on_reading_done)

    async def _read_in_task(self) -> ParsedRequest:
        self.tenant = await self.router.resolve_tenant(self.request)
        return await self.router.reader.read(self.request.path, self.request.body)

    def _on_reading_done(self, reading: asyncio.Task[ParsedRequest]) -> None:
        if self._reading is None:  # the client left, even if the prompt was read by then
            self._reading_step.end(ClientDisconnectedError("the client left"))
        else:
            self._run(self._read_with, reading.result)

    def _on_read(self, parsed: ParsedRequest) -> None:
        """Check what the tenant may ask, and match the prompt or wait for a worker with room."""
        router, self.parsed = self.router, parsed
        if isinstance(self.responder, SplitPart):  # the whole request was admitted
            self.parsed = msgspec.structs.replace(parsed, prefill_rank=self.responder.prefill_rank)
            self.body = self.request.body
            self._match(_MAX_MATCH_RETRIES)
            return
        self.body = without_field(self.request.body, parsed.fields, *REPORT_MODE)
        self.body = with_model(self.body, parsed)
        self._reading_step.end()
        api = APIS.get(parsed.path, "other")
        router.metrics.counts["readings", api, parsed.outcome, parsed.obstacle or ""] += 1
        self.trace.set(spans.of_prompt, parsed)
        try:
            if self.request.body:
                self.tenant.check_models(parsed.model, parsed.fields)
                self._isolate()
            timeout_s = timeout_of(self.request, router.config.queue_timeout_s)
            self.spending = router.limits.enter(self.tenant)
            work = partial(router.routing.work_of, self.parsed) if router.config.has_tenants else lambda: 0.0
            self._enter_queue = partial(
                router.admission.enter,
                model=parsed.model,
                priority=self.priority,
                timeout_s=timeout_s,
                tenant=self.tenant,
                work=work,
                since_s=router.now_s(),
            )
            self.place = self._enter_queue(self)
        except RequestError as error:
            if error.code == LIMITED:
                router.accounts[self.tenant.name, router.fleet.label_of(parsed.model)].limited += 1
            self._refuse(error)
            return
        if self.place is None:
            self._match(_MAX_MATCH_RETRIES)
        else:
            self._waiting_step = self.trace.step("queue")

    def _isolate(self) -> None:
        """Salt the prompt's blocks with the tenant's salt, if tenants are isolated; may raise RequestError."""
        secret, parsed = self.router.config.isolation_secret, self.parsed
        if self.router.config.isolation == "none" or secret is None or not takes_salt(self.request.path):
            return
        self.parsed = msgspec.structs.replace(parsed, cache_salt=salt_of(secret, self.tenant, parsed.cache_salt))
        self.body = with_fields(self.body, {"cache_salt": self.parsed.cache_salt})

    # Wait and match.

    def on_room(self) -> None:
        """Continue, with caches and loads as they are now; waiting for one worker then costs the tenant nothing."""
        self._waiting_step.end()
        self._enter_queue = partial(self._enter_queue, work=lambda: 0.0)
        self._run(self._match, _MAX_MATCH_RETRIES)

    def on_refused(self, error: RequestError) -> None:
        self._waiting_step.end(error)
        self._refuse(error)

    def _match(self, num_retries: int) -> None:
        """Find who holds the prompt, and try again soon while another process is writing to the index."""
        self._match_retry = None
        with self.trace.step("match"):
            prefix = self.router.routing.match(self.parsed)
        if prefix is None and num_retries:
            loop = asyncio.get_running_loop()
            self._match_retry = loop.call_later(_MATCH_RETRY_S, self._run, self._match, num_retries - 1)
            return
        if prefix is None:
            self.router.metrics.counts["unmatched",] += 1
        self.prefix = prefix or Prefix()
        self._send_next()

    # Choose and send.

    def _send_next(self) -> None:
        """Send the request to the next worker or pair, or refuse it where there is none."""
        self.attempt = None
        if self.handover is not None and self.pull is not None:  # the worker that was to fetch the prefix has failed
            self._fall_back(LocalReason.DECODE_FAILED)
        if self.is_pair:  # its prompt is of no use to another pair
            self._cancel_prefill(_PEER_ENDED)
            self.handover = None
        try:
            if self.handover is not None:
                decode = self._choose_decode(self.handover.prefill_worker)
                if decode is None:
                    self._fall_back(LocalReason.DECODE_FAILED)
                else:
                    self._answer_by(decode)
                    return
            plan = self._plan()
            if plan is None:
                return
        except RequestError as error:
            if error.code == MODEL_NOT_FOUND and not self._has_waited_for_model:
                self._has_waited_for_model = True
                self._wait_for_model(self.router.now_s() + _MODEL_WAIT_S)
            else:
                self._refuse(error)
            return
        if self.place is not None and self.computed_by is None:
            model = self.router.fleet.label_of(self.parsed.model)
            self.router.metrics.observe(self.place.waited_s, "queue_seconds", model)
        self.pull = plan if plan.pulled_tokens else None
        self.computed_by = plan.computed_by
        if self.spending is not None:
            self.spending.charge(self.parsed.num_tokens - self.computed_by.overlap_tokens)
        if plan.is_split:
            self._split(plan.answer)
        elif plan.prefill is None:
            self._answer_by(plan.answer)
        elif plan.handoff is None:
            self.attempt = PrefillAttempt(self, plan.prefill, plan)
            if self.pull is not None:
                now_s = self.router.now_s()
                self.reserved = self.router.routing.begin(now_s, plan.answer, is_streamed=self.is_streamed)
        else:
            self.handover = Handover(plan.handoff, plan.prefill.chosen.target.worker)
            self.prefill = PrefillAttempt(self, plan.prefill, plan)
            self._answer_by(plan.answer)

    def _wait_for_model(self, until_s: float) -> None:
        """Match once some worker serves the model, or after a while in any case."""
        if self.router.fleet.is_known(self.parsed.model) or self.router.now_s() >= until_s:
            self._match(_MAX_MATCH_RETRIES)
        else:
            loop = asyncio.get_running_loop()
            self._match_retry = loop.call_later(_MODEL_POLL_S, self._run, self._wait_for_model, until_s)

    def _plan(self) -> Plan | None:
        """Return the plan for the request, None where it first waits for the full worker that is to compute its prompt.

        The reason why one worker does all of it is recorded the first time.
        """
        full = self.router.admission.full_workers(self.parsed.model, self.tried)
        full.pop(self.parsed.worker or "", None)  # it holds what no other worker does
        with self.trace.step("choose") as choice:
            plan = self.router.routing.plan(self.parsed, self.prefix, self.tried, full, self.local_reason)
            choice.set(spans.of_plan, plan)
        worker = plan.computed_by.chosen.target.worker
        if worker in full and not self.tried and not isinstance(self.responder, SplitPart):
            awaited = worker if full[worker] < inf else ANY_STANDALONE
            self.place, self._waiting_step = self._enter_queue(self, worker=awaited), self.trace.step("queue")
            return None
        if plan.local_reason is not None and plan.local_reason not in FALLBACKS:
            if not self.tried:
                self.local_reason = plan.local_reason
                self.router.metrics.counts["local_prefills", plan.local_reason] += 1
            elif self.local_reason is None:  # so those that were tried are prefill workers, or of pairs
                is_decoding = plan.local_reason is LocalReason.NO_DECODE_WORKER
                self._fall_back(LocalReason.DECODE_FAILED if is_decoding else LocalReason.PREFILL_FAILED)
                self.local_reason = plan.local_reason  # pairs that have no room now may be tried yet
        return plan

    def _choose_decode(self, prefill_worker: str) -> Decision | None:
        """Return the worker that generates from the computed prompt, None if none can; a full one only if all are."""
        full = self.router.admission.full_workers(self.parsed.model, self.tried)
        decide = partial(self.router.routing.decode_decision, self.parsed, self.prefix, prefill_worker)
        with self.trace.step("choose") as choice:
            decision = decide({*self.tried, *full}) or decide(self.tried)
            choice.set(spans.of_decision, decision)
        return decision

    def _answer_by(self, decision: Decision) -> None:
        if not self.tried:
            self.router.admission.on_first_attempt()
        self.tried.add(decision.chosen.target.worker)
        self.attempt = AnswerAttempt(self, decision)

    def _split(self, decision: Decision) -> None:
        """Have each of several answers made by a request of its own, which is routed as any other."""
        split = self.attempt = SplitAttempt(self, decision)
        for number, body in enumerate(split_bodies(self.parsed, self.body)):
            part, request = SplitPart(split, number), msgspec.structs.replace(self.request, body=body)
            request_id, trace = b"%b-%d" % (self.request_id, number), self.trace.step("answer")
            who = self.tenant, trace, self.is_administrator, self.started_s
            part.request = Forwarding(self.router, request, part, request_id, *who)
            split.parts.append(part)
        single = single_answer(self.parsed) if self.parsed.num_prompts == 1 else None
        read_now = partial(self.router.reader.read_now, self.request.path)
        for part in split.parts:
            if part.is_running:  # else one has failed
                part.request._read_with(
                    partial(read_now, part.request.request.body) if single is None else lambda: single
                )

    def forget_body(self) -> None:
        """Let go of what only another attempt would need, as the answer has begun and may take long."""
        self.body, self.request = b"", msgspec.structs.replace(self.request, body=b"")

    def client_headers(self, decision: Decision) -> Headers:
        """Return the headers that the router adds for the client.

        Administrators alone learn what a worker held, as that may tell what others have asked.
        """
        headers = [(b"x-request-id", self.request_id)]
        if self.is_administrator or self.router.config.debug_headers:
            headers.append((b"x-kvist-worker", decision.chosen.target.worker.encode()))
            headers.append((b"x-kvist-overlap-tokens", b"%d" % decision.overlap_tokens))
            if self.handover is not None:
                headers.append((b"x-kvist-prefill-worker", self.handover.prefill_worker.encode()))
        return headers

    # What became of an attempt.

    def on_prefilled(self, attempt: PrefillAttempt, handoff: Handoff | None) -> None:
        """Continue with the prompt that a worker has computed, or without it if `handoff` is None."""
        now_s = self.router.now_s()
        if attempt is self.attempt:
            if handoff is None:
                self._fall_back(LocalReason.PREFILL_REFUSED)
            else:
                self.handover = Handover(handoff, attempt.decision.chosen.target.worker, now_s - attempt.sent_s)
                self.prefill = attempt
            if self.pull is not None and self.router.fleet.get(self.pull.answer.chosen.target.worker) is not None:
                self._answer_by(self.pull.answer)
            else:
                self._send_next()
        elif (answer := self._unanswered_peer(attempt)) is not None and self.handover is not None:
            self.handover.prefill_s, self.handover.sent_s = now_s - attempt.sent_s, now_s
            answer.on_peer_prefilled(attempt)

    def on_prefill_failed(self, attempt: PrefillAttempt, reason: str) -> None:
        """Have another prefill worker compute the prompt, while attempts are left."""
        if attempt.is_pair and (answer := self._unanswered_peer(attempt)) is not None:
            self.tried.discard(answer.decision.chosen.target.worker)
            answer.stop(CLIENT_LEFT_STATUS, _PEER_ENDED)
        elif attempt is not self.attempt:
            return  # the decode worker has what it needs, or reports that it has not
        worker = attempt.decision.chosen.target.worker
        logger.warning("prefill failed worker=%s reason=%s", worker, reason)
        self.tried.add(worker)
        self._count_retry(attempt.decision, reason)
        # A request can do without a pulled prefix; and the last attempt is for an answer, but a pair's is for both.
        num_tried = len(self.tried) + (not attempt.is_pair)
        if self.pull is not None or num_tried >= self.router.config.max_attempts:
            self._fall_back(LocalReason.PREFILL_FAILED)
        self._send_next()

    def on_transfer_failed(self, decision: Decision) -> None:
        """Have one worker do all, or another pair try.

        The worker that could not fetch the prompt may be the one: it is not its fault.
        """
        if not self.is_pair:
            self._fall_back(LocalReason.TRANSFER_FAILED)
            self.tried.discard(decision.chosen.target.worker)
        self.on_answer_failed(decision, "the transfer failed")

    def on_answer_failed(self, decision: Decision, reason: str, *, was_sent: bool = True) -> None:
        """Have another worker answer."""
        self._count_retry(decision, reason)
        if was_sent and self.handover is not None and self.handover.handoff.is_for_one:
            self._fall_back(LocalReason.DECODE_FAILED)
        self._send_next()

    def on_no_endpoint(self, decision: Decision) -> None:
        """Have another worker answer, if there is one: engines differ in the endpoints they have."""
        if self.may_retry():
            self.on_answer_failed(decision, "has no such endpoint")
        else:
            message = f"{self.request.path}: no worker that was asked has this endpoint"
            self._refuse(RequestError(HTTPStatus.NOT_FOUND, message, code="endpoint_not_found"))

    def on_no_answer(self, decision: Decision, error: UpstreamError) -> None:
        """Have another worker answer, if there is one.

        A worker that timed out may still be busy with the request: trying another would double the work. A request that
        was never sent, or whose worker has gone silent, keeps no worker busy, and is not counted as a retry.
        """
        is_lost = self.was_moved or isinstance(error, ConnectError)
        if not isinstance(error, UpstreamTimeoutError) and (self.has_alternative() if is_lost else self.may_retry()):
            self.on_answer_failed(decision, error.reason, was_sent=not isinstance(error, ConnectError))
        else:
            self._refuse(worker_failure(error))

    def has_alternative(self) -> bool:
        """Return whether another worker may answer."""
        is_allowed = len(self.tried) < self.router.config.max_attempts
        return is_allowed and self.router.routing.has_alternative(self.parsed, self.tried)

    def may_retry(self) -> bool:
        """Return whether another worker may answer, and count that as a retry."""
        return self.has_alternative() and self.router.admission.may_retry()

    def _unanswered_peer(self, attempt: PrefillAttempt) -> AnswerAttempt | None:
        """Return the answering attempt beside this one, if the client was sent nothing of its answer yet."""
        peer = self.attempt
        if attempt is self.prefill and isinstance(peer, AnswerAttempt) and not peer.has_begun:
            return peer
        return None

    def _cancel_prefill(self, error: Exception) -> None:
        """Stop the worker that still computes the prompt, as nobody will fetch it."""
        prefill, self.prefill = self.prefill, None
        if prefill is not None and not prefill.is_done:
            prefill.stop(CLIENT_LEFT_STATUS, error)

    def _count_retry(self, decision: Decision, reason: str) -> None:
        worker = decision.chosen.target.worker
        self.router.metrics.counts["retries", worker] += 1
        self.trace.mark("retry", {"kvist.worker": worker, "kvist.reason": reason})

    def _fall_back(self, reason: LocalReason) -> None:
        """Have one worker do all, without what a prefill worker computed or was to compute."""
        self._cancel_prefill(_PEER_ENDED)
        self._release_reserved()
        name = "disaggregation_fallbacks" if self.pull is None else "pulls"
        self.handover, self.pull, self.local_reason = None, None, reason
        self.router.metrics.counts[name, reason] += 1
        self.trace.mark("fallback", {"kvist.reason": reason.value})
        logger.warning("prefill falls back reason=%s request_id=%s", reason, self.request_id.decode("latin-1"))

    # The end.

    def _run(self, step: Callable[..., None], *arguments: object) -> None:
        """Take a step outside of the client's callbacks; a bug in it ends the request, and the loop logs it."""
        try:
            step(*arguments)
        except BaseException:
            message = "the router failed on this request"
            self.abort(RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error"))
            raise

    def _refuse(self, error: RequestError) -> None:
        self.trace.set(spans.of_answer, error.status)
        self.router.refuse(self.responder, error, self.request_id)
        self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """Account for the request, whose answer has ended or is not wanted any more, and release what it holds."""
        if isinstance(self.responder, SplitPart):
            self.responder.on_end(accounting.charged_usage(self), error)
        else:
            accounting.charge(self)
            self.router.on_ended(self, error)
            accounting.log(self, error)
        if isinstance(self.attempt, SplitAttempt):
            self.trace.set(spans.of_answer, self.responder.status or CLIENT_LEFT_STATUS, self.attempt.first_byte_s)
            self.attempt.close()
        if error is not None or self.responder.status != OK:
            self._cancel_prefill(error or _PEER_ENDED)
        if self._deadline is not None:
            self._deadline.close()
        self.attempt = self.prefill = self.place = None  # they refer to this request
        if self.spending is not None:
            self.spending.finish()
        self._release_reserved()
        self.trace.end(error)

    def _release_reserved(self) -> None:
        if self.reserved is not None:
            self.reserved.finish(self.router.now_s())
            self.reserved = None

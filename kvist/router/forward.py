"""The life of one request, top to bottom: read, match, choose, send, relay, account.

    read    the prompt's tokens, as the worker will see them          prompts
    wait    where no worker has room                                  admission
    match   which ranks hold how many of its leading blocks           routing
    choose  a rank, by overlap and load                               policy
    prefill where that is worth it, by another worker first           prefill
    send    the same bytes; another worker if this one fails          here, attempts
            before the first byte of its answer. A vLLM worker
            that is known in part is asked to report all it finds     healing
    relay   the answer's bytes as they come, unchanged                attempts
    account for load, circuit, metrics and the cached tokens reported attempts

It runs in the callbacks of the client's and the workers' sockets, without a task; only a prompt that takes long is read
on a thread. Whatever ends a request, its load is given back; when the client leaves, the worker's connection closes at
once. Each step can be told to a trace (`spans`); untold, it costs what telling nobody costs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
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
from kvist.router import spans
from kvist.router.access_log import MAX_CHARS, AccessLog
from kvist.router.admission import ALONE, Admission, Place, priority_of, timeout_of
from kvist.router.attempts import CLIENT_LEFT_STATUS, OK, AnswerAttempt, PrefillAttempt, worker_failure
from kvist.router.config import RouterConfig
from kvist.router.fleet.load import ActiveRequest
from kvist.router.healing import REPORT_MODE, Healer
from kvist.router.metrics import PREFIX, RouterMetrics, gauge_of
from kvist.router.policy.decision import Decision
from kvist.router.prefill.dialect import FALLBACKS, Handoff, Local
from kvist.router.prefill.handover import Handover, Plan, Releases
from kvist.router.prefill.several import Answers, Part, bodies_of, one_answer
from kvist.router.prompts import APIS, COMPLETION_PATH, Ask, PromptReader, with_model
from kvist.router.recording import SESSION_HEADER, Recorded, RequestRecorder
from kvist.router.regret import Routed
from kvist.router.routing import Known, Prefix, Routing
from kvist.router.tenants.accounts import Accounts
from kvist.router.tenants.isolation import salt_of, takes_salt
from kvist.router.tenants.limits import LIMITED, Limits, Spending
from kvist.router.tenants.tenant import UNJUDGED, Tenant
from kvist.router.usage import ReportedUsage
from kvist.tracing import NO_SPAN, Span

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

logger = logging.getLogger(__name__)

_RELEASE_HEADERS = frozenset({b"authorization", b"traceparent", b"tracestate", b"x-request-id"})

_LOOK_S, _MAX_LOOKS = 0.001, 20
"""How often the index is looked at in vain, before a request is routed by load."""

_PARTED = ConnectionAbortedError("the other of its pair has ended")

Refuse = Callable[[Responder, RequestError, bytes], None]
"""Answers with an error, under the request's id."""


class Forwarder:
    """Sends each request to the worker that its routing chooses, and relays the answer as it comes."""

    def __init__(
        self,
        config: RouterConfig,
        known: Known,
        pool: UpstreamPool,
        metrics: RouterMetrics,
        judge: Callable[[Request], Awaitable[Tenant]],
        refuse: Refuse,
        on_routed: Callable[[Routed], None],
        on_ended: Callable[[Forwarding, Exception | None], None],
        tracing: Tracing | None = None,
        access_log: AccessLog | None = None,
        recorder: RequestRecorder | None = None,
    ) -> None:
        """Decide from what is `known`, and tell of requests that were answered, and of each that has ended."""
        fleet, load, index = known.fleet, known.load, known.index
        self.config, self.fleet, self.load, self.pool, self.metrics = config, fleet, load, pool, metrics
        self.judge, self.refuse, self.on_routed, self.on_ended = judge, refuse, on_routed, on_ended
        self.tracing, self.access_log, self.recorder = tracing, access_log, recorder
        self.now_s = time.monotonic
        self.routing = Routing(known, Random(), self.now_s)
        limits = config.max_queued, config.max_worker_prefill_tokens, config.max_fleet_requests
        self.admission = Admission(fleet, load, self.now_s, pool.clock, *limits)
        self.admission.can_do_all = partial(self.routing.can_do_all, COMPLETION_PATH)
        self.reader = PromptReader(
            known.models,
            has_index=lambda: index is not None and index.has_joined,
            needs_tokens=lambda: index is not None or fleet.has_prefill_workers or recorder is not None,
        )
        self.healer = Healer(fleet, index, metrics)
        self.releases = Releases(pool, lambda outcome: metrics.counts.update([("releases", outcome)]))
        self.accounts, self.limits = Accounts(), Limits(load.tenants, self.now_s)

    def forward(
        self,
        request: Request,
        responder: Responder,
        request_id: bytes,
        tenant: Tenant,
        *,
        is_administrator: bool = False,
    ) -> Forwarding:
        """Answer the request from a worker, or refuse it; what is returned is told of what the client does.

        An administrator may jump the queue, and is told which worker that was, and how much of the prompt it held.
        """
        trace = NO_SPAN
        if self.tracing is not None:
            attributes = spans.of_request(request, request_id)
            trace = self.tracing.request(spans.name_of(request), request.headers, attributes)
        forwarding = Forwarding(self, request, responder, request_id, tenant, trace, is_administrator, self.now_s())
        forwarding.start()
        return forwarding

    def gauges(self) -> Iterator[Metric]:
        """Yield what is true now of those who ask: who waits, what tenants have used, what could not be written."""
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
        yield from self.accounts.collect()
        for name, writer in (("access_log", self.access_log), ("recording", self.recorder)):
            if writer is not None:
                text = "Lines that were dropped, as they could not be written in time or at all"
                yield CounterMetricFamily(f"{PREFIX}_{name}_dropped", text, writer.num_dropped)


@dataclass(slots=True, eq=False)
class Forwarding:
    """One request, from its body to the last byte of its answer. It is a `Producer`, and in one of these states:

        reading      the prompt, on a thread, when it is known    then: waiting
                     who asks
        waiting      for a worker with room, if none has, or for   then: alone
                     one that is full and worth it (`place`)
        alone        `_plan` has one worker do all of it          `AnswerAttempt`; if it fails: alone, by another
                     or fetch a prefix that another holds         `PrefillAttempt`, then `AnswerAttempt`; if either
                                                                  fails: alone, without a `pull`
                     or one compute the prompt for another        `PrefillAttempt`: handed over; if it fails: alone
                     or a pair do so at once                      `AnswerAttempt`, and a `PrefillAttempt` beside it;
                                                                  if either fails: alone, by another pair
                     or each of several answers is a request      `Answers`
                     of its own
        handed over  `_choose_decode` says who goes on            `AnswerAttempt`; if it fails: handed over, to another
                                                                  if the transfer fails, or nobody is left: alone

    `attempt` is the worker that is asked now, `beside` the other of its pair, `handover` the prompt that was or is
    being computed, `local` why none will be, `pull` the plan to fetch a prefix, `reserved` the load of who will fetch
    it, `computed_by` who computes the prompt, `tried` whom not to ask again.
    """

    router: Forwarder
    request: Request
    responder: Responder
    request_id: bytes
    tenant: Tenant
    trace: Span
    is_administrator: bool
    started_s: float
    ask: Ask = field(init=False)
    body: bytes = field(init=False)
    prefix: Prefix = field(default_factory=Prefix)
    is_client_slow: bool = False
    handover: Handover | None = None
    local: Local | None = None
    pull: Plan | None = None
    reserved: ActiveRequest | None = None
    computed_by: Decision | None = None
    tried: set[str] = field(default_factory=set)
    was_moved: bool = False
    place: Place | None = None
    spending: Spending | None = None
    attempt: PrefillAttempt | AnswerAttempt | Answers | None = None
    beside: PrefillAttempt | None = None
    routed: Routed | None = None
    _enter: Callable[..., Place | None] = field(init=False)
    _next_look: asyncio.TimerHandle | None = None
    _deadline: Deadline | None = None
    _reading: asyncio.Task[Ask] | None = None
    _reading_step: Span = NO_SPAN
    _waiting_step: Span = NO_SPAN

    @property
    def is_streamed(self) -> bool:
        """Return whether the client asks for a stream."""
        return self.ask.fields.get("stream") is True

    # What the client does.

    def pause(self) -> None:
        """Let the worker wait, if the answer has begun."""
        self.is_client_slow = True
        if isinstance(self.attempt, AnswerAttempt | Answers):
            self.attempt.pause()

    def resume(self) -> None:
        """Go on."""
        self.is_client_slow = False
        if isinstance(self.attempt, AnswerAttempt | Answers):
            self.attempt.resume()

    def stop(self) -> None:
        """Let everybody know that the client has left."""
        error = ClientDisconnectedError("the client left")
        self._stop(CLIENT_LEFT_STATUS, error)
        self.end(error)

    def shut_down(self) -> None:
        """Tell the client that the router ends, as far as its answer allows."""
        message = "the router is shutting down; ask again"
        self.break_off(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="shutting_down"))

    def break_off(self, error: RequestError) -> None:
        """End the request, whatever it is at, with an error that the client is told if it still can be."""
        attempt = self.attempt
        self._stop(error.status, error)
        if isinstance(attempt, AnswerAttempt | Answers) and attempt.break_off(error):
            self.end(error)
        else:
            self._refuse(error)

    def _stop(self, status: int, error: Exception) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self.place is not None:
            self.router.admission.leave(self.place)
            self._waiting_step.end(error)
        if self._next_look is not None:
            self._next_look.cancel()
        if self.attempt is not None:
            self.attempt.stop(status, error)
        self._leave_beside(error)

    # Read and match.

    def start(self) -> None:
        """Read the prompt; the time for the whole request runs from now on, if there is a bound."""
        timeout_s = self.router.config.request_timeout_s
        if timeout_s is not None:
            message = f"the request was not answered within {timeout_s:g} s"
            error = RequestError(HTTPStatus.GATEWAY_TIMEOUT, message, code="request_timeout")
            self._deadline = Deadline(self.router.pool.clock, lambda _: self.break_off(error))
            self._deadline.set("request", timeout_s)
        self._reading_step = self.trace.step("read")
        path, body = self.request.path, self.request.body
        self._go_on_from(lambda: None if self.tenant is UNJUDGED else self.router.reader.read_now(path, body))

    def _go_on_from(self, read: Callable[[], Ask | None]) -> None:
        """Go on with what is read or, where that would hold the event loop up, have it read on a thread first."""
        self._reading = None
        try:
            ask = read()
        except RequestError as error:
            self._reading_step.end(error)
            self._refuse(error)
            return
        if ask is None:
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="kvist-read-prompt")
            self._reading.add_done_callback(self._on_reading_done)
        else:
            self._on_read(ask)

    async def _read(self) -> Ask:
        if self.tenant is UNJUDGED:
            self.tenant = await self.router.judge(self.request)
        return await self.router.reader.read(self.request.path, self.request.body)

    def _on_reading_done(self, reading: asyncio.Task[Ask]) -> None:
        if self._reading is None:  # the client left, even if the prompt was read by then
            self._reading_step.end(ClientDisconnectedError("the client left"))
        else:
            self._take(self._go_on_from, reading.result)

    def _on_read(self, ask: Ask) -> None:
        router, self.ask = self.router, ask
        if isinstance(self.responder, Part):  # the whole was let in
            self.ask = msgspec.structs.replace(ask, prefill_rank=self.responder.prefill_rank)
            self.body = self.request.body
            self._look(_MAX_LOOKS)
            return
        self.body = without_field(self.request.body, ask.fields, *REPORT_MODE)
        if not router.config.workers_use_priority:  # vLLM refuses one that it does not use
            self.body = without_field(self.body, ask.fields, "priority")
        self.body = with_model(self.request.path, self.body, ask)
        self._reading_step.end()
        router.metrics.counts["readings", APIS.get(self.request.path, "other"), ask.outcome, ask.obstacle or ""] += 1
        self.trace.set(spans.of_ask, ask)
        try:
            if self.request.body:
                self.tenant.check_models(ask.model, ask.fields)
                self._isolate()
            timeout_s = timeout_of(self.request, router.config.queue_timeout_s)
            priority = priority_of(ask.fields, self.tenant.priority, is_administrator=self.is_administrator)
            if router.config.workers_use_priority and priority != ask.fields.get("priority", 0):
                self.body = with_fields(self.body, {"priority": priority})
            self.spending = router.limits.enter(self.tenant)
            work = partial(router.routing.work_of, self.ask) if router.config.has_tenants else lambda: 0.0
            asked = ask.model, priority, timeout_s, self.tenant
            self._enter = partial(router.admission.enter, self, *asked, work=work, since_s=router.now_s())
            self.place = self._enter()
        except RequestError as error:
            if error.code == LIMITED:
                router.accounts.of(self.tenant.name, router.fleet.label_of(ask.model)).limited += 1
            self._refuse(error)
            return
        if self.place is None:
            self._look(_MAX_LOOKS)
        else:
            self._waiting_step = self.trace.step("queue")

    def _isolate(self) -> None:
        """Have caches keep the prompt apart from other tenants', if they are to; raises RequestError if they cannot."""
        secret, ask = self.router.config.isolation_secret, self.ask
        if self.router.config.isolation == "none" or secret is None or not takes_salt(self.request.path):
            return
        self.ask = msgspec.structs.replace(ask, cache_salt=salt_of(secret, self.tenant, ask.cache_salt))
        self.body = with_fields(self.body, {"cache_salt": self.ask.cache_salt})

    # Wait and match.

    def on_room(self) -> None:
        """Go on, with caches and loads as they are now; who has had its turn and waits for a worker pays no more."""
        self._waiting_step.end()
        self._enter = partial(self._enter, work=lambda: 0.0)
        self._take(self._look, _MAX_LOOKS)

    def on_refused(self, error: RequestError) -> None:
        """Tell the client that the wait was in vain."""
        self._waiting_step.end(error)
        self._refuse(error)

    def _look(self, num_left: int) -> None:
        """Look who holds the prompt, again and again while the index is being written to by another process."""
        self._next_look = None
        with self.trace.step("match"):
            prefix = self.router.routing.prefix(self.ask)
        if prefix is None and num_left:
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_S, self._take, self._look, num_left - 1)
            return
        if prefix is None:
            self.router.metrics.counts["unmatched",] += 1
        self.prefix = prefix or Prefix()
        self._ask_next()

    # Choose and send.

    def _ask_next(self) -> None:
        """Ask the next worker, or refuse the request where there is none."""
        self.attempt = None
        if self.handover is not None and self.pull is not None:  # who was to fetch the prefix is away
            self._fall_back(Local.DECODE_FAILED)
        if self.beside is not None:  # another pair meets elsewhere
            self._leave_beside(_PARTED)
            self.handover = None
        try:
            if self.handover is not None:
                decode = self._choose_decode(self.handover.prefill_worker)
                if decode is None:
                    self._fall_back(Local.DECODE_FAILED)
                else:
                    self._answer_by(decode)
                    return
            plan, full = self._plan()
            may_wait = not self.tried and not isinstance(self.responder, Part)
            worker = plan.answer.chosen.target.worker
            if may_wait and worker in full and plan.dialect.works_alone:
                seat = ALONE if self.router.fleet.has_roles else worker
                self.place, self._waiting_step = self._enter(worker=seat), self.trace.step("queue")
                return
        except RequestError as error:
            self._refuse(error)
            return
        if self.place is not None and self.computed_by is None:
            model = self.router.fleet.label_of(self.ask.model)
            self.router.metrics.observe(self.place.waited_s, "queue_seconds", model)
        self.pull = plan if plan.pulled_tokens else None
        self.computed_by = plan.answer if self.pull is not None else plan.prefill or plan.answer
        if self.spending is not None:
            self.spending.computes(self.ask.num_tokens - self.computed_by.overlap_tokens)
        if plan.is_several:
            self._answer_each(plan.answer)
        elif plan.prefill is None:
            self._answer_by(plan.answer)
        elif plan.handoff is None:
            self.attempt = PrefillAttempt(self, plan.prefill, plan)
            if self.pull is not None:
                now_s = self.router.now_s()
                self.reserved = self.router.routing.begin(now_s, plan.answer, is_streamed=self.is_streamed)
        else:
            self.handover = Handover(plan.handoff, plan.prefill.chosen.target.worker)
            self.beside = PrefillAttempt(self, plan.prefill, plan)
            self._answer_by(plan.answer)

    def _plan(self) -> tuple[Plan, Mapping[str, float]]:
        """Return who answers and who computes the prompt, and who is full.

        Why nobody computes it for another is noted the first time.
        """
        full = self.router.admission.full(self.ask.model, self.tried)
        full.pop(self.ask.worker or "", None)  # that one has what nobody else has
        with self.trace.step("choose") as choice:
            plan = self.router.routing.plan(self.request.path, self.ask, self.prefix, self.tried, full, self.local)
            choice.set(spans.of_plan, plan)
        if plan.local is not None and plan.local not in FALLBACKS:
            if not self.tried:
                self.local = plan.local
                self.router.metrics.counts["local_prefills", plan.local] += 1
            elif self.local is None:  # so those that were tried are prefill workers, or of pairs
                is_decoding = plan.local is Local.NO_DECODE_WORKER
                self._fall_back(Local.DECODE_FAILED if is_decoding else Local.PREFILL_FAILED)
                self.local = plan.local  # pairs that have no room now may be tried yet
        return plan, full

    def _choose_decode(self, prefill_worker: str) -> Decision | None:
        """Return who goes on with the prompt that was computed, if anybody can; who is full, only where all are."""
        full = self.router.admission.full(self.ask.model, self.tried)
        decide = partial(self.router.routing.decode_decision, self.ask, self.prefix, prefill_worker)
        with self.trace.step("choose") as choice:
            decision = decide({*self.tried, *full}) or decide(self.tried)
            choice.set(spans.of_decision, decision)
        return decision

    def _answer_by(self, decision: Decision) -> None:
        if not self.tried:
            self.router.admission.on_first_attempt()
        self.tried.add(decision.chosen.target.worker)
        self.attempt = AnswerAttempt(self, decision)

    def _answer_each(self, decision: Decision) -> None:
        """Have each of several answers made by a request of its own, that goes the usual way."""
        answers = self.attempt = Answers(self, decision)
        for number, body in enumerate(bodies_of(self.ask, self.body)):
            part, request = Part(answers, number), msgspec.structs.replace(self.request, body=body)
            request_id, trace = b"%b-%d" % (self.request_id, number), self.trace.step("answer")
            who = self.tenant, trace, self.is_administrator, self.started_s
            part.request = Forwarding(self.router, request, part, request_id, *who)
            answers.parts.append(part)
        one = one_answer(self.request.path, self.ask) if self.ask.num_prompts == 1 else None
        read_now = partial(self.router.reader.read_now, self.request.path)
        for part in answers.parts:
            if part.is_running:  # else one has failed
                part.request._go_on_from(partial(read_now, part.request.request.body) if one is None else lambda: one)

    def headers_for(self, worker: str) -> Headers:
        """Return the client's headers as this worker gets them."""
        return forwarded_headers(self.request, self.router.config, worker, self.request_id)

    def own_headers(self, decision: Decision) -> Headers:
        """Return what the client is told. Who knows what a worker held may learn what others have asked."""
        told = [(b"x-request-id", self.request_id)]
        if self.is_administrator or self.router.config.debug_headers:
            told.append((b"x-kvist-worker", decision.chosen.target.worker.encode()))
            told.append((b"x-kvist-overlap-tokens", b"%d" % decision.overlap_tokens))
            if self.handover is not None:
                told += self.handover.headers()
        return told

    # What came of an attempt.

    def on_prefilled(self, attempt: PrefillAttempt, handoff: Handoff | None, prefill_s: float) -> None:
        """Go on with the prompt that a worker computes, or without it; the other of a pair does so by itself."""
        if attempt is self.attempt:
            if handoff is None:
                self._fall_back(Local.PREFILL_REFUSED)
            else:
                self.handover = Handover(handoff, attempt.decision.chosen.target.worker, prefill_s)
                attempt.handover = self.handover
            if self.pull is not None and self.router.fleet.get(self.pull.answer.chosen.target.worker) is not None:
                self._answer_by(self.pull.answer)
            else:
                self._ask_next()
        elif (other := self._awaiting(attempt)) is not None and self.handover is not None:
            self.handover.prefill_s, self.handover.sent_s = prefill_s, self.router.now_s()
            other.on_prefilled(attempt)

    def on_prefill_failed(self, attempt: PrefillAttempt, reason: str) -> None:
        """Have another prefill worker compute the prompt, while attempts are left."""
        if (other := self._awaiting(attempt)) is not None:
            self.tried.discard(other.decision.chosen.target.worker)
            other.stop(CLIENT_LEFT_STATUS, _PARTED)
        elif attempt is not self.attempt:
            return  # the decode worker has what it needs, or says that it has not
        worker = attempt.decision.chosen.target.worker
        logger.warning("prefill failed worker=%s reason=%s", worker, reason)
        self.tried.add(worker)
        self._note_retry(attempt.decision, reason)
        # Without a prefix a request can be answered; and the last attempt is for who answers, but that is of a pair.
        num_tried = len(self.tried) + (self.beside is None)
        if self.pull is not None or num_tried >= self.router.config.max_attempts:
            self._fall_back(Local.PREFILL_FAILED)
        self._ask_next()

    def on_transfer_failed(self, decision: Decision) -> None:
        """Have one worker do all: the one that could not fetch the prompt may, it is not its fault; or another pair."""
        if self.beside is None:
            self._fall_back(Local.TRANSFER_FAILED)
            self.tried.discard(decision.chosen.target.worker)
        self.on_answer_failed(decision, "the transfer failed")

    def on_answer_failed(self, decision: Decision, reason: str) -> None:
        """Have another worker answer."""
        self._note_retry(decision, reason)
        self._ask_next()

    def on_no_endpoint(self, decision: Decision) -> None:
        """Have another worker answer, if there is one: engines differ in what they have."""
        if self.may_retry():
            self.on_answer_failed(decision, "has no such endpoint")
        else:
            message = f"{self.request.path}: no worker that was asked has this endpoint"
            self._refuse(RequestError(HTTPStatus.NOT_FOUND, message, code="endpoint_not_found"))

    def on_no_answer(self, decision: Decision, error: UpstreamError) -> None:
        """Have another worker answer, if there is one.

        A worker that was silent too long may still be busy with it: trying another would double the work. What no
        worker works at, as it was not sent or its worker has stopped, makes none busier, and is not budgeted.
        """
        is_lost = self.was_moved or isinstance(error, ConnectError)
        if not isinstance(error, UpstreamTimeoutError) and (self.has_other() if is_lost else self.may_retry()):
            self.on_answer_failed(decision, error.reason)
        else:
            self._refuse(worker_failure(error))

    def has_other(self) -> bool:
        """Return whether there is another worker that may answer."""
        is_allowed = len(self.tried) < self.router.config.max_attempts
        return is_allowed and self.router.routing.has_alternative(self.request.path, self.ask, self.tried)

    def may_retry(self) -> bool:
        """Return whether another worker may answer, and count it."""
        return self.has_other() and self.router.admission.may_retry()

    def _awaiting(self, attempt: PrefillAttempt) -> AnswerAttempt | None:
        """Return the attempt that waits for this one of its pair: nothing of its answer was sent."""
        other = self.attempt
        return other if attempt is self.beside and isinstance(other, AnswerAttempt) and not other.has_begun else None

    def _leave_beside(self, error: Exception) -> None:
        beside, self.beside = self.beside, None
        if beside is not None and not beside.is_done:
            beside.stop(CLIENT_LEFT_STATUS, error)

    def _note_retry(self, decision: Decision, reason: str) -> None:
        """Count that another worker gets what this one failed."""
        worker = decision.chosen.target.worker
        self.router.metrics.counts["retries", worker] += 1
        self.trace.mark("retry", {"kvist.worker": worker, "kvist.reason": reason})

    def _fall_back(self, reason: Local) -> None:
        """Do without what a prefill worker computed, or was to: one worker does all."""
        self._release()
        name = "disaggregation_fallbacks" if self.pull is None else "pulls"
        self.handover, self.pull, self.local = None, None, reason
        self.router.metrics.counts[name, reason] += 1
        self.trace.mark("fallback", {"kvist.reason": reason.value})
        logger.warning("prefill is local again reason=%s request_id=%s", reason, self.request_id.decode("latin-1"))

    # The end.

    def _take(self, step: Callable[..., None], *arguments: object) -> None:
        """Take a step that others than the client's socket begin, and end the request if it fails."""
        try:
            step(*arguments)
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        """End a request that a fault of ours has stopped, which the loop logs."""
        message = "the router failed on this request"
        self.break_off(RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error"))

    def _refuse(self, error: RequestError) -> None:
        self.trace.set(spans.of_answer, error.status)
        self.router.refuse(self.responder, error, self.request_id)
        self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """Let go of what the request still holds; its answer has ended or nobody will read it."""
        if isinstance(self.responder, Part):
            self.responder.on_end(error)
        else:
            self._account()
            self.router.on_ended(self, error)
            if self.router.access_log is not None or self.router.recorder is not None:
                self._log(error)
        if isinstance(self.attempt, Answers):
            self.trace.set(spans.of_answer, self.responder.status or CLIENT_LEFT_STATUS, self.attempt.first_byte_s)
        if error is not None or self.responder.status != OK:
            self._leave_beside(error or _PARTED)
        self.attempt = self.beside = None
        if self._deadline is not None:
            self._deadline.close()
        if self.spending is not None:
            self.spending.finish()
        self._release()
        self.trace.end(error)

    def _account(self) -> None:
        charged = self.charged()
        if charged is None:
            return
        account = self.router.accounts.of(self.tenant.name, self.router.fleet.label_of(self.ask.model))
        num_cached_tokens = charged.cached_tokens or 0
        account.requests += 1
        account.prompt_tokens += charged.prompt_tokens
        account.cached_tokens += num_cached_tokens
        account.output_tokens += charged.completion_tokens or 0
        if self.spending is not None:
            self.spending.computes(charged.prompt_tokens - num_cached_tokens)

    def charged(self) -> ReportedUsage | None:
        """Return what a tenant pays of an answer that has begun: as its worker says or, for want of that, is known."""
        attempt, computed_by = self.attempt, self.computed_by
        if self.responder.status != OK:
            return None
        if isinstance(attempt, Answers):
            return attempt.usage
        if not isinstance(attempt, AnswerAttempt) or computed_by is None:
            return None
        usage = attempt.usage or ReportedUsage(self.ask.num_tokens, None)
        is_here = self.handover is None or self.pull is not None
        reported = usage.cached_tokens if is_here else None  # what was fetched was computed, too
        num_cached_tokens = min(usage.prompt_tokens, computed_by.overlap_tokens if reported is None else reported)
        return ReportedUsage(usage.prompt_tokens, num_cached_tokens, attempt.num_output_tokens)

    def _log(self, error: Exception | None) -> None:
        """Tell the access log and the recording of the request."""
        router, ended_s = self.router, self.router.now_s()
        attempt, status = self.attempt, self.responder.status or CLIENT_LEFT_STATUS
        ask: Ask | None = getattr(self, "ask", None)  # there is none of a prompt that could not be read
        num_tokens = None if ask is None or ask.token_ids is None else ask.num_tokens
        decision, usage = (None, None) if attempt is None else (attempt.decision, attempt.usage)
        told: dict[str, object] = {
            "tenant": self.tenant.name,
            "worker": None if decision is None else decision.chosen.target.worker,
            "num_attempts": len(self.tried),
            "queue_s": 0.0 if self.place is None else round(self.place.waited_s, 6),
            "first_byte_s": None if attempt is None else attempt.first_byte_s,
            "total_s": round(ended_s - self.started_s, 6),
            "overlap_predicted": None if decision is None or num_tokens is None else decision.overlap_tokens,
            "overlap_reported": None if usage is None else usage.cached_tokens,
        }
        if router.access_log is not None:
            cause = "the worker answered so" if status >= HTTPStatus.BAD_REQUEST else None
            router.access_log.write(
                self.request,
                self.request_id,
                status,
                cause if error is None else str(error),
                model=None if ask is None or ask.model is None else ask.model[:MAX_CHARS],
                input_tokens=num_tokens if usage is None else usage.prompt_tokens,
                output_tokens=None if usage is None else usage.completion_tokens,
                **told,
            )
        if router.recorder is not None and (ask is None or ask.num_tokens):  # some requests are about answers of old
            hashes, num_blocks, told["block_size"] = router.routing.naming(ask, self.prefix)
            told["status"], told["streamed"] = status, attempt is not None and attempt.is_event_stream
            if told["overlap_predicted"] is not None and decision is not None:
                told["overlap_held"] = self.prefix.held_tokens(decision.prompt)
            if (routed := self.routed) is not None:
                told["overlap_in_flight"], told["overlap_under_way"] = routed.in_flight, routed.under_way
                told["exact"], told["alike"] = routed.is_exact, routed.alike
            told["model"] = None if ask is None else router.fleet.label_of(ask.model)
            told["input_length"] = (usage and usage.prompt_tokens) or (ask and ask.num_tokens)
            told["output_length"] = 0 if attempt is None else attempt.num_output_tokens
            session = self.request.header(SESSION_HEADER)
            router.recorder.write(Recorded(self.started_s, ended_s, session, hashes, told), num_blocks)

    def _release(self) -> None:
        """Tell the prefill worker that nobody will fetch the prompt, unless whoever should has begun to answer."""
        if self.reserved is not None:
            self.reserved.finish(self.router.now_s())
            self.reserved = None
        handover = self.handover
        if handover is None or handover.is_fetched or handover.handoff.remote_request_id is None:
            return
        worker = self.router.fleet.get(handover.prefill_worker)
        if worker is not None and worker.identity.engine == "kvist":
            theirs = self.headers_for(worker.url)
            headers = [field for field in self.trace.headers(theirs) if field[0] in _RELEASE_HEADERS]
            self.router.releases.release(worker.url, handover.handoff.remote_request_id, headers)


def forwarded_headers(request: Request, config: RouterConfig, worker: str, request_id: bytes) -> Headers:
    """Return the request's headers as a worker gets them, under the request's id and with the worker's own key.

    What a client shows is passed on only where nobody here asks for it and the worker has no key from us.
    """
    authorization = config.authorization(worker)
    dropped = {b"x-request-id"}
    if authorization or config.asks_for_keys or (config.admin_key and request.bears(config.admin_key)):
        dropped.add(b"authorization")
    headers = [field for field in request.headers if field[0] not in dropped]
    return [*headers, (b"x-request-id", request_id), *authorization]

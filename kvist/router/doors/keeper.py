"""Who knows the fleet: follows its streams, checks its workers, and answers for them.

    GET  /health      200 while the router serves              POST   /workers     add {"url", "role"?, …}
    GET  /readiness   200 while requests can be taken           DELETE /workers     ?url=…: drain, then remove
    GET  /metrics     Prometheus text                          GET    /get_loads   load by rank
    GET  /workers     every worker, its state and why          POST   /route       the decision for a body, not sent
    GET  /regret      where hits went, of ?window=10m           GET    /usage      what tenants have used
    GET  /ui/state    what the live page shows, ?since=…

The caller has checked who may ask (`kvist.router.doors.auth`), and answers /route itself: who decides can explain. It
is part of a router that is one process (`service`), and a process of its own where there are several (`processes`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvist import __version__
from kvist.errors import InvalidValueError
from kvist.http import Request, Responder, UpstreamPool
from kvist.metrics_page import MetricsPage
from kvist.openai.errors import RequestError, error_body
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.admission import Admission
from kvist.router.config import RouterConfig
from kvist.router.conversations import Conversations, Kept
from kvist.router.doors.auth import is_administrator
from kvist.router.doors.explain import explain_load, explain_readiness, explain_workers
from kvist.router.doors.journal import Seen
from kvist.router.doors.live import STATE_PATH, LiveState
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.membership import Membership
from kvist.router.fleet.models import Models
from kvist.router.fleet.replicas import Replicas
from kvist.router.fleet.speeds import kept_speeds
from kvist.router.index import FleetIndex
from kvist.router.metrics import FleetGauges
from kvist.router.regret import Regret, Routed
from kvist.router.routing import Known
from kvist.router.sources import WantedWorker
from kvist.router.tenants.accounts import used

_WINDOW, _UNITS_S = re.compile(r"([1-9][0-9]{0,3})([smh])"), {"s": 1, "m": 60, "h": 3600}
_RESIZE_S = 1.0
"""How often it is asked how much all caches hold."""


class Question(msgspec.Struct, frozen=True):
    """A request to one of these endpoints.

    `is_draining` says how its asker is, `tenant` who asks for its own usage, `is_outsider` that who asks is to know no
    more than whether requests can be taken.
    """

    method: str
    path: str
    query: str = ""
    content_type: str = ""
    body: bytes = b""
    is_draining: bool = False
    tenant: str | None = None
    is_outsider: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What to answer it."""

    status: int
    body: bytes
    content_type: str = "application/json"


class FleetKnowledge(Known, Protocol):
    """What a router needs to know of its fleet, from a keeper in its own process or in another."""

    async def answer(self, question: Question) -> Answer:
        """Return what to answer an operator."""

    def on_routed(self, request: Routed) -> None:
        """Take what came of a request, for `GET /regret`."""

    def on_seen(self, request: Seen) -> None:
        """Take a request, as the live page shows it."""

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on."""

    def connect(self, conversations: Conversations, admission: Admission) -> None:
        """Have other processes that take requests know of responses and of room, and these of theirs."""


class Keeper:
    """A `FleetKnowledge` while its context is open."""

    def __init__(
        self,
        config: RouterConfig,
        pool: UpstreamPool,
        load: LoadTracker,
        started_s: float,
        *,
        registry: CollectorRegistry | Collector,
        gauges: Callable[[], Iterator[Metric | None]] = lambda: iter(()),
        counted: Callable[[], Iterable[Metric | None]] | None = None,
        on_removed: Callable[[str], None] = lambda _: None,
        descriptor: int | None = None,
    ) -> None:
        """Its metrics are those of the fleet, what `gauges` yields, and, read in a thread, what `registry` has.

        What tenants have used is in those that `counted` yields, by default `gauges`.

        The index lies in the file of a `descriptor`, if there is one, for other processes to read.
        """
        now_s = time.monotonic
        self.load, self._config = load, config
        self.index = FleetIndex(config, now_s, descriptor) if config.policy == "kv" else None
        self.fleet = Fleet(config.block_size, self.index, now_s, config.engines)
        self.models = Models(config, self.fleet, self._on_tokenizer)
        self.membership = Membership(config, pool, self.fleet, self.models, load, self.index, now_s, on_removed)
        self.replicas = None if config.replicas is None else Replicas(config.replicas, load.board, self.fleet, now_s)
        own = FleetGauges(self.fleet, load, self.index, self.replicas, now_s)
        discovered = self.membership.discovery.metrics
        self._page = MetricsPage(lambda: chain(own.collect(), discovered(), gauges()), registry)
        self._counted, self._started_s = counted or gauges, started_s
        self._regret, self._capacity_blocks, self._sized_at_s = Regret(), 0, -math.inf
        self._live = LiveState(self.fleet, self.models, load, self.index, self._regret, self._explain_others)
        self._endpoints = {
            ("GET", "/health"): self._health,
            ("GET", "/readiness"): self._readiness,
            ("GET", "/workers"): self._list_workers,
            ("POST", "/workers"): self._add_worker,
            ("DELETE", "/workers"): self._drain_worker,
            ("GET", "/get_loads"): self._loads,
            ("GET", "/regret"): self._regret_of_window,
            ("GET", "/usage"): self._usage,
            ("GET", STATE_PATH): self._live_state,
        }
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            await exits.enter_async_context(self.models)  # reads while workers are asked who they are
            if self.index is not None:
                await exits.enter_async_context(self.index)
            if self._config.state_dir is not None:
                path = Path(self._config.state_dir) / "router.speeds.json"
                await exits.enter_async_context(kept_speeds(path, self.load.board, self._config.state_interval_s))
            await exits.enter_async_context(self.membership)
            await self.models.configured()
            if self.replicas is not None:
                await exits.enter_async_context(self.replicas)
            self._live.start()
            exits.callback(self._live.close)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._exits.__aexit__(*exception)  # type: ignore[arg-type]

    async def answer(self, question: Question) -> Answer:
        """Return what to answer an operator, also where that is an error."""
        method = "GET" if question.method == "HEAD" else question.method
        try:
            if (method, question.path) == ("GET", "/metrics"):
                return Answer(HTTPStatus.OK, await self._page.text(), CONTENT_TYPE_LATEST)
            endpoint = self._endpoints.get((method, question.path))
            if endpoint is None:
                message = f"{question.method} {question.path}: the endpoint is not used so"
                raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, message)
            return endpoint(question)
        except RequestError as error:
            return refusal(error)
        except InvalidValueError as error:
            return refusal(RequestError(HTTPStatus.BAD_REQUEST, str(error)))

    def on_routed(self, request: Routed) -> None:
        """Add up what came of a request."""
        now_s = time.monotonic()
        if now_s - self._sized_at_s > _RESIZE_S:
            ranks = (rank for worker in self.fleet.workers for rank in self.fleet.ranks(worker))
            self._capacity_blocks, self._sized_at_s = sum(rank.num_blocks for rank in ranks), now_s
        self._regret.add(now_s, [request], self._capacity_blocks)

    def on_seen(self, request: Seen) -> None:
        """Show a request on the live page."""
        self._live.add(request)

    def _on_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Have the tokens of the model's workers compared with these from now on."""
        if self.index is not None:
            self.fleet.renderings.start(tokenizer)
            self.membership.check_renderings()

    def connect(self, conversations: Conversations, admission: Admission) -> None:  # noqa: ARG002
        """There are no others here, but may be other routers."""
        if self.replicas is not None:
            replicas = self.replicas
            conversations.on_kept = lambda response_id, kept: replicas.relayed(response_id, kept.worker)
            replicas.on_response = lambda response_id, worker: conversations.keep(response_id, Kept(worker, None))

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on."""
        self.models.reconfigure(config)
        self.membership.reconfigure(config)

    # What operators ask.

    def _health(self, _: Question) -> Answer:
        joined_at_s = None if self.index is None else self.index.joined_at_s
        cold_start_s = None if joined_at_s is None else round(joined_at_s - self._started_s, 3)
        return json_answer({"status": "ok", "version": __version__, "cold_start_s": cold_start_s} | self._kept_state())

    def _readiness(self, question: Question) -> Answer:
        page = explain_readiness(self.fleet, self.models, self.index, is_draining=question.is_draining)
        page |= self._explain_others()
        told = {"ready": page["ready"]} if question.is_outsider else page
        return json_answer(told, HTTPStatus.OK if page["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)

    def _explain_others(self) -> dict[str, Any]:
        """Return what readiness tells beside the fleet."""
        told: dict[str, Any] = self._kept_state()
        if self.replicas is not None:
            told["replicas"] = self.replicas.described()
        if sources := self.membership.discovery.explain():
            told["discovery"] = sources
        return told

    def _kept_state(self) -> dict[str, Any]:
        state = None if self.index is None else self.index.state_statistics()
        return {} if state is None else {"state": state.described()}

    def _list_workers(self, _: Question) -> Answer:
        explained = explain_workers(self.fleet, self.load, self.index, self._regret, time.monotonic())
        return json_answer({"workers": explained})

    def _add_worker(self, question: Question) -> Answer:
        # A page in a browser can post to loopback, but not with this content type unless it is allowed to.
        if question.content_type.partition(";")[0].strip() != "application/json":
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type: expected application/json")
        try:
            new = msgspec.json.decode(question.body, type=WantedWorker)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"body: {error}") from None
        worker = self.membership.add(new)
        return json_answer({"url": worker.url, "state": worker.state}, HTTPStatus.CREATED)

    def _drain_worker(self, question: Question) -> Answer:
        url = parse_qs(question.query).get("url", [""])[-1].rstrip("/")
        worker = self.fleet.get(url)
        if worker is None:
            raise RequestError(HTTPStatus.NOT_FOUND, f"url: got {url!r}, expected a known worker", param="url")
        self.membership.remove(worker)
        return json_answer({"url": worker.url, "state": worker.state}, HTTPStatus.ACCEPTED)

    def _loads(self, _: Question) -> Answer:
        now_s = time.monotonic()
        targets = [rank.target for worker in self.fleet.workers for rank in self.fleet.ranks(worker)]
        return json_answer({"loads": [explain_load(target, self.load.load(target, now_s)) for target in targets]})

    def _regret_of_window(self, question: Question) -> Answer:
        given = parse_qs(question.query).get("window", ["10m"])[-1]
        window = _WINDOW.fullmatch(given)
        if window is None:
            raise InvalidValueError("window", given, "a time of up to an hour: 90s, 10m or 1h")
        return json_answer(self._regret.report(time.monotonic(), int(window[1]) * _UNITS_S[window[2]]))

    def _live_state(self, question: Question) -> Answer:
        return Answer(HTTPStatus.OK, self._live.state(question.query))

    def _usage(self, question: Question) -> Answer:
        return json_answer({"usage": used(self._counted(), question.tenant)})


def json_answer(value: Any, status: int = HTTPStatus.OK) -> Answer:
    """Return an answer of JSON."""
    return Answer(status, msgspec.json.encode(value))


def question_of(
    request: Request, config: RouterConfig, is_draining: bool = False, tenant: str | None = None
) -> Question:
    """Return what an operator asks over HTTP."""
    content_type = (request.header(b"content-type") or b"").decode("latin-1")
    is_outsider = config.asks_for_keys and not is_administrator(request, config.admin_key)
    asked = request.method, request.path, request.query, content_type, request.body
    return Question(*asked, is_draining, tenant, is_outsider)


def show(answer: Answer, responder: Responder) -> None:
    """Send an operator what was answered."""
    responder.answer(answer.status, [(b"content-type", answer.content_type.encode())], answer.body)


def refusal(error: RequestError) -> Answer:
    """Return an answer that says what was wrong."""
    return Answer(error.status, error_body(error))

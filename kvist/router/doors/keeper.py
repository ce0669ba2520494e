"""The keeper of a router: it follows the fleet's event streams, checks its workers, and answers operators' requests.

    GET  /health      200 while the router serves              POST   /workers     add {"url", "role"?, …}
    GET  /readiness   200 while requests can be taken           DELETE /workers     ?url=…: drain, then remove
    GET  /metrics     Prometheus text                          GET    /get_loads   load by rank
    GET  /workers     every worker, its state and why          POST   /route       the decision for a body, not sent
    GET  /regret      where hits went, of ?window=10m           GET    /usage      what tenants have used
    GET  /ui/state    what the live page shows, ?since=…

Its caller has checked who may ask (`kvist.router.doors.auth`), and answers /route, as it makes the decisions. A router
of one process has a keeper in it (`service`); a router of several processes has a keeper process (`processes`).
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvist import __version__
from kvist.contexts import ComposedContext
from kvist.errors import InvalidValueError
from kvist.files import exclusive_folder
from kvist.http import Request, Responder, UpstreamPool
from kvist.metrics_page import MetricsPage
from kvist.openai.errors import RequestError, error_body, error_headers
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.admission import Admission
from kvist.router.config import RouterConfig
from kvist.router.conversations import Conversations
from kvist.router.doors.auth import is_administrator
from kvist.router.doors.explain import explain_load, explain_readiness, explain_workers
from kvist.router.doors.journal import JournalEntry
from kvist.router.doors.live import STATE_PATH, LiveState
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.membership import Membership
from kvist.router.fleet.models import Models
from kvist.router.fleet.replicas import Replicas, num_replicas
from kvist.router.fleet.speeds import saved_speeds
from kvist.router.index import FleetIndex
from kvist.router.metrics import fleet_metrics
from kvist.router.regret import Regret, Routed
from kvist.router.routing import FleetView
from kvist.router.sources import WantedWorker
from kvist.router.tenants.accounts import used

_WINDOW, _UNITS_S = re.compile(r"([0-9]{1,4})([smh])"), {"s": 1, "m": 60, "h": 3600}
_RESIZE_S = 1.0
"""How often the size of all caches together is computed anew."""


class Question(Request, frozen=True):
    """A request to one of these endpoints.

    `is_draining` says that the router that received it drains, `tenant` who asks for its own usage, `is_outsider` that
    the client may learn no more than whether the router is ready.
    """

    is_draining: bool = False
    tenant: str | None = None
    is_outsider: bool = False


class Answer(msgspec.Struct, frozen=True):
    """The response to a `Question`."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: list[tuple[bytes, bytes]] = []


class FleetKeeper(FleetView, Protocol):
    """What a router needs to know of its fleet, from a keeper in its own process or in another."""

    async def answer(self, question: Question) -> Answer:
        """Answer an operator."""

    def on_routed(self, request: Routed) -> None:
        """Add an answered request to the statistics of `GET /regret`."""

    def on_journal_entry(self, entry: JournalEntry) -> None:
        """Add a request to the live page."""

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply another configuration."""

    def connect(self, conversations: Conversations, admission: Admission) -> None:
        """Share stored responses with other processes and routers, and free room with other processes."""


class Keeper(ComposedContext):
    """A `FleetKeeper` of this process while its context is open."""

    def __init__(
        self,
        config: RouterConfig,
        pool: UpstreamPool,
        started_s: float,
        load: LoadTracker | None = None,
        *,
        registry: CollectorRegistry | Collector,
        gauges: Callable[[], Iterator[Metric | None]] = lambda: iter(()),
        refresh: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0),
        descriptor: int | None = None,
    ) -> None:
        """Its metrics are the fleet's, those that `gauges` yields, and those of `registry`, which a thread reads.

        `refresh` updates the registry before each page. `load` is by default counted in this process alone. If there is
        a `descriptor`, the index lies in its file, for other processes to read.
        """
        now_s = time.monotonic
        load = LoadTracker(LoadBoard(num_replicas=num_replicas(config))) if load is None else load
        self.load, self._config = load, config
        self.index = FleetIndex(config, now_s, descriptor) if config.policy == "kv" else None
        self.fleet = Fleet(config.block_size, self.index, now_s, config.engines)
        self.models = Models(config, self.fleet, self._on_tokenizer)
        self.membership = Membership(config, pool, self.fleet, self.models, load, self.index, now_s)
        self.fleet.on_unknown_model = self.membership.check_all
        self.replicas = None if config.replicas is None else Replicas(config.replicas, load.board, self.fleet, now_s)
        measured, discovered = (self.fleet, load, self.index, self.replicas), self.membership.discovery.metrics
        self._page = MetricsPage(lambda: chain(fleet_metrics(*measured), discovered(), gauges()), registry, refresh)
        self._started_s = started_s
        self._regret, self._capacity_blocks, self._sized_at_s = Regret(), 0, -math.inf
        self._live = LiveState(self.fleet, self.models, load, self.index, self._regret, self._explain_more)
        self._endpoints: dict[tuple[str, str], Callable[[Question], Answer]] = {
            ("GET", "/health"): self._health,
            ("GET", "/readiness"): self._readiness,
            ("GET", "/workers"): self._list_workers,
            ("POST", "/workers"): self._add_worker,
            ("DELETE", "/workers"): self._drain_worker,
            ("GET", "/get_loads"): self._loads,
            ("GET", "/regret"): self._regret_of_window,
            ("GET", "/usage"): lambda asked: json_answer(
                {"usage": used(chain(gauges(), registry.collect()), asked.tenant)}
            ),
            ("GET", STATE_PATH): lambda asked: Answer(HTTPStatus.OK, self._live.state(asked.query)),
        }

    async def _open(self, exits: AsyncExitStack) -> None:
        if self._config.state_dir is not None:
            exits.enter_context(exclusive_folder("state_dir", Path(self._config.state_dir)))
        await exits.enter_async_context(self.models)  # reads files while workers are asked who they are
        if self.index is not None:
            await exits.enter_async_context(self.index)
        if self._config.state_dir is not None:
            path = Path(self._config.state_dir) / "router.speeds.json"
            await exits.enter_async_context(saved_speeds(path, self.load.board, self._config.state_interval_s))
        await exits.enter_async_context(self.membership)
        await self.models.wait_for_configured()
        if self.replicas is not None:
            await exits.enter_async_context(self.replicas)
        self._live.start()
        exits.callback(self._live.close)

    async def answer(self, question: Question) -> Answer:
        """Answer an operator; errors become answers, too."""
        method = "GET" if question.method == "HEAD" else question.method
        try:
            if (method, question.path) == ("GET", "/metrics"):
                return Answer(HTTPStatus.OK, await self._page.text(), CONTENT_TYPE_LATEST)
            endpoint = self._endpoints.get((method, question.path))
            if endpoint is None:
                known = (("GET", "/metrics"), ("POST", "/route"), *self._endpoints)
                methods = tuple(method for method, path in known if path == question.path)
                status = HTTPStatus.METHOD_NOT_ALLOWED if methods else HTTPStatus.NOT_FOUND
                expected = f"expected {' or '.join(methods)}" if methods else "no endpoint for operators"
                message = f"{question.method} {question.path}: {expected}"
                raise RequestError(status, message, allowed_methods=methods)
            return endpoint(question)
        except RequestError as error:
            return error_answer(error)
        except InvalidValueError as error:
            return error_answer(RequestError(HTTPStatus.BAD_REQUEST, str(error)))

    def on_routed(self, request: Routed) -> None:
        now_s = time.monotonic()
        if now_s - self._sized_at_s > _RESIZE_S:
            ranks = (rank for worker in self.fleet.workers for rank in self.fleet.ranks(worker))
            self._capacity_blocks, self._sized_at_s = sum(rank.num_blocks for rank in ranks), now_s
        self._regret.add(now_s, [request], self._capacity_blocks)

    def on_journal_entry(self, entry: JournalEntry) -> None:
        self._live.add(entry)

    def _on_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Compare the tokens of the model's workers with this tokeniser's from now on."""
        if self.index is not None:
            self.fleet.renderings.add_special_tokens(tokenizer)
            self.membership.check_renderings()

    def connect(self, conversations: Conversations, admission: Admission) -> None:  # noqa: ARG002
        """Share stored responses with other routers; a router of one process has no other processes."""
        if self.replicas is not None:
            replicas = self.replicas
            conversations.on_stored = lambda response_id, worker, _: replicas.add_response(response_id, worker)
            replicas.on_response = lambda response_id, worker: conversations.store(response_id, worker, None)

    def reconfigure(self, config: RouterConfig) -> None:
        self.models.reconfigure(config)
        self.membership.reconfigure(config)

    # Endpoints.

    def _health(self, _: Question) -> Answer:
        joined_at_s = None if self.index is None else self.index.joined_at_s
        cold_start_s = None if joined_at_s is None else round(joined_at_s - self._started_s, 3)
        return json_answer({"status": "ok", "version": __version__, "cold_start_s": cold_start_s} | self._saved_state())

    def _readiness(self, question: Question) -> Answer:
        page = explain_readiness(self.fleet, self.models, self.index, is_draining=question.is_draining)
        return readiness_answer(page | self._explain_more(), question)

    def _explain_more(self) -> dict[str, Any]:
        """Return the parts of readiness that are not about workers."""
        page: dict[str, Any] = self._saved_state()
        if self.replicas is not None:
            page["replicas"] = self.replicas.describe()
        if sources := self.membership.discovery.explain():
            page["discovery"] = sources
        return page

    def _saved_state(self) -> dict[str, Any]:
        state = None if self.index is None else self.index.state_statistics()
        return {} if state is None else {"state": state.described()}

    def _list_workers(self, _: Question) -> Answer:
        explained = explain_workers(self.fleet, self.load, self.index, self._regret, time.monotonic())
        return json_answer({"workers": explained})

    def _add_worker(self, question: Question) -> Answer:
        # A foreign page in a browser can post to loopback, but with this content type only if it is allowed to.
        if (question.header(b"content-type") or b"").partition(b";")[0].strip() != b"application/json":
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
        targets = [rank.target for worker in self.fleet.workers for rank in self.fleet.ranks(worker)]
        return json_answer({"loads": [explain_load(target, self.load.load(target)) for target in targets]})

    def _regret_of_window(self, question: Question) -> Answer:
        given = parse_qs(question.query).get("window", ["10m"])[-1]
        window = _WINDOW.fullmatch(given)
        window_s = int(window[1]) * _UNITS_S[window[2]] if window else 0
        if not 0 < window_s <= _UNITS_S["h"]:
            raise InvalidValueError("window", given, "a time of up to an hour: 90s, 10m or 1h")
        return json_answer(self._regret.report(time.monotonic(), window_s))


def json_answer(value: Any, status: int = HTTPStatus.OK) -> Answer:
    return Answer(status, msgspec.json.encode(value))


def readiness_answer(page: dict[str, Any], question: Question) -> Answer:
    """Return what `/readiness` says; outsiders learn no more of the page than whether the router is ready."""
    shown = {"ready": page["ready"]} if question.is_outsider else page
    return json_answer(shown, HTTPStatus.OK if page["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)


def question_of(request: Request, config: RouterConfig, is_draining: bool, tenant: str | None = None) -> Question:
    """Return an operator's HTTP request as a question, without a body that no endpoint reads.

    Anybody may send one to `/readiness`, and a few large ones would close a front's link to its keeper.
    """
    is_outsider = config.asks_for_keys and not is_administrator(request, config.admin_key)
    asked = msgspec.structs.asdict(request) | ({} if request.path == "/workers" else {"body": b""})
    return Question(**asked, is_draining=is_draining, tenant=tenant, is_outsider=is_outsider)


def send_answer(answer: Answer, responder: Responder) -> None:
    headers = [(b"content-type", answer.content_type.encode()), *answer.headers]
    responder.answer(answer.status, headers, answer.body)


def error_answer(error: RequestError) -> Answer:
    return Answer(error.status, error_body(error), headers=error_headers(error))

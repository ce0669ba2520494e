"""The router's own endpoints: workers, loads, health, metrics.

    GET  /health      200 while the router serves              POST   /workers     add {"url", "role"?, …}
    GET  /readiness   200 while requests can be taken           DELETE /workers     ?url=…: drain, then remove
    GET  /metrics     Prometheus text                          GET    /get_loads   load by rank
    GET  /workers     every worker, its state and why          POST   /route       the decision for a body, not sent
    GET  /regret      where hits went, of ?window=10m           GET    /usage      what tenants have used
    GET  /ui/state    what the live page shows, ?since=…

The caller has checked who may ask (`kvist.router.doors.auth`), and answers /route itself: who decides can explain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric

from kvist import __version__
from kvist.errors import InvalidValueError
from kvist.metrics_page import MetricsPage
from kvist.openai.errors import RequestError, error_body
from kvist.router.doors.explain import explain_load, explain_readiness, explain_workers
from kvist.router.doors.live import STATE_PATH, LiveState
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.membership import Membership, WorkerConflictError
from kvist.router.fleet.models import Models
from kvist.router.fleet.replicas import Replicas
from kvist.router.index import FleetIndex
from kvist.router.regret import Regret
from kvist.router.sources import WantedWorker
from kvist.router.tenants.accounts import used

_WINDOW, _UNITS_S = re.compile(r"([1-9][0-9]{0,3})([smh])"), {"s": 1, "m": 60, "h": 3600}


class Question(msgspec.Struct, frozen=True):
    """A request to one of these endpoints; `is_draining` says how its asker is, `tenant` who asks for its own usage."""

    method: str
    path: str
    query: str = ""
    content_type: str = ""
    body: bytes = b""
    is_draining: bool = False
    tenant: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """What to answer it."""

    status: int
    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class AdminApi:
    """The endpoints over one fleet."""

    fleet: Fleet
    models: Models
    membership: Membership
    load: LoadTracker
    index: FleetIndex | None
    metrics: MetricsPage
    regret: Regret
    counted: Callable[[], Iterable[Metric | None]]
    """What is counted of requests, among other metrics."""
    replicas: Replicas | None
    live: LiveState
    started_s: float
    now_s: Callable[[], float]

    async def answer(self, question: Question) -> Answer:
        """Return what to answer, also where that is an error."""
        endpoints = {
            ("GET", "/health"): self._health,
            ("GET", "/readiness"): self._readiness,
            ("GET", "/workers"): self._list_workers,
            ("POST", "/workers"): self._add_worker,
            ("DELETE", "/workers"): self._drain_worker,
            ("GET", "/get_loads"): self._loads,
            ("GET", "/regret"): self._regret,
            ("GET", "/usage"): self._usage,
            ("GET", STATE_PATH): self._live_state,
        }
        method = "GET" if question.method == "HEAD" else question.method
        try:
            if (method, question.path) == ("GET", "/metrics"):
                return Answer(HTTPStatus.OK, await self.metrics.text(), CONTENT_TYPE_LATEST)
            endpoint = endpoints.get((method, question.path))
            if endpoint is None:
                message = f"{question.method} {question.path}: the endpoint is not used so"
                raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, message)
            return endpoint(question)
        except RequestError as error:
            return refusal(error)
        except WorkerConflictError as error:
            return refusal(RequestError(HTTPStatus.CONFLICT, str(error)))
        except InvalidValueError as error:
            return refusal(RequestError(HTTPStatus.BAD_REQUEST, str(error)))

    def _health(self, _: Question) -> Answer:
        joined_at_s = None if self.index is None else self.index.joined_at_s
        cold_start_s = None if joined_at_s is None else round(joined_at_s - self.started_s, 3)
        health: dict[str, Any] = {"status": "ok", "version": __version__, "cold_start_s": cold_start_s}
        state = None if self.index is None else self.index.state_statistics()
        if state is not None:
            health["state"] = state.described()
        return json_answer(health)

    def _readiness(self, question: Question) -> Answer:
        page = explain_readiness(self.fleet, self.models, self.index, is_draining=question.is_draining)
        if self.replicas is not None:
            page["replicas"] = self.replicas.described()
        if sources := self.membership.discovery.explain():
            page["discovery"] = sources
        return json_answer(page, HTTPStatus.OK if page["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)

    def _list_workers(self, _: Question) -> Answer:
        explained = explain_workers(self.fleet, self.load, self.index, self.regret, self.now_s())
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
        now_s = self.now_s()
        targets = [rank.target for worker in self.fleet.workers for rank in self.fleet.ranks(worker)]
        return json_answer({"loads": [explain_load(target, self.load.load(target, now_s)) for target in targets]})

    def _regret(self, question: Question) -> Answer:
        given = parse_qs(question.query).get("window", ["10m"])[-1]
        window = _WINDOW.fullmatch(given)
        if window is None:
            raise InvalidValueError("window", given, "a time of up to an hour: 90s, 10m or 1h")
        return json_answer(self.regret.report(self.now_s(), int(window[1]) * _UNITS_S[window[2]]))

    def _live_state(self, question: Question) -> Answer:
        return Answer(HTTPStatus.OK, self.live.state(question.query))

    def _usage(self, question: Question) -> Answer:
        return json_answer({"usage": used(self.counted(), question.tenant)})


def json_answer(value: Any, status: int = HTTPStatus.OK) -> Answer:
    """Return an answer of JSON."""
    return Answer(status, msgspec.json.encode(value))


def refusal(error: RequestError) -> Answer:
    """Return an answer that says what was wrong."""
    return Answer(error.status, error_body(error))

"""The router's own endpoints, as a Starlette application: workers, loads, health, metrics, and why a decision falls.

    GET  /health      200 while the router serves              POST   /workers     add {"url", "role"?, …}
    GET  /readiness   200 while requests can be taken           DELETE /workers     ?url=…: drain, then remove
    GET  /metrics     Prometheus text                          GET    /get_loads   load by rank
    GET  /workers     every worker, its state and why          POST   /route       the decision for a body, not sent

The caller has checked who may ask (`kvist.router.doors.auth`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvist import __version__
from kvist.errors import InvalidValueError
from kvist.metrics_page import MetricsPage
from kvist.openai.errors import RequestError, error_body
from kvist.router.admission import Admission
from kvist.router.doors.explain import explain_load, explain_plan, explain_readiness, explain_worker
from kvist.router.fleet.fleet import Fleet, WorkerConflictError
from kvist.router.fleet.load import LoadTracker
from kvist.router.index import FleetIndex
from kvist.router.policy.decision import Role
from kvist.router.prefill.handover import obstacle
from kvist.router.prompts import COMPLETION_PATH, PromptReader
from kvist.router.routing import Routing


class _NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    kv_event_sources: tuple[str, ...] = ()
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class AdminApi:
    """The endpoints over one running router."""

    fleet: Fleet
    load: LoadTracker
    admission: Admission
    index: FleetIndex | None
    reader: PromptReader
    routing: Routing
    metrics: MetricsPage
    started_s: float
    now_s: Callable[[], float]
    is_draining: Callable[[], bool]

    def application(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/readiness", self._readiness),
                Route("/metrics", self._metrics),
                Route("/workers", self._list_workers),
                Route("/workers", self._add_worker, methods=["POST"]),
                Route("/workers", self._drain_worker, methods=["DELETE"]),
                Route("/get_loads", self._loads),
                Route("/route", self._route, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys(
                (RequestError, InvalidValueError, WorkerConflictError, HTTPException), _refuse
            ),
        )

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        joined_at_s = None if self.index is None else self.index.joined_at_s
        cold_start_s = None if joined_at_s is None else round(joined_at_s - self.started_s, 3)
        health: dict[str, Any] = {"status": "ok", "version": __version__, "cold_start_s": cold_start_s}
        state = None if self.index is None else self.index.state_statistics()
        if state is not None:
            health["state"] = state.described()
        return _json(health)

    async def _readiness(self, request: Request) -> Response:  # noqa: ARG002
        page = explain_readiness(self.fleet, self.index, is_draining=self.is_draining())
        return _json(page, HTTPStatus.OK if page["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        return Response(await self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _list_workers(self, request: Request) -> Response:  # noqa: ARG002
        explained = [explain_worker(worker, self.load, self.index) for worker in self.fleet.workers]
        return _json({"block_size": self.fleet.block_size, "workers": explained})

    async def _add_worker(self, request: Request) -> Response:
        # A page in a browser can post to loopback, but not with this content type unless it is allowed to.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type: expected application/json")
        try:
            new = msgspec.json.decode(await request.body(), type=_NewWorker)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"body: {error}") from None
        worker = self.fleet.add(new.url.rstrip("/"), new.kv_event_sources, new.role)
        return _json({"url": worker.url, "state": worker.state}, HTTPStatus.CREATED)

    async def _drain_worker(self, request: Request) -> Response:
        url = request.query_params.get("url", "").rstrip("/")
        worker = self.fleet.get(url)
        if worker is None:
            raise RequestError(HTTPStatus.NOT_FOUND, f"url: got {url!r}, expected a known worker", param="url")
        self.fleet.drain(worker)
        return _json({"url": worker.url, "state": worker.state}, HTTPStatus.ACCEPTED)

    async def _loads(self, request: Request) -> Response:  # noqa: ARG002
        now_s = self.now_s()
        targets = [rank.target for worker in self.fleet.workers for rank in self.routing.ranks(worker)]
        return _json({"loads": [explain_load(target, self.load.load(target, now_s)) for target in targets]})

    async def _route(self, request: Request) -> Response:
        ask = await self.reader.read(None, await request.body())
        full = self.admission.full(ask.model, ())
        plan = self.routing.plan(ask, self.routing.overlaps(ask), full, obstacle(COMPLETION_PATH, ask))
        return _json(explain_plan(plan, ask) | {"queued": self.admission.would_wait(ask.model)})


def _json(value: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    match error:
        case RequestError():
            refusal = error
        case WorkerConflictError():
            refusal = RequestError(HTTPStatus.CONFLICT, str(error))
        case HTTPException():
            refusal = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        case _:
            refusal = RequestError(HTTPStatus.BAD_REQUEST, str(error))
    return Response(error_body(refusal), refusal.status, media_type="application/json")

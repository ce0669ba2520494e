"""The router's decisions for a gateway that sends the requests itself.

    async with Router(RouterConfig(worker_urls=(...))) as router:
        routed = await router.route("/v1/chat/completions", body)
        with routed:
            ...  # POST routed.body to routed.worker with routed.headers; routed.answered() at its first byte

It follows streams and workers as `kvist route` does, but opens no port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from math import inf
from random import Random
from typing import NamedTuple, Self

from prometheus_client import CollectorRegistry

from kvist.contexts import ComposedContext
from kvist.errors import InvalidValueError
from kvist.http import LoopClock
from kvist.openai.requests import without_field
from kvist.router.admission import Admission, priority_of, with_priority
from kvist.router.config import RouterConfig
from kvist.router.doors.keeper import Keeper
from kvist.router.doors.tls import Certificates
from kvist.router.healing import REPORT_MODE
from kvist.router.policy.decision import Decision
from kvist.router.prefill.dialect import LocalReason
from kvist.router.prompts import ParsedRequest, PromptReader, with_model
from kvist.router.regret import DEFAULT_TENANT
from kvist.router.routing import FleetView, Prefix, Routing


class RoutedRequest:
    """A request that was sent to a worker and counts as its load until `finish`, which ends a `with` block, too.

    A block that ends with an error counts against the worker, whose circuit five in a row open. A block that ends
    without an answer, as when the client leaves, says nothing of the worker.
    """

    def __init__(self, router: Router, choice: Choice, *, is_streamed: bool) -> None:
        parsed, self.decision, body, _ = choice
        target = self.decision.chosen.target
        self.worker = target.worker
        """Its URL; `decision` says from what it was chosen."""
        headers = router._config.authorization(target.worker) + router._routing.rank_headers(target)
        self.headers = {name.decode(): value.decode() for name, value in headers}
        """Headers to add to the client's own. `body` is the client's without fields that only a router may set."""
        worker = router.view.fleet.get(target.worker)
        assert worker is not None
        self._worker, self._admission = worker, router._admission
        priority = priority_of(parsed.fields, 0, is_administrator=False)
        by_default = router._config.workers_use_priority
        self.body = with_priority(body, parsed, priority, worker, by_default=by_default)
        self._is_trial = worker.breaker.begin()
        router.view.load.count_dispatch()
        self._load = router._routing.begin(time.monotonic(), self.decision, is_streamed=is_streamed)
        self._on_answered = partial(router._routing.record_computed, parsed, self.decision)
        self._on_unreported = partial(router._routing.record_unreported, parsed, self.decision)
        self._on_ended = partial(router._add_regret, choice)
        self._was_answered = self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.finish(has_failed=isinstance(error, Exception))

    def answered(self) -> None:
        """Record the first byte of a successful answer."""
        self._was_answered = True
        self._load.end_prefill()
        self._load.on_first_token(time.monotonic())
        self._on_answered()

    def add_tokens(self, num_tokens: int) -> None:
        """Record that a stream grew by so many tokens."""
        self._load.add_tokens(num_tokens)

    def refused(self, retry_after: str | None) -> None:
        """Record that the worker is too busy (429 or 503): it gets no requests for as long as `retry_after` says."""
        self._admission.pause(self._worker, None if retry_after is None else retry_after.encode())

    def finish(self, *, has_failed: bool = False) -> None:
        """Record that the request has ended; further calls do nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._load.finish(time.monotonic())
        if has_failed:
            self._worker.breaker.fail(time.monotonic())
        elif self._was_answered:
            self._worker.breaker.succeed()
            self._on_unreported()
            self._on_ended()
        elif self._is_trial:
            self._worker.breaker.abandon()


class Choice(NamedTuple):
    """A decision that does not count as load yet, the request it was made for, and the body for the worker."""

    parsed: ParsedRequest
    decision: Decision
    body: bytes
    prefix: Prefix

    def at(self, worker: str) -> Choice | None:
        """Return the same choice with another worker, None if that one was no candidate."""
        candidates = self.decision.candidates
        found = (idx for idx, each in enumerate(candidates) if each.target.worker == worker)
        idx = self.decision.chosen_idx if self.decision.chosen.target.worker == worker else next(found, None)
        return None if idx is None else self._replace(decision=self.decision.choosing(idx))


class Router(ComposedContext):
    """Decides while its context is open; all methods belong to one event loop."""

    def __init__(self, config: RouterConfig, view: AbstractAsyncContextManager[FleetView] | None = None) -> None:
        """Use the same configuration as `kvist route`, except for the settings about listening.

        If another system finds and checks the workers, `view` is what it knows of them; it is opened with this context.
        Raises InvalidValueError for a configuration with tenants, as only the gateway knows who asks, or with what
        `kvist route` alone has.
        """
        for name in ("processes", "access_log", "record_requests", "otlp_traces_endpoint"):
            value, default = getattr(config, name), getattr(RouterConfig(), name)
            if value != default:
                raise InvalidValueError(name, value, f"{default}: only kvist route has it")
        if config.has_tenants:
            raise InvalidValueError("tenants", config.tenants or config.auth_url, "none, as the gateway knows who asks")
        self._config, self._view, self.certificates = config, view, Certificates(config)

    async def _open(self, exits: AsyncExitStack) -> None:
        """Ask each worker who it is, and start to follow its stream."""
        config, now_s = self._config, time.monotonic
        if self._view is None:
            pool = await exits.enter_async_context(self.certificates.worker_pool())
            self._view = Keeper(config, pool, now_s(), registry=CollectorRegistry())
        view = self.view = await exits.enter_async_context(self._view)
        index, clock = view.index, LoopClock(asyncio.get_running_loop())
        limits = config.max_worker_prefill_tokens, config.max_fleet_requests, config.max_fleet_prefill_tokens
        self._admission = Admission(view.fleet, view.load, now_s, clock, 0, *limits)  # no request waits here
        self._routing = Routing(view, Random(), now_s)
        self._reader = PromptReader(
            view.models,
            has_index=lambda: index is not None and index.has_joined,
            needs_tokens=lambda: index is not None,
        )

    def reload(self, config: RouterConfig) -> RouterConfig:
        """Apply the settings that may change while it runs, as `kvist route` does; return those that hold now.

        Only where it finds its workers itself. Raises InvalidValueError, and changes nothing, if one is wrong.
        """
        assert isinstance(self.view, Keeper)
        self.certificates.renew()
        self._config = self._config.changed_to(config)
        self.view.reconfigure(self._config)
        return self._config

    async def route(
        self, path: str, body: bytes, excluded: Collection[str] = (), *, is_sheddable: bool = False
    ) -> RoutedRequest:
        """Choose a worker for a request to this endpoint, and count it there; workers of `excluded` URLs are left out.

        The worker does all of it, also in a fleet with prefill workers. A full worker (by `max_worker_requests`, or by
        what was learnt of it) gets the request only if all are full, and then only if it is not sheddable. Raises
        RequestError, whose `status` and message are for the client: 400 for a wrong body, 404 for a model that no
        worker serves, 429 for a sheddable request if no worker has room, 503 if no worker can take requests now.
        """
        choice = await self.choose(path, body, excluded, is_sheddable=is_sheddable)
        return self.begin(choice, is_streamed=choice.parsed.fields.get("stream") is True)

    async def choose(
        self, path: str, body: bytes, excluded: Collection[str] = (), *, is_sheddable: bool = False
    ) -> Choice:
        """Choose a worker as `route` does, without counting the request."""
        parsed = await self._reader.read(path, body)
        prefix = self._routing.match(parsed) or Prefix()
        if is_sheddable:
            self._admission.shed(parsed.model, excluded)
        full = dict.fromkeys(self._admission.full_workers(parsed.model, excluded), inf)  # no request waits here
        plan = self._routing.plan(parsed, prefix, excluded, full, local_reason=LocalReason.OTHER_ENDPOINT)
        body = with_model(without_field(body, parsed.fields, *REPORT_MODE), parsed)
        return Choice(parsed, plan.answer, body, prefix)

    def begin(self, choice: Choice, *, is_streamed: bool) -> RoutedRequest:
        """Count a request at the chosen worker; its first byte ends its prefill only if it `is_streamed`."""
        return RoutedRequest(self, choice, is_streamed=is_streamed)

    def _add_regret(self, choice: Choice) -> None:
        """Add an answered request to `GET /regret`, without the engine's own report of what it found cached."""
        if isinstance(self.view, Keeper):
            routed = self._routing.outcome(DEFAULT_TENANT, choice.parsed, choice.prefix, choice.decision, None)
            if routed is not None:
                self.view.on_routed(routed)

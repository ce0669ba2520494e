"""The router's decisions inside somebody else's gateway, which carries the requests itself.

    async with Router(RouterConfig(worker_urls=(...))) as router:
        routed = await router.route("/v1/chat/completions", body)
        with routed:
            ...  # POST routed.body to routed.worker with routed.headers; routed.answered() at its first byte

It follows streams and workers as `kvist route` does, and listens to nobody.
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

from kvist.errors import InvalidValueError
from kvist.http import LoopClock
from kvist.openai.requests import without_field
from kvist.router.admission import Admission
from kvist.router.attempts import RANK_HEADER
from kvist.router.config import RouterConfig
from kvist.router.doors.keeper import Keeper
from kvist.router.doors.tls import Certificates
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.replicas import num_replicas
from kvist.router.healing import REPORT_MODE
from kvist.router.policy.decision import Decision
from kvist.router.prefill.dialect import Local
from kvist.router.prompts import Ask, PromptReader, with_model
from kvist.router.regret import DEFAULT_TENANT
from kvist.router.routing import Known, Prefix, Routing


class RoutedRequest:
    """A request on its way to a worker, which counts there until `finish`; as a context manager it ends by itself.

    A block that ends with an error counts against the worker, as five in a row open its circuit; one that ends without
    an answer, as the client left, says nothing of it.
    """

    def __init__(self, router: Router, choice: Choice, *, is_streamed: bool) -> None:
        ask, self.decision, self.body, _ = choice
        target = self.decision.chosen.target
        self.worker = target.worker
        """Its URL; `decision` says from what it was chosen."""
        headers = router._config.authorization(target.worker)
        if router._routing.is_one_of_several_ranks(target):
            headers.append((RANK_HEADER, b"%d" % target.rank))
        self.headers = {name.decode(): value.decode() for name, value in headers}
        """To be sent beside the client's own, with `body`: the client's without what only a router may say."""
        worker = router.known.fleet.get(target.worker)
        assert worker is not None
        self._worker, self._admission = worker, router._admission
        self._is_trial = worker.breaker.begin()
        router.known.load.dispatched()
        self._load = router._routing.begin(time.monotonic(), self.decision, is_streamed=is_streamed)
        self._on_answered = partial(router._routing.computed, ask, target.worker)
        self._on_ended = partial(router._add_regret, choice)
        self._was_answered = self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.finish(has_failed=isinstance(error, Exception))

    def answered(self) -> None:
        """Take note of the first byte of a successful answer."""
        self._was_answered = True
        self._load.end_prefill()
        self._load.answered(time.monotonic())
        self._on_answered()

    def add_tokens(self, num_tokens: int) -> None:
        """Take note that a stream grew by so many tokens."""
        self._load.add_tokens(num_tokens)

    def refused(self, retry_after: str | None) -> None:
        """Take note that the worker said it is too busy (429 or 503), for as long as its `retry-after` says."""
        self._admission.pause(self._worker, None if retry_after is None else retry_after.encode())

    def finish(self, *, has_failed: bool = False) -> None:
        """Take note that the request ended; further calls change nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._load.finish(time.monotonic())
        if has_failed:
            self._worker.breaker.fail(time.monotonic())
        elif self._was_answered:
            self._worker.breaker.succeed()
            self._on_ended()
        elif self._is_trial:
            self._worker.breaker.abandon()


class Choice(NamedTuple):
    """A decision that nothing counts yet, what it was made for, and the body for the worker."""

    ask: Ask
    decision: Decision
    body: bytes
    prefix: Prefix

    def at(self, worker: str) -> Choice | None:
        """Return the same with another worker chosen, None if that was no candidate."""
        candidates = self.decision.candidates
        found = (idx for idx, each in enumerate(candidates) if each.target.worker == worker)
        idx = self.decision.chosen_idx if self.decision.chosen.target.worker == worker else next(found, None)
        return None if idx is None else self._replace(decision=self.decision.choosing(idx))


class Router:
    """Decides while its context is open; all methods belong to one event loop."""

    def __init__(self, config: RouterConfig, known: AbstractAsyncContextManager[Known] | None = None) -> None:
        """Go by the same configuration as `kvist route`; what is said there of listening counts for nothing.

        Where others say who the workers are, and check them, what is `known` of them is opened along with this. Raises
        InvalidValueError for a configuration that tells clients apart: the gateway does.
        """
        if config.has_tenants or config.isolation != "none":
            expected = "none, and no isolation, as the gateway knows who asks"
            raise InvalidValueError("tenants", config.tenants or config.auth_url or config.isolation, expected)
        self._config, self._known = config, known
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Ask each worker who it is, and begin to follow its stream."""
        config, now_s = self._config, time.monotonic
        async with AsyncExitStack() as exits:
            if self._known is None:
                pool = await exits.enter_async_context(Certificates(config).worker_pool())
                load = LoadTracker(LoadBoard(num_replicas=num_replicas(config)))
                self._known = Keeper(config, pool, load, now_s(), registry=CollectorRegistry())
            known = self.known = await exits.enter_async_context(self._known)
            index, clock = known.index, LoopClock(asyncio.get_running_loop())
            limits = config.max_worker_prefill_tokens, config.max_fleet_requests
            self._admission = Admission(known.fleet, known.load, now_s, clock, 0, *limits)  # nobody waits here
            self._routing = Routing(known, Random(), now_s)
            self._reader = PromptReader(
                known.models,
                has_index=lambda: index is not None and index.has_joined,
                needs_tokens=lambda: index is not None,
            )
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._exits.__aexit__(*exception)  # type: ignore[arg-type]

    async def route(
        self, path: str, body: bytes, excluded: Collection[str] = (), *, is_sheddable: bool = False
    ) -> RoutedRequest:
        """Return which worker a request of this endpoint goes to, and count it there; `excluded` are URLs not to take.

        One worker does all of it, also in a fleet with prefill workers. One that is full (`max_worker_requests`, or
        what it was seen to take) is given it where all are, unless it is sheddable. Raises RequestError, whose `status`
        and message are for the client: 400 for a wrong body, 404 for a model that nobody has, 429 for a sheddable
        request that nobody has room for, 503 where nobody can take it now.
        """
        choice = await self.choose(path, body, excluded, is_sheddable=is_sheddable)
        return self.begin(choice, is_streamed=choice.ask.fields.get("stream") is True)

    async def choose(
        self, path: str, body: bytes, excluded: Collection[str] = (), *, is_sheddable: bool = False
    ) -> Choice:
        """Return which worker that is, as `route` does, and count nothing."""
        ask = await self._reader.read(path, body)
        prefix = self._routing.prefix(ask) or Prefix()
        if is_sheddable:
            self._admission.shed(ask.model, excluded)
        full = dict.fromkeys(self._admission.full(ask.model, excluded), inf)  # nobody waits here
        plan = self._routing.plan(path, ask, prefix, excluded, full, local=Local.OTHER_ENDPOINT)
        return Choice(ask, plan.answer, with_model(path, without_field(body, ask.fields, *REPORT_MODE), ask), prefix)

    def begin(self, choice: Choice, *, is_streamed: bool) -> RoutedRequest:
        """Count a request where it was decided to go; only one that `is_streamed` shows when its prompt is computed."""
        return RoutedRequest(self, choice, is_streamed=is_streamed)

    def _add_regret(self, choice: Choice) -> None:
        """Add an answered request up, for `GET /regret`; what the engine found is not known here."""
        if isinstance(self.known, Keeper):
            routed = self._routing.routed(DEFAULT_TENANT, choice.ask, choice.prefix, choice.decision, None)
            if routed is not None:
                self.known.on_routed(routed)

"""How workers come, are checked, and go.

Each worker has a task that checks it, learns what it serves and points the indexer at its event stream. A removed
worker drains: it takes nothing new, and is forgotten when its last request has ended or its time is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Self

from kvist.errors import InvalidValueError, KvistError, MalformedMessageError, leave_group
from kvist.events import WorkerRank
from kvist.http import UpstreamError, UpstreamPool, UpstreamTimeoutError
from kvist.router.config import RouterConfig, check_event_source, check_worker_url
from kvist.router.fleet.capacity import WARM_UP_STEPS, Capacity, read_report
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.health import CircuitBreaker, HealthGauge
from kvist.router.fleet.identity import Identity, event_endpoint, fetch, probe
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.rendering import RenderingChecks
from kvist.router.fleet.worker import Worker, WorkerState
from kvist.router.index import FleetIndex
from kvist.router.policy.decision import Role

logger = logging.getLogger(__name__)

STARTING_INTERVAL_S = 0.5
"""Time between checks of a worker that is not healthy, where that is less than the health interval."""

REPORT_INTERVAL_S = 1.0

FIRST_CHECKS_S = 1.0
"""How long the router's start waits for workers that say nothing."""


class WorkerConflictError(KvistError):
    """The worker is already there, or still draining: the administrator waits or removes it first."""

    def __init__(self, url: str, state: WorkerState) -> None:
        super().__init__(f"worker {url} is already there and {state}")
        self.url = url
        self.state = state


class Membership:
    """Checks the workers of a fleet while its context is open; all methods belong to the event loop."""

    def __init__(
        self,
        config: RouterConfig,
        pool: UpstreamPool,
        fleet: Fleet,
        models: Models,
        load: LoadTracker,
        index: FleetIndex | None,
        now_s: Callable[[], float],
        on_removed: Callable[[str], None],
    ) -> None:
        """Take the configured workers; `index` is None where the policy does not look at caches."""
        self._config = config
        self._pool = pool
        self._fleet = fleet
        self._load = load
        self._index = index
        self._on_removed = on_removed
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._reports: dict[str, asyncio.Task[None]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()
        self._renderings = RenderingChecks(config, pool, fleet.renderings, models, now_s)
        self._now_s = now_s

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for url in self._config.every_worker_url:
            self.add(url, self._config.kv_event_sources.get(url, ()), self._config.role_of(url))
        # A router that listened before it had asked anybody would refuse its first requests.
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECKS_S):
                await asyncio.gather(*(worker.was_checked.wait() for worker in self._fleet.workers))
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for tasks in (self._checks, self._reports, self._drains, self._renderings.tasks):
            for task in tasks.values():
                task.cancel()
        await leave_group(self._tasks, error)

    def check_renderings(self) -> None:
        """Have workers asked whose model has a tokeniser now."""
        for worker in self._fleet.workers:
            if worker.was_checked.is_set():
                self._renderings.on_health_check(worker, self._tasks)

    def add(self, url: str, event_sources: Sequence[str] = (), role: Role | None = None) -> Worker:
        """Take a worker in and start checking it; raises InvalidValueError or WorkerConflictError.

        Event sources and a role given here count whatever the worker announces.
        """
        check_worker_url("url", url)
        for endpoint in event_sources:
            check_event_source(endpoint)
        if (present := self._fleet.get(url)) is not None:
            raise WorkerConflictError(url, present.state)
        self._load.name(WorkerRank(url, 0))
        config = self._config
        worker = Worker(
            url,
            tuple(event_sources),
            HealthGauge(config.health_failures, config.health_successes),
            CircuitBreaker(config.breaker_failures, config.breaker_cooldown_s),
            configured_role=role,
            capacity=Capacity(config.max_worker_requests),
        )
        if config.max_worker_requests is not None:
            self._fleet.bounded.add(url)
        if self._index is not None:
            self._index.follow(url, event_sources)
        self._fleet.put(worker)
        self._checks[url] = self._tasks.create_task(self._watch(worker), name=f"kvist-health {url}")
        self._reports[url] = self._tasks.create_task(self._attend(worker), name=f"kvist-report {url}")
        logger.info("worker added url=%s", url)
        return worker

    def drain(self, worker: Worker) -> None:
        """Give the worker nothing new, and forget it once its requests have ended or `drain_timeout_s` is over."""
        if not worker.is_draining:
            worker.is_draining = True
            logger.info("worker draining url=%s running=%d", worker.url, self._load.running_requests(worker.url))
            task = self._tasks.create_task(self._remove_when_idle(worker), name=f"kvist-drain {worker.url}")
            self._drains[worker.url] = task

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on: drain the workers that it no longer names, take in those it adds.

        What an administrator has added or removed stays so unless this names it and the last one did not. A worker's
        next health check finds its new event sources.
        """
        old, self._config, self._renderings.config = self._config, config, config
        for url in set(old.every_worker_url).difference(config.every_worker_url):
            if (worker := self._fleet.get(url)) is not None:
                self.drain(worker)
        for url in config.every_worker_url:
            sources, role = config.kv_event_sources.get(url, ()), config.role_of(url)
            is_new = url not in old.every_worker_url
            if (worker := self._fleet.get(url)) is not None:
                worker.configured_event_sources, worker.configured_role = sources, role
                if is_new and worker.is_draining:
                    worker.is_draining = False
                    self._drains.pop(url).cancel()
                    self._fleet.on_room()
            elif is_new:
                self.add(url, sources, role)

    async def _remove_when_idle(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._load.wait_idle(worker.url)
        except TimeoutError:
            running = self._load.running_requests(worker.url)
            logger.warning("worker removed before its requests ended url=%s running=%d", worker.url, running)
        del self._drains[worker.url]
        self._checks.pop(worker.url).cancel()
        self._reports.pop(worker.url).cancel()
        if self._index is not None:
            self._index.follow(worker.url, ())
            self._index.forget_expected(worker.url)
        self._load.forget(worker.url)
        self._renderings.forget(worker.url)
        self._fleet.remove(worker.url)
        self._on_removed(worker.url)
        logger.info("worker removed url=%s", worker.url)

    async def _watch(self, worker: Worker) -> None:
        while True:
            await self._check(worker)
            self._renderings.on_health_check(worker, self._tasks)
            interval_s = self._config.health_interval_s
            if not worker.health.is_healthy:
                interval_s = min(interval_s, STARTING_INTERVAL_S)
            await asyncio.sleep(interval_s)

    async def _attend(self, worker: Worker) -> None:
        """While requests run, learn each second how many the worker runs, and give up one that says nothing."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            authorization, timeout_s = self._config.authorization(worker.url), self._config.silence_timeout_s
            warms_from = worker.capacity.warms_from
            if warms_from is not None and self._load.num_steps(worker.url) - warms_from >= WARM_UP_STEPS:
                worker.capacity.warms_from = None
            if not self._load.running_requests(worker.url):
                worker.capacity.forget()
                continue
            try:
                async with self._pool.timeout(timeout_s):
                    status, page = await fetch(self._pool, worker.url, "/metrics", authorization)
            except TimeoutError:
                silent_s = min(self._pool.silent_s(worker.url), self._now_s() - self._load.heard_at_s(worker.url))
                if silent_s >= timeout_s:
                    self._give_up(worker, timeout_s)
            except (UpstreamError, MalformedMessageError):
                continue  # health checks and circuits judge by that
            else:
                report = read_report(page) if status == HTTPStatus.OK else None
                if report is not None:
                    in_flight, num_ended = (
                        self._load.running_requests(worker.url),
                        self._load.ended_requests(worker.url),
                    )
                    worker.capacity.learn(report, in_flight, num_ended)
                    if worker.capacity.max_requests is not None:
                        self._fleet.bounded.add(worker.url)
                    self._fleet.on_room()

    def _give_up(self, worker: Worker, silent_s: float) -> None:
        """Give a worker nothing more until health checks pass, and what it has not begun to answer to others."""
        logger.warning("worker is silent url=%s silent_s=%g", worker.url, silent_s)
        worker.health.give_up()
        worker.last_failure = f"said nothing for {silent_s:g} s, though asked"
        worker.give_up(silent_s)

    async def _check(self, worker: Worker) -> None:
        """Probe once and take in what the worker said of itself."""
        is_untold = self._index is not None and not self._index.is_told(worker.url)
        is_apart = worker.role is not Role.BOTH and not worker.identity.engine  # what are its blocks?
        authorization = self._config.authorization(worker.url)
        try:
            async with self._pool.timeout(self._config.health_timeout_s):
                identity = await probe(self._pool, worker.url, authorization, asks_for_metrics=is_untold or is_apart)
        except (UpstreamError, MalformedMessageError) as error:
            if self._index is not None and not isinstance(error, UpstreamTimeoutError):  # who is busy forgets nothing
                self._index.forget_expected(worker.url)
            self._checked(worker, str(error))
        except TimeoutError:
            self._checked(worker, f"no answer to the health check within {self._config.health_timeout_s:g} s")
        else:
            self._identified(worker, identity)
            self._checked(worker, None)
        self._fleet.on_room()

    def _checked(self, worker: Worker, failure: str | None) -> None:
        worker.last_failure = failure
        worker.was_checked.set()
        if worker.health.record(failure is None):
            if failure is None:
                self._warm_up(worker)
            logger.log(
                logging.INFO if failure is None else logging.WARNING,
                "worker is %s url=%s reason=%s",
                worker.state,
                worker.url,
                failure or "health check passed",
            )

    def _warm_up(self, worker: Worker) -> None:
        """Let a worker in by what it takes where others like it are busy: as it is empty, it would get everything."""
        models = worker.model_ids or (None,)
        if any(
            other is not worker and other.role is worker.role and self._load.running_requests(other.url)
            for other in self._fleet.workers
            if any(map(other.serves, models))
        ):
            worker.capacity.warms_from = self._load.num_steps(worker.url)
            self._fleet.bounded.add(worker.url)

    def _identified(self, worker: Worker, identity: Identity) -> None:
        has_restarted = identity.has_restarted(worker.identity)
        worker.identify(identity)
        if has_restarted:
            self._renderings.expire(worker.url)
        self._fleet.identified()
        if self._index is None or worker.is_draining:
            return
        has_events = bool(worker.configured_event_sources) or identity.event_endpoint is not None
        block_size = identity.block_size if has_events else None
        if identity.data_parallel_size is not None:
            self._index.limit_ranks(worker.url, identity.data_parallel_size)
        if worker.configured_event_sources:
            self._index.follow(worker.url, worker.configured_event_sources, block_size)
        else:
            self._follow_announced(worker, identity, self._index)
        if has_restarted:
            self._index.forget_expected(worker.url)
        num_tokens = identity.num_cache_tokens
        if num_tokens is None:
            num_tokens = self._config.expected_cache_tokens
        model = next(iter(worker.model_ids or ()), None)
        self._index.expect(worker.url, num_tokens // self._fleet.block_size_of(worker.url, model))

    def _follow_announced(self, worker: Worker, identity: Identity, index: FleetIndex) -> None:
        """Follow the announced stream, or none where it is not one that may be dialled."""
        endpoints: list[str] = []
        announced, error = identity.event_endpoint, None
        if announced is None:
            error = "the worker announces no KV events, and none are configured for it"
        else:
            try:
                endpoints = [event_endpoint(worker.url, announced, self._config.allowed_event_networks)]
            except InvalidValueError as refusal:
                error = str(refusal)
        if error is not None and error != worker.event_error:
            logger.warning("worker is expected to hold what it is given url=%s reason=%s", worker.url, error)
        worker.event_error = error
        index.follow(worker.url, endpoints, identity.block_size)

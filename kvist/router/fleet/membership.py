"""How workers come, are checked, and go.

Each worker has a task that checks it, learns what it serves and points the indexer at its event stream. A worker is
there while somebody wants it: settings, an administrator, or a source that they name (`discovery`). Then it drains: it
takes nothing new, and is forgotten when its last request has ended or its time is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from itertools import chain
from typing import Self

from kvist.errors import InvalidValueError, MalformedMessageError, leave_group
from kvist.events import WorkerRank
from kvist.http import UpstreamError, UpstreamPool, UpstreamTimeoutError
from kvist.openai.errors import RequestError
from kvist.router.config import RouterConfig
from kvist.router.fleet.discovery import Discovery
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.identity import Identity, event_endpoint, fetch, probe
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.rendering import RenderingChecks
from kvist.router.fleet.worker import (
    WARM_UP_STEPS,
    Capacity,
    CircuitBreaker,
    CircuitState,
    HealthGauge,
    Worker,
    read_report,
)
from kvist.router.index import FleetIndex
from kvist.router.policy.decision import Role
from kvist.router.sources import WantedWorker

logger = logging.getLogger(__name__)

UNSURE_INTERVAL_S = 0.5
"""Time between checks of a worker that is not healthy, or failed the last one, where that is less than the interval."""

REPORT_INTERVAL_S = 1.0

FIRST_CHECKS_S = 1.0
"""How long the router's start waits for workers that say nothing."""


SETTINGS, ADMINISTRATOR, EARLIER = "settings", "administrator", "earlier process"
"""Who may want workers, beside the sources that settings name; what one before another says of a worker counts."""


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
        self._wanted: dict[str, dict[str, WantedWorker]] = {SETTINGS: {}, ADMINISTRATOR: {}}
        self._removed: set[str] = set()
        """Those that an administrator does not want until somebody wants them anew."""
        self.discovery = Discovery(self.want)
        self._watches: dict[str, list[asyncio.Task[None]]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()
        self._renderings = RenderingChecks(config, pool, fleet.renderings, models, now_s)
        self._now_s = now_s

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self.reconfigure(self._config)
        # A router that listened before it had asked anybody would refuse its first requests.
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECKS_S):
                await self.discovery.tried()
                await asyncio.gather(*(worker.was_checked.wait() for worker in self._fleet.workers))
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.discovery.end()
        for task in chain(*self._watches.values(), self._drains.values(), self._renderings.tasks.values()):
            task.cancel()
        await leave_group(self._tasks, error)

    def check_renderings(self) -> None:
        """Have workers asked whose model has a tokeniser now."""
        for worker in self._fleet.workers:
            if worker.was_checked.is_set():
                self._renderings.on_health_check(worker, self._tasks)

    def add(self, worker: WantedWorker) -> Worker:
        """Take a worker in that an administrator wants.

        Event sources and a role given here count whatever the worker announces. Raises InvalidValueError, and
        RequestError (409) for one that is already there, or still draining.
        """
        if (present := self._fleet.get(worker.url)) is not None:
            raise RequestError(HTTPStatus.CONFLICT, f"worker {worker.url} is already there and {present.state}")
        self._load.name(WorkerRank(worker.url, 0))
        self.want(ADMINISTRATOR, [*self._wanted[ADMINISTRATOR].values(), worker])
        added = self._fleet.get(worker.url)
        assert added is not None
        return added

    def remove(self, worker: Worker) -> None:
        """Drain a worker for an administrator, whoever else wants it now."""
        self._wanted[ADMINISTRATOR].pop(worker.url, None)
        self._removed.add(worker.url)
        self._drain(worker)

    def want(self, source: str, workers: Iterable[WantedWorker]) -> None:
        """Have the workers that this source wants now, in the place of those that it did, and drain whom nobody wants.

        One that an administrator has removed comes back if a source wants it that did not. Raises InvalidValueError
        for a worker that cannot be had; all others are.
        """
        earlier = self._wanted.get(source, {})
        self._wanted[source] = {worker.url: worker for worker in workers}
        self._removed -= self._wanted[source].keys() - earlier.keys()
        every = {url: worker for wanted in reversed(self._wanted.values()) for url, worker in wanted.items()}
        self._removed &= every.keys()
        for url in earlier.keys() - every.keys():
            if (worker := self._fleet.get(url)) is not None:
                self._drain(worker)
        refusal = None
        for url in [url for url in every if url not in self._removed]:
            if (worker := self._fleet.get(url)) is None:
                try:
                    worker = self._start(every[url])
                except InvalidValueError as error:  # which holds up no others
                    refusal = error if url in self._wanted[source] else refusal
                    continue
            worker.configured_event_sources, worker.configured_role = every[url].kv_event_sources, every[url].role
            wanting = [each for each, wanted in self._wanted.items() if url in wanted]
            worker.wanted_by = tuple(map(self.discovery.name_of, wanting))
            if worker.is_draining:
                worker.is_draining = False
                self._drains.pop(url).cancel()
                self._fleet.on_room()
        if EARLIER in self._wanted and source != EARLIER and self.discovery.is_complete:
            self.want(EARLIER, ())
            del self._wanted[EARLIER]
        if refusal is not None:
            raise refusal

    def adopt(self, workers: Iterable[tuple[WantedWorker, Iterable[str]]]) -> None:
        """Have the workers that a process before this one had, with who wanted each, until it is known who does now."""
        known = list(workers)
        self.want(EARLIER, [worker for worker, _ in known])
        self.want(ADMINISTRATOR, [worker for worker, wanted_by in known if ADMINISTRATOR in wanted_by])
        urls = {worker.url for worker, _ in known}
        for worker in self._fleet.workers:
            if worker.url not in urls and SETTINGS in worker.wanted_by:
                self.remove(worker)

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on; a worker's next health check finds its new event sources."""
        self._config, self._renderings.config = config, config
        wanted = [
            WantedWorker(url, config.kv_event_sources.get(url, ()), config.role_of(url))
            for url in config.every_worker_url
        ]
        self.want(SETTINGS, wanted)
        self.discovery.follow(config, self._tasks)

    def _start(self, wanted: WantedWorker) -> Worker:
        """Take a worker in and start checking it; raises InvalidValueError."""
        url = wanted.url
        self._load.name(WorkerRank(url, 0))
        config = self._config
        worker = Worker(
            url,
            wanted.kv_event_sources,
            HealthGauge(config.health_failures, config.health_successes),
            CircuitBreaker(config.breaker_failures, config.breaker_cooldown_s),
            capacity=Capacity(config.max_worker_requests),
        )
        worker.breaker.on_change = lambda *_: self._on_circuit(worker.breaker)
        if config.max_worker_requests is not None:
            self._fleet.bounded.add(url)
        if self._index is not None:
            self._index.follow(url, wanted.kv_event_sources)
        self._fleet.put(worker)
        watches = {"health": self._watch(worker), "report": self._attend(worker)}
        self._watches[url] = [
            self._tasks.create_task(each, name=f"kvist-{what} {url}") for what, each in watches.items()
        ]
        logger.info("worker added url=%s", url)
        return worker

    def _on_circuit(self, breaker: CircuitBreaker) -> None:
        """Have who waits try a worker as soon as its circuit allows that."""
        if breaker.state is CircuitState.OPEN:
            asyncio.get_running_loop().call_later(breaker.cooldown_s, self._fleet.on_room)

    def _drain(self, worker: Worker) -> None:
        """Give the worker nothing new, and forget it once its requests have ended or `drain_timeout_s` is over."""
        if not worker.is_draining:
            worker.is_draining, worker.wanted_by = True, ()
            if self._index is not None:
                self._index.forget_expected(worker.url)
            logger.info("worker draining url=%s running=%d", worker.url, self._load.running_requests(worker.url))
            task = self._tasks.create_task(self._remove_when_idle(worker), name=f"kvist-drain {worker.url}")
            self._drains[worker.url] = task
            self._fleet.on_room()  # elsewhere, for who waits for this one

    async def _remove_when_idle(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._load.wait_idle(worker.url)
        except TimeoutError:
            running = self._load.running_requests(worker.url)
            logger.warning("worker removed before its requests ended url=%s running=%d", worker.url, running)
        del self._drains[worker.url]
        for task in self._watches.pop(worker.url):
            task.cancel()
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
            if not worker.health.is_healthy or worker.last_failure is not None:
                interval_s = min(interval_s, UNSURE_INTERVAL_S)
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
                async with self._pool.clock.timeout(timeout_s):
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
                    num_in_flight = self._load.running_requests(worker.url)
                    worker.capacity.learn(report, num_in_flight, self._load.ended_requests(worker.url))
                    if worker.capacity.max_requests is not None:
                        self._fleet.bounded.add(worker.url)
                    self._fleet.on_room()

    def _give_up(self, worker: Worker, silent_s: float) -> None:
        """Give a worker nothing more until health checks pass, and what it has not begun to answer to others."""
        logger.warning("worker is silent url=%s silent_s=%g", worker.url, silent_s)
        worker.health.give_up()
        worker.last_failure = f"said nothing for {silent_s:g} s, though asked"
        worker.give_up(silent_s)
        self._fleet.on_room()

    async def _check(self, worker: Worker) -> None:
        """Probe once and take in what the worker said of itself."""
        is_untold = self._index is not None and not self._index.is_told(worker.url)
        is_apart = worker.role is not Role.BOTH and not worker.identity.engine  # what are its blocks?
        authorization = self._config.authorization(worker.url)
        try:
            async with self._pool.clock.timeout(self._config.health_timeout_s):
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

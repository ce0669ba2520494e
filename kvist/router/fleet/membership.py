"""Adds workers to the fleet, checks them, and removes them.

Each worker has a task that checks it, reads what it serves and points the indexer at its event stream. A worker stays
as long as it is wanted: by settings, by an administrator, or by a source that settings name (`discovery`). Then it
drains: it gets no new requests, and is removed when its last request has ended or `drain_timeout_s` is over.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from http import HTTPStatus

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError, MalformedMessageError
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
    parse_report,
)
from kvist.router.index import FleetIndex
from kvist.router.policy.decision import Role
from kvist.router.sources import WantedWorker

logger = logging.getLogger(__name__)

UNSURE_INTERVAL_S = 0.5
"""The longest time between checks of a worker that is not healthy or that failed the last check."""
ASK_AGAIN_S, ASKED_A_SECOND = 1.0, 50
"""All workers are checked for a model that nobody is known to serve this long after the last time at the soonest, and
later in large fleets: no more than so many workers a second."""
REPORT_INTERVAL_S = 1.0
FIRST_CHECKS_S = 1.0
"""How long the router's start waits for workers that do not answer."""
SETTINGS, ADMINISTRATOR, EARLIER = "settings", "administrator", "earlier process"
"""Who may want workers, beside the sources that settings name; the first that wants one sets its role and streams."""


class Membership(ComposedContext):
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
    ) -> None:
        """Start with the configured workers; `index` is None if the policy does not use it."""
        self._config = config
        self._pool = pool
        self._fleet = fleet
        self._load = load
        self._index = index
        self._wanted: dict[str, dict[str, WantedWorker]] = {SETTINGS: {}, ADMINISTRATOR: {}}
        self._removed: set[str] = set()
        """Those that an administrator removed; one comes back when a source wants it that did not."""
        self.discovery = Discovery(self.set_wanted)
        self._watches: dict[str, list[asyncio.Task[None]]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()
        self._renderings = RenderingChecks(config, pool, fleet.renderings, models, now_s)
        self._now_s = now_s
        self._check_now, self._checked_at_s = asyncio.Event(), -math.inf

    async def _open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self._tasks)
        self.reconfigure(self._config)
        # A router that listened before it had asked anybody would refuse its first requests.
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECKS_S):
                await asyncio.gather(*(source.was_tried.wait() for source in self.discovery.sources.values()))
                await asyncio.gather(*(worker.was_checked.wait() for worker in self._fleet.workers))

    def check_all(self) -> None:
        """Check all workers now, as one may have loaded an adapter, unless that was done a moment ago."""
        now_s = self._now_s()
        if now_s >= self._checked_at_s + max(ASK_AGAIN_S, len(self._fleet.workers) / ASKED_A_SECOND):
            self._checked_at_s = now_s
            self._check_now.set()
            self._check_now = asyncio.Event()

    def check_renderings(self) -> None:
        """Compare tokens with the workers whose model has a tokeniser now."""
        for worker in self._fleet.workers:
            if worker.was_checked.is_set():
                self._renderings.on_health_check(worker, self._tasks)

    def add(self, worker: WantedWorker) -> Worker:
        """Add a worker for an administrator.

        Event sources and a role given here win over what the worker announces. Raises InvalidValueError, and
        RequestError (409) if the worker is already there or still draining.
        """
        if (present := self._fleet.get(worker.url)) is not None:
            raise RequestError(HTTPStatus.CONFLICT, f"worker {worker.url} is already there and {present.state}")
        self._load.register(WorkerRank(worker.url, 0))
        self.set_wanted(ADMINISTRATOR, [*self._wanted[ADMINISTRATOR].values(), worker])
        added = self._fleet.get(worker.url)
        assert added is not None
        return added

    def remove(self, worker: Worker) -> None:
        """Drain a worker for an administrator, even if others want it now."""
        self._wanted[ADMINISTRATOR].pop(worker.url, None)
        self._removed.add(worker.url)
        self._drain(worker)

    def set_wanted(self, source: str, workers: Iterable[WantedWorker]) -> None:
        """Replace the workers that this source wants; start new ones, and drain those that nobody wants any more.

        A worker that an administrator removed comes back if a source wants it that did not before. Raises
        InvalidValueError, after all others were started, if a worker cannot be added.
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
                except InvalidValueError as error:
                    refusal = error if url in self._wanted[source] else refusal
                    continue
            worker.configured_event_sources, worker.configured_role = every[url].kv_event_sources, every[url].role
            wanting = [each for each, wanted in self._wanted.items() if url in wanted]
            worker.registered_by = tuple(map(self.discovery.name_of, wanting))
            if worker.is_draining:
                worker.is_draining = False
                self._drains.pop(url).cancel()
                self._fleet.on_room(worker)
        if EARLIER in self._wanted and source != EARLIER and self.discovery.is_complete:
            self.set_wanted(EARLIER, ())
            del self._wanted[EARLIER]
        if refusal is not None:
            raise refusal

    def adopt(self, workers: Iterable[tuple[WantedWorker, Iterable[str]]]) -> None:
        """Keep the workers of the process before this one, each with who wanted it, until all sources have answered."""
        known = list(workers)
        self.set_wanted(EARLIER, [worker for worker, _ in known])
        self.set_wanted(ADMINISTRATOR, [worker for worker, registered_by in known if ADMINISTRATOR in registered_by])
        urls = {worker.url for worker, _ in known}
        for worker in self._fleet.workers:
            if worker.url not in urls and SETTINGS in worker.registered_by:
                self.remove(worker)

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply another configuration; a worker's next health check finds its new event sources."""
        self._config, self._renderings.config = config, config
        wanted = [
            WantedWorker(url, config.kv_event_sources.get(url, ()), config.role_of(url))
            for url in config.every_worker_url
        ]
        self.set_wanted(SETTINGS, wanted)
        self.discovery.follow(config, self._tasks)

    def _start(self, wanted: WantedWorker) -> Worker:
        """Add a worker and start to check it; raises InvalidValueError."""
        url = wanted.url
        self._load.register(WorkerRank(url, 0))
        config = self._config
        worker = Worker(
            url,
            wanted.kv_event_sources,
            HealthGauge(config.health_failures),
            CircuitBreaker(config.breaker_failures, config.breaker_cooldown_s),
            capacity=Capacity(config.max_worker_requests),
        )
        worker.breaker.on_change = lambda *_: self._on_circuit_change(worker.breaker)
        if config.max_worker_requests is not None:
            self._fleet.bounded.add(url)
        if self._index is not None:
            self._index.follow(url, wanted.kv_event_sources)
        self._fleet.put(worker)
        watches = {"health": self._check_regularly(worker), "report": self._poll_load(worker)}
        self._watches[url] = [
            self._tasks.create_task(each, name=f"kvist-{what} {url}") for what, each in watches.items()
        ]
        logger.info("worker added url=%s", url)
        return worker

    def _on_circuit_change(self, breaker: CircuitBreaker) -> None:
        """Let waiting requests try the worker as soon as its open circuit allows a trial."""
        if breaker.state is CircuitState.OPEN:
            asyncio.get_running_loop().call_later(breaker.cooldown_s, self._fleet.on_room, None)

    def _drain(self, worker: Worker) -> None:
        """Give the worker no new requests, and remove it once its requests have ended or `drain_timeout_s` is over."""
        if not worker.is_draining:
            worker.is_draining, worker.registered_by = True, ()
            if self._index is not None:
                self._index.unreported.forget(worker.url)
            logger.info("worker draining url=%s running=%d", worker.url, self._load.running_requests(worker.url))
            task = self._tasks.create_task(self._remove_when_idle(worker), name=f"kvist-drain {worker.url}")
            self._drains[worker.url] = task
            self._fleet.on_room(worker)  # requests that wait for this worker may go to others

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
            self._index.unreported.forget(worker.url)
        self._load.forget(worker.url)
        self._renderings.forget(worker.url)
        self._fleet.remove(worker.url)
        logger.info("worker removed url=%s", worker.url)

    async def _check_regularly(self, worker: Worker) -> None:
        while True:
            check_now = self._check_now  # one during the check asks for another
            await self._check(worker)
            self._renderings.on_health_check(worker, self._tasks)
            interval_s = self._config.health_interval_s
            if not worker.health.is_healthy or worker.last_failure is not None:
                interval_s = min(interval_s, UNSURE_INTERVAL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await check_now.wait()

    async def _poll_load(self, worker: Worker) -> None:
        """Read each second how many requests the worker runs, while it has some; give it up if it sends nothing."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            authorization, timeout_s = self._config.authorization(worker.url), self._config.silence_timeout_s
            if (warms_from := worker.capacity.warms_from) is not None:
                num_steps = self._load.num_steps(worker.url)
                warms_from = min(warms_from, num_steps)  # less if a front has died
                worker.capacity.warms_from = warms_from if num_steps < warms_from + WARM_UP_STEPS else None
            if not self._load.running_requests(worker.url):
                worker.capacity.reset()
                continue
            try:
                async with self._pool.clock.timeout(timeout_s):
                    status, page = await fetch(self._pool, worker.url, "/metrics", authorization)
            except TimeoutError:
                silent_s = min(self._pool.silent_s(worker.url), self._now_s() - self._load.last_byte_at_s(worker.url))
                if silent_s >= timeout_s:
                    self._give_up(worker, timeout_s)
            except (UpstreamError, MalformedMessageError):
                continue  # health checks and circuits judge by that
            else:
                # What waits at a prefill worker are prompts: the price counts their work, and no batch is to be filled.
                learns = status == HTTPStatus.OK and worker.role is not Role.PREFILL
                url, load, capacity = worker.url, self._load, worker.capacity
                report = parse_report(page) if learns else None
                capacity.learn(report, load.running_requests(url), load.ended_requests(url))
                capacity.learn_prefill(load.prefill_work(url), load.work_a_second(url))
                if capacity.max_requests is not None or capacity.max_prefill_work is not None:
                    self._fleet.bounded.add(url)
                self._fleet.on_room(worker)

    def _give_up(self, worker: Worker, silent_s: float) -> None:
        """Set a silent worker unhealthy, and let other workers have the requests that it has not begun to answer."""
        if worker.health.is_healthy:  # and not each time while an answer hangs that it has begun
            logger.warning("worker does not respond url=%s silent_s=%g", worker.url, silent_s)
        worker.health.set_unhealthy()
        worker.last_failure = f"sent no byte for {silent_s:g} s, not even its /metrics"
        worker.give_up(silent_s)
        self._fleet.on_room(worker)

    async def _check(self, worker: Worker) -> None:
        """Run one health check, and apply what the worker says of itself."""
        authorization = self._config.authorization(worker.url)
        try:
            async with self._pool.clock.timeout(self._config.health_timeout_s):
                identity = await probe(self._pool, worker.url, authorization, worker.identity)
        except (UpstreamError, MalformedMessageError) as error:
            if self._index is not None and not isinstance(error, UpstreamTimeoutError):  # a busy worker keeps its cache
                self._index.unreported.forget(worker.url)
            self._record_check(worker, str(error))
        except TimeoutError:
            self._record_check(worker, f"no answer to the health check within {self._config.health_timeout_s:g} s")
        else:
            self._apply_identity(worker, identity)
            self._record_check(worker, None)
        self._fleet.on_room(worker)

    def _record_check(self, worker: Worker, failure: str | None) -> None:
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
        """Start to warm a worker up if others like it are busy: as it is empty, it would get all requests at once."""
        models = worker.model_ids or (None,)
        if any(
            other is not worker and other.role is worker.role and self._load.running_requests(other.url)
            for other in self._fleet.workers
            if any(map(other.serves, models))
        ):
            worker.capacity.warms_from = self._load.num_steps(worker.url)
            self._fleet.bounded.add(worker.url)

    def _apply_identity(self, worker: Worker, identity: Identity) -> None:
        has_restarted = identity.has_restarted(worker.identity)
        worker.set_identity(identity)
        if has_restarted:
            self._renderings.expire(worker.url)
        self._fleet.put(worker)
        if self._index is None or worker.is_draining:
            return
        if identity.data_parallel_size is not None:
            self._index.limit_ranks(worker.url, identity.data_parallel_size)
        if worker.configured_event_sources:
            self._index.follow(worker.url, worker.configured_event_sources, identity.block_size)
        else:
            self._follow_announced(worker, identity, self._index)
        if has_restarted:
            self._index.unreported.forget(worker.url)
        num_tokens = identity.cache_size_tokens
        if num_tokens is None:
            num_tokens = self._config.expected_cache_tokens
        model = next(iter(worker.model_ids or ()), None)
        num_blocks = num_tokens // self._fleet.block_size_of(worker.url, model)
        self._index.unreported.set_room(worker.url, num_blocks, reports_anew=identity.engine == "vllm")

    def _follow_announced(self, worker: Worker, identity: Identity, index: FleetIndex) -> None:
        """Follow the announced event streams, or none if an address is not allowed."""
        endpoints, error, networks = [], None, self._config.allowed_event_networks
        if not identity.event_endpoints:
            error = "the worker announces no KV events, and none are configured for it"
        try:
            endpoints = [event_endpoint(worker.url, each, networks) for each in identity.event_endpoints]
        except InvalidValueError as refusal:
            error = str(refusal)
        if error is not None and error != worker.event_error:
            logger.warning("cache estimated, as no KV events are followed url=%s reason=%s", worker.url, error)
        worker.event_error = error
        index.follow(worker.url, endpoints, identity.block_size)

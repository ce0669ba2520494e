"""The process that knows the fleet: what `doors.keeper` is in a router of one process, told to fronts as it changes.

What it was told by administrators outlives it in the fronts, and what it has learnt of circuits does not. Its index
begins anew, in memory of its own: what a keeper that died has left half done, nobody repairs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvist.http import UpstreamPool
from kvist.router.config import RouterConfig
from kvist.router.doors.keeper import Keeper, Question
from kvist.router.doors.tls import Certificates
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.worker import Change, Worker
from kvist.router.processes import messages
from kvist.router.processes.messages import Families, Link, Message, ToKeeper, WorkerNews, encode
from kvist.router.sources import WantedWorker

logger = logging.getLogger(__name__)

KEEPER_SOCKET = "keeper"
"""In the router's own directory."""
TICK_S = 0.01
"""What changes is told after so long …"""
_REST = 9
"""… but telling takes no more than one part in ten of the time."""
_RESCAN_S = 0.25
_METRICS_TIMEOUT_S = 2.0

_decode = msgspec.msgpack.Decoder(ToKeeper).decode


class KeeperProcess:
    """Serves the fronts that connect in `directory` while its context is open."""

    def __init__(self, config: RouterConfig, directory: Path, load: LoadTracker, started_s: float) -> None:
        self._config, self._directory, self._load, self._started_s = config, directory, load, started_s
        self._certificates = Certificates(config)
        self._metrics = FrontMetrics()
        self._fronts: dict[Link, int] = {}
        self._told: dict[str, bytes] = {}
        self._is_due = True
        self._has_adopted = False
        self._trials: dict[str, Link] = {}
        self._descriptor = os.memfd_create("kvist-index")
        self._tasks = asyncio.TaskGroup()
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            pool: UpstreamPool = await exits.enter_async_context(self._certificates.worker_pool())
            self._keeper = await exits.enter_async_context(
                Keeper(
                    self._config,
                    pool,
                    self._load,
                    self._started_s,
                    registry=self._metrics,
                    counted=self._metrics.collect,
                    on_removed=self._on_removed,
                    descriptor=self._descriptor,
                )
            )
            self._keeper.fleet.on_room = self._on_change
            if self._keeper.replicas is not None:
                self._keeper.replicas.on_response = self._on_response
            await exits.enter_async_context(self._tasks)
            exits.callback(self._tasks.create_task(self._publish(), name="kvist-news").cancel)
            path = str(self._directory / KEEPER_SOCKET)
            server = await asyncio.start_unix_server(self._serve, path, limit=2**20)
            exits.callback(self._close, server)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._exits.__aexit__(*exception)  # type: ignore[arg-type]

    def _close(self, server: asyncio.Server) -> None:
        server.close()
        for link in self._fronts:
            link.close()

    def reload(self, config: RouterConfig) -> None:
        """Take over what may change while the router runs; raises InvalidValueError, and nothing has changed."""
        renewed, _, _ = self._config.changed_to(config)
        self._certificates.renew(renewed)
        self._config = renewed
        self._keeper.reconfigure(renewed)

    def _on_response(self, response_id: str, worker: str) -> None:
        self._tell_all(encode(messages.Said(response_id, worker, None)))

    # What is told.

    def _on_change(self) -> None:
        self._is_due = True

    async def _publish(self) -> None:
        """Tell fronts what has changed, soon after it has."""
        loop, index, seen = asyncio.get_running_loop(), self._keeper.index, None
        scanned_s = rests_until_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            began_s = loop.time()
            givings = None if index is None or index.radix is None else index.radix.num_givings
            now = (givings, frozenset() if index is None else frozenset(index.resyncing))
            is_due = self._is_due or now != seen or began_s - scanned_s > _RESCAN_S
            if is_due and began_s >= rests_until_s:
                seen, self._is_due, scanned_s = now, False, began_s
                self._tell_changes()
                rests_until_s = began_s + _REST * (loop.time() - began_s)

    def _tell_changes(self) -> None:
        for worker in self._keeper.fleet.workers:
            self._tell_of(worker)
        index = self._keeper.index
        if index is not None and index.has_joined:
            self._tell_if_new("", messages.IndexJoined(f"/proc/{os.getpid()}/fd/{self._descriptor}"))

    def _on_removed(self, url: str) -> None:
        """Tell it at once: who comes back under this URL may have other columns on the board."""
        self._told.pop(url, None)
        self._metrics.forget(url)
        self._tell_all(encode(messages.WorkerGone(url)))

    def _tell_of(self, worker: Worker) -> None:
        self._tell_if_new(worker.url, self._news_of(worker))

    def _tell_if_new(self, about: str, message: Message) -> None:
        frame = encode(message)
        if self._told.get(about) != frame:
            self._told[about] = frame
            self._tell_all(frame)

    def _tell_all(self, frame: bytes, but: Link | None = None) -> None:
        for link in self._fronts:
            if link is not but:
                link.tell(frame)

    def _news_of(self, worker: Worker) -> WorkerNews:
        fleet, index = self._keeper.fleet, self._keeper.index
        ranks = [] if index is None else [replace(rank, num_blocks=0) for rank in index.ranks(worker.url)]
        for rank in ranks:
            self._load.name(rank.target)
        breaker = worker.breaker
        return WorkerNews(
            worker.url,
            worker.configured_event_sources,
            worker.configured_role,
            worker.wanted_by,
            worker.identity,
            worker.health.is_healthy,
            worker.is_draining,
            worker.last_failure,
            (breaker.state, breaker.failures_in_a_row, breaker.retry_at_s),
            worker.capacity.max_requests,
            worker.capacity.paused_until_s,
            worker.capacity.warms_from,
            round(worker.capacity.ends_a_second, 1),
            worker.url in fleet.bounded,
            worker.num_given_up,
            ranks,
            None if index is None else index.block_sizes.get(worker.url),
            dict(fleet.renderings.differing.get(worker.url, {})),
        )

    # What is heard.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            async for frame in link.frames():
                self._take(link, _decode(frame))
        finally:
            self._fronts.pop(link, None)
            link.close()
            for url in [url for url, each in self._trials.items() if each is link]:  # of which nobody tells the end
                self._on_happened(link, url, "abandon", 0.0)

    def _take(self, link: Link, message: ToKeeper) -> None:
        index, fleet = self._keeper.index, self._keeper.fleet
        match message:
            case messages.Hello():
                self._greet(link, message)
            case messages.Happened(url, what, now_s):
                self._on_happened(link, url, what, now_s)
            case messages.Paused(url, until_s) if (worker := fleet.get(url)) is not None:
                worker.capacity.paused_until_s = max(worker.capacity.paused_until_s, until_s)
                fleet.bounded.add(url)
                self._tell_of(worker)
            case messages.Used(hashes) if index is not None:
                index.used(np.frombuffer(hashes, np.uint64))
            case messages.Computed(url, hashes) if index is not None and index.is_expecting(url):
                index.computed(url, np.frombuffer(hashes, np.uint64))
            case messages.Said():
                self._tell_all(encode(message), but=link)
                if self._keeper.replicas is not None:
                    self._keeper.replicas.relayed(message.response_id, message.worker)
            case messages.Ended(requests, seen):
                for request in requests:
                    self._keeper.on_routed(request)
                for each in seen:
                    self._keeper.on_seen(each)
            case messages.Asked(number, question) if question is not None:
                self._tasks.create_task(self._answer(link, number, question), name="kvist-answer")
            case messages.Answered():
                link.on_answer(message)

    def _on_happened(self, link: Link, url: str, what: Change, now_s: float) -> None:
        if what == "begin":
            self._trials[url] = link
        else:
            self._trials.pop(url, None)
        if (worker := self._keeper.fleet.get(url)) is not None:
            worker.breaker.apply(what, now_s)
            self._tell_of(worker)

    def _greet(self, link: Link, hello: messages.Hello) -> None:
        if hello.told_by not in (None, os.getpid()) and not self._has_adopted:
            self._adopt(hello.workers)
            self._has_adopted = True
        self._metrics.begin(hello.front, hello.pid)
        self._tell_changes()
        self._fronts[link] = hello.front
        for frame in (*self._told.values(), encode(messages.AllTold(os.getpid()))):
            link.tell(frame)

    def _adopt(self, known: list[WorkerNews]) -> None:
        """Have the workers that the keeper before this one had, whatever administrators made of the configured ones."""
        fleet, membership = self._keeper.fleet, self._keeper.membership
        membership.adopt(
            (WantedWorker(each.url, each.configured_event_sources, each.configured_role), each.wanted_by)
            for each in known
        )
        for each in known:
            if (worker := fleet.get(each.url)) is None:
                continue
            if worker.health.is_healthy is None:
                worker.health.is_healthy = each.is_healthy
                worker.identify(each.identity)
            if each.is_draining:
                membership.remove(worker)
        fleet.identified()

    async def _answer(self, link: Link, number: int, question: Question) -> None:
        if question.path in ("/metrics", "/usage"):
            await asyncio.gather(*(self._read_metrics(*each) for each in self._fronts.items()))
        answer = await self._keeper.answer(question)
        self._tell_changes()  # what it has made of the fleet is so once it is answered
        link.tell(encode(messages.Answered(number, answer)))

    async def _read_metrics(self, link: Link, front: int) -> None:
        """Have a front tell its metrics; where it does not in time, those it told last count."""
        with suppress(TimeoutError, ConnectionResetError):
            self._metrics.take(front, await link.ask(None, _METRICS_TIMEOUT_S))


class FrontMetrics(Collector):
    """The metrics of all fronts together: sums of what counts, over those that have died, too.

    What is measured of processes is that of this one, too.
    """

    def __init__(self) -> None:
        self._own = ProcessCollector(registry=None)
        self._ended: Families = []
        self._told: dict[int, Families] = {}
        self._pids: dict[int, int] = {}

    def begin(self, front: int, pid: int) -> None:
        """Take a front that connects: another process in the place of one counts from 0."""
        if self._pids.get(front, pid) != pid:
            counted = [family for family in self._told.pop(front, []) if family[2] != "gauge"]
            self._ended = families_of(_merged([self._ended, counted]))
        self._pids[front] = pid

    def take(self, front: int, families: Families) -> None:
        """Take what a front tells."""
        self._told[front] = families

    def forget(self, worker: str) -> None:
        """Drop the series of a worker that is removed."""
        for _, _, _, samples in itertools.chain(self._ended, *self._told.values()):
            samples[:] = [sample for sample in samples if sample[1].get("worker") != worker]

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once."""
        yield from _merged([self._ended, *self._told.values(), families_of(self._own.collect())])


def families_of(metrics: Iterable[Metric | None]) -> Families:
    """Return metrics as they are told."""
    told = []
    for metric in filter(None, metrics):
        samples = [(name, dict(labels), value) for name, labels, value, *_ in metric.samples]
        told.append((metric.name, metric.documentation, metric.type, samples))
    return told


def _merged(told: Iterable[Families]) -> Iterator[Metric]:
    """Yield the sums; of moments, which have none, the first."""
    metrics: dict[str, tuple[Metric, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for name, text, kind, samples in itertools.chain.from_iterable(told):
        _, values = metrics.setdefault(name, (Metric(name, text, kind), {}))
        for sample_name, labels, value in samples:
            key = sample_name, tuple(labels.items())
            is_moment = sample_name.endswith(("_created", "start_time_seconds"))
            values[key] = min(values.get(key, value), value) if is_moment else values.get(key, 0.0) + value
    for metric, values in metrics.values():
        for (sample_name, pairs), value in values.items():
            metric.add_sample(sample_name, dict(pairs), value)
        yield metric

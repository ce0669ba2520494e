"""The process that knows the fleet: it runs the `Keeper` of `doors.keeper` and sends its changes to the fronts.

The next keeper gets the list of workers back from the fronts, with administrators' changes; what was learnt of circuits
is lost. It builds a new index in memory of its own, as a keeper that died may have left its index half written.
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

import msgspec
import numpy as np
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvist.contexts import ComposedContext
from kvist.events import WorkerRank
from kvist.http import UpstreamPool
from kvist.router.config import RouterConfig
from kvist.router.doors.keeper import Keeper, Question
from kvist.router.doors.tls import Certificates
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.worker import Capacity, Change, Worker
from kvist.router.processes import messages
from kvist.router.processes.messages import Families, Link, Message, ToKeeper, WorkerNews, encode
from kvist.router.sources import WantedWorker

logger = logging.getLogger(__name__)

KEEPER_SOCKET = "keeper"
"""The name of the socket in the router's own directory."""
_MIN_REST_S, _REST = 0.005, 9
"""What has changed of the index is sent at once, but sending takes no more than one part in ten of the time: it rests
for so many times as long as it took."""
_RESCAN_S = 1.0
"""What nobody reports is noticed after so long."""
_METRICS_TIMEOUT_S = 2.0

_decode = msgspec.msgpack.Decoder(ToKeeper).decode


class KeeperProcess(ComposedContext):
    """Serves the fronts that connect in `directory` while its context is open."""

    def __init__(self, config: RouterConfig, directory: Path, load: LoadTracker, started_s: float) -> None:
        self._config, self._directory, self._load, self._started_s = config, directory, load, started_s
        self._certificates = Certificates(config)
        self._metrics = FrontMetrics()
        self._fronts: dict[Link, int] = {}
        self._last_sent: dict[str, bytes] = {}
        """The last frame about each worker, by its URL, and about the index, by an empty string."""
        self._has_adopted = False
        self._trials: dict[str, Link] = {}
        """The front that is trying a worker whose circuit is half-open."""
        self._descriptor = os.memfd_create("kvist-index")
        self._ranks: object = None
        self._has_changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    async def _open(self, exits: AsyncExitStack) -> None:
        pool: UpstreamPool = await exits.enter_async_context(self._certificates.worker_pool())
        self._keeper = await exits.enter_async_context(
            Keeper(
                self._config,
                pool,
                self._started_s,
                self._load,
                registry=self._metrics,
                refresh=self._read_fronts,
                descriptor=self._descriptor,
            )
        )
        self._keeper.fleet.on_room, self._keeper.fleet.on_removed = self._send_worker, self._on_removed
        if self._keeper.index is not None:
            self._keeper.index.on_round = self._note_change
        if self._keeper.replicas is not None:
            self._keeper.replicas.on_response = lambda response_id, worker: self._broadcast(
                encode(messages.ResponseStored(response_id, worker, None))
            )
        await exits.enter_async_context(self._tasks)
        exits.callback(self._tasks.create_task(self._publish(), name="kvist-news").cancel)
        path = str(self._directory / KEEPER_SOCKET)
        server = await asyncio.start_unix_server(self._serve, path, limit=2**20)
        exits.callback(self._close, server)

    def _close(self, server: asyncio.Server) -> None:
        server.close()
        for link in self._fronts:
            link.close()

    def reload(self, config: RouterConfig) -> None:
        """Apply the settings that may change while the router runs; raises InvalidValueError before any changes."""
        self._certificates.renew()
        self._config = self._config.changed_to(config)
        self._keeper.reconfigure(self._config)

    # Sending.

    def _note_change(self) -> None:
        """Have fronts told if ranks have come or were cleared, or are resyncing or no longer so."""
        index = self._keeper.index
        ranks = None if index is None else (index.num_clearings, frozenset(index.resyncing))
        if ranks != self._ranks:
            self._ranks = ranks
            self._has_changed.set()

    async def _publish(self) -> None:
        """Send fronts what has changed of the index, and what nobody reports; other changes are sent at once."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RESCAN_S):
                    await self._has_changed.wait()
            self._has_changed.clear()
            began_s = loop.time()
            self._send_changes()
            await asyncio.sleep(max(_MIN_REST_S, _REST * (loop.time() - began_s)))

    def _send_changes(self) -> None:
        for worker in self._keeper.fleet.workers:
            self._send_worker(worker)
        index = self._keeper.index
        if index is not None and index.has_joined:
            self._send_if_new("", messages.IndexJoined(f"/proc/{os.getpid()}/fd/{self._descriptor}"))

    def _on_removed(self, url: str) -> None:
        """Report it at once: a later worker of this URL may have other columns on the board."""
        self._last_sent.pop(url, None)
        self._metrics.forget(url)
        self._broadcast(encode(messages.WorkerGone(url)))

    def _send_worker(self, worker: Worker | None) -> None:
        if worker is not None:
            self._send_if_new(worker.url, self._news_of(worker))

    def _send_if_new(self, subject: str, message: Message) -> None:
        frame = encode(message)
        if self._last_sent.get(subject) != frame:
            self._last_sent[subject] = frame
            self._broadcast(frame)

    def _broadcast(self, frame: bytes, except_to: Link | None = None) -> None:
        for link in self._fronts:
            if link is not except_to:
                link.send(frame)

    def _news_of(self, worker: Worker) -> WorkerNews:
        fleet, index = self._keeper.fleet, self._keeper.index
        ranks = [] if index is None else [replace(rank, num_blocks=0) for rank in index.ranks(worker.url)]
        for rank in ranks:
            self._load.register(rank.target)
        breaker, known = worker.breaker, worker.capacity
        return WorkerNews(
            worker.url,
            worker.configured_event_sources,
            worker.configured_role,
            worker.registered_by,
            worker.identity,
            worker.health.is_healthy,
            worker.is_draining,
            worker.last_failure,
            (breaker.state, breaker.failures_in_a_row, breaker.retry_at_s),
            Capacity(
                known.max_requests,
                None,
                known.paused_until_s,
                known.warms_from,
                round(known.ends_a_second, 1),
                known.max_prefill_work,
            ),
            worker.url in fleet.bounded,
            worker.num_given_up,
            ranks,
            None if index is None else index.block_sizes.get(worker.url),
            dict(fleet.renderings.differing.get(worker.url, {})),
        )

    # Receiving.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            async for frame in link.frames():
                self._on_message(link, _decode(frame))
                self._note_change()
        finally:
            self._fronts.pop(link, None)
            link.close()
            for url in [url for url, each in self._trials.items() if each is link]:  # nobody will report their end
                self._on_circuit_changed(link, url, "abandon", 0.0)

    def _on_message(self, link: Link, message: ToKeeper) -> None:
        index, fleet = self._keeper.index, self._keeper.fleet
        match message:
            case messages.Hello():
                self._on_hello(link, message)
            case messages.CircuitChanged(url, what, now_s):
                self._on_circuit_changed(link, url, what, now_s)
            case messages.Paused(url, until_s) if (worker := fleet.get(url)) is not None:
                worker.capacity.paused_until_s = max(worker.capacity.paused_until_s, until_s)
                fleet.bounded.add(url)
                self._send_worker(worker)
            case messages.ModelUnknown():
                fleet.on_unknown_model()
            case messages.Used(hashes) if index is not None:
                index.touch(np.frombuffer(hashes, np.uint64))
            case messages.Computed(url, hashes, rank) if index is not None:
                index.record_computed(WorkerRank(url, rank), np.frombuffer(hashes, np.uint64))
            case messages.ResponseStored():
                self._broadcast(encode(message), except_to=link)
                if self._keeper.replicas is not None:
                    self._keeper.replicas.add_response(message.response_id, message.worker)
            case messages.Ended(requests, entries):
                for request in requests:
                    self._keeper.on_routed(request)
                for entry in entries:
                    self._keeper.on_journal_entry(entry)
            case messages.Asked(number, question) if question is not None:
                self._tasks.create_task(self._answer(link, number, question), name="kvist-answer")
            case messages.Answered():
                link.on_answer(message)

    def _on_circuit_changed(self, link: Link, url: str, what: Change, now_s: float) -> None:
        if what == "begin":
            self._trials[url] = link
        else:
            self._trials.pop(url, None)
        if (worker := self._keeper.fleet.get(url)) is not None:
            worker.breaker.apply(what, now_s)
            self._send_worker(worker)

    def _on_hello(self, link: Link, hello: messages.Hello) -> None:
        if hello.keeper_pid not in (None, os.getpid()) and not self._has_adopted:
            self._adopt(hello.workers)
            self._has_adopted = True
        self._metrics.on_connect(hello.front, hello.pid)
        self._send_changes()
        self._fronts[link] = hello.front
        for frame in (*self._last_sent.values(), encode(messages.Synced(os.getpid()))):
            link.send(frame)

    def _adopt(self, known: list[WorkerNews]) -> None:
        """Continue with the workers of the keeper before this one, and with what administrators changed of them."""
        fleet, membership = self._keeper.fleet, self._keeper.membership
        membership.adopt(
            (WantedWorker(each.url, each.configured_event_sources, each.configured_role), each.registered_by)
            for each in known
        )
        for each in known:
            if (worker := fleet.get(each.url)) is None:
                continue
            if worker.health.is_healthy is None:
                worker.health.is_healthy = each.is_healthy
                worker.set_identity(each.identity)
                fleet.put(worker)
            for rank in each.ranks:  # else nobody would free the columns of a worker that is gone
                self._load.register(rank.target)
            if each.is_draining:
                membership.remove(worker)

    async def _answer(self, link: Link, number: int, question: Question) -> None:
        if question.path == "/usage":
            await self._read_fronts()
        answer = await self._keeper.answer(question)
        self._send_changes()  # before the answer: who has it may rely on what it changed
        link.send(encode(messages.Answered(number, answer)))

    async def _read_fronts(self) -> None:
        """Ask all fronts for their metrics."""
        await asyncio.gather(*(self._read_metrics(*each) for each in self._fronts.items()))

    async def _read_metrics(self, link: Link, front: int) -> None:
        """Ask a front for its metrics; if it does not answer in time, its last ones count."""
        with suppress(TimeoutError, ConnectionResetError):
            self._metrics.update(front, await link.ask(None, _METRICS_TIMEOUT_S))


class FrontMetrics(Collector):
    """The metrics of all fronts and this process, summed; counters include fronts that have died."""

    def __init__(self) -> None:
        self._own = ProcessCollector(registry=None)
        self._of_ended: Families = []
        self._of_fronts: dict[int, Families] = {}
        self._pids: dict[int, int] = {}

    def on_connect(self, front: int, pid: int) -> None:
        """Keep the counters of a front's earlier process, as a new process counts from 0."""
        if self._pids.get(front, pid) != pid:
            counted = [family for family in self._of_fronts.pop(front, []) if family[2] != "gauge"]
            self._of_ended = families_of(_merged([self._of_ended, counted]))
        self._pids[front] = pid

    def update(self, front: int, families: Families) -> None:
        self._of_fronts[front] = families

    def forget(self, worker: str) -> None:
        for _, _, _, samples in itertools.chain(self._of_ended, *self._of_fronts.values()):
            samples[:] = [sample for sample in samples if sample[1].get("worker") != worker]

    def collect(self) -> Iterator[Metric]:
        yield from _merged([self._of_ended, *self._of_fronts.values(), families_of(self._own.collect())])


def families_of(metrics: Iterable[Metric | None]) -> Families:
    """Return metrics as they are sent to the keeper."""
    families = []
    for metric in filter(None, metrics):
        samples = [(name, dict(labels), value) for name, labels, value, *_ in metric.samples]
        families.append((metric.name, metric.documentation, metric.type, samples))
    return families


def _merged(sources: Iterable[Families]) -> Iterator[Metric]:
    """Yield each metric with the sums of its samples, or the earliest of samples that are points in time."""
    metrics: dict[str, tuple[Metric, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for name, text, kind, samples in itertools.chain.from_iterable(sources):
        _, values = metrics.setdefault(name, (Metric(name, text, kind), {}))
        for sample_name, labels, value in samples:
            key = sample_name, tuple(labels.items())
            is_moment = sample_name.endswith(("_created", "start_time_seconds"))
            values[key] = min(values.get(key, value), value) if is_moment else values.get(key, 0.0) + value
    for metric, values in metrics.values():
        for (sample_name, pairs), value in values.items():
            metric.add_sample(sample_name, dict(pairs), value)
        yield metric

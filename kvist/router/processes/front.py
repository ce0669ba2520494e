"""A front's copy of what the keeper knows of the fleet; it sends back how requests change the state of workers.

It matches prompts in the keeper's index, which it maps; the keeper tells it which slots belong to which rank.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import mmap
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from kvist import __version__
from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.events import WorkerRank
from kvist.events.session import SourceState
from kvist.http import UpstreamPool
from kvist.indexer import compilation
from kvist.openai.errors import RequestError
from kvist.router.admission import Admission
from kvist.router.config import RouterConfig
from kvist.router.conversations import Conversations
from kvist.router.doors.explain import explain_readiness
from kvist.router.doors.journal import JournalEntry
from kvist.router.doors.keeper import Answer, Question, error_answer, json_answer, readiness_answer
from kvist.router.doors.service import RouterService
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.worker import CircuitBreaker, HealthGauge, Worker
from kvist.router.index import Overlaps, RankStatus
from kvist.router.metrics import RouterMetrics
from kvist.router.processes import messages
from kvist.router.processes.keeper import KEEPER_SOCKET, KeeperProcess, families_of
from kvist.router.processes.messages import Link, Message, ToFront, WorkerNews, encode
from kvist.router.processes.supervisor import KEEPER, Part
from kvist.router.recording import Beginning
from kvist.router.regret import Routed
from kvist.router.unreported import add_expected

if TYPE_CHECKING:
    from kvist.radix import RadixReader

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Between two attempts to reach a keeper."""
FIRST_SYNC_S = 10.0
"""How long a front that starts waits for a keeper; then it listens, and refuses requests until there is one."""
ANSWER_TIMEOUT_S, READINESS_TIMEOUT_S = 15.0, 0.5
"""How long to wait for the keeper's answer; a readiness probe itself waits only a second or so."""
REPORT_INTERVAL_S = 0.25
MAX_ENDED, MAX_ENTRIES = 4096, 256

_decode = msgspec.msgpack.Decoder(ToFront).decode


class SharedIndex:
    """The `kvist.router.index.Caches` of a front: the keeper's index; empty while there is no keeper."""

    num_clearings = 0
    """It does not change, as a front forgets its lists of ranks with all that the keeper sends about a worker."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        """Report matches and answers to the keeper with `send`, as far as it needs to know of them."""
        self._send = send
        self._reader: RadixReader | None = None
        self._ranks: dict[str, list[RankStatus]] = {}
        self._targets: dict[int, WorkerRank] = {}
        self._expected: dict[int, RankStatus] = {}
        self.block_sizes: Mapping[str, int] = {}

    @property
    def has_joined(self) -> bool:
        return self._reader is not None

    def attach(self, reader: RadixReader) -> None:
        self._reader = reader

    def detach(self) -> None:
        """Stop using the index of a keeper that is gone; slots and clearings of the next one differ."""
        self._reader = None
        self._targets.clear()
        self._expected.clear()
        for worker, ranks in self._ranks.items():
            self._ranks[worker] = [replace(each, slot=None, clearing=None, expected_clearing=None) for each in ranks]

    def set_ranks(self, worker: str, ranks: list[RankStatus], block_size: int | None = None) -> None:
        """Set the ranks and the block size of a worker, as the keeper reports them; no ranks remove it."""
        if block_size != self.block_sizes.get(worker):
            others = {name: size for name, size in self.block_sizes.items() if name != worker}
            self.block_sizes = others if block_size is None else {**others, worker: block_size}
        for status in self._ranks.pop(worker, ()):
            self._targets.pop(status.clearing or 0, None)
            self._expected.pop(status.expected_clearing or 0, None)
        if ranks:
            self._ranks[worker] = ranks
        for status in ranks:
            if status.clearing is not None and status.state is not SourceState.RESYNCING:
                self._targets[status.clearing] = status.target
                if status.expected_clearing is not None:
                    self._expected[status.expected_clearing] = status

    def match(
        self, hashes: NDArray[np.uint64], num_usable: int | None = None, num_exact: int | None = None
    ) -> Overlaps | None:
        """Return who holds how many leading blocks, of the first `num_usable`; None while the keeper writes."""
        reader, targets = self._reader, self._targets
        if reader is None:
            return {}
        found = reader.match(hashes, len(hashes) if num_usable is None else num_usable)
        if found is None:
            return None
        if found and reader.wants_uses:
            self._send(messages.Used(hashes.tobytes()))
        overlaps = {targets[clearing]: depths for clearing, depths in found.items() if clearing in targets}
        for clearing in found.keys() & self._expected.keys():
            status = self._expected[clearing]
            add_expected(overlaps, status.target, status.state, found[clearing], num_exact)
        return overlaps

    def ranks(self, worker: str) -> list[RankStatus]:
        """Return the worker's ranks, with what each holds."""
        ranks, reader = self._ranks.get(worker, []), self._reader
        if reader is None:
            return ranks
        return [replace(rank, num_blocks=reader.num_held(rank.slot or 0, rank.clearing or 0)) for rank in ranks]

    def is_expecting(self, worker: str) -> bool:
        return any(status.is_approximate for status in self._ranks.get(worker, ()))

    def record_computed(self, target: WorkerRank, hashes: NDArray[np.uint64]) -> None:
        """Report that a rank now holds all blocks of a prompt, as its events do not say so."""
        self._send(messages.Computed(target.worker, hashes.tobytes(), target.rank))


class RemoteKeeper(ComposedContext):
    """A front's `FleetKeeper`: the state that the keeper sent last; the keeper may be away."""

    def __init__(
        self,
        config: RouterConfig,
        part: Part,
        load: LoadTracker,
        pool: UpstreamPool,
        metrics: RouterMetrics,
        gauges: Callable[[], Iterator[Metric | None]],
    ) -> None:
        self._config, self._part, self._pool, self._metrics, self._gauges = config, part, pool, metrics, gauges
        self.load = load
        self.index = SharedIndex(self._send) if config.policy == "kv" else None
        self.fleet = Fleet(config.block_size, self.index, time.monotonic, config.engines)
        self.models = Models(config, self.fleet, self.fleet.renderings.add_special_tokens)
        self.fleet.on_paused = lambda worker: self._send(messages.Paused(worker.url, worker.capacity.paused_until_s))
        self.fleet.on_unknown_model = lambda: self._send(messages.ModelUnknown())
        self._conversations: Conversations | None = None
        self._link: Link | None = None
        self._is_synced = asyncio.Event()
        self._keeper_pid: int | None = None
        self._bell = part.bells[part.front]
        self._news: dict[str, tuple[Link, WorkerNews]] = {}
        """What was received last about each worker, and from which keeper."""
        self._ended = messages.Ended([], [])
        self._tasks = BackgroundTasks()

    async def _open(self, exits: AsyncExitStack) -> None:
        """Follow the keeper; returns once its whole state was received, or after `FIRST_SYNC_S`."""
        await exits.enter_async_context(self.models)
        await exits.enter_async_context(self._tasks)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._bell, self._on_bell)
        exits.callback(loop.remove_reader, self._bell)
        self._tasks.create_task(self._follow(), name="kvist-keeper-link")
        self._tasks.create_task(self._report_regularly(), name="kvist-keeper-reports")
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SYNC_S):
                await self._is_synced.wait()
        await self.models.wait_for_configured()

    async def answer(self, question: Question) -> Answer:
        """Return the keeper's answer, or one of this process where the keeper is not needed or not there."""
        if question.path == "/health":
            return json_answer({"status": "ok", "version": __version__})
        is_readiness, away = question.path == "/readiness", "is being started"
        timeout_s = READINESS_TIMEOUT_S if is_readiness else ANSWER_TIMEOUT_S
        try:
            if self._link is not None:
                answer: Answer = await self._link.ask(question, timeout_s)
                return answer
        except TimeoutError:
            away = f"does not answer for {timeout_s:g} s"
        except ConnectionResetError:
            away = "has ended"
        if is_readiness:
            page = explain_readiness(self.fleet, self.models, None, is_draining=question.is_draining)
            page["index"] = f"away: the process that follows the fleet {away}"
            return readiness_answer(page, question)
        message = f"the router's process that follows the fleet {away}; requests are routed by load"
        return error_answer(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="keeper_away", retry_after_s=1))

    def on_routed(self, request: Routed) -> None:
        """Report the request to the keeper soon; while it is away, requests beyond `MAX_ENDED` are dropped."""
        if len(self._ended.requests) < MAX_ENDED:
            self._ended.requests.append(request)

    def on_journal_entry(self, entry: JournalEntry) -> None:
        """Report it likewise, up to `MAX_ENTRIES`."""
        if len(self._ended.entries) < MAX_ENTRIES:
            self._ended.entries.append(entry)

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply another configuration; the keeper process reads its own."""
        self.models.reconfigure(config)

    def connect(self, conversations: Conversations, admission: Admission) -> None:
        """Share stored responses with the other fronts, and wake them when workers have room."""
        self._conversations = conversations
        conversations.on_stored = lambda *stored: self._send(messages.ResponseStored(*stored))
        admission.wake_front = lambda front: os.eventfd_write(self._part.bells[front], 1)

    def _on_bell(self) -> None:
        os.eventfd_read(self._bell)
        self.fleet.on_room(None)

    # Sending and receiving.

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(encode(message))

    async def _follow(self) -> None:
        while True:
            try:
                path = f"{self._part.directory}/{KEEPER_SOCKET}"
                reader, writer = await asyncio.open_unix_connection(path, limit=2**20)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            link = Link(reader, writer)
            known = [news for _, news in self._news.values()]
            link.send(encode(messages.Hello(self._part.front, os.getpid(), self._keeper_pid, known)))
            try:
                async for frame in link.frames():
                    self._on_message(link, _decode(frame))
            finally:
                link.close()
                self._link = None
                if self.index is not None:
                    self.index.detach()

    def _on_message(self, link: Link, message: ToFront) -> None:
        match message:
            case WorkerNews():
                self._news[message.url] = link, message
                self._update_worker(message)
            case messages.WorkerGone(url):
                self._remove_worker(url)
            case messages.IndexJoined(path) if self.index is not None:
                attaching = self._attach(link, self.index, Path(path))
                self._tasks.create_task(attaching, name="kvist-attach")
            case messages.Synced(pid):
                for url in [url for url, (sender, _) in self._news.items() if sender is not link]:
                    self._remove_worker(url)
                self._link, self._keeper_pid = link, pid
                self._is_synced.set()
            case messages.Answered():
                link.on_answer(message)
            case messages.Asked(number):
                families = families_of(itertools.chain(self._gauges(), self._metrics.registry.collect()))
                link.send(encode(messages.Answered(number, families)))
            case messages.ResponseStored(response_id, worker, said):
                if self._conversations is not None:
                    self._conversations.store(response_id, worker, said)

    async def _attach(self, link: Link, index: SharedIndex, path: Path) -> None:
        try:
            await compilation.load()
            from kvist.radix import RadixReader

            with path.open("r+b") as file:
                reader = RadixReader(mmap.mmap(file.fileno(), 0))
        except OSError as error:
            if not link.is_closed:
                logger.warning("the index cannot be mapped: %s", error)
        else:
            if not link.is_closed:  # else the keeper is gone, and another may have started
                index.attach(reader)
                logger.info("index ready")

    def _update_worker(self, news: WorkerNews) -> None:
        worker = self.fleet.get(news.url)
        if worker is None:
            breaker = CircuitBreaker(self._config.breaker_failures, self._config.breaker_cooldown_s)
            breaker.on_change = lambda what, now_s: self._send(messages.CircuitChanged(news.url, what, now_s))
            worker = Worker(news.url, (), HealthGauge(), breaker, num_given_up=news.num_given_up)
        # The keeper's circuit replaces ours: changes by requests here were sent to it, and come back with its own.
        worker.breaker.state, worker.breaker.failures_in_a_row, worker.breaker.retry_at_s = news.circuit
        worker.configured_event_sources, worker.configured_role = news.configured_event_sources, news.configured_role
        worker.registered_by = news.registered_by
        worker.health.is_healthy, worker.is_draining = news.is_healthy, news.is_draining
        worker.last_failure = news.last_failure
        paused_until_s = worker.capacity.paused_until_s  # ours may be on its way to the keeper
        worker.capacity = replace(news.capacity, paused_until_s=max(news.capacity.paused_until_s, paused_until_s))
        worker.set_identity(news.identity)
        self.fleet.put(worker)
        if news.is_bounded:
            self.fleet.bounded.add(news.url)
        self.fleet.renderings.set_differing(news.url, news.same_tokens)
        if self.index is not None:
            self.index.set_ranks(news.url, news.ranks, news.block_size)
        for rank in self.fleet.ranks(worker):
            self.load.register(rank.target)
        if news.num_given_up > worker.num_given_up:
            worker.give_up(self._pool.silent_s(news.url))
        worker.num_given_up = news.num_given_up
        self.fleet.on_room(worker)

    def _remove_worker(self, url: str) -> None:
        if self.fleet.get(url) is not None:
            self.fleet.remove(url)
            del self._news[url]
            self.load.forget(url)
            if self.index is not None:
                self.index.set_ranks(url, [])

    async def _report_regularly(self) -> None:
        """Report what the keeper cannot know: ended requests, and when workers last sent something."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            if (self._ended.requests or self._ended.entries) and self._link is not None:
                self._send(self._ended)
                self._ended = messages.Ended([], [])
            for worker in self.fleet.workers:
                silent_s = self._pool.silent_s(worker.url)
                if silent_s < math.inf:
                    self.load.set_last_byte_at(worker.url, time.monotonic() - silent_s)


def make_part(
    config: RouterConfig, part: Part, started_s: float, recording: Beginning | None = None
) -> RouterService | KeeperProcess:
    """Return the service that this process of a router runs, by the part that its supervisor gave it."""
    is_keeper = part.front == KEEPER
    rows = {"num_fronts": len(part.bells), "num_replicas": part.num_replicas}
    board = LoadBoard(mmap.mmap(part.board, 0), **rows, names_columns=is_keeper)
    load = LoadTracker(board, max(0, part.front))
    if is_keeper:
        return KeeperProcess(config, Path(part.directory), load, started_s)
    open_keeper = partial(RemoteKeeper, config, part, load)
    return RouterService(replace(config, port=part.port), started_s, open_keeper, recording)


def end_with_supervisor(part: Part) -> None:
    """Shut this process down when its supervisor is gone, and remove the directory that it may have left behind."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_end() -> None:
        loop.remove_reader(descriptor)
        shutil.rmtree(part.directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(descriptor, on_end)

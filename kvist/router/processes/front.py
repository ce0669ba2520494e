"""What a front knows of the fleet: the keeper tells it, and is told what requests make of workers.

The index it matches in the keeper's memory, with the keeper's word for whose slots are whose.
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
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from kvist import __version__
from kvist.errors import leave_group
from kvist.events import WorkerRank
from kvist.events.session import SourceState
from kvist.http import UpstreamPool
from kvist.indexer import compilation
from kvist.openai.errors import RequestError
from kvist.router.admission import Admission
from kvist.router.config import RouterConfig
from kvist.router.conversations import Conversations, Kept
from kvist.router.doors.explain import explain_readiness
from kvist.router.doors.journal import Seen
from kvist.router.doors.keeper import Answer, Question, json_answer, refusal
from kvist.router.doors.service import RouterService
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.worker import Capacity, CircuitBreaker, HealthGauge, Worker
from kvist.router.index import Overlaps, RankStatus
from kvist.router.metrics import RouterMetrics
from kvist.router.processes import messages
from kvist.router.processes.keeper import KEEPER_SOCKET, KeeperProcess, families_of
from kvist.router.processes.messages import Link, Message, ToFront, WorkerNews, encode
from kvist.router.processes.supervisor import KEEPER, Part
from kvist.router.recording import Beginning
from kvist.router.regret import Routed

if TYPE_CHECKING:
    from kvist.radix import RadixReader

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Between two attempts to reach a keeper."""
FIRST_NEWS_S = 10.0
"""How long a front that starts waits for a keeper; then it listens, and refuses requests until there is one."""
ANSWER_TIMEOUT_S, READINESS_TIMEOUT_S = 15.0, 0.5
"""How long a keeper is waited for; whoever asks for readiness waits a second or so."""
HEARD_INTERVAL_S = 0.25
MAX_ENDED, MAX_SEEN = 4096, 256

_decode = msgspec.msgpack.Decoder(ToFront).decode


class SharedIndex:
    """What `kvist.router.index.Caches` is, while there is a keeper; without one, nobody is known to hold anything."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        """Tell the keeper what it needs to know of matches and answers."""
        self._tell = tell
        self._reader: RadixReader | None = None
        self._ranks: dict[str, list[RankStatus]] = {}
        self._targets: dict[int, WorkerRank] = {}
        self.block_sizes: Mapping[str, int] = {}

    @property
    def has_joined(self) -> bool:
        """Return whether prompts can be hashed and matched."""
        return self._reader is not None

    def attach(self, reader: RadixReader) -> None:
        """Match in this index from now on."""
        self._reader = reader

    def detach(self) -> None:
        """Know nothing of caches any more; the next index counts its givings anew."""
        self._reader = None
        self._targets.clear()
        for worker, ranks in self._ranks.items():
            self._ranks[worker] = [replace(status, slot=None, clearing=None) for status in ranks]

    def know(self, worker: str, ranks: list[RankStatus], block_size: int | None = None) -> None:
        """Take what the keeper says of a worker's ranks, and of its blocks; of one that is gone they are none."""
        if block_size != self.block_sizes.get(worker):
            others = {name: size for name, size in self.block_sizes.items() if name != worker}
            self.block_sizes = others if block_size is None else {**others, worker: block_size}
        for status in self._ranks.pop(worker, ()):
            self._targets.pop(status.clearing or 0, None)
        if ranks:
            self._ranks[worker] = ranks
        for status in ranks:
            if status.clearing is not None and status.state is not SourceState.RESYNCING:
                self._targets[status.clearing] = status.target

    def match(self, hashes: NDArray[np.uint64], num_usable: int | None = None) -> Overlaps | None:
        """Return who holds how many leading blocks, of the first `num_usable`; None while the keeper writes."""
        reader, targets = self._reader, self._targets
        if reader is None:
            return {}
        found = reader.match(hashes, len(hashes) if num_usable is None else num_usable)
        if found is None:
            return None
        if found and reader.wants_uses:
            self._tell(messages.Used(hashes.tobytes()))
        return {targets[giving]: depths for giving, depths in found.items() if giving in targets}

    def ranks(self, worker: str) -> list[RankStatus]:
        """Return the worker's ranks, with what each holds."""
        ranks, reader = self._ranks.get(worker, []), self._reader
        if reader is None:
            return ranks
        return [replace(rank, num_blocks=reader.num_held(rank.slot or 0, rank.clearing or 0)) for rank in ranks]

    def is_expecting(self, worker: str) -> bool:
        """Return whether what the worker was given is all that is known of its cache."""
        return any(status.is_approximate for status in self._ranks.get(worker, ()))

    def computed(self, worker: str, hashes: NDArray[np.uint64]) -> None:
        """Take note that a worker, expected to hold what it was given, now holds all blocks of a prompt."""
        self._tell(messages.Computed(worker, hashes.tobytes()))


class RemoteKeeper:
    """A `FleetKnowledge` while its context is open: as of the last word of the keeper, which may be away."""

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
        self.index = SharedIndex(self._tell) if config.policy == "kv" else None
        self.fleet = Fleet(config.block_size, self.index, time.monotonic, config.engines)
        self.models = Models(config, self.fleet, self.fleet.renderings.start)
        self.fleet.on_paused = lambda worker: self._tell(messages.Paused(worker.url, worker.capacity.paused_until_s))
        self._conversations: Conversations | None = None
        self._link: Link | None = None
        self._was_told = asyncio.Event()
        self._told_by: int | None = None
        self._bell = part.bells[part.front]
        self._news: dict[str, WorkerNews] = {}
        self._seen: set[str] = set()
        self._ended = messages.Ended([], [])
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Follow the keeper; returns once it has told all, or after a while without."""
        await self._tasks.__aenter__()
        asyncio.get_running_loop().add_reader(self._bell, self._on_bell)
        self._running = [self._tasks.create_task(self._follow()), self._tasks.create_task(self._note_heard())]
        await self.models.__aenter__()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._was_told.wait(), FIRST_NEWS_S)
        await self.models.configured()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        asyncio.get_running_loop().remove_reader(self._bell)
        for task in self._running:
            task.cancel()
        await self.models.__aexit__(None, error, None)
        await leave_group(self._tasks, error)

    async def answer(self, question: Question) -> Answer:
        """Return the keeper's answer, or what can be said without it."""
        if question.path == "/health":
            return json_answer({"status": "ok", "version": __version__})
        is_readiness, link = question.path == "/readiness", self._link
        if is_readiness and question.is_draining:
            return self._own_readiness(None, is_draining=True)
        if link is None:
            return self._own_readiness("is being started") if is_readiness else refusal(_away("is being started"))
        timeout_s = READINESS_TIMEOUT_S if is_readiness else ANSWER_TIMEOUT_S
        try:
            answer: Answer = await link.ask(question, timeout_s)
            return answer
        except TimeoutError:
            away = f"does not answer for {timeout_s:g} s"
        except ConnectionResetError:
            away = "has ended"
        return self._own_readiness(away) if is_readiness else refusal(_away(away))

    def _own_readiness(self, away: str | None, *, is_draining: bool = False) -> Answer:
        page = explain_readiness(self.fleet, self.models, None, is_draining=is_draining)
        page["index"] = None if away is None else f"away: the process that follows the fleet {away}"
        return json_answer(page, HTTPStatus.OK if page["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)

    def on_routed(self, request: Routed) -> None:
        """Tell the keeper soon; while it is away, no more than there is room for."""
        if len(self._ended.requests) < MAX_ENDED:
            self._ended.requests.append(request)

    def on_seen(self, request: Seen) -> None:
        """Likewise."""
        if len(self._ended.seen) < MAX_SEEN:
            self._ended.seen.append(request)

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on; the keeper reads its own itself."""
        self.models.reconfigure(config)

    def connect(self, conversations: Conversations, admission: Admission) -> None:
        """Have other fronts know of responses and of room, and this one of theirs."""
        self._conversations = conversations
        conversations.on_kept = lambda response_id, kept: self._tell(messages.Said(response_id, kept.worker, kept.said))
        admission.ring = lambda front: os.eventfd_write(self._part.bells[front], 1)

    def _on_bell(self) -> None:
        os.eventfd_read(self._bell)
        self.fleet.on_room()

    # Telling and being told.

    def _tell(self, message: Message) -> None:
        if self._link is not None:
            self._link.tell(encode(message))

    async def _follow(self) -> None:
        while True:
            try:
                path = f"{self._part.directory}/{KEEPER_SOCKET}"
                reader, writer = await asyncio.open_unix_connection(path, limit=2**20)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            link = Link(reader, writer)
            self._seen = set()
            known = [*self._news.values()]
            link.tell(encode(messages.Hello(self._part.front, os.getpid(), self._told_by, known)))
            try:
                async for frame in link.frames():
                    self._take(link, _decode(frame))
            finally:
                link.close()
                self._lose()

    def _lose(self) -> None:
        """Go on without a keeper."""
        self._link = None
        if self.index is not None:
            self.index.detach()

    def _take(self, link: Link, message: ToFront) -> None:
        match message:
            case WorkerNews():
                self._know(message)
            case messages.WorkerGone(url):
                self._forget(url)
            case messages.IndexJoined(path) if self.index is not None:
                attaching = self._attach(link, self.index, Path(path))
                self._running.append(self._tasks.create_task(attaching, name="kvist-attach"))
            case messages.AllTold(pid):
                for url in [worker.url for worker in self.fleet.workers if worker.url not in self._seen]:
                    self._forget(url)
                self._link, self._told_by = link, pid
                self._was_told.set()
            case messages.Answered():
                link.on_answer(message)
            case messages.Asked(number):
                families = families_of(itertools.chain(self._gauges(), self._metrics.registry.collect()))
                link.tell(encode(messages.Answered(number, families)))
            case messages.Said(response_id, worker, said):
                if self._conversations is not None:
                    self._conversations.keep(response_id, Kept(worker, said))

    async def _attach(self, link: Link, index: SharedIndex, path: Path) -> None:
        try:
            reader = await open_reader(path)
        except OSError as error:
            if not link.is_closed:
                logger.warning("the index cannot be mapped: %s", error)
        else:
            if not link.is_closed:  # or it may be another keeper's
                index.attach(reader)
                logger.info("the index has joined")

    def _know(self, news: WorkerNews) -> None:
        self._seen.add(news.url)
        self._news[news.url] = news
        worker = self.fleet.get(news.url)
        if worker is None:
            breaker = CircuitBreaker(self._config.breaker_failures, self._config.breaker_cooldown_s)
            breaker.on_change = lambda what, now_s: self._tell(messages.Happened(news.url, what, now_s))
            worker = Worker(news.url, (), HealthGauge(), breaker, num_given_up=news.num_given_up)
        # The keeper's word counts; what requests here have made of a circuit comes back with it.
        worker.breaker.state, worker.breaker.failures_in_a_row, worker.breaker.retry_at_s = news.circuit
        worker.configured_event_sources, worker.configured_role = news.configured_event_sources, news.configured_role
        worker.wanted_by = news.wanted_by
        worker.health.is_healthy, worker.is_draining = news.is_healthy, news.is_draining
        worker.last_failure = news.last_failure
        paused_until_s = max(news.paused_until_s, worker.capacity.paused_until_s)  # the keeper may not know of ours yet
        worker.capacity = Capacity(
            news.max_requests, None, paused_until_s, news.warms_from, ends_a_second=news.ends_a_second
        )
        worker.identify(news.identity)
        self.fleet.put(worker)
        if news.is_bounded:
            self.fleet.bounded.add(news.url)
        self.fleet.renderings.learn(news.url, news.same_tokens)
        if self.index is not None:
            self.index.know(news.url, news.ranks, news.block_size)
        for rank in self.fleet.ranks(worker):
            self.load.name(rank.target)
        if news.num_given_up > worker.num_given_up:
            worker.give_up(self._pool.silent_s(news.url))
        worker.num_given_up = news.num_given_up
        self.fleet.on_room()

    def _forget(self, url: str) -> None:
        if self.fleet.get(url) is not None:
            self.fleet.remove(url)
            del self._news[url]
            self.load.forget(url)
            self._metrics.forget_removed()
            if self.index is not None:
                self.index.know(url, [])

    async def _note_heard(self) -> None:
        """Show now and then what the keeper cannot know: when workers were last heard, and what came of requests."""
        while True:
            await asyncio.sleep(HEARD_INTERVAL_S)
            if (self._ended.requests or self._ended.seen) and self._link is not None:
                self._tell(self._ended)
                self._ended = messages.Ended([], [])
            for worker in self.fleet.workers:
                silent_s = self._pool.silent_s(worker.url)
                if silent_s < math.inf:
                    self.load.heard(worker.url, time.monotonic() - silent_s)


def _away(what: str) -> RequestError:
    message = f"the router's process that follows the fleet {what}; requests are routed by load"
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="keeper_away", retry_after_s=1)


async def open_reader(path: Path) -> RadixReader:
    """Map the index of this path; raises OSError if it is not there any more."""
    await compilation.load()
    from kvist.radix import RadixReader

    with path.open("r+b") as file:
        return RadixReader(mmap.mmap(file.fileno(), 0))


def make_part(
    config: RouterConfig, part: Part, started_s: float, recording: Beginning | None = None
) -> RouterService | KeeperProcess:
    """Return what this process of a router has to run, as its supervisor says."""
    is_keeper = part.front == KEEPER
    rows = {"num_fronts": len(part.bells), "num_replicas": part.num_replicas}
    board = LoadBoard(mmap.mmap(part.board, 0), **rows, names_columns=is_keeper)
    load = LoadTracker(board, max(0, part.front))
    if is_keeper:
        return KeeperProcess(config, Path(part.directory), load, started_s)
    knowledge = partial(RemoteKeeper, config, part, load)
    return RouterService(replace(config, port=part.port), started_s, knowledge, recording)


def end_with_supervisor(part: Part) -> None:
    """End this process, in order, when the one that started it is gone, which may have left its directory behind."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_end() -> None:
        loop.remove_reader(descriptor)
        shutil.rmtree(part.directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(descriptor, on_end)

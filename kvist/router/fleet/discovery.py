"""Follows sources of workers, whose URLs `kvist.router.sources` explains, and tells what each of them wants.

starting   it has not said anything yet
ok         what it said last holds: all of its workers, or none
failed     it cannot be asked or says nothing of use: what it said last still holds, and it is asked again
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from kvist.errors import InvalidValueError, KvistError
from kvist.files import file_stamp
from kvist.router.config import RouterConfig
from kvist.router.fleet.identity import event_endpoint
from kvist.router.sources import SourceUrl, WantedWorker
from kvist.settings import read_struct

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

logger = logging.getLogger(__name__)

Tell: TypeAlias = Callable[[Iterable[WantedWorker]], None]
"""Is called with all workers that a source wants now."""

LOOK_S = 1.0
"""How often a file is looked at."""
MIN_RETRY_S, MAX_RETRY_S = 0.5, 30.0
MIN_TTL_S, MAX_TTL_S = 1.0, 60.0
"""How soon a name is asked for again, whatever its answers say; at once after the first where there is none."""
DNS_TIMEOUT_S = 5.0
SILENCE_S = 15.0
"""After so long without another announcement a worker is gone."""
MAX_ANNOUNCED = 4096
CONNECT_S = 5.0


class SourceError(KvistError):
    """A source cannot be asked, or its answer is of no use."""


@dataclass(eq=False, slots=True)
class Source:
    """One source and what became of it; `is_complete` once it has named all of its workers."""

    url: SourceUrl
    task: asyncio.Task[None] = field(init=False)
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    is_complete: bool = False
    problem: str | None = None
    num_workers: int = 0
    heard_at_s: float | None = None

    @property
    def state(self) -> str:
        """Return how it is, as said above."""
        return "failed" if self.problem is not None else "starting" if self.heard_at_s is None else "ok"


class Discovery:
    """The sources of one configuration; `want` is told which workers the source of a URL wants."""

    def __init__(self, want: Callable[[str, Iterable[WantedWorker]], None]) -> None:
        self._want = want
        self._networks: tuple[str, ...] = ()
        self.sources: dict[str, Source] = {}

    def follow(self, config: RouterConfig, tasks: asyncio.TaskGroup) -> None:
        """Follow what the configuration names from now on, and nothing else."""
        self._networks = config.allowed_event_networks
        for url in self.sources.keys() - set(config.discover):
            self.sources.pop(url).task.cancel()
            self._want(url, ())
        for url in config.discover:
            if url not in self.sources:
                source = self.sources[url] = Source(SourceUrl.parse(url))
                source.task = tasks.create_task(self._follow(url, source), name=f"kvist-discovery {source.url.name}")

    def end(self) -> None:
        """Follow nothing any more; what was wanted stays so."""
        for source in self.sources.values():
            source.task.cancel()

    def name_of(self, url: str) -> str:
        """Return what a source is called where others see it; whoever is no source has its own name."""
        return self.sources[url].url.name if url in self.sources else url

    @property
    def is_complete(self) -> bool:
        """Return whether every source has named its workers."""
        return all(source.is_complete for source in self.sources.values())

    async def tried(self) -> None:
        """Wait until every source has been asked, whatever came of it."""
        await asyncio.gather(*(source.was_tried.wait() for source in self.sources.values()))

    def explain(self) -> list[dict[str, Any]]:
        """Return how each source is, as an operator reads it."""
        now_s = monotonic()
        return [
            {
                "source": source.url.name,
                "state": source.state,
                "reason": source.problem,
                "workers": source.num_workers,
                "age_s": None if source.heard_at_s is None else round(now_s - source.heard_at_s, 3),
            }
            for source in self.sources.values()
        ]

    def metrics(self) -> Iterator[Metric]:
        """Yield how many workers each source names, and whether it can be asked."""
        named = GaugeMetricFamily("kvist_router_discovered_workers", "Workers that a source names", labels=["source"])
        text = "Whether a source of workers can be asked"
        up = GaugeMetricFamily("kvist_router_discovery_up", text, labels=["source"])
        for source in self.sources.values():
            named.add_metric([source.url.name], source.num_workers)
            up.add_metric([source.url.name], source.state == "ok")
        yield from (named, up)

    async def _follow(self, url: str, source: Source) -> None:
        num_failures = 0

        def tell(workers: Iterable[WantedWorker], *, is_complete: bool = True) -> None:
            nonlocal num_failures
            if self.sources.get(url) is not source:
                return  # who announced itself while the source was dropped
            num_failures = 0
            if source.problem is not None:
                logger.info("discovery goes on source=%s", source.url.name)
            wanted = {worker.url: worker for worker in workers}
            source.num_workers, source.problem, source.heard_at_s = len(wanted), None, monotonic()
            source.is_complete |= is_complete
            self._want(url, wanted.values())
            source.was_tried.set()

        longest_s = LOOK_S if source.url.scheme == "file" else MAX_RETRY_S
        follow: Callable[[Any], Awaitable[None]] | None = None
        while True:
            try:
                follow = follow or _following(source.url, lambda: self._networks)
                await follow(tell)
            except (KvistError, OSError) as error:
                if source.problem != str(error):
                    logger.error("discovery failed, what was found stays source=%s reason=%s", source.url.name, error)
                source.problem = str(error)
            source.was_tried.set()
            await asyncio.sleep(min(MIN_RETRY_S * 2**num_failures, longest_s) * random.uniform(0.5, 1.0))
            num_failures = min(num_failures + 1, 10)


def _following(url: SourceUrl, networks: Callable[[], tuple[str, ...]]) -> Callable[[Any], Awaitable[None]]:
    """Return what tells of the workers there until it fails, and may be called again then.

    Raises MissingExtraError.
    """
    match url.scheme:
        case "file":
            return lambda tell: _follow_file(Path(url.path), tell)
        case "kubernetes":
            from kvist.router.fleet.kubernetes import KubernetesSource

            return KubernetesSource(url).follow
        case "nats":
            return Announcements(url, networks).follow
    return lambda tell: _follow_name(url, tell)


# --- Files and names --------------------------------------------------------------------------------------------------


class _WorkersFile(msgspec.Struct, forbid_unknown_fields=True):
    workers: list[WantedWorker]


async def _follow_file(path: Path, tell: Tell) -> NoReturn:
    seen = None
    while True:
        stamp = file_stamp(path)
        if stamp is None or stamp != seen:
            seen = stamp
            tell(_read_workers(path))
        await asyncio.sleep(LOOK_S)


def _read_workers(path: Path) -> list[WantedWorker]:
    try:
        return read_struct(path, _WorkersFile).workers
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None


async def _follow_name(url: SourceUrl, tell: Tell) -> NoReturn:
    from dns.asyncresolver import Resolver
    from dns.exception import DNSException

    try:
        resolver = Resolver(configure=url.nameserver is None)
        if url.nameserver is not None:
            resolver.nameservers, resolver.port = [url.nameserver[0]], url.nameserver[1]
        while True:
            workers, ttl_s = await _resolve(resolver, url)
            tell(workers)
            await asyncio.sleep(min(max(ttl_s, MIN_TTL_S), MAX_TTL_S))
    except DNSException as error:
        raise SourceError(str(error)) from None


async def _resolve(resolver: Resolver, url: SourceUrl) -> tuple[list[WantedWorker], float]:
    """Return the workers that a name stands for now, and for how long; a name that is not there stands for none."""
    from dns.resolver import NXDOMAIN

    records, ttls = [], []
    for kind in ("SRV",) if url.scheme == "dns+srv" else ("A", "AAAA"):
        try:
            answer = await resolver.resolve(
                url.host, kind, raise_on_no_answer=False, lifetime=DNS_TIMEOUT_S, search=True
            )
        except NXDOMAIN:
            continue
        if answer.rrset is not None:
            records += list(answer.rrset)
            ttls.append(answer.rrset.ttl)
    if url.scheme == "dns":
        return [url.worker(record.address, url.port or 0) for record in records], min(ttls, default=0)
    found = [(record.target.to_text(omit_final_dot=True), record.port) for record in records]
    return [url.worker(host, port) for host, port in found if host != "."], min(ttls, default=0)


# --- Announcements ----------------------------------------------------------------------------------------------------


class _Announcement(WantedWorker, frozen=True, forbid_unknown_fields=False):
    leaving: bool = False


class Announcements:
    """Workers that say over NATS every few seconds that they are there; who is silent is gone, unless all are unheard.

    Where their events are counts as far as what a worker itself announces.
    """

    def __init__(self, url: SourceUrl, networks: Callable[[], tuple[str, ...]]) -> None:
        self._url, self._networks = url, networks
        self._heard: dict[str, tuple[WantedWorker, float]] = {}
        self._is_malformed = False

    async def follow(self, tell: Callable[..., None]) -> NoReturn:
        """Tell of the workers, and raise SourceError while no server can be reached."""
        from kvist.events.transports.nats import FAILURES, shared_link

        assert self._url.broker is not None

        async def received(message: Any) -> None:
            if self._hear(message.data):
                tell([worker for worker, _ in self._heard.values()], is_complete=False)

        async with shared_link(self._url.broker, self) as link:
            while True:
                try:
                    async with asyncio.timeout(CONNECT_S):
                        client = await link.connected()
                except TimeoutError:
                    raise SourceError(link.problem or "no connection") from None
                with suppress(*FAILURES):  # the link says why
                    subscription = await client.subscribe(self._url.path, cb=received)
                    since_s = monotonic()  # nobody was heard before that
                    try:
                        while link.client is client:
                            self._forget_silent(since_s)
                            workers = [worker for worker, _ in self._heard.values()]
                            tell(workers, is_complete=monotonic() - since_s > SILENCE_S)
                            await asyncio.sleep(LOOK_S)
                    finally:
                        await subscription.unsubscribe()

    def _forget_silent(self, since_s: float) -> None:
        oldest_s = monotonic() - SILENCE_S
        self._heard = {url: each for url, each in self._heard.items() if max(each[1], since_s) >= oldest_s}

    def _hear(self, data: bytes) -> bool:
        """Take an announcement and return whether it says anything new."""
        try:
            said = msgspec.json.decode(data, type=_Announcement)
            streams = [event_endpoint(said.url, each, self._networks()) for each in said.kv_event_sources]
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidValueError) as error:
            if not self._is_malformed:
                self._is_malformed = True
                logger.warning("announcement skipped, as others may be: %s source=%s", error, self._url.name)
            return False
        before = self._heard.pop(said.url, None)
        if said.leaving or len(self._heard) >= MAX_ANNOUNCED:
            return before is not None
        worker = WantedWorker(said.url, tuple(streams), said.role)
        self._heard[said.url] = worker, monotonic()
        return before is None or before[0] != worker

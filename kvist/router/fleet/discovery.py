"""Follows sources of workers, whose URLs `kvist.router.sources` explains, and reports the workers that each names.

starting   it has not answered yet
ok         its last answer holds: it named all of its workers, or none
failed     it cannot be asked, or its answer is of no use: the last good answer still holds, and it is asked again
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

from kvist.contexts import BackgroundTasks
from kvist.errors import InvalidValueError, KvistError
from kvist.files import file_stamp
from kvist.router.config import RouterConfig
from kvist.router.fleet.identity import event_endpoint
from kvist.router.sources import SourceUrl, WantedWorker
from kvist.settings import read_struct

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

logger = logging.getLogger(__name__)

Report: TypeAlias = Callable[[Iterable[WantedWorker]], None]
"""Is called with all workers that a source wants now."""

POLL_S = 1.0
"""How often a file is checked for changes."""
MIN_RETRY_S, MAX_RETRY_S = 0.5, 30.0
MIN_TTL_S, MAX_TTL_S = 1.0, 60.0
"""Bounds of the time after which a name is resolved again, whatever TTL its records have, if it has any."""
DNS_TIMEOUT_S = 5.0
SILENCE_S = 15.0
"""A worker that has not announced itself for so long is gone."""
LATE_S = 1.0
"""A router that was itself away for so long takes nobody for silent before `SILENCE_S` from then."""
MAX_ANNOUNCED = 4096
CONNECT_S = 5.0


class SourceError(KvistError):
    """A source cannot be asked, or its answer is of no use."""


@dataclass(eq=False, slots=True)
class Source:
    """One source and its state; `is_complete` once it has named all of its workers."""

    url: SourceUrl
    task: asyncio.Task[None] = field(init=False)
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it was asked, whether or not it answered."""
    is_complete: bool = False
    problem: str | None = None
    num_workers: int = 0
    answered_at_s: float | None = None

    @property
    def state(self) -> str:
        return "failed" if self.problem is not None else "starting" if self.answered_at_s is None else "ok"


class Discovery:
    """The sources of a configuration; `set_wanted` is called with a source's URL and the workers that it wants."""

    def __init__(self, set_wanted: Callable[[str, Iterable[WantedWorker]], None]) -> None:
        self._set_wanted = set_wanted
        self._networks: tuple[str, ...] = ()
        self.sources: dict[str, Source] = {}

    def follow(self, config: RouterConfig, tasks: BackgroundTasks) -> None:
        """Follow exactly the sources that the configuration names."""
        self._networks = config.allowed_event_networks
        for url in self.sources.keys() - set(config.discover):
            self.sources.pop(url).task.cancel()
            self._set_wanted(url, ())
        for url in config.discover:
            if url not in self.sources:
                source = self.sources[url] = Source(SourceUrl.parse(url))
                source.task = tasks.create_task(self._follow(url, source), name=f"kvist-discovery {source.url.name}")

    def name_of(self, url: str) -> str:
        """Return the public name, without secrets, of the source with this URL; any other text as it is."""
        return self.sources[url].url.name if url in self.sources else url

    @property
    def is_complete(self) -> bool:
        return all(source.is_complete for source in self.sources.values())

    def explain(self) -> list[dict[str, Any]]:
        now_s = monotonic()
        return [
            {
                "source": source.url.name,
                "state": source.state,
                "reason": source.problem,
                "workers": source.num_workers,
                "age_s": None if source.answered_at_s is None else round(now_s - source.answered_at_s, 3),
            }
            for source in self.sources.values()
        ]

    def metrics(self) -> Iterator[Metric]:
        """Yield how many workers each source names, and whether it can be asked."""
        named = GaugeMetricFamily("kvist_router_discovered_workers", "Workers that a source names", labels=["source"])
        text = "1 if a source of workers can be queried"
        up = GaugeMetricFamily("kvist_router_discovery_up", text, labels=["source"])
        for source in self.sources.values():
            named.add_metric([source.url.name], source.num_workers)
            up.add_metric([source.url.name], source.state == "ok")
        yield from (named, up)

    async def _follow(self, url: str, source: Source) -> None:
        num_failures = 0

        def report(workers: Iterable[WantedWorker], *, is_complete: bool = True) -> None:
            nonlocal num_failures
            if self.sources.get(url) is not source:
                return  # a worker announced itself while the source was dropped
            num_failures = 0
            if source.problem is not None:
                logger.info("discovery works again source=%s", source.url.name)
            wanted = {worker.url: worker for worker in workers}
            source.num_workers, source.problem, source.answered_at_s = len(wanted), None, monotonic()
            source.is_complete |= is_complete
            self._set_wanted(url, wanted.values())
            source.was_tried.set()

        longest_s = POLL_S if source.url.scheme == "file" else MAX_RETRY_S
        follow: Callable[[Any], Awaitable[None]] | None = None
        while True:
            try:
                follow = follow or _following(source.url, lambda: self._networks)
                await follow(report)
            except (KvistError, OSError) as error:
                if source.problem != str(error):
                    logger.error("discovery failed, workers kept source=%s reason=%s", source.url.name, error)
                source.problem = str(error)
            source.was_tried.set()
            await asyncio.sleep(min(MIN_RETRY_S * 2**num_failures, longest_s) * random.uniform(0.5, 1.0))
            num_failures = min(num_failures + 1, 10)


def _following(url: SourceUrl, networks: Callable[[], tuple[str, ...]]) -> Callable[[Any], Awaitable[None]]:
    """Return a function that follows the source and reports its workers until it fails; it may be called again.

    Raises MissingExtraError.
    """
    match url.scheme:
        case "file":
            return lambda report: _follow_file(Path(url.path), report)
        case "kubernetes":
            from kvist.router.fleet.kubernetes import KubernetesSource

            return KubernetesSource(url).follow
        case "nats":
            return Announcements(url, networks).follow
    return lambda report: _follow_name(url, report)


# --- Files and names --------------------------------------------------------------------------------------------------


class _WorkersFile(msgspec.Struct, forbid_unknown_fields=True):
    workers: list[WantedWorker]


async def _follow_file(path: Path, report: Report) -> NoReturn:
    last = None
    while True:
        stamp = file_stamp(path)
        if stamp is None or stamp != last:
            last = stamp
            try:
                workers = read_struct(path, _WorkersFile).workers
            except ValueError as error:
                raise SourceError(f"{path}: {error}") from None
            report(workers)
        await asyncio.sleep(POLL_S)


async def _follow_name(url: SourceUrl, report: Report) -> NoReturn:
    from dns.asyncresolver import Resolver
    from dns.exception import DNSException

    try:
        resolver = Resolver(configure=url.nameserver is None)
        if url.nameserver is not None:
            resolver.nameservers, resolver.port = [url.nameserver[0]], url.nameserver[1]
        while True:
            workers, ttl_s = await _resolve(resolver, url)
            report(workers)
            await asyncio.sleep(min(max(ttl_s, MIN_TTL_S), MAX_TTL_S))
    except DNSException as error:
        raise SourceError(str(error)) from None


async def _resolve(resolver: Resolver, url: SourceUrl) -> tuple[list[WantedWorker], float]:
    """Return the workers that a name resolves to, none if it does not exist, and for how many seconds that holds."""
    from dns.resolver import NXDOMAIN

    records, ttls = [], []
    for kind in ("SRV",) if url.scheme == "dns+srv" else ("A", "AAAA"):
        try:
            answer = await resolver.resolve(
                url.host, kind, raise_on_no_answer=False, lifetime=DNS_TIMEOUT_S, search=True
            )
        except NXDOMAIN:
            continue
        finally:  # up to Python 3.11 the `asyncio.wait_for` that dnspython waits by may swallow a cancellation
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError
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
    """Workers that announce themselves over NATS every few seconds; one that stops is gone, unless NATS was away.

    Their event endpoints are checked like those that a worker announces over HTTP.
    """

    def __init__(self, url: SourceUrl, networks: Callable[[], tuple[str, ...]]) -> None:
        self._url, self._networks = url, networks
        self._announced: dict[str, tuple[WantedWorker, float]] = {}
        """Each worker, and when it was last announced."""
        self._is_malformed = False

    async def follow(self, report: Callable[..., None]) -> NoReturn:
        """Report the workers regularly; raises SourceError if no server can be reached."""
        from kvist.events.transports.nats import FAILURES, shared_link

        assert self._url.broker is not None

        async def on_message(message: Any) -> None:
            if self._receive(message.data):
                report([worker for worker, _ in self._announced.values()], is_complete=False)

        async with shared_link(self._url.broker) as link:
            while True:
                try:
                    async with asyncio.timeout(CONNECT_S):
                        client = await link.wait_connected()
                except TimeoutError:
                    raise SourceError(link.problem or "no connection") from None
                with suppress(*FAILURES):  # the link says why
                    subscription = await client.subscribe(self._url.path, cb=on_message)
                    since_s = monotonic()
                    try:
                        while link.client is client:
                            self._drop_silent(since_s)
                            workers = [worker for worker, _ in self._announced.values()]
                            report(workers, is_complete=monotonic() - since_s > SILENCE_S)
                            at_s = monotonic() + POLL_S
                            await asyncio.sleep(POLL_S)
                            if monotonic() - at_s > LATE_S:  # what came while this process did not run is not read yet
                                since_s = monotonic()
                    finally:
                        await subscription.unsubscribe()

    def _drop_silent(self, since_s: float) -> None:
        """Drop workers that were silent for too long, of which the time before this subscription does not count."""
        oldest_s = monotonic() - SILENCE_S
        self._announced = {url: each for url, each in self._announced.items() if max(each[1], since_s) >= oldest_s}

    def _receive(self, data: bytes) -> bool:
        """Apply an announcement and return whether it changed anything."""
        try:
            announced = msgspec.json.decode(data, type=_Announcement)
            streams = [event_endpoint(announced.url, each, self._networks()) for each in announced.kv_event_sources]
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidValueError) as error:
            if not self._is_malformed:
                self._is_malformed = True
                logger.warning("announcement skipped: %s source=%s", error, self._url.name)
            return False
        before = self._announced.pop(announced.url, None)
        if announced.leaving or len(self._announced) >= MAX_ANNOUNCED:
            return before is not None
        worker = WantedWorker(announced.url, tuple(streams), announced.role)
        self._announced[announced.url] = worker, monotonic()
        return before is None or before[0] != worker

"""The sidecar: follows the stream of an engine that knows nothing of Kvist, and publishes a canonical one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvist.events import EngineCleared, EngineStored, WorkerRank
from kvist.events.dialects import DecodedEngineBatch
from kvist.events.follow import Ticker, follow
from kvist.events.transports import Endpoint, open_publication, open_subscription
from kvist.events.windows import KnownWindow
from kvist.publisher.engine_feed import EngineFeed
from kvist.publisher.publisher import KvEventPublisher, PublisherLimits, PublisherStatistics
from kvist.publisher.stream import RankStream, topic_of

_logger = logging.getLogger(__name__)

LIMITS = PublisherLimits(inbox_capacity=1 << 20)
"""A sidecar's inbox holds more than an engine's: nobody shares this process's memory, and a loss clears a rank."""

FAILURE_CHECK_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class SidecarStatistics:
    """What a sidecar did: on the engine's side, summed over its endpoints, and as a publisher."""

    num_engine_batches: int
    num_malformed: int
    num_gaps: int
    num_recovered: int
    num_lost: int
    num_restarts: int
    published: PublisherStatistics


class Sidecar:
    """Republishes an engine's events as canonical batches; a restarted engine's ranks are cleared first.

    Give it one endpoint for each data-parallel rank that has its own. Without a `block_size` the first stored event
    tells it, and nothing is published before. Use it as `with Sidecar(...) as sidecar: await sidecar.run()`.
    """

    def __init__(
        self,
        engine_endpoints: Sequence[Endpoint],
        *,
        to: str,
        worker: str,
        block_size: int | None = None,
        window: KnownWindow | None = None,
        lora_names: Mapping[int, str] | None = None,
        limits: PublisherLimits = LIMITS,
    ) -> None:
        """Bind the publication at the URL `to`; raises InvalidValueError when a value is wrong or the port taken."""
        # Raises now for a value that would otherwise be refused only when the first event comes.
        source = WorkerRank(worker, 0)
        topic_of(source)
        RankStream(source, 1 if block_size is None else block_size, epoch=0, window=window)
        self._worker = worker
        self._window = window
        self._lora_names = lora_names
        self._limits = limits
        self._publication = open_publication(to, worker)
        self._publisher: KvEventPublisher | None = None
        self._ticker = Ticker()
        self._feeds = [(endpoint, _Feed(endpoint, self)) for endpoint in engine_endpoints]
        if block_size is not None:
            self._start_publisher(block_size)

    @property
    def endpoint(self) -> str:
        """The URL a subscriber connects to, with real port numbers."""
        return self._publication.endpoint

    async def run(self) -> None:
        """Follow every endpoint until cancelled, or until publishing fails, which `close` then raises.

        Raises InvalidValueError for an endpoint that cannot be connected to or bound.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                followers = [tasks.create_task(self._ticker.run(), name="kvist-sidecar-ticker")]
                followers += [
                    tasks.create_task(self._follow(endpoint, feed), name=f"kvist-sidecar-{endpoint.address}")
                    for endpoint, feed in self._feeds
                ]
                # Polled, because the publisher's thread knows nothing of this loop.
                while self._publisher is None or self._publisher.failure is None:  # noqa: ASYNC110
                    await asyncio.sleep(FAILURE_CHECK_INTERVAL_S)
                for follower in followers:
                    follower.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    def statistics(self) -> SidecarStatistics:
        """Return the counters as they are now."""
        feeds = [feed.feed for _, feed in self._feeds]
        return SidecarStatistics(
            num_engine_batches=sum(feed.num_batches for feed in feeds),
            num_malformed=sum(feed.num_malformed for feed in feeds),
            num_gaps=sum(feed.session.num_gaps for feed in feeds),
            num_recovered=sum(feed.session.num_recovered for feed in feeds),
            num_lost=sum(feed.session.num_lost for feed in feeds),
            num_restarts=sum(max(0, feed.session.num_epochs - 1) for feed in feeds),
            published=PublisherStatistics() if self._publisher is None else self._publisher.statistics(),
        )

    def close(self) -> None:
        """Publish what was received, then stop; raises what had ended publishing, if any."""
        if self._publisher is None:
            self._publication.close()
        else:
            self._publisher.close()

    def __enter__(self) -> Self:
        """Return the sidecar, whose publication is bound."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def publisher_for(self, batch: DecodedEngineBatch) -> KvEventPublisher | None:
        """Return the publisher, started by the first batch that tells the block size if none was given."""
        if self._publisher is None:
            block_size = next((event.block_size for event in batch.events if isinstance(event, EngineStored)), None)
            if block_size is not None and block_size > 0:
                _logger.info("block size learnt from the engine worker=%s block_size=%d", self._worker, block_size)
                self._start_publisher(block_size)
        return self._publisher

    def _start_publisher(self, block_size: int) -> None:
        self._publisher = KvEventPublisher(
            self._publication,
            worker=self._worker,
            block_size=block_size,
            window=self._window,
            lora_names=self._lora_names,
            limits=self._limits,
        )

    async def _follow(self, endpoint: Endpoint, feed: _Feed) -> None:
        async with open_subscription(endpoint) as subscription:
            await follow(
                subscription, feed.feed, clock=time.monotonic, ticker=self._ticker, replay_gate=asyncio.Semaphore()
            )


class _Feed:
    """One endpoint of the engine, fed into the sidecar's publisher."""

    def __init__(self, endpoint: Endpoint, sidecar: Sidecar) -> None:
        self.feed = EngineFeed(endpoint.engine, endpoint.address, self)
        self._sidecar = sidecar
        self._publisher: KvEventPublisher | None = None
        self._ranks: set[int] = set()

    def apply(self, batch: DecodedEngineBatch) -> None:
        """Report a batch's events to the publisher, once there is one."""
        self._publisher = self._publisher or self._sidecar.publisher_for(batch)
        if self._publisher is not None:
            for event in batch.events:
                self._ranks.add(event.rank)
                self._publisher.report(event)

    def clear(self) -> None:
        """Report that every rank of this endpoint holds nothing that is known."""
        if self._publisher is not None:
            for rank in self._ranks:
                self._publisher.report(EngineCleared(rank))

"""Who knows the fleet: follows its streams, checks its workers, and answers for them.

It is part of a router that is one process (`service`), and a process of its own where there are several (`processes`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvist.http import UpstreamPool
from kvist.metrics_page import MetricsPage
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.admission import Admission
from kvist.router.config import RouterConfig
from kvist.router.conversations import Conversations, Kept
from kvist.router.doors.api import AdminApi, Answer, Question
from kvist.router.doors.journal import Seen
from kvist.router.doors.live import LiveState
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.membership import Membership
from kvist.router.fleet.models import Models
from kvist.router.fleet.replicas import Replicas
from kvist.router.fleet.speeds import Speeds
from kvist.router.index import Caches, FleetIndex
from kvist.router.metrics import FleetGauges
from kvist.router.regret import Regret, Routed

_RESIZE_S = 1.0
"""How often it is asked how much all caches hold."""


class FleetKnowledge(Protocol):
    """What a router needs to know of its fleet, from a keeper in its own process or in another."""

    fleet: Fleet
    models: Models
    load: LoadTracker

    @property
    def index(self) -> Caches | None:
        """What is known of caches, None where the policy does not look at them."""

    async def answer(self, question: Question) -> Answer:
        """Return what to answer an operator."""

    def on_routed(self, request: Routed) -> None:
        """Take what came of a request, for `GET /regret`."""

    def on_seen(self, request: Seen) -> None:
        """Take a request, as the live page shows it."""

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on."""

    def connect(self, conversations: Conversations, admission: Admission) -> None:
        """Have other processes that take requests know of responses and of room, and these of theirs."""


class Keeper:
    """A `FleetKnowledge` while its context is open."""

    def __init__(
        self,
        config: RouterConfig,
        pool: UpstreamPool,
        load: LoadTracker,
        started_s: float,
        *,
        registry: CollectorRegistry | Collector,
        gauges: Callable[[], Iterator[Metric | None]] = lambda: iter(()),
        counted: Callable[[], Iterable[Metric | None]] | None = None,
        on_removed: Callable[[str], None] = lambda _: None,
        descriptor: int | None = None,
    ) -> None:
        """Its metrics are those of the fleet, what `gauges` yields, and, read in a thread, what `registry` has.

        What tenants have used is in those that `counted` yields, by default `gauges`.

        The index lies in the file of a `descriptor`, if there is one, for other processes to read.
        """
        now_s = time.monotonic
        self.load = load
        self.index: FleetIndex | None = None
        if config.policy == "kv":
            self.index = FleetIndex(
                config.block_size,
                now_s,
                config.state_dir,
                config.state_interval_s,
                num_ranks=config.data_parallel_size,
                has_full_reports=config.full_reports,
                max_blocks=config.max_blocks,
                expected_time_to_live_s=config.expected_time_to_live_s,
                descriptor=descriptor,
            )
        self.fleet = Fleet(config.block_size, self.index, now_s, config.engines)
        self.models = Models(config, self.fleet, self._on_tokenizer)
        self.membership = Membership(config, pool, self.fleet, self.models, load, self.index, now_s, on_removed)
        self.replicas = None if config.replicas is None else Replicas(config.replicas, load.board, self.fleet, now_s)
        own = FleetGauges(self.fleet, load, self.index, self.replicas, now_s)
        page = MetricsPage(lambda: chain(own.collect(), self.membership.discovery.metrics(), gauges()), registry)
        self._speeds = None
        if config.state_dir is not None:
            self._speeds = Speeds(Path(config.state_dir) / "router.speeds.json", load.board, config.state_interval_s)
        self._regret, self._capacity_blocks, self._sized_at_s = Regret(), 0, -math.inf
        self._live = LiveState(self.fleet, self.models, load, self.index, self._regret, self._explain_others)
        self._api = AdminApi(
            self.fleet,
            self.models,
            self.membership,
            load,
            self.index,
            page,
            self._regret,
            counted or gauges,
            self.replicas,
            self._live,
            started_s,
            now_s,
        )
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            await exits.enter_async_context(self.models)  # reads while workers are asked who they are
            if self.index is not None:
                await exits.enter_async_context(self.index)
            if self._speeds is not None:
                await exits.enter_async_context(self._speeds)
            await exits.enter_async_context(self.membership)
            await self.models.configured()
            if self.replicas is not None:
                await exits.enter_async_context(self.replicas)
            self._live.start()
            exits.callback(self._live.close)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._exits.__aexit__(*exception)  # type: ignore[arg-type]

    async def answer(self, question: Question) -> Answer:
        """Return what to answer an operator."""
        return await self._api.answer(question)

    def on_routed(self, request: Routed) -> None:
        """Add up what came of a request."""
        now_s = time.monotonic()
        if now_s - self._sized_at_s > _RESIZE_S:
            ranks = (rank for worker in self.fleet.workers for rank in self.fleet.ranks(worker))
            self._capacity_blocks, self._sized_at_s = sum(rank.num_blocks for rank in ranks), now_s
        self._regret.add(now_s, [request], self._capacity_blocks)

    def on_seen(self, request: Seen) -> None:
        """Show a request on the live page."""
        self._live.add(request)

    def _explain_others(self) -> dict[str, Any]:
        """Return what readiness tells beside the fleet."""
        told: dict[str, Any] = {"discovery": self.membership.discovery.explain()}
        if self.replicas is not None:
            told["replicas"] = self.replicas.described()
        if self.index is not None and (state := self.index.state_statistics()) is not None:
            told["state"] = state.described()
        return told

    def _on_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Have the tokens of the model's workers compared with these from now on."""
        if self.index is not None:
            self.fleet.renderings.start(tokenizer)
            self.membership.check_renderings()

    def connect(self, conversations: Conversations, admission: Admission) -> None:  # noqa: ARG002
        """There are no others here, but may be other routers."""
        if self.replicas is not None:
            replicas = self.replicas
            conversations.on_kept = lambda response_id, kept: replicas.relayed(response_id, kept.worker)
            replicas.on_response = lambda response_id, worker: conversations.keep(response_id, Kept(worker, None))

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on."""
        self.models.reconfigure(config)
        self.membership.reconfigure(config)

"""A request router of Ray Serve: the handles of a deployment send each request to the replica where it costs least.

    @serve.deployment(request_router_config=request_router(model_path=...))

    replicas    say in `record_replica_metadata` where they stream KV events; Serve starts, checks and stops them
    handles     follow those streams, each by itself, and read prompts as `kvist route` does
    requests    count from when the replica accepts them until Serve reports that they have ended

A request is read from the first argument of the call: OpenAI's fields, as a mapping, a Pydantic model or JSON. Any
other call goes where Serve itself finds the shortest queue; so does every request before the router has opened, and one
for which none of the replicas that Kvist prefers has room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec

from kvist.contexts import ComposedContext
from kvist.errors import InvalidValueError, MissingExtraError
from kvist.events import WorkerRank
from kvist.openai.errors import RequestError
from kvist.router.config import RouterConfig
from kvist.router.doors.embedded import Choice, RoutedRequest, Router
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.worker import CircuitBreaker, HealthGauge, Worker
from kvist.router.index import FleetIndex
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH
from kvist.settings import parse_values

try:
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ModuleNotFoundError as error:
    raise MissingExtraError("ray", str(error.name)) from error

logger = logging.getLogger(__name__)

EVENT_SOURCES = "kv_event_sources"
"""The key of a replica's metadata under which it lists the URLs of its streams."""
_EXPECT_INTERVAL_S = 5.0
"""How often the guessed caches of replicas without a stream are updated."""


def request_router(**settings: Any) -> RequestRouterConfig:
    """Return a deployment's configuration of routing, by settings of `kvist route`; raises InvalidValueError."""
    RouterConfig(**parse_values(RouterConfig, settings))
    name = f"{KvistRequestRouter.__module__}.{KvistRequestRouter.__qualname__}"
    return RequestRouterConfig(request_router_class=name, request_router_kwargs=settings)


class KvistRequestRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by what a request would cost each."""

    def initialize_state(self, **settings: Any) -> None:
        """Apply the settings; raises InvalidValueError."""
        self._config = RouterConfig(**parse_values(RouterConfig, settings))
        self._fleet: ReplicaFleet | None = None
        self._router: Router | None = None
        self._running: defaultdict[tuple[str, str], list[RoutedRequest]] = defaultdict(list)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Route to exactly these replicas."""
        super().update_replicas(replicas)
        if self._fleet is None:
            self._fleet = ReplicaFleet(self._config)
            self._opening = asyncio.create_task(self._open(self._fleet), name="kvist-ray")
        self._fleet.follow(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if self._fleet is not None:
            self._fleet.follow(self._replicas.values())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas one by one, the best first, or all together if Kvist cannot rank them."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before Serve calls this again
        if self._router is None or pending_request is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        others = [worker.url for worker in self._router.view.fleet.workers if worker.url not in by_name]
        try:
            choice = await self._router.choose(*request_of(pending_request.args), others)
        except RequestError:  # the replica answers with an error of its own
            return [candidate_replicas]
        pending_request.kvist_choice = choice
        ranked = [[by_name.pop(name)] for name in choice.decision.ranked_workers if name in by_name]
        return [*ranked, list(by_name.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request at the replica that accepted it."""
        super().on_request_routed(pending_request, replica_id, result)
        choice: Choice | None = getattr(pending_request, "kvist_choice", None)
        choice = None if choice is None else choice.at(replica_id.unique_id)
        if choice is not None and self._router is not None and self._router.view.fleet.get(replica_id.unique_id):
            # Serve does not report first bytes.
            routed = self._router.begin(choice, is_streamed=False)
            self._running[replica_id.unique_id, pending_request.metadata.internal_request_id].append(routed)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        for routed in self._running.pop((replica_id.unique_id, internal_request_id), ()):
            routed.answered()
            routed.finish()

    async def _open(self, fleet: ReplicaFleet) -> None:
        try:
            async with Router(self._config, fleet) as router:
                self._router = router
                while True:
                    fleet.expect()
                    await asyncio.sleep(_EXPECT_INTERVAL_S)
        except Exception:
            logger.exception("falling back to Ray Serve's own routing deployment=%s", self._deployment_id)
            raise
        finally:
            self._router = None


class ReplicaFleet(ComposedContext):
    """The replicas of a deployment as workers of a `Router`: all are healthy, and serve any model."""

    def __init__(self, config: RouterConfig) -> None:
        now_s = time.monotonic
        self._config = config
        self.load = LoadTracker()
        self.index = FleetIndex(replace(config, state_dir=None), now_s)
        self.fleet = Fleet(config.block_size, self.index, now_s)
        self.models = Models(config, self.fleet)

    async def _open(self, exits: AsyncExitStack) -> None:
        """Read the configured model and follow the streams; raises InvalidValueError."""
        await exits.enter_async_context(self.models)
        await exits.enter_async_context(self.index)
        await self.models.wait_for_configured()

    def follow(self, replicas: Iterable[RunningReplica]) -> None:
        """Set the replicas; the cache of one whose streams cannot be followed is guessed from what it was given."""
        wanted = {replica.replica_id.unique_id: replica for replica in replicas}
        for worker in self.fleet.workers:
            if worker.url not in wanted:
                self.index.follow(worker.url, ())
                self.index.unreported.forget(worker.url)
                self.load.forget(worker.url)
                self.fleet.remove(worker.url)
        for name, replica in wanted.items():
            if self.fleet.get(name) is not None:
                continue
            self.load.register(WorkerRank(name, 0))
            try:
                self.index.follow(name, replica.replica_metadata.get(EVENT_SOURCES, ()))
            except InvalidValueError as error:
                logger.error("events of a replica are not followed replica=%s reason=%s", name, error)
            self.fleet.put(Worker(name, (), HealthGauge(is_healthy=True), CircuitBreaker()))

    def expect(self) -> None:
        """Guess that replicas without streams keep what they were given, up to `expected_cache_tokens`."""
        for worker in self.fleet.workers:
            num_blocks = self._config.expected_cache_tokens // self.fleet.block_size_of(worker.url, None)
            self.index.unreported.set_room(worker.url, num_blocks)


def request_of(arguments: Sequence[Any]) -> tuple[str, bytes]:
    """Return a call's first argument as a path and a body of OpenAI's API; raises RequestError."""
    first: Any = arguments[0] if arguments else None
    if hasattr(first, "model_dump"):
        first = first.model_dump(mode="json", exclude_unset=True)
    try:
        body = first.encode() if isinstance(first, str) else first
        body = body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (TypeError, msgspec.DecodeError) as error:
        raise RequestError(400, f"not OpenAI's fields: {error}") from None
    return CHAT_PATH if "messages" in fields else COMPLETION_PATH, body

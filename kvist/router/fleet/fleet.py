"""The workers of a router, and which of them may take a request.

Their state is kept up to date by `membership`, in this process or in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import gcd, inf
from random import uniform
from typing import NamedTuple

from kvist.events import WorkerRank
from kvist.router.fleet.rendering import Renderings
from kvist.router.fleet.worker import CircuitState, Worker
from kvist.router.index import Caches, RankStatus
from kvist.router.policy.decision import Role

DEFAULT_BLOCK_SIZE = 16
"""The block size of workers that do not say theirs: their load and their guessed caches are counted in such blocks."""

RANKS_MAX_AGE_S = 0.2
"""How long the list of a worker's ranks is reused, at least half of it: asking anew takes 10 µs a rank. Workers' lists
end at different times: with 64 workers of eight ranks, a request would wait 5 ms for all of them."""


class BlockSizes(NamedTuple):
    """The block sizes of some workers, the smallest first, and their greatest common divisor, which depths count in."""

    each: tuple[int, ...]
    unit: int


class _Serving(NamedTuple):
    """What follows from which workers serve a model; `workers` are those whose engine gets requests."""

    workers: list[Worker]
    block_sizes: BlockSizes
    engine: str | None


class Fleet:
    """All methods belong to the event loop."""

    def __init__(
        self,
        block_size: int | None,
        index: Caches | None,
        now_s: Callable[[], float],
        engines: frozenset[str] | None = None,
    ) -> None:
        """Begin without workers; `index` is None if the policy does not use it.

        `block_size` is assumed for workers that do not say theirs. If `engines` are given, workers of any other engine
        get no requests.
        """
        self.engines = engines
        self._block_size = block_size or DEFAULT_BLOCK_SIZE
        self._index = index
        self._now_s = now_s
        self._workers: dict[str, Worker] = {}
        self._ranks: dict[str, tuple[float, list[RankStatus]]] = {}
        """The ranks of each worker, and until when they are reused."""
        self._num_clearings = 0
        self._adapters: frozenset[str | None] = frozenset()
        self._model_ids: frozenset[str | None] = frozenset()
        self._known: dict[str, tuple[object, ...]] = {}
        """What all that is computed from workers' identities follows from, by worker."""
        self._last_sizes: Mapping[str, int] = {}
        self._models: dict[str | None, _Serving] = {}
        self.has_prefill_workers = False
        """Whether some worker, in whatever state, has the role to compute prompts for others."""
        self.has_roles = False
        """Whether some worker has the role to compute prompts for others, or to decode what others computed."""
        self.has_pulls = False
        """Whether some worker can fetch the part of a prompt that another holds."""
        self.bounded: set[str] = set()
        """The workers whose number of requests has, or once had, a bound."""
        self.on_room: Callable[[Worker | None], None] = lambda _: None
        """Is called when a worker has changed and may have room that it had not, or None where any may have."""
        self.on_paused: Callable[[Worker], None] = lambda _: None
        """Is called when a worker has asked for no requests for a while."""
        self.on_removed: Callable[[str], None] = lambda _: None
        """Is called with the URL of a worker that was removed."""
        self.on_models: Callable[[], None] = lambda: None
        """Is called when the models that workers serve have changed."""
        self.on_unknown_model: Callable[[], None] = lambda: None
        """Is called when a request names a model that no worker is known to serve."""
        self.renderings = Renderings()

    def put(self, worker: Worker) -> None:
        """Add a worker, or replace the one of the same URL, or update what follows from its identity."""
        tokens_per_s = worker.identity.tokens_per_s
        known = worker, worker.role, worker.engine, worker.model_ids, worker.adapters, tokens_per_s
        self._workers[worker.url] = worker
        self._ranks.pop(worker.url, None)
        if known != self._known.get(worker.url):
            self._known[worker.url] = known
            self._refresh()

    def remove(self, url: str) -> None:
        self.bounded.discard(url)
        self.renderings.differing.pop(url, None)
        del self._workers[url], self._known[url]
        self._refresh()
        self.on_removed(url)

    def _refresh(self) -> None:
        self._models.clear()
        self._ranks.clear()
        roles = {worker.role for worker in self._workers.values()}
        self.has_prefill_workers, self.has_roles = Role.PREFILL in roles, bool(roles - {Role.BOTH})
        self.has_pulls = any(worker.identity.tokens_per_s for worker in self._workers.values())
        nothing = frozenset[str | None]()
        earlier = self._model_ids, self._adapters
        self._adapters = nothing.union(*(each.adapters for each in self._workers.values()))
        self._model_ids = nothing.union(*(each.model_ids or nothing for each in self._workers.values()))
        if earlier != (self._model_ids, self._adapters):
            self.on_models()

    @property
    def has_several_models(self) -> bool:
        """Return whether workers serve models that are not one and its adapters, so that requests must say which."""
        return len(self._model_ids) - len(self._adapters) > 1

    def block_sizes(self, model: str | None) -> BlockSizes:
        """Return the tokens per block of the workers that serve the model."""
        return self._serving(model).block_sizes

    def engine_of(self, model: str | None) -> str | None:
        """Return the engine of the workers that serve the model and name one; of several, vLLM, or else none."""
        return self._serving(model).engine

    def _serving(self, model: str | None) -> _Serving:
        known = self._last_sizes if self._index is None else self._index.block_sizes
        if known is not self._last_sizes:
            self._last_sizes = known
            self._models.clear()
        serving = self._models.get(model)
        if serving is None:
            workers = [worker for worker in self._workers.values() if worker.serves(model)]
            sizes = tuple(sorted({known[worker.url] for worker in workers if worker.url in known}))
            block_sizes = BlockSizes(sizes or (self._block_size,), gcd(*sizes) or self._block_size)
            engines = {worker.engine for worker in workers if worker.engine}
            engine = "vllm" if "vllm" in engines else engines.pop() if len(engines) == 1 else None
            allowed = [worker for worker in workers if self.engines is None or worker.engine in self.engines]
            serving = _Serving(allowed, block_sizes, engine)
            if model in self._model_ids or model is None:  # clients may make up any number of others
                self._models[model] = serving
        return serving

    def block_size_of(self, worker: str, model: str | None) -> int:
        """Return the tokens per block of a worker; if unknown, the smallest of those that serve the model."""
        sizes = self.block_sizes(model)
        return self._last_sizes.get(worker) or sizes.each[0]

    @property
    def workers(self) -> list[Worker]:
        """Return all workers, in the order they came."""
        return list(self._workers.values())

    def get(self, url: str) -> Worker | None:
        return self._workers.get(url)

    def routable(self, model: str | None, excluded: Collection[str] = ()) -> list[Worker]:
        """Return the workers that may take a request for the model now."""
        now_s = self._now_s()
        return [
            worker
            for worker in self._serving(model).workers
            if worker.health.is_healthy
            and not worker.is_draining
            and (worker.breaker.state is CircuitState.CLOSED or worker.breaker.allows(now_s))
            and worker.url not in excluded
        ]

    def is_known(self, model: str | None) -> bool:
        """Return whether some worker, in whatever state, serves the model."""
        return any(worker.serves(model) for worker in self._workers.values())

    def label_of(self, model: str | None) -> str:
        """Return how metrics name the model: itself if some worker says that it has it, else "other".

        A request that names none is of the only model, adapters aside, if there is but one.
        """
        if model is None and len(only := self._model_ids - self._adapters) == 1:
            (model,) = only
        return model if model is not None and model in self._model_ids else "other"

    def is_adapter(self, model: str | None) -> bool:
        """Return whether the model is a LoRA adapter, whose blocks hash with its name."""
        return model in self._adapters

    def ranks(self, worker: Worker) -> list[RankStatus]:
        """Return the worker's ranks; a worker without events has one, rank 0.

        What is said of them is up to `RANKS_MAX_AGE_S` old, unless a rank has come or was cleared since.
        """
        now_s = self._now_s()
        if self._index is not None and self._index.num_clearings != self._num_clearings:
            self._num_clearings = self._index.num_clearings
            self._ranks.clear()
        until_s, ranks = self._ranks.get(worker.url, (-inf, []))
        if now_s >= until_s:
            known = [] if self._index is None else self._index.ranks(worker.url)
            ranks = known or [RankStatus(WorkerRank(worker.url, 0))]
            self._ranks[worker.url] = now_s + RANKS_MAX_AGE_S * uniform(0.5, 1.0), ranks
        return ranks

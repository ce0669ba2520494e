"""Policies for any simulator to drive: it reports arrivals, first tokens and ends, they choose each request's worker.

`make_driver` returns the router's own `kv` policy: the code that decides there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.router.policy.priced import Dispatched, PricedPolicy, Prices
from kvist.router.policy.settings import FETCH_SCALE

Hashes = Sequence[int] | NDArray[np.uint64]
Counts = Sequence[int] | NDArray[np.int64]
Depths = Counts | Sequence[Sequence[int]]
"""A number for each worker, or one for each of its tiers, which counts the faster ones, too."""
Among = Sequence[int] | None


class Driver(Protocol):
    """What a simulator calls; `PricedDriver` documents each method. Times never go back."""

    def route(self, *query: Any, **more: Any) -> int: ...
    def prefer(self, *query: Any, **more: Any) -> int: ...
    def answered(self, now_s: float, request_id: Hashable, /) -> None: ...
    def tokens(self, now_s: float, request_id: Hashable, num: int, /) -> None: ...
    def finished(self, now_s: float, request_id: Hashable, /) -> None: ...


class PricedDriver:
    """The router's `kv` policy behind the interface of `make_driver`."""

    def __init__(self, num_workers: int, block_size: int, seed: int = 0) -> None:
        """Decide for so many workers; ties are broken by `seed`."""
        self._policy = PricedPolicy.for_one(num_workers, block_size)
        self._num_workers = num_workers
        self._random = Random(seed)
        self._running: dict[Hashable, Dispatched] = {}
        self._streams = True  # until a request ends without a first token, and again from the next first token on

    def route(
        self,
        now_s: float,
        request_id: Hashable,
        block_hashes: Hashes,
        num_tokens: int,
        depths: Depths,
        held_blocks: Counts,
        among: Among = None,
        *,
        is_fetched: bool = False,
    ) -> int:
        """Choose the worker for a request, count the request there from now on, and return the worker's index.

        `depths` are how many leading blocks of the prompt the index holds for each worker, `held_blocks` all that it
        holds. `among` are the workers to choose from, if not all. A prompt that `is_fetched` was computed by another
        worker. A request that is routed again no longer counts at its earlier worker. Raises InvalidValueError unless
        there is one count for each worker.
        """
        self.finished(now_s, request_id)
        scale = FETCH_SCALE if is_fetched else 1.0
        query = (block_hashes, num_tokens, depths, held_blocks, among)
        worker_idx, chosen_idx, prices = self._weigh(scale, now_s, *query)
        self._running[request_id] = self._policy.dispatched(
            now_s, worker_idx, prices, chosen_idx, is_streamed=self._streams, computes=not is_fetched
        )
        return worker_idx

    def prefer(self, now_s: float, *query: Any) -> int:
        """Return the index of the worker that `route` would choose for the same arguments; nothing is counted."""
        return self._weigh(1.0, now_s, *query)[0]

    def _weigh(
        self,
        scale: float,
        now_s: float,
        hashes: Hashes,
        num_tokens: int,
        depths: Depths,
        held: Counts,
        among: Among = None,
    ) -> tuple[int, int, Prices]:
        """Return the index of the worker, where it stands among the candidates, and their prices."""
        for name, counts in (("depths", depths), ("held_blocks", held)):
            if len(counts) != self._num_workers:
                raise InvalidValueError(name, list(counts), f"{self._num_workers} numbers, one a worker")
        candidates = np.array(range(self._num_workers) if among is None else among)
        by_worker = np.asarray(depths)[candidates]
        prices = self._policy.weigh(now_s, int(num_tokens), hashes, by_worker, candidates, scale)
        chosen_idx = self._policy.choose(prices, np.asarray(held)[candidates].tolist(), self._random)
        return int(candidates[chosen_idx]), chosen_idx, prices

    def answered(self, now_s: float, request_id: Hashable) -> None:
        """Record a request's first token; later ones, and unknown requests, change nothing."""
        if (request := self._running.get(request_id)) is not None:
            self._streams = True
            request.answered(now_s)

    def tokens(self, now_s: float, request_id: Hashable, num: int) -> None:  # noqa: ARG002
        """Record that an answer grew by so many tokens."""
        if (request := self._running.get(request_id)) is not None:
            request.add_tokens(int(num))

    def finished(self, now_s: float, request_id: Hashable) -> None:
        """Record that a request ended; a streamed one without a first token was not computed."""
        if (request := self._running.pop(request_id, None)) is not None:
            self._streams = self._streams and not request.is_waiting
            request.finish(now_s)


def make_driver(*, num_workers: int, block_size: int, seed: int = 0) -> PricedDriver:
    """Return the router's `kv` policy for a simulator of one's own; raises InvalidValueError."""
    for name, value in (("num_workers", num_workers), ("block_size", block_size)):
        if value < 1:
            raise InvalidValueError(name, value, "1 or more")
    return PricedDriver(num_workers, block_size, seed)

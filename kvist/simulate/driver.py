"""Policies as anybody's simulator drives them: told of arrivals, first tokens and ends, they say who takes what.

`make_driver` gives the router's own `kv` policy, the very code that decides there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.router.policy.priced import Dispatched, PricedPolicy, Prices, Pull
from kvist.router.policy.settings import DEFAULT_MAX_LOCAL_PREFILL_TOKENS, FETCH_SCALE, PriceSettings

Hashes = Sequence[int] | NDArray[np.uint64]
Counts = Sequence[int] | NDArray[np.int64]
Depths = Counts | Sequence[Sequence[int]]
"""Of each worker, or of each of its tiers with the faster ones."""
Among = Sequence[int] | None


class Driver(Protocol):
    """What a simulator tells a policy, as `PricedDriver` has it. Times never go back."""

    fetch: tuple[int, float]
    """How many first blocks are there when the request that was routed last has fetched others', and how long that
    takes: 0 s where it fetches nothing."""

    def route(self, *asked: Any, **more: Any) -> int: ...
    def prefer(self, *asked: Any, **more: Any) -> int: ...
    def answered(self, now_s: float, request_id: Hashable, /) -> None: ...
    def tokens(self, now_s: float, request_id: Hashable, num: int, /) -> None: ...
    def finished(self, now_s: float, request_id: Hashable, /) -> None: ...


class PricedDriver:
    """The router's `kv` policy behind the interface of `make_driver`."""

    def __init__(
        self,
        num_workers: int,
        block_size: int,
        seed: int = 0,
        settings: PriceSettings | None = None,
        fetch_tokens_per_s: float | None = None,
    ) -> None:
        """Decide for so many workers; ties are broken by `seed`.

        Workers fetch what others hold so fast, if they do, while they are all there and answer.
        """
        self.fetch = 0, 0.0
        self._fetch_token_s = None if fetch_tokens_per_s is None else np.full(num_workers, 1.0 / fetch_tokens_per_s)
        self._policy = PricedPolicy.for_one(num_workers, block_size, settings)
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
        """Return the index of the worker that takes the request, and count it there from now on.

        `depths` are the leading blocks of the prompt that the index holds, a worker; `held_blocks` all that it holds.
        `among` are the workers that are there, where that is not all. A prompt that `is_fetched` was computed by
        another worker. A request that is routed again is withdrawn from where it was. Raises InvalidValueError where
        counts are not one a worker.
        """
        self.finished(now_s, request_id)
        scale, asked = FETCH_SCALE if is_fetched else 1.0, (block_hashes, num_tokens, depths, held_blocks, among)
        worker_idx, chosen_idx, prices = self._weigh(scale, now_s, *asked)
        num_held_tokens = int(prices.cached_tokens[chosen_idx] + prices.fetched_tokens[chosen_idx])
        self.fetch = num_held_tokens // self._policy.block_size, float(prices.fetch_s[chosen_idx])
        self._running[request_id] = self._policy.dispatched(
            now_s, worker_idx, prices, chosen_idx, is_streamed=self._streams, computes=not is_fetched
        )
        return worker_idx

    def prefer(self, now_s: float, *asked: Any) -> int:
        """Return the index of the worker that `route` would choose, asked the same; nothing is counted."""
        return self._weigh(1.0, now_s, *asked)[0]

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
        for name, counts in (("depths", depths), ("held_blocks", held)):
            if len(counts) != self._num_workers:
                raise InvalidValueError(name, list(counts), f"{self._num_workers} numbers, one a worker")
        ranks = None if among is None else np.array(among)
        here, pull, by_worker = slice(None) if ranks is None else ranks, None, np.asarray(depths)
        if self._fetch_token_s is not None and ranks is None:
            on_gpu = by_worker.reshape(self._num_workers, -1)[:, 0]
            pull = Pull(int(on_gpu.max()), self._fetch_token_s, DEFAULT_MAX_LOCAL_PREFILL_TOKENS)
        prices = self._policy.weigh(now_s, int(num_tokens), hashes, by_worker[here], ranks, scale, pull)
        chosen_idx = self._policy.choose(prices, np.asarray(held)[here].tolist(), self._random)
        return chosen_idx if among is None else among[chosen_idx], chosen_idx, prices

    def answered(self, now_s: float, request_id: Hashable) -> None:
        """Take note of a request's first token; later ones, and requests that are not known, change nothing."""
        if (request := self._running.get(request_id)) is not None:
            self._streams = True
            request.answered(now_s)

    def tokens(self, now_s: float, request_id: Hashable, num: int) -> None:  # noqa: ARG002
        """Take note that an answer grew by so many tokens."""
        if (request := self._running.get(request_id)) is not None:
            request.add_tokens(int(num))

    def finished(self, now_s: float, request_id: Hashable) -> None:
        """Take note that a request ended; a streamed one that had no first token was not computed."""
        if (request := self._running.pop(request_id, None)) is not None:
            self._streams = self._streams and not request.is_waiting
            request.finish(now_s)


def make_driver(*, num_workers: int, block_size: int, seed: int = 0) -> PricedDriver:
    """Return the router's `kv` policy for a simulator of one's own; raises InvalidValueError."""
    for name, value in (("num_workers", num_workers), ("block_size", block_size)):
        if value < 1:
            raise InvalidValueError(name, value, "1 or more")
    return PricedDriver(num_workers, block_size, seed)

"""What policies decide from, the decision they return, and the random draw that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

import msgspec

from kvist.events import WorkerRank

if TYPE_CHECKING:
    from kvist.router.policy.priced import Prices


class Role(StrEnum):
    """Which part of requests a worker is for. Only routing looks at it: any worker can compute a request alone."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt's length: an estimate where `is_exact` is false."""

    num_tokens: int
    block_size: int
    is_exact: bool = True


class Load(msgspec.Struct, frozen=True, gc=False):
    """What a rank has to do now: see `kvist.router.fleet.load`."""

    running_requests: int = 0
    prefill_tokens: int = 0


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A rank that may take the request.

    `overlap_blocks[tier]` counts the leading blocks of the prompt held in this tier or a faster one, so it never falls.
    `num_cached_blocks` is all that the rank holds. Where `is_approximate`, the worker has reported neither: they are
    only expected. `load` is set only for policies that look at it.
    """

    target: WorkerRank
    load: Load = Load()
    overlap_blocks: tuple[int, ...] = ()
    num_cached_blocks: int = 0
    is_approximate: bool = False
    is_exact: bool = False
    """Whether all that the rank holds is known."""


class Weighing(msgspec.Struct, frozen=True, gc=False):
    """One probability a candidate, summing to 1, and the rule that made them."""

    rule: str
    probabilities: list[float]


class Decision(msgspec.Struct, frozen=True):
    """The rank that takes the request, and everything that the decision was made from."""

    policy: str
    prompt: Prompt
    chosen: Candidate
    """The candidate that takes the request."""
    chosen_idx: int
    overlap_tokens: int
    """How many prompt tokens it is expected to find in its cache, in any tier."""
    weighed: Callable[[], tuple[Sequence[Candidate], Weighing]]
    """Returns all candidates, and how likely they were; computed on demand, as few callers need it."""
    prices: Prices | None = None
    """The terms of the `kv` policy; None for others."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Return all that could have been chosen."""
        return self.weighed()[0]

    @property
    def weighing(self) -> Weighing:
        """Return how likely each was."""
        return self.weighed()[1]

    def choosing(self, idx: int) -> Decision:
        """Return the same with another candidate chosen."""
        chosen = self.candidates[idx]
        tokens = usable_tokens(chosen.overlap_blocks, self.prompt)
        return msgspec.structs.replace(self, chosen=chosen, chosen_idx=idx, overlap_tokens=tokens)

    @property
    def ranked_workers(self) -> list[str]:
        """Return the worker that takes the request, then the others, the cheapest or likeliest first."""
        candidates, weighing = self.weighed()
        costs = [-each for each in weighing.probabilities] if self.prices is None else self.prices.cost_s.tolist()
        ranked = sorted(range(len(costs)), key=costs.__getitem__)
        return list(dict.fromkeys(candidates[idx].target.worker for idx in (self.chosen_idx, *ranked)))


def usable_blocks(overlap_blocks: int, prompt: Prompt) -> int:
    """Return how many of the overlapping blocks spare work: the block with the last token is computed in any case."""
    return min(overlap_blocks, max(0, prompt.num_tokens - 1) // prompt.block_size)


def usable_tokens(overlap_blocks: Sequence[int], prompt: Prompt) -> int:
    """Return how many tokens the blocks held in any tier spare."""
    return usable_blocks(overlap_blocks[-1], prompt) * prompt.block_size if overlap_blocks else 0


def is_worth_handing_over(prompt: Prompt, num_cached_tokens: int, max_local_prefill_tokens: int) -> bool:
    """Return whether the worker that would do all of a request had more than so many tokens to compute."""
    return prompt.num_tokens - num_cached_tokens > max_local_prefill_tokens


def uniform_over_minima(keys: Sequence[tuple[float, ...]]) -> list[float]:
    """Return equal probabilities for all candidates whose key is the smallest, wherever they stand."""
    lowest = min(keys)
    share = 1.0 / keys.count(lowest)
    return [share if key == lowest else 0.0 for key in keys]


def draw(probabilities: Sequence[float], random: Random) -> int:
    """Return an index at random, each as likely as its probability says."""
    remaining = random.random() * sum(probabilities)  # `random.choices` takes 5 µs more of a request
    chosen_idx = 0
    for idx, probability in enumerate(probabilities):
        if probability > 0:
            chosen_idx = idx
            remaining -= probability
            if remaining < 0:
                break
    return chosen_idx

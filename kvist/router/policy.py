"""Routing policies: pure functions from what is known about a prompt and the fleet to a probability per candidate.

A policy never draws, keeps no state and reads no clock: `decide` takes the randomness, and `turn` (how many requests
were dispatched so far) is what round robin counts with. So a decision can be explained without being taken.

The `kv` policy gives each candidate a cost in blocks, the lowest wins:

    cost = prefill_scale · max(0, (prompt_tokens + queued_prefill_tokens) / B − credit)
           + decode_scale · decode_blocks + recent_scale · recent_prefill_tokens / B
    credit = overlap_credit · Σ over tiers of tier_credit · leading blocks that only this tier adds

The overlap is at most ⌊(prompt_tokens − 1) / B⌋ blocks: an engine always computes the last token of a prompt. The
recent term (prefill work handed out, decaying over a minute or so) keeps clients that wait between requests, whom no
in-flight load ever shows, from filling one worker's cache while the others idle.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import ClassVar, Protocol

import msgspec

from kvist.events import WorkerRank

DEFAULT_TIER_CREDITS = (1.0, 0.75, 0.25, 0.0)
"""What a cached block is worth by `Tier`: GPU, host, disk; external storage serves every worker alike, so 0."""

DEFAULT_DECODE_SCALE = 0.03
"""A block of prefill is computed through the whole model; a block of context is only read, once a step. Simulated
(benchmarks/bench_policy.py, 2026-11-20): with 1, one running request outweighs a cached prompt, and 83 tenants of four
workers find 73 % of their prompts cached instead of 91 %. From 0 to 0.1 most traffics cannot tell; chats find 83 % at
0.03, 81 % at 0.1, and with 0 whole answers take up to 7 % longer."""

DEFAULT_RECENT_SCALE = 0.03
"""Enough to spread what shares little: over a minute it grows to the work of many requests. In the same simulation, 0
sends paced clients, whom in-flight load never shows, to half of the workers, 0.03 to all. Conversations that outgrow
the cache find more the higher it is (80, 81, 84 % at 0, 0.03, 0.1); but with 0.1 the trace waits 10 % longer for a
first token on 8 workers at load 0.95 (mean over four random shifts of its arrivals; one alone tells nothing there)."""


class Role(StrEnum):
    """What a worker is there for. A role is for routing: any worker can compute a request alone."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """How long the prompt is. `num_tokens` is an estimate where `is_tokenized` is false, and then nothing overlaps."""

    num_tokens: int
    block_size: int
    is_tokenized: bool = True


class Load(msgspec.Struct, frozen=True, gc=False):
    """What a rank has to do now: see `kvist.router.load`."""

    running_requests: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    recent_prefill_tokens: float = 0.0


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A rank that may take the request.

    `overlap_blocks[tier]` counts the leading blocks of the prompt held in this tier or a faster one, so it never falls.
    `num_cached_blocks` is all that the rank holds.
    """

    target: WorkerRank
    load: Load = Load()
    overlap_blocks: tuple[int, ...] = ()
    num_cached_blocks: int = 0


class Weighing(msgspec.Struct, frozen=True, gc=False):
    """One probability a candidate, summing to 1, and the rule that made them; costs where the policy has such."""

    rule: str
    probabilities: list[float]
    costs: list[float] | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Who takes the request, and everything the decision was made from."""

    policy: str
    prompt: Prompt
    candidates: Sequence[Candidate]
    weighing: Weighing
    chosen_idx: int

    @property
    def chosen(self) -> Candidate:
        """Return the candidate that takes the request."""
        return self.candidates[self.chosen_idx]

    @property
    def overlap_tokens(self) -> int:
        """Return how many prompt tokens the chosen candidate is expected to find in its cache, in any tier."""
        blocks = self.chosen.overlap_blocks
        return usable_blocks(blocks[-1], self.prompt) * self.prompt.block_size if blocks else 0


class Policy(Protocol):
    """A way to weigh candidates; candidates are never empty."""

    name: ClassVar[str]

    def weigh(self, prompt: Prompt, candidates: Sequence[Candidate], turn: int) -> Weighing:
        """Return a probability for each candidate, in order."""


def decide(policy: Policy, prompt: Prompt, candidates: Sequence[Candidate], turn: int, random: Random) -> Decision:
    """Return the decision of one draw from the policy's probabilities."""
    weighing = policy.weigh(prompt, candidates, turn)
    return Decision(policy.name, prompt, candidates, weighing, _draw(weighing.probabilities, random))


def usable_blocks(overlap_blocks: int, prompt: Prompt) -> int:
    """Return how many of the overlapping blocks spare work: the block with the last token is computed in any case."""
    return min(overlap_blocks, max(0, prompt.num_tokens - 1) // prompt.block_size)


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Lowest cost wins, by the formula above; ties go to the candidate with the fewest cached blocks, then to chance.

    With `temperature` T > 0 a candidate is drawn by softmax of −(cost − min) / ((max − min) · T). Overlaps shorter than
    `min_match_blocks` count as none. Where the most loaded candidate runs more than `imbalance_abs` requests above the
    least loaded, and more than `imbalance_rel` times as many, only the least loaded are considered.
    A prompt without tokens is routed by load.
    """

    name: ClassVar[str] = "kv"
    prefill_scale: float = 1.0
    overlap_credit: float = 1.0
    tier_credits: tuple[float, ...] = DEFAULT_TIER_CREDITS
    decode_scale: float = DEFAULT_DECODE_SCALE
    recent_scale: float = DEFAULT_RECENT_SCALE
    temperature: float = 0.0
    min_match_blocks: int = 1
    imbalance_abs: int = 64
    imbalance_rel: float = 1.5

    def weigh(self, prompt: Prompt, candidates: Sequence[Candidate], turn: int) -> Weighing:
        """Return the cost of every candidate and the probabilities that follow from them."""
        if not prompt.is_tokenized:
            return LeastLoadedPolicy().weigh(prompt, candidates, turn)
        costs = [self.cost(prompt, candidate) for candidate in candidates]
        running = [candidate.load.running_requests for candidate in candidates]
        fewest, most = min(running), max(running)
        if most - fewest > self.imbalance_abs and most > self.imbalance_rel * fewest:
            return Weighing("imbalance", _uniform_over_minima(list(zip(running, costs, strict=True))), costs)
        if self.temperature > 0:
            return Weighing("temperature", softmax_of_costs(costs, self.temperature), costs)
        num_cached_blocks = [candidate.num_cached_blocks for candidate in candidates]
        return Weighing("cost", _uniform_over_minima(list(zip(costs, num_cached_blocks, strict=True))), costs)

    def cost(self, prompt: Prompt, candidate: Candidate) -> float:
        """Return what the request would cost here, in blocks."""
        load = candidate.load
        queued_blocks = (prompt.num_tokens + load.prefill_tokens) / prompt.block_size
        prefill_blocks = max(0.0, queued_blocks - self.credit(prompt, candidate.overlap_blocks))
        recent_blocks = load.recent_prefill_tokens / prompt.block_size
        return (
            self.prefill_scale * prefill_blocks
            + self.decode_scale * load.decode_blocks
            + self.recent_scale * recent_blocks
        )

    def credit(self, prompt: Prompt, overlap_blocks: Sequence[int]) -> float:
        """Return how many blocks of prefill the overlap is worth."""
        if not overlap_blocks or overlap_blocks[-1] < self.min_match_blocks:
            return 0.0
        credit, counted = 0.0, 0
        for blocks, tier_credit in zip(overlap_blocks, self.tier_credits, strict=False):
            usable = usable_blocks(blocks, prompt)
            credit += tier_credit * (usable - counted)
            counted = usable
        return self.overlap_credit * credit


@dataclass(frozen=True, slots=True)
class LeastLoadedPolicy:
    """Fewest running requests wins; ties go to the least queued prefill, then the least recent prefill, then chance."""

    name: ClassVar[str] = "least-loaded"

    def weigh(self, prompt: Prompt, candidates: Sequence[Candidate], turn: int) -> Weighing:  # noqa: ARG002
        """Return equal probabilities for the least loaded candidates."""
        return Weighing("load", _uniform_over_minima([_load_key(candidate.load) for candidate in candidates]))


@dataclass(frozen=True, slots=True)
class PowerOfTwoPolicy:
    """Of two candidates picked at random the less loaded wins: routers that do not know each other do not herd."""

    name: ClassVar[str] = "power-of-two"

    def weigh(self, prompt: Prompt, candidates: Sequence[Candidate], turn: int) -> Weighing:  # noqa: ARG002
        """Return how likely each candidate wins such a pair; a pair of equals is decided by chance."""
        keys = [_load_key(candidate.load) for candidate in candidates]
        if len(keys) == 1:
            return Weighing("load", [1.0])
        ordered = sorted(keys)
        num_ordered_pairs = len(keys) * (len(keys) - 1)
        probabilities = []
        for key in keys:
            first, behind = bisect_left(ordered, key), bisect_right(ordered, key)
            num_heavier, num_equal_others = len(keys) - behind, behind - first - 1
            probabilities.append((2 * num_heavier + num_equal_others) / num_ordered_pairs)
        return Weighing("load", probabilities)


@dataclass(frozen=True, slots=True)
class RoundRobinPolicy:
    """Candidates take turns."""

    name: ClassVar[str] = "round-robin"

    def weigh(self, prompt: Prompt, candidates: Sequence[Candidate], turn: int) -> Weighing:  # noqa: ARG002
        """Return certainty for the candidate whose turn it is."""
        chosen_idx = turn % len(candidates)
        return Weighing("turn", [1.0 if idx == chosen_idx else 0.0 for idx in range(len(candidates))])


@dataclass(frozen=True, slots=True)
class RandomPolicy:
    """Every candidate is as likely as any other."""

    name: ClassVar[str] = "random"

    def weigh(self, prompt: Prompt, candidates: Sequence[Candidate], turn: int) -> Weighing:  # noqa: ARG002
        """Return equal probabilities."""
        return Weighing("chance", [1.0 / len(candidates)] * len(candidates))


def softmax_of_costs(costs: Sequence[float], temperature: float) -> list[float]:
    """Return probabilities that fall with cost, the spread of costs being the unit; equal costs are equally likely."""
    lowest, highest = min(costs), max(costs)
    if lowest == highest:
        return [1.0 / len(costs)] * len(costs)
    scale = (highest - lowest) * temperature
    weights = [math.exp(-(cost - lowest) / scale) for cost in costs]
    total = sum(weights)
    return [weight / total for weight in weights]


def _load_key(load: Load) -> tuple[int, int, float]:
    return (load.running_requests, load.prefill_tokens, load.recent_prefill_tokens)


def _uniform_over_minima(keys: Sequence[tuple[float, ...]]) -> list[float]:
    """Return equal probabilities for all candidates whose key is the smallest, wherever they stand."""
    lowest = min(keys)
    share = 1.0 / keys.count(lowest)
    return [share if key == lowest else 0.0 for key in keys]


def _draw(probabilities: Sequence[float], random: Random) -> int:
    """Return an index whose probability is not 0."""
    remaining = random.random() * sum(probabilities)
    chosen_idx = 0
    for idx, probability in enumerate(probabilities):
        if probability > 0:
            chosen_idx = idx
            remaining -= probability
            if remaining < 0:
                break
    return chosen_idx

"""Policies that look at load, turn or chance alone: what the `kv` policy is measured against, and falls back to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias

from kvist.router.policy.decision import (
    Candidate,
    Decision,
    Prompt,
    Weighing,
    draw,
    uniform_over_minima,
    usable_tokens,
)

Baseline: TypeAlias = Callable[[Sequence[Candidate], int], Weighing]
"""Returns a probability for each candidate, one at least, from them and the number of requests dispatched before."""


def least_loaded(candidates: Sequence[Candidate], _turn: int) -> Weighing:
    """Fewest running requests wins; ties go to the least queued prefill, then to chance."""
    return Weighing("load", uniform_over_minima([_load_key(candidate) for candidate in candidates]))


def power_of_two(candidates: Sequence[Candidate], _turn: int) -> Weighing:
    """Of two candidates picked at random the less loaded wins: routers that do not know each other do not herd."""
    keys = [_load_key(candidate) for candidate in candidates]
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


def round_robin(candidates: Sequence[Candidate], turn: int) -> Weighing:
    """Candidates take turns."""
    chosen_idx = turn % len(candidates)
    return Weighing("turn", [1.0 if idx == chosen_idx else 0.0 for idx in range(len(candidates))])


def at_random(candidates: Sequence[Candidate], _turn: int) -> Weighing:
    """Every candidate is as likely as any other."""
    return Weighing("chance", [1.0 / len(candidates)] * len(candidates))


BASELINES: Mapping[str, Baseline] = {
    "least-loaded": least_loaded,
    "power-of-two": power_of_two,
    "round-robin": round_robin,
    "random": at_random,
}
"""By the names that settings have for them."""


def decide(policy: str, prompt: Prompt, candidates: Sequence[Candidate], turn: int, random: Random) -> Decision:
    """Return the decision of one draw from the probabilities of the policy of this name."""
    weighing = BASELINES[policy](candidates, turn)
    chosen_idx = draw(weighing.probabilities, random)
    chosen = candidates[chosen_idx]
    overlap_tokens = usable_tokens(chosen.overlap_blocks, prompt)
    return Decision(policy, prompt, chosen, chosen_idx, overlap_tokens, lambda: (candidates, weighing))


def _load_key(candidate: Candidate) -> tuple[int, int]:
    return candidate.load.running_requests, candidate.load.prefill_tokens

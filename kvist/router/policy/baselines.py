"""Policies that look at load or turn alone: what the `kv` policy is measured against, and falls back to."""

from __future__ import annotations

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
    loads = [candidate.load for candidate in candidates]
    return Weighing("load", uniform_over_minima([(load.running_requests, load.prefill_tokens) for load in loads]))


def round_robin(candidates: Sequence[Candidate], turn: int) -> Weighing:
    """Candidates take turns."""
    chosen_idx = turn % len(candidates)
    return Weighing("turn", [1.0 if idx == chosen_idx else 0.0 for idx in range(len(candidates))])


BASELINES: Mapping[str, Baseline] = {
    "least-loaded": least_loaded,
    "round-robin": round_robin,
}
"""By the names that settings have for them."""


def decide(policy: str, prompt: Prompt, candidates: Sequence[Candidate], turn: int, random: Random) -> Decision:
    """Return the decision of one draw from the probabilities of the policy of this name."""
    weighing = BASELINES[policy](candidates, turn)
    chosen_idx = draw(weighing.probabilities, random)
    chosen = candidates[chosen_idx]
    overlap_tokens = usable_tokens(chosen.overlap_blocks, prompt)
    return Decision(policy, prompt, chosen, chosen_idx, overlap_tokens, lambda: (candidates, weighing))

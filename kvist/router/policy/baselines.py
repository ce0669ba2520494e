"""Policies that look at load, turn or chance alone: what the `kv` policy is measured against, and falls back to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvist.router.policy.decision import Candidate, Load, Prompt, Weighing, uniform_over_minima


@dataclass(frozen=True, slots=True)
class LeastLoadedPolicy:
    """Fewest running requests wins; ties go to the least queued prefill, then the least recent prefill, then chance."""

    name: ClassVar[str] = "least-loaded"

    def weigh(self, prompt: Prompt, candidates: Sequence[Candidate], turn: int) -> Weighing:  # noqa: ARG002
        """Return equal probabilities for the least loaded candidates."""
        return Weighing("load", uniform_over_minima([_load_key(candidate.load) for candidate in candidates]))


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


def _load_key(load: Load) -> tuple[int, int, float]:
    return (load.running_requests, load.prefill_tokens, load.recent_prefill_tokens)

"""Policies that look at no cache, and the properties that hold for any fleet."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events import WorkerRank
from kvist.router.policy.baselines import BASELINES, decide
from kvist.router.policy.decision import Candidate, Load, Prompt, usable_blocks

TEN_BLOCKS = Prompt(num_tokens=160, block_size=16)


def candidate(name: str = "w", *, overlap: tuple[int, ...] = (), cached: int = 0, **load: float) -> Candidate:
    return Candidate(WorkerRank(name, 0), Load(**load), overlap, cached)


def test_a_prompt_that_ends_on_a_block_boundary_loses_its_last_block() -> None:
    assert usable_blocks(10, TEN_BLOCKS) == 9
    assert usable_blocks(10, Prompt(161, 16)) == 10
    assert usable_blocks(10, Prompt(0, 16)) == 0


def test_least_loaded_breaks_ties_by_queued_prefill_then_chance() -> None:
    fleet = [
        candidate("a", running_requests=1, prefill_tokens=5),
        candidate("b", running_requests=1, prefill_tokens=5),
        candidate("c", running_requests=1, prefill_tokens=6),
        candidate("d", running_requests=2),
    ]
    assert BASELINES["least-loaded"](fleet, 0).probabilities == [0.5, 0.5, 0, 0]


def test_power_of_two_gives_the_chances_of_winning_a_random_pair() -> None:
    fleet = [candidate(running_requests=count) for count in (0, 1, 1, 5)]
    assert BASELINES["power-of-two"](fleet, 0).probabilities == pytest.approx([1 / 2, 1 / 4, 1 / 4, 0])
    assert BASELINES["power-of-two"](fleet[:1], 0).probabilities == [1]


def test_round_robin_counts_with_the_turn_it_is_given() -> None:
    fleet = [candidate(name) for name in "abc"]
    taken = [decide("round-robin", TEN_BLOCKS, fleet, turn, random.Random(1)).chosen for turn in range(5)]
    assert [each.target.worker for each in taken] == ["a", "b", "c", "a", "b"]


def test_overlap_tokens_of_a_decision_are_those_the_engine_can_reuse() -> None:
    fleet = [candidate(overlap=(4, 10))]
    assert decide("random", TEN_BLOCKS, fleet, 0, random.Random(1)).overlap_tokens == 9 * 16
    assert decide("random", TEN_BLOCKS, [candidate()], 0, random.Random(1)).overlap_tokens == 0


loads = st.builds(
    Load,
    running_requests=st.integers(0, 200),
    prefill_tokens=st.integers(0, 100_000),
)
overlaps = st.lists(st.integers(0, 64), max_size=4).map(lambda depths: tuple(sorted(depths)))
candidates = st.builds(
    Candidate,
    target=st.builds(WorkerRank, st.sampled_from("abcdef"), st.integers(0, 3)),
    load=loads,
    overlap_blocks=overlaps,
    num_cached_blocks=st.integers(0, 1000),
)
fleets = st.lists(candidates, min_size=1, max_size=8)
prompts = st.builds(Prompt, st.integers(0, 2000), st.sampled_from([1, 16, 64]), st.booleans())


@given(st.sampled_from(sorted(BASELINES)), prompts, fleets, st.integers(0, 10**6))
def test_probabilities_sum_to_one_and_the_impossible_is_never_drawn(
    policy: str, prompt: Prompt, fleet: list[Candidate], turn: int
) -> None:
    decision = decide(policy, prompt, fleet, turn, random.Random(turn))
    assert len(decision.weighing.probabilities) == len(fleet)
    assert sum(decision.weighing.probabilities) == pytest.approx(1)
    assert decision.weighing.probabilities[decision.chosen_idx] > 0

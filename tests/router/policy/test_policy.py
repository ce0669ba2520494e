"""Policies against the worked examples of their formulas, and the properties that hold for any fleet."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events import WorkerRank
from kvist.router.policy.baselines import LeastLoadedPolicy, PowerOfTwoPolicy, RandomPolicy, RoundRobinPolicy
from kvist.router.policy.cost import KvPolicy, softmax_of_costs
from kvist.router.policy.decision import Candidate, Load, Policy, Prompt, decide, usable_blocks

POLICIES: list[Policy] = [KvPolicy(), LeastLoadedPolicy(), PowerOfTwoPolicy(), RoundRobinPolicy(), RandomPolicy()]
EQUAL_WEIGHTS = KvPolicy(prefill_scale=1.0, decode_scale=1.0, recent_scale=1.0)
TEN_BLOCKS = Prompt(num_tokens=160, block_size=16)


def candidate(name: str = "w", *, overlap: tuple[int, ...] = (), cached: int = 0, **load: float) -> Candidate:
    return Candidate(WorkerRank(name, 0), Load(**load), overlap, cached)


def worked_example() -> list[Candidate]:
    overlaps_and_loads = [(2, 10), (5, 5), (8, 9)]
    return [candidate(f"w{i}", overlap=(o,), decode_blocks=d) for i, (o, d) in enumerate(overlaps_and_loads)]


def test_the_worked_example_costs_18_10_11_and_takes_the_second() -> None:
    decision = decide(EQUAL_WEIGHTS, TEN_BLOCKS, worked_example(), 0, random.Random(1))
    assert decision.weighing.costs == [18, 10, 11]
    assert decision.chosen.target.worker == "w1"
    assert decision.weighing.rule == "cost"


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1.0, [0.1635, 0.4444, 0.3922]), (0.1, [0.0000, 0.7773, 0.2227])]
)
def test_softmax_of_the_worked_example(temperature: float, expected: list[float]) -> None:
    weighing = KvPolicy(decode_scale=1.0, temperature=temperature).weigh(TEN_BLOCKS, worked_example(), 0)
    assert weighing.probabilities == pytest.approx(expected, abs=5e-5)


def test_softmax_of_equal_costs_is_uniform() -> None:
    assert softmax_of_costs([3, 3], 1.0) == [0.5, 0.5]


def test_queued_prefill_counts_in_blocks_and_is_scaled_with_the_prompt() -> None:
    policy = KvPolicy(prefill_scale=2.0, decode_scale=0.5)
    assert policy.cost(TEN_BLOCKS, candidate(prefill_tokens=80, decode_blocks=3)) == 2.0 * 15 + 0.5 * 3


def test_a_block_in_host_memory_or_on_disk_is_worth_its_tier() -> None:
    assert KvPolicy().credit(TEN_BLOCKS, (2, 4, 8)) == 2 * 1.0 + 2 * 0.75 + 4 * 0.25


def test_external_storage_gives_no_credit() -> None:
    assert KvPolicy().credit(TEN_BLOCKS, (0, 0, 0, 8)) == 0


def test_a_prompt_that_ends_on_a_block_boundary_loses_its_last_block() -> None:
    assert usable_blocks(10, TEN_BLOCKS) == 9
    assert usable_blocks(10, Prompt(161, 16)) == 10
    assert usable_blocks(10, Prompt(0, 16)) == 0
    assert KvPolicy().credit(TEN_BLOCKS, (10,)) == 9


def test_overlaps_below_the_minimum_count_as_none() -> None:
    policy = KvPolicy(min_match_blocks=4)
    assert policy.credit(TEN_BLOCKS, (3,)) == 0
    assert policy.credit(TEN_BLOCKS, (4,)) == 4


def test_load_wins_over_a_shared_system_prompt() -> None:
    """A short shared prefix on one worker does not keep it once its work exceeds what the prefix spares."""
    holders = [candidate(overlap=(2,), decode_blocks=100), candidate(overlap=(2,), prefill_tokens=48)]
    for holder in holders:
        idle = candidate("idle")
        assert decide(KvPolicy(), TEN_BLOCKS, [holder, idle], 0, random.Random(1)).chosen is idle


def test_a_cached_prompt_wins_over_one_running_request() -> None:
    holder = candidate("holder", overlap=(8,), running_requests=1, decode_blocks=40)
    assert decide(KvPolicy(), TEN_BLOCKS, [candidate("idle"), holder], 0, random.Random(1)).chosen is holder


def test_cold_ties_are_spread_over_all_workers() -> None:
    draw = random.Random(7)
    fleet = [candidate(f"w{i}") for i in range(4)]
    taken = Counter(decide(KvPolicy(), TEN_BLOCKS, fleet, 0, draw).chosen.target.worker for _ in range(4000))
    assert all(900 < taken[f"w{i}"] < 1100 for i in range(4))


def test_equal_costs_go_to_the_fewest_cached_blocks_before_chance() -> None:
    fleet = [candidate("a", cached=9), candidate("b", cached=4), candidate("c", cached=4)]
    assert KvPolicy().weigh(TEN_BLOCKS, fleet, 0).probabilities == [0, 0.5, 0.5]


def test_recent_prefill_moves_paced_clients_off_the_worker_with_one_shared_block() -> None:
    holder = candidate("holder", overlap=(1,), recent_prefill_tokens=3200.0)
    assert decide(KvPolicy(), TEN_BLOCKS, [holder, candidate("idle")], 0, random.Random(1)).chosen is not holder
    session = candidate("session", overlap=(9,), recent_prefill_tokens=3200.0)
    assert decide(KvPolicy(), TEN_BLOCKS, [session, candidate("idle")], 0, random.Random(1)).chosen is session


def test_a_lopsided_fleet_is_routed_by_load_whatever_the_overlap() -> None:
    crowded = candidate("crowded", overlap=(9,), running_requests=100)
    idle, idle_with_overlap = candidate("idle"), candidate("warm", overlap=(3,))
    weighing = KvPolicy().weigh(TEN_BLOCKS, [crowded, idle, idle_with_overlap], 0)
    assert (weighing.rule, weighing.probabilities) == ("imbalance", [0, 0, 1])


@pytest.mark.parametrize(("most", "fewest"), [(64, 0), (210, 145)])
def test_the_guard_needs_both_thresholds(most: int, fewest: int) -> None:
    fleet = [candidate("a", overlap=(9,), running_requests=most), candidate("b", running_requests=fewest)]
    assert KvPolicy().weigh(TEN_BLOCKS, fleet, 0).rule == "cost"


def test_a_prompt_without_tokens_is_routed_by_load() -> None:
    fleet = [candidate("a", overlap=(9,), running_requests=1), candidate("b")]
    weighing = KvPolicy().weigh(Prompt(160, 16, is_tokenized=False), fleet, 0)
    assert (weighing.rule, weighing.probabilities, weighing.costs) == ("load", [0, 1], None)


def test_least_loaded_breaks_ties_by_queued_then_recent_prefill() -> None:
    fleet = [
        candidate("a", running_requests=1, prefill_tokens=5, recent_prefill_tokens=9.0),
        candidate("b", running_requests=1, prefill_tokens=5, recent_prefill_tokens=3.0),
        candidate("c", running_requests=1, prefill_tokens=6),
        candidate("d", running_requests=2),
    ]
    assert LeastLoadedPolicy().weigh(TEN_BLOCKS, fleet, 0).probabilities == [0, 1, 0, 0]


def test_power_of_two_gives_the_chances_of_winning_a_random_pair() -> None:
    fleet = [candidate(running_requests=count) for count in (0, 1, 1, 5)]
    assert PowerOfTwoPolicy().weigh(TEN_BLOCKS, fleet, 0).probabilities == pytest.approx([1 / 2, 1 / 4, 1 / 4, 0])
    assert PowerOfTwoPolicy().weigh(TEN_BLOCKS, fleet[:1], 0).probabilities == [1]


def test_round_robin_counts_with_the_turn_it_is_given() -> None:
    fleet = [candidate(name) for name in "abc"]
    taken = [decide(RoundRobinPolicy(), TEN_BLOCKS, fleet, turn, random.Random(1)).chosen for turn in range(5)]
    assert [each.target.worker for each in taken] == ["a", "b", "c", "a", "b"]


def test_overlap_tokens_of_a_decision_are_those_the_engine_can_reuse() -> None:
    fleet = [candidate(overlap=(4, 10))]
    assert decide(KvPolicy(), TEN_BLOCKS, fleet, 0, random.Random(1)).overlap_tokens == 9 * 16
    assert decide(KvPolicy(), TEN_BLOCKS, [candidate()], 0, random.Random(1)).overlap_tokens == 0


loads = st.builds(
    Load,
    running_requests=st.integers(0, 200),
    prefill_tokens=st.integers(0, 100_000),
    decode_blocks=st.integers(0, 10_000),
    recent_prefill_tokens=st.floats(0, 1e6),
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


@given(st.sampled_from([*POLICIES, KvPolicy(temperature=0.3)]), prompts, fleets, st.integers(0, 10**6))
def test_probabilities_sum_to_one_and_the_impossible_is_never_drawn(
    policy: Policy, prompt: Prompt, fleet: list[Candidate], turn: int
) -> None:
    decision = decide(policy, prompt, fleet, turn, random.Random(turn))
    assert len(decision.weighing.probabilities) == len(fleet)
    assert sum(decision.weighing.probabilities) == pytest.approx(1)
    assert decision.weighing.probabilities[decision.chosen_idx] > 0


@given(prompts, candidates, st.integers(1, 100))
def test_cost_rises_with_load_and_falls_with_overlap(prompt: Prompt, base: Candidate, more: int) -> None:
    policy, load = KvPolicy(), base.load
    cost = policy.cost(prompt, base)
    busier = Load(load.running_requests, load.prefill_tokens + more, load.decode_blocks + more)
    assert policy.cost(prompt, Candidate(base.target, busier, base.overlap_blocks)) >= policy.cost(
        prompt, Candidate(base.target, Load(0, load.prefill_tokens, load.decode_blocks), base.overlap_blocks)
    )
    deeper = tuple(blocks + more for blocks in base.overlap_blocks)
    assert policy.cost(prompt, Candidate(base.target, load, deeper)) <= cost
    assert cost >= 0

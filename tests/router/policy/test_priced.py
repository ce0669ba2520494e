"""The priced cost, term by term; rows split over several routers; prompts in flight; speeds learnt."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from kvist.router.policy.in_flight import (
    NUM_RANKS_OF_A_MARK,
    NUM_SLOTS,
    REQUESTS_WINDOW_S,
    SLOT,
    PromptsInFlight,
)
from kvist.router.policy.priced import MAX_SHARE, Dispatched, PricedPolicy, Prices, Pull
from kvist.router.policy.settings import PULL_LATENCY_S, PriceSettings
from kvist.router.policy.work import NUM_FIELDS, NUM_LEARNT, WorkRows, learnt_of, merged

BLOCK = 256
ALPHA = 2.9e-5
UNIT_S = 40e-6


def policy_of(num_ranks: int, **settings: object) -> PricedPolicy:
    return PricedPolicy.for_one(num_ranks, BLOCK, PriceSettings(**settings))  # type: ignore[arg-type]


def fronts_of(num_fronts: int, num_ranks: int) -> list[PricedPolicy]:
    rows = np.zeros((num_fronts, NUM_FIELDS, num_ranks))
    tables = np.zeros((num_fronts, NUM_SLOTS), SLOT)
    return [
        PricedPolicy(PriceSettings(), WorkRows(rows, idx), PromptsInFlight(tables, num_ranks, BLOCK, idx), BLOCK)
        for idx in range(num_fronts)
    ]


def in_flight_of(num_ranks: int, block_size: int) -> PromptsInFlight:
    return PromptsInFlight(np.zeros((1, NUM_SLOTS), SLOT), num_ranks, block_size)


def work_of(num_tokens: float, cached: float = 0.0) -> float:
    """Sum what each token costs, instead of the closed form."""
    return sum(1 + ALPHA * (position + 0.5) for position in range(int(cached), int(num_tokens)))


def hashes_of(num_tokens: int, name: int = 0) -> list[int]:
    return [name * 100 + idx + 1 for idx in range(num_tokens // BLOCK)]


def send(policy: PricedPolicy, now_s: float, rank: int, num_tokens: int, name: int = 0, **kind: bool) -> Dispatched:
    prices = policy.weigh(now_s, num_tokens, hashes_of(num_tokens, name), [0] * policy._work.num_ranks)
    return policy.dispatched(now_s, rank, prices, rank, **kind)


def test_an_idle_fleet_is_priced_by_what_is_left_to_compute() -> None:
    prices = policy_of(3).weigh(5.0, 1000, hashes_of(1000), [0, 1, 3])
    expected = [work_of(1000), work_of(1000, 256), work_of(1000, 768)]
    assert prices.compute == pytest.approx(expected)
    assert prices.cost_s == pytest.approx([UNIT_S * work for work in expected])
    assert list(prices.cached_tokens) == [0, 256, 768]


def test_the_block_with_the_last_token_is_computed_in_any_case() -> None:
    prices = policy_of(2).weigh(5.0, 1024, hashes_of(1024), [4, 9])
    assert prices.compute == pytest.approx([work_of(1024, 768)] * 2)


def test_blocks_of_slower_tiers_cost_a_part_of_computing_them() -> None:
    prices = policy_of(1, tier_credits=(1.0, 0.75, 0.25)).weigh(5.0, 2000, hashes_of(2000), [[1, 3, 4]])
    fetched = work_of(768, 256) * 0.25 + work_of(1024, 768) * 0.75
    assert prices.compute == pytest.approx([work_of(2000, 1024) + fetched])


def test_what_another_rank_holds_is_fetched_where_that_is_cheaper_than_computing_it() -> None:
    policy = policy_of(4)
    asked = (5.0, 4000, hashes_of(4000), [0, 14, 15, 0])
    token_s = np.array([1e-6, 1e-6, 1e-6, math.inf])
    alone, pulled = policy.weigh(*asked), policy.weigh(*asked, pull=Pull(15, token_s, min_tokens=256))
    fetch_s = PULL_LATENCY_S + 15 * BLOCK * 1e-6
    assert pulled.compute[0] == pytest.approx(work_of(4000, 15 * BLOCK))
    assert pulled.cost_s[0] == pytest.approx(UNIT_S * pulled.compute[0] + fetch_s)
    assert list(pulled.fetched_tokens) == [15 * BLOCK, 0, 0, 0]
    assert list(pulled.fetch_s) == pytest.approx([fetch_s, 0.0, 0.0, 0.0])
    assert list(pulled.cost_s[1:]) == list(alone.cost_s[1:])
    assert list(pulled.terms_s()["fetch"]) == list(pulled.fetch_s)
    slow = policy.weigh(*asked, pull=Pull(15, np.full(4, 1e-4), min_tokens=256))
    assert list(slow.cost_s) == list(alone.cost_s)
    assert policy.dispatched(5.0, 0, pulled, 0).work == round(work_of(4000, 15 * BLOCK))


def test_how_fast_a_rank_computes_is_not_learnt_where_a_part_was_to_be_fetched() -> None:
    policy = policy_of(1)
    prices = policy.weigh(5.0, 8000, hashes_of(8000), [0], pull=Pull(15, np.array([1e-6]), min_tokens=256))
    assert prices.fetched_tokens[0] == 15 * BLOCK
    policy.dispatched(5.0, 0, prices, 0).answered(35.0)  # the fetch has failed
    assert policy.weigh(35.0, 8000, (), [0]).load.unit_s == pytest.approx([UNIT_S])


def test_recomputation_costs_more_the_busier_the_fleet_is_and_waiting_does_not() -> None:
    policy = policy_of(1)
    idle = policy.weigh(100.0, 1000, (), [0])
    running = [send(policy, 100.0 + idx, 0, 10_000, idx) for idx in range(20)]
    busy = policy.weigh(120.0, 1000, (), [0])
    given = sum(math.exp(-(120.0 - (100.0 + idx)) / 10.0) for idx in range(20)) * round(work_of(10_000)) * UNIT_S
    utilisation = given / (10.0 * (1 - math.exp(-20.0 / 10.0)))
    assert idle.price == 0.0
    assert busy.price == pytest.approx(2.5 * utilisation**2 / (1 - utilisation), rel=1e-3)
    queued = sum(request.work for request in running) * UNIT_S
    assert busy.load.wait_s == pytest.approx([abs(queued - 20.0)])
    assert busy.cost_s == pytest.approx(
        busy.load.wait_s
        + ((1 + busy.price) * busy.compute + 0.05 * busy.load.context_tokens + 0.03 * busy.load.recent)
        * busy.load.unit_s
    )
    assert busy.terms_s()["running"] == pytest.approx(0.05 * busy.load.context_tokens * busy.load.unit_s)


def test_recent_work_counts_alike_where_ranks_are_not_equally_fast() -> None:
    """One that is taken for fast by mistake is not given everything, and so taken for faster still."""
    policy = policy_of(2)
    for idx, took_s in enumerate((4.0, 1.0)):
        send(policy, 10.0, idx, 50_000).answered(10.0 + took_s)
    prices = policy.weigh(20.0, 1000, (), [0, 0])
    assert prices.load.unit_s[0] > 1.2 * prices.load.unit_s[1]
    recent = prices.terms_s()["recent"]
    assert (
        recent[0] == pytest.approx(recent[1]) == pytest.approx(0.03 * prices.load.recent[0] * prices.load.unit_s.mean())
    )


def test_utilisation_of_a_slow_fleet_is_averaged_over_a_longer_time() -> None:
    for unit_s, expected in ((4e-5, 3.6 / 10.0), (4e-4, 36.0 / 40.0)):
        rows = WorkRows(np.zeros((1, NUM_FIELDS, 1)), first_unit_s=unit_s)
        for now_s, work in ((1.0, 1), (1000.0, 90_000)):
            rows.read(now_s)
            rows.dispatch(now_s, 0, work, unit_s, 0, is_streamed=False)
        assert rows.read(1000.0).utilisation == pytest.approx(expected, rel=1e-6)


def test_what_is_told_of_prices_is_plain_numbers() -> None:
    policy = policy_of(2)
    send(policy, 10.0, 0, 50_000)
    prices = policy.weigh(11.0, 1000, (), [0, 1])
    told = [prices.price, prices.load.utilisation, *prices.terms_s()["cost"]]
    assert {type(each) for each in told} == {float}


def test_the_price_has_a_bound() -> None:
    policy = policy_of(1)
    for idx in range(200):
        send(policy, 100.0 + idx / 10, 0, 60_000, idx)
    assert policy.weigh(120.0, 1000, (), [0]).price == 40.0


def test_a_queue_shortens_until_the_first_token_should_have_come_then_grows_and_ends_with_it() -> None:
    policy = policy_of(1)
    request = send(policy, 10.0, 0, 50_000)
    seconds = request.work * UNIT_S
    assert policy.weigh(10.0, 10, (), [0]).load.wait_s == pytest.approx([seconds])
    assert policy.weigh(11.0, 10, (), [0]).load.wait_s == pytest.approx([seconds - 1.0])
    assert policy.weigh(10.0 + seconds, 10, (), [0]).load.wait_s == pytest.approx([0.0], abs=1e-9)
    assert policy.weigh(15.0 + seconds, 10, (), [0]).load.wait_s == pytest.approx([5.0])
    request.answered(20.0)
    assert policy.weigh(20.0, 10, (), [0]).load.wait_s == [0.0]


def test_a_rank_is_heard_of_by_what_fails_there_too() -> None:
    policy = policy_of(1)
    first, second = (send(policy, 10.0, 0, 50_000, name) for name in (1, 2))
    first.finish(60.0)
    assert policy.weigh(60.0, 10, (), [0]).load.wait_s == pytest.approx([second.work * UNIT_S])


def test_answers_that_are_not_streamed_queue_for_as_long_as_they_should_take() -> None:
    policy = policy_of(1)
    first, second = (send(policy, 10.0, 0, 50_000, name, is_streamed=False) for name in (1, 2))
    seconds = (first.work + second.work) * UNIT_S
    assert policy.weigh(11.0, 10, (), [0]).load.wait_s == pytest.approx([seconds - 1.0])
    first.finish(11.0)
    assert policy.weigh(10.0 + seconds, 10, (), [0]).load.wait_s == pytest.approx([0.0], abs=1e-9)


def test_a_rank_that_is_faster_than_foretold_is_not_waited_for_once_it_has_answered() -> None:
    policy = policy_of(2)
    running = [send(policy, 10.0, 0, 50_000, name, is_streamed=False) for name in range(100)]
    for each in running[1:]:
        each.finish(11.0)
    assert policy.weigh(11.0, 10, (), [0, 0]).load.wait_s == pytest.approx([running[0].work * UNIT_S, 0.0])
    running[0].finish(11.0)
    assert list(policy.weigh(11.0, 10, (), [0, 0]).load.wait_s) == [0.0, 0.0]


def test_a_rank_that_takes_longer_is_learnt_to_be_slow_and_a_single_surprise_is_not() -> None:
    policy, now_s = policy_of(2), 0.0
    for turn in range(100):
        for rank, slowness in ((0, 1), (1, 3)):
            request = send(policy, now_s, rank, 8000, turn)
            request.answered(now_s + request.work * UNIT_S * slowness)
            request.finish(now_s + 3.0)
        if turn == 0:
            assert (
                policy.weigh(now_s, 10, (), [0, 0]).load.unit_s[1]
                < 1.1 * policy.weigh(now_s, 10, (), [0, 0]).load.unit_s[0]
            )
        now_s += 4.0
    fast, slow = policy.weigh(now_s, 10, (), [0, 0]).load.unit_s
    assert 2.0 < slow / fast < 3.0
    assert UNIT_S < fast < 1.5 * UNIT_S


def test_answers_that_are_not_streamed_tell_who_is_slower_than_others_and_not_how_fast_all_are() -> None:
    policy, now_s, step_s = policy_of(3), 0.0, 0.02
    for turn in range(200):
        for rank, slowness, num_tokens in ((0, 1, 500), (1, 1, 5), (2, 3, 50)):  # one has the long answers
            request = send(policy, now_s, rank, 8000, turn, is_streamed=False)
            request.finish(now_s + (request.work * UNIT_S + num_tokens * step_s) * slowness, num_tokens)
        now_s += 40.0
    long, short, slow = policy.weigh(now_s, 10, (), [0, 0, 0]).load.unit_s
    assert 1.5 < slow / long < 3.5
    assert 0.8 < long / short < 1.25
    assert sum((long, short, slow)) / 3 == pytest.approx(UNIT_S, rel=0.1)


def test_nothing_is_learnt_from_answers_that_do_not_say_how_long_they_are() -> None:
    policy = policy_of(2)
    for now_s in range(100):
        send(policy, float(now_s), 0, 8000, is_streamed=False).finish(now_s + 30.0)
    assert list(policy.weigh(200.0, 10, (), [0, 0]).load.unit_s) == pytest.approx([UNIT_S] * 2)


def test_nothing_is_learnt_from_a_first_token_that_came_after_prompts_which_are_not_streamed() -> None:
    policy = policy_of(2)
    for turn in range(100):
        others = [send(policy, turn * 10.0, 0, 8000, name, is_streamed=False) for name in range(5)]
        request = send(policy, turn * 10.0, 0, 8000, turn)
        request.answered(turn * 10.0 + 6 * request.work * UNIT_S)
        for each in (request, *others):
            each.finish(turn * 10.0 + 5.0)
    assert list(policy.weigh(2000.0, 10, (), [0, 0]).load.unit_s) == pytest.approx([UNIT_S] * 2)


def test_a_prompt_in_flight_counts_as_cached_where_it_runs_and_only_there() -> None:
    policy = policy_of(3)
    running = send(policy, 10.0, 1, 4000)
    assert list(policy.weigh(10.1, 5000, hashes_of(5000), [0, 0, 2]).cached_tokens) == [0, 15 * BLOCK, 2 * BLOCK]
    assert list(policy.weigh(10.1, 5000, hashes_of(5000, name=7), [0, 0, 0]).cached_tokens) == [0, 0, 0]
    running.finish(10.2)  # without a first token: it was not computed
    assert list(policy.weigh(10.3, 5000, hashes_of(5000), [0, 0, 2]).cached_tokens) == [0, 0, 2 * BLOCK]


def test_what_is_asked_for_while_it_is_computed_is_computed_twice_in_a_fleet_that_idles_and_not_in_a_busy_one() -> None:
    for num_before in (0, 8):
        policy = policy_of(2)
        for idx in range(num_before):
            send(policy, 100.0 + idx, idx % 2, 80_000, idx + 2).answered(101.0 + idx)
        send(policy, 110.0, 0, 16_500)
        prices = policy.weigh(110.1, 16_500, hashes_of(16_500), [0, 0])
        in_flight = work_of(usable := 64 * BLOCK) * prices.load.unit_s[0] * (1 - prices.load.utilisation)
        assert list(prices.cached_tokens) == [usable, 0]
        assert prices.terms_s()["in_flight"] == pytest.approx([in_flight, 0.0])
        assert prices.cost_s.argmin() == (0 if num_before else 1)


def test_who_runs_less_is_worth_computing_for_and_not_waiting_for() -> None:
    policy = policy_of(2)
    held = policy.weigh(1.0, 10_000, (), [39, 39])
    policy.dispatched(1.0, 0, held, 0, computes=False).add_tokens(500_000)
    prompt = (1.0, 10_000, hashes_of(10_000))
    assert policy.weigh(*prompt, [39, 0]).cost_s.argmin() == 1
    send(policy, 1.0, 1, 15_000, name=7)
    prices = policy.weigh(*prompt, [39, 39])
    assert prices.cost_s.argmin() == 0
    assert prices.load.wait_s[1] < 0.05 * prices.load.context_tokens[0] * UNIT_S


def test_later_requests_share_the_computation_of_a_prefix_that_is_requested_often() -> None:
    policy, prefix, num_tokens = policy_of(2), hashes_of(10_240), 10_752
    before = policy.weigh(1.0, num_tokens, [*prefix, 9001, 9002], [40, 0])
    assert list(before.shared) == [0, 0]
    for number in range(30):  # the last two blocks of each are its own
        query = policy.weigh(1.0, num_tokens, [*prefix, 8000 + number, 9000 + number], [40, 0])
        policy.dispatched(1.0, 0, query, 0)
    first = work_of(BLOCK)  # up to a mark some may be held
    num_requests = 30 * math.exp(-12.0 / REQUESTS_WINDOW_S)
    for now_s, share in ((7.0, MAX_SHARE), (13.0, num_requests / (num_requests + 2))):
        after = policy.weigh(now_s, num_tokens, [*prefix, 7001, 7002], [40, 0])
        assert after.compute == pytest.approx(before.compute)
        assert after.shared == pytest.approx([0, share * (work_of(10_240) - first)])
    assert after.terms_s()["compute"] == pytest.approx((after.compute - after.shared) * after.load.unit_s)
    assert list(policy.weigh(7.0, num_tokens, hashes_of(num_tokens, 5), [0, 0]).shared) == [0, 0]


def test_a_prefix_has_its_price_except_as_far_as_most_requests_have_it() -> None:
    policy, prefix, num_tokens = policy_of(3), hashes_of(10_240), 10_752
    work, ranks = work_of(10_240) - work_of(BLOCK), np.array([0, 1])
    for num_all in (30, 60):  # up to a mark some may be held
        for idx in range(30):
            blocks = prefix if num_all == 30 else hashes_of(num_tokens, 1 + idx)
            policy.dispatched(1.0, 0, policy.weigh(1.0, num_tokens, blocks, [40, 0, 0]), 0)
        send(policy, 1.0, 2, 100)  # a rank of another model
        after = policy.weigh(2.0, num_tokens, [*prefix, 7001, 7002], [40, 0], ranks)
        assert after.unpriced == pytest.approx([0, (30 / num_all) ** 2 * work])
        priced = after.compute - after.unpriced
        assert after.terms_s()["price_of_computing"] == pytest.approx(after.price * priced * after.load.unit_s)


def test_a_prefix_that_is_requested_all_the_time_is_copied_before_its_holder_runs_many_requests() -> None:
    policy, now_s, num_sent = policy_of(8), 100.0, 0
    while True:
        prices = policy.weigh(now_s, 30_500, hashes_of(30_000), [117] + [0] * 7)
        if prices.cost_s.argmin() != 0:
            break
        policy.dispatched(now_s, 0, prices, 0).answered(now_s + 0.02)
        num_sent, now_s = num_sent + 1, now_s + 0.1
    assert 5 <= num_sent <= 15  # 29 would make up for all of the computation


def test_fetching_a_prefix_that_is_requested_often_costs_no_more_than_computing_it() -> None:
    policy, hashes = policy_of(2), hashes_of(10_240)
    for _ in range(100):
        policy.dispatched(1.0, 0, policy.weigh(1.0, 10_240, hashes, [40, 0]), 0)
    computed = policy.weigh(2.0, 10_240, hashes, [40, 0])
    fast, slow = (
        policy.weigh(2.0, 10_240, hashes, [40, 0], pull=Pull(40, np.full(2, token_s), 256)) for token_s in (1e-5, 3e-5)
    )
    assert fast.shared[1] == 0
    assert fast.cost_s[1] < computed.cost_s[1]
    assert slow.fetch_s[1] > 0
    assert slow.cost_s == pytest.approx(computed.cost_s)
    assert slow.terms_s()["cost"] == pytest.approx(slow.cost_s)


def test_a_prompt_that_was_computed_counts_until_the_index_should_know_of_it() -> None:
    policy = policy_of(1)
    request = send(policy, 10.0, 0, 4000)
    request.answered(11.0)
    request.finish(11.5)
    assert list(policy.weigh(12.0, 5000, hashes_of(5000), [0]).cached_tokens) == [15 * BLOCK]
    assert list(policy.weigh(30.0, 5000, hashes_of(5000), [0]).cached_tokens) == [0]


def test_what_is_in_flight_goes_on_where_the_index_ends() -> None:
    policy = policy_of(1)
    send(policy, 9.0, 0, 1024).answered(10.0)
    later = send(policy, 14.0, 0, 8000)
    policy.dispatched(14.0, 0, policy.weigh(14.0, 1024, hashes_of(1024), [4]), 0)  # renews the first blocks
    later.finish(14.5)
    tail = send(policy, 15.0, 0, 8000)
    assert tail.marks[0] == 1
    assert list(policy.weigh(400.0, 9000, hashes_of(9000), [4]).cached_tokens) == [1024]
    assert list(policy.weigh(16.0, 9000, hashes_of(9000), [2]).cached_tokens) == [31 * BLOCK]


@pytest.mark.parametrize("seed", range(20))
def test_prompts_in_flight_are_those_of_a_plain_model(seed: int) -> None:
    random, table = Random(seed), in_flight_of(4, BLOCK)
    running: list[tuple[int, list[int], np.ndarray, float]] = []
    has_failed = False
    for step in range(60):
        family = random.randrange(1, 3) * 500
        chain = [family + idx for idx in range(random.randrange(1, 12))]  # a block's name says what is before it
        if random.random() < 0.3:
            chain[-1] += 100 * random.randrange(1, 4)
        if running and step > 30 and random.random() < 0.4:
            rank, _, marks, until_s = running.pop(random.randrange(len(running)))
            table.settle(step, rank, marks, until_s, is_computed=False)
            has_failed = True
        else:
            rank, marks = random.randrange(4), table.marks(chain)
            running.append((rank, chain, marks, table.add(step, rank, marks)))
        held = np.array([random.randrange(3) for _ in range(4)])
        found, _, _ = table.read(step + 0.5, table.marks(chain), held)
        for rank in range(4):
            there = {block for at, blocks, _, _ in running if at == rank for block in blocks} | set(chain[: held[rank]])
            expected = next((depth for depth, block in enumerate(chain) if block not in there), len(chain))
            # A prompt that fails takes marks with it that an older one had set too: less is possible, never more.
            assert held[rank] <= found[rank] <= max(held[rank], expected)
            assert found[rank] == max(held[rank], expected) or has_failed
    assert running


def test_a_mark_names_the_ranks_that_had_it_last() -> None:
    table, marks = in_flight_of(100, BLOCK), np.arange(1, 5, dtype=np.uint64)
    for rank in range(99, -1, -1):
        table.add(100.0 - rank, rank, marks)
    table.add(101.0, 1, marks)  # again: that takes no other's place
    found, _, _ = table.read(102.0, marks, np.zeros(100, np.int64))
    assert list(found.nonzero()[0]) == list(range(NUM_RANKS_OF_A_MARK))
    some = np.array([50, 3, 99, 0])
    assert list(table.read(102.0, marks, np.array([1, 1, 0, 0]), some)[0]) == [1, 4, 0, 4]


def test_a_mark_that_takes_anothers_slot_takes_none_of_its_ranks() -> None:
    table, marks = in_flight_of(2, BLOCK), np.array([7], np.uint64)
    table.add(0.0, 0, marks)
    for other in range(8, 20 * NUM_SLOTS):
        table.add(0.0, 1, np.array([other], np.uint64))
        if not table.read(1.0, marks, np.zeros(2, np.int64))[0].any():
            break
    found, _, num_requests = table.read(1.0, np.array([other], np.uint64), np.zeros(2, np.int64))
    assert list(found) == [0, 1]
    assert num_requests == pytest.approx([math.exp(-1.0 / REQUESTS_WINDOW_S)])


def test_requests_for_a_prefix_are_counted_over_some_seconds_and_a_deeper_mark_tells_of_those_before_it() -> None:
    tables = np.zeros((2, NUM_SLOTS), SLOT)
    fronts = [PromptsInFlight(tables, 2, BLOCK, own_idx) for own_idx in range(2)]
    long, short = np.arange(1, 5, dtype=np.uint64), np.arange(1, 3, dtype=np.uint64)
    for at_s, front, marks in ((0.0, 0, long), (4.0, 1, long), (6.0, 0, short)):
        fronts[front].add(at_s, 0, marks)
    of_short = sum(math.exp(-since_s / REQUESTS_WINDOW_S) for since_s in (10.0, 6.0, 4.0))
    of_long = of_short - math.exp(-4.0 / REQUESTS_WINDOW_S)
    _, marked, num_requests = fronts[0].read(10.0, long, np.zeros(2, np.int64))
    assert list(marked) == [1, 2, 3, 4]
    assert num_requests == pytest.approx([of_short, of_short, of_long, of_long])
    tables[:, 3] = np.zeros(2, SLOT)  # the third mark's slot goes to others
    assert fronts[0].read(10.0, long, np.zeros(2, np.int64))[2] == pytest.approx([of_short, of_short, of_long, of_long])


def test_marks_lie_at_the_same_places_of_each_prompt_and_are_few() -> None:
    table = in_flight_of(1, 16)
    long = np.arange(1, 100_000 // 16, dtype=np.uint64)
    assert len(table.marks(long)) == 132
    assert list(table.marks(long[:1000])) == list(table.marks(long)[: len(table.marks(long[:1000]))])
    assert list(table.marks(long)[:3]) == [16, 32, 48]
    assert len(table.marks(long[:15])) == 0


def test_hashes_are_taken_as_ints_of_any_size_and_as_arrays() -> None:
    table = in_flight_of(1, BLOCK)
    hashes = [2**64 - 1, 2**63, 5]
    assert list(table.marks(hashes)) == list(table.marks(np.array(hashes, np.uint64))) == hashes
    assert list(table.marks([-1, -(2**63), 5])) == hashes


def _play(fronts: list[PricedPolicy], seed: int) -> list[Prices]:
    """Send random requests, each through a random router, answered in order; return what each was told."""
    random, seen, now_s = Random(seed), [], 0.0
    queues: list[list[tuple[PricedPolicy, Dispatched, bool]]] = [[] for _ in range(3)]
    for step in range(150):
        now_s += random.expovariate(40.0)
        rank, num_tokens = random.randrange(3), random.randrange(300, 12_000)
        name, is_streamed, fails, depths = random.randrange(5), random.random() < 0.8, random.random() < 0.1, [1, 0, 2]
        if queues[rank] and random.random() < 0.5:
            front, request, fails = queues[rank].pop(0)
            if not fails:
                request.answered(now_s)
                request.add_tokens(20)
            request.finish(now_s)
            continue
        front = fronts[Random(step).randrange(len(fronts))]
        prices = front.weigh(now_s, num_tokens, () if fails else hashes_of(num_tokens, name), depths)
        queues[rank].append((front, front.dispatched(now_s, rank, prices, rank, is_streamed=is_streamed), fails))
        seen.append(prices)
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_four_routers_that_share_rows_decide_as_one_does(seed: int) -> None:
    one, four = _play(fronts_of(1, 3), seed), _play(fronts_of(4, 3), seed)
    for alone, shared in zip(one, four, strict=True):
        assert shared.load.wait_s == pytest.approx(alone.load.wait_s, rel=1e-9, abs=1e-9)
        assert shared.load.unit_s == pytest.approx(alone.load.unit_s, rel=1e-9)
        assert shared.load.context_tokens == pytest.approx(alone.load.context_tokens)
        assert shared.load.recent == pytest.approx(alone.load.recent, rel=1e-9)
        assert shared.price == pytest.approx(alone.price, rel=1e-9)
        assert shared.cost_s == pytest.approx(alone.cost_s, rel=1e-9)


def test_requests_give_back_all_they_counted_once() -> None:
    policy = policy_of(2)
    requests = [send(policy, 10.0, idx % 2, 3000, idx, is_streamed=idx % 3 > 0) for idx in range(12)]
    for idx, request in enumerate(requests):
        if idx % 2:
            request.answered(11.0)
            request.answered(11.5)
        request.add_tokens(10)
        request.finish(12.0)
        request.finish(13.0)
        request.add_tokens(10)
        request.answered(14.0)
    prices = policy.weigh(100.0, 1000, (), [0, 0])
    assert list(prices.load.wait_s) == [0.0, 0.0]
    assert list(prices.load.context_tokens) == [0.0, 0.0]


def test_rows_may_lie_as_cells_of_ranks_side_by_side() -> None:
    cells = np.zeros((2, 5, 16))  # a row's rank after rank, each with room for more
    rows = cells[:, :, :NUM_FIELDS].transpose(0, 2, 1)
    table = PromptsInFlight(np.zeros((2, NUM_SLOTS), SLOT), 5, BLOCK, 1)
    seen = []
    for policy in (PricedPolicy(PriceSettings(), WorkRows(rows, 1), table, BLOCK), policy_of(5)):
        send(policy, 10.0, 3, 20_000).answered(15.0)
        send(policy, 16.0, 4, 9000)
        seen.append(policy.weigh(17.0, 6000, hashes_of(6000, 9), [2, 0], np.array([4, 3])))
    assert seen[0].cost_s == pytest.approx(seen[1].cost_s)
    assert cells[0].sum() == 0.0 < cells[1, 3].sum()


def test_only_the_ranks_that_are_asked_for_are_priced() -> None:
    policy = policy_of(5)
    send(policy, 10.0, 3, 20_000)
    prices = policy.weigh(10.0, 6000, hashes_of(6000), [2, 0], np.array([1, 3]))
    assert list(prices.cached_tokens) == [2 * BLOCK, 23 * BLOCK]
    assert prices.load.wait_s[0] == 0.0 < prices.load.wait_s[1]


def test_of_equal_costs_the_rank_with_the_fewest_blocks_wins_then_chance() -> None:
    policy = policy_of(4)
    prices = policy.weigh(10.0, 1000, (), [0, 0, 0, 0])
    assert policy.choose(prices, [3, 1, 2, 9], Random(0)) == 1
    assert {policy.choose(prices, [3, 1, 2, 1], Random(seed)) for seed in range(20)} == {1, 3}
    cheapest = policy.weigh(10.0, 1000, (), [0, 0, 2, 0])
    assert policy.choose(cheapest, [0, 0, 9, 0], Random(0)) == 2


def test_what_fronts_of_one_router_learnt_fades_at_another_as_what_that_one_learns() -> None:
    rows, random = np.zeros((3, NUM_FIELDS, 1)), Random(1)
    routers = [WorkRows(rows, idx) for idx in range(3)]
    now_s = 1000.0

    def learn(router: WorkRows, num: int) -> None:
        nonlocal now_s
        for _ in range(num):
            router.dispatch(now_s, 0, 1000, UNIT_S, 1000, is_streamed=True)
            before_s, now_s = now_s, now_s + random.uniform(0.01, 0.1)
            router.answer(now_s, 0, 1000, before_s)

    def is_as_known_elsewhere() -> bool:
        as_replicas = np.stack([merged(rows[:2], rows[:, NUM_LEARNT].sum(0)), rows[2]])
        return learnt_of(as_replicas) == pytest.approx(learnt_of(rows))

    for _ in range(900):
        learn(random.choice(routers), 1)
    assert is_as_known_elsewhere()
    rows[2] = 0.0  # the other router is started anew
    learn(routers[0], 5)
    assert is_as_known_elsewhere()

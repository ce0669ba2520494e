"""Simulated workers and fleets, by hand where they are small, and against plainer models where they are not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest

from kvist.errors import InvalidValueError
from kvist.events import Tier
from kvist.simulate.driver import PricedDriver
from kvist.simulate.fleet import Conditions, Simulation, at_load, measure, work_left
from kvist.simulate.index import LateIndex
from kvist.simulate.memory import MAX_STEP_TOKENS, Memory, find_prefix
from kvist.simulate.peers import POLICIES
from kvist.simulate.trace import Request, Trace, conversations, read_trace, tool_agents
from kvist.simulate.worker import Machine

HALF_AS_FAST = Machine().times_as_fast(0.5)
PLAIN = Machine(step_s=0.01, prefill_s=1e-3, context_s=0.0, alpha=0.0, cache_tokens=100_000)


def request(idx: int, at_s: float, num_tokens: int, num_output_tokens: int = 1, name: int | None = None) -> Request:
    """Return a request whose blocks of 100 tokens are those of all others with its name."""
    name = idx if name is None else name
    return Request(
        idx, at_s, tuple(name * 1000 + block for block in range(num_tokens // 100)), num_tokens, num_output_tokens
    )


def served(requests: Sequence[Request], machine: Machine = PLAIN, num_workers: int = 1) -> Simulation:
    driver = POLICIES["round-robin"](num_workers=num_workers, block_size=100)
    simulation = Simulation(Trace(requests, 100), [machine] * num_workers, driver)
    simulation.run()
    return simulation


def test_a_prompt_is_computed_in_chunks_and_its_answer_a_token_a_step() -> None:
    (job,) = served([request(0, 5.0, 3000, 4)]).jobs
    assert job.answered_at_s == pytest.approx(5.0 + 2 * 0.01 + 3000 * 1e-3)
    assert job.done_at_s == pytest.approx(job.answered_at_s + 3 * 0.01)


def test_attention_makes_late_tokens_dearer_and_context_slows_decoding() -> None:
    machine = replace(PLAIN, alpha=1e-3, context_s=1e-5)
    (job,) = served([request(0, 0.0, 1000, 3)], machine).jobs
    assert job.answered_at_s == pytest.approx(0.01 + 1e-3 * 1000 * (1 + 0.5))
    assert job.done_at_s - job.answered_at_s == pytest.approx(2 * (0.01 + 1000 * 1e-5), rel=1e-2)


def test_what_a_worker_computed_is_found_but_for_the_last_block() -> None:
    jobs = served([request(0, 0.0, 500, name=1), request(1, 10.0, 500, name=1), request(2, 20.0, 950, name=1)]).jobs
    assert [job.num_cached_tokens for job in jobs] == [0, 400, 500]


def test_the_blocks_used_longest_ago_are_forgotten_from_their_end() -> None:
    small = replace(PLAIN, cache_tokens=900)
    first, second = request(0, 0.0, 550, name=1), request(1, 10.0, 550, name=2)
    jobs = served([first, second, replace(first, idx=2, at_s=20.0), replace(second, idx=3, at_s=30.0)], small).jobs
    assert [job.num_cached_tokens for job in jobs] == [0, 0, 300, 300]


def test_a_prompt_waits_until_running_requests_leave_room_for_it() -> None:
    small = replace(PLAIN, cache_tokens=1000)
    first, second = served([request(0, 0.0, 590, 10), request(1, 0.0, 590, 10)], small).jobs
    assert second.answered_at_s == pytest.approx(first.done_at_s + 0.01 + 0.59)


def _plainly(requests: Sequence[Request], machine: Machine) -> list[tuple[float, float]]:
    """Step through each step of a worker that caches nothing; return when answers begin and end."""
    now_s, waiting, decoding, times = 0.0, list(requests), [], {each.idx: [inf, inf] for each in requests}
    missing = {each.idx: each.num_tokens for each in requests}
    while waiting or decoding:
        if not decoding and waiting[0].at_s > now_s:
            now_s = waiting[0].at_s
        budget, answered, cost_s = MAX_STEP_TOKENS, [], machine.step_s
        while budget and waiting and waiting[0].at_s <= now_s:
            first = waiting[0]
            num = min(budget, missing[first.idx])
            begin = first.num_tokens - missing[first.idx]
            cost_s += sum(machine.prefill_s * (1 + machine.alpha * (begin + idx + 0.5)) for idx in range(num))
            missing[first.idx] -= num
            budget -= num
            if not missing[first.idx]:
                answered.append(waiting.pop(0))
        cost_s += machine.context_s * sum(each.num_tokens + done for each, done in decoding)
        now_s += cost_s
        decoding = [(each, done + 1) for each, done in decoding]
        for each, done in decoding:
            if done >= max(1, each.num_output_tokens - 1):
                times[each.idx][1] = now_s
        decoding = [(each, done) for each, done in decoding if done < max(1, each.num_output_tokens - 1)]
        for each in answered:
            times[each.idx][0] = now_s
            decoding.append((each, 0))
    return [(begin, end) for begin, end in times.values()]


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_keeps_the_times_of_one_that_counts_every_step(seed: int) -> None:
    random, machine = Random(seed), replace(PLAIN, context_s=1e-9, alpha=1e-4, prefill_s=1e-5, cache_tokens=10**7)
    at_s = [0.0]
    while len(at_s) < 25:
        at_s.append(at_s[-1] + random.expovariate(10.0))
    requests = [
        request(idx, each, random.randrange(1, 6000), random.randrange(1, 150)) for idx, each in enumerate(at_s)
    ]
    jobs = served(requests, machine).jobs
    for job, (answered_at_s, done_at_s) in zip(jobs, _plainly(requests, machine), strict=True):
        # A run of steps keeps the context it began with, at most 64 tokens an answer behind.
        assert job.answered_at_s == pytest.approx(answered_at_s, abs=5e-3)
        assert job.done_at_s == pytest.approx(done_at_s, abs=5e-3)


@pytest.mark.parametrize("memory", [Memory(), Memory(1000, 0.75), Memory(host_tokens=40_000), Memory(500, 0.5, 50_000)])
@pytest.mark.parametrize(("seed", "num_prefill"), [(0, 0), (2, 2)])
def test_everybody_is_served_and_the_index_knows_in_the_end_what_caches_hold(
    seed: int, num_prefill: int, memory: Memory
) -> None:
    trace = at_load(tool_agents(150, seed), [Machine()] * 4, 2.0, seed)
    driver = POLICIES["kv"](num_workers=4, block_size=trace.block_size, seed=seed)
    machines = [replace(Machine(), cache_tokens=80_000)] * 4
    simulation = Simulation(trace, machines, driver, Conditions(memory=memory, num_prefill=num_prefill))
    outcome = simulation.run()
    assert all(job.at_s < job.answered_at_s <= job.done_at_s < inf for job in simulation.jobs)
    assert 0 < outcome.cached < 1
    assert outcome.regret_held_elsewhere_s >= 0
    depths = [simulation.index.depths(each.blocks, inf) for each in trace.requests]
    for idx, worker in enumerate(simulation._workers):
        assert worker._context_tokens == 0
        for pool, by_tier in zip(worker._pools, simulation.index._held[idx], strict=True):
            assert not pool.pinned
            assert pool.num_own == 0
            held = [pool.idle, pool.host][: len(by_tier)]
            assert [set(blocks) for blocks in held] == by_tier
            assert len(pool.idle) <= pool.num_blocks
            assert len(pool.host) <= pool.num_on_host
            assert not set(pool.idle) & set(pool.host)
        for each, depth in zip(trace.requests, depths, strict=True):
            in_caches = find_prefix(worker._pools, each.blocks, each.num_tokens + 1, trace.block_size)
            assert tuple(num * trace.block_size for num in (depth[idx][0], depth[idx][-1])) == in_caches
        assert simulation.index.held[idx] == len(worker._pools[0].idle) + len(worker._pools[0].host)


def test_a_hybrid_model_finds_a_prompt_only_while_the_window_before_its_end_is_cached() -> None:
    tokens, machine, hits = 1000, replace(PLAIN, cache_tokens=20_000), []
    others = [request(idx, 10.0 * idx, 950) for idx in range(2, 40)]
    for num_between in (0, 20, 38):
        again = request(1, 1000.0, 950, name=0)
        requests = [request(0, 0.0, 950), *others[:num_between], again]
        driver = POLICIES["round-robin"](num_workers=1, block_size=100)
        simulation = Simulation(Trace(requests, 100), [machine], driver, Conditions(memory=Memory(300, 0.9)))
        simulation.run()
        (full, sliding), blocks = simulation._workers[0]._pools, again.blocks
        assert full.num_blocks > 2 * machine.cache_tokens / 100  # sliding layers leave the others room
        assert sliding.num_blocks < full.num_blocks
        hits.append(simulation.jobs[-1].num_cached_tokens)
    assert hits[0] == tokens - 100
    assert hits[-1] == 0
    assert all(block in full.idle for block in blocks)  # so that the window alone was missed


def test_what_the_gpu_forgets_is_fetched_from_the_host_at_a_part_of_its_price() -> None:
    small = replace(PLAIN, cache_tokens=900)
    first, second = request(0, 0.0, 550, name=1), request(1, 10.0, 550, name=2)
    requests = [first, second, replace(first, idx=2, at_s=20.0), replace(second, idx=3, at_s=30.0)]
    driver = POLICIES["round-robin"](num_workers=1, block_size=100)
    simulation = Simulation(Trace(requests, 100), [small], driver, Conditions(memory=Memory(host_tokens=1000)))
    simulation.run()
    assert [job.num_cached_tokens for job in simulation.jobs] == [0, 0, 500, 500]
    assert [job.num_gpu_tokens for job in simulation.jobs] == [0, 0, 300, 300]
    assert simulation.jobs[2].answered_at_s == pytest.approx(20.0 + 0.01 + (0.25 * 200 + 50) * 1e-3)


@pytest.mark.parametrize("name", POLICIES)
def test_long_prompts_are_computed_by_prefill_workers_and_fetched(name: str) -> None:
    requests = [request(0, 0.0, 250, 5), request(1, 10.0, 1500, 5), request(2, 30.0, 1600, 5, name=1)]
    driver = POLICIES[name](num_workers=3, block_size=100)
    simulation = Simulation(Trace(requests, 100), [PLAIN] * 3, driver, Conditions(num_prefill=1))
    outcome = simulation.run()
    short, long, again = simulation.jobs
    assert short.computed_by is None
    assert short.answered_at_s == pytest.approx(0.26)
    assert long.computed_by is not None
    assert long.answered_at_s == pytest.approx(10.0 + 1.51 + 0.05 * 1.5 + 0.01)
    assert all(job.done_at_s - job.answered_at_s == pytest.approx(0.04) for job in simulation.jobs)
    assert outcome.itl_p99_s == pytest.approx(0.01)
    # The blocks are at the prefill worker and at a decode worker, which may compute the rest itself.
    found_by = again if again.computed_by is None else again.computed_by
    assert found_by.num_cached_tokens == 1500


def test_prefill_workers_keep_prompts_from_holding_up_answers() -> None:
    machines = [Machine()] * 4
    trace = at_load(tool_agents(400), machines, 0.7, seed=1)
    together, apart = (measure(trace, POLICIES["kv"], machines, 1, Conditions(num_prefill=num)) for num in (0, 2))
    assert apart.itl_p99_s < 0.5 * together.itl_p99_s


def test_a_request_whose_worker_dies_while_it_fetches_begins_anew() -> None:
    driver = POLICIES["round-robin"](num_workers=3, block_size=100)
    simulation = Simulation(Trace([request(0, 0.0, 1500, 5)], 100), [PLAIN] * 3, driver, Conditions(num_prefill=1))
    simulation.call_at(1.52, partial(simulation.fail_worker, 1))
    simulation.run()
    (job,) = simulation.jobs
    fetched_in_vain_s = 1.51 + 0.05 * 1.5
    assert job.answered_at_s == pytest.approx(
        fetched_in_vain_s + 0.11 + 0.05 * 1.5 + 0.01
    )  # most of it was still cached


def test_the_index_hears_late_and_counts_leading_blocks() -> None:
    index, random = LateIndex(3, delay_s=1.0), Random(0)
    history: list[tuple[float, list[set[int]]]] = [(-inf, [set(), set(), set()])]
    for step in range(300):
        now_s, worker_idx, block = step / 8, random.randrange(3), random.randrange(12)
        after = [set(each) for each in history[-1][1]]
        if random.random() < 0.6:
            after[worker_idx].add(block)
        else:
            after[worker_idx].discard(block)
        index.receive(worker_idx, now_s, 0, Tier.GPU, [block], is_stored=block in after[worker_idx])
        history.append((now_s, after))
        known = next(held for at_s, held in reversed(history) if at_s <= now_s - 1.0)
        chain = random.sample(range(12), 4)
        expected = [(next((depth for depth, each in enumerate(chain) if each not in held), 4),) for held in known]
        assert index.depths(chain, now_s) == expected
        assert index.held == [len(held) for held in known]


def test_events_that_are_lost_never_reach_the_index() -> None:
    index = LateIndex(1, delay_s=0.0, lost=0.3, seed=1)
    for block in range(1000):
        index.receive(0, 0.0, 0, Tier.GPU, [block], is_stored=True)
    index.depths((), 1.0)
    assert 650 < index.held[0] < 750


def test_a_silent_worker_is_expected_to_hold_what_it_answered_last_as_far_as_it_fits() -> None:
    index = LateIndex(2, silent={1: 8})
    index.receive(1, 0.0, 0, Tier.GPU, [1, 2], is_stored=True)  # it says nothing
    index.on_first_token(0, request(0, 0.0, 500), 1.0)  # this one does
    index.on_first_token(1, request(1, 0.0, 500), 1.0)
    index.on_first_token(1, request(2, 0.0, 600), 2.0)
    assert index.held == [0, 8]
    assert index.depths(request(2, 0.0, 600).blocks, 2.0) == [(0,), (6,)]
    assert index.depths(request(1, 0.0, 500).blocks, 2.0) == [(0,), (2,)]
    index.clear_worker(1)
    assert index.depths(request(2, 0.0, 600).blocks, 3.0) == [(0,), (0,)]
    index.on_first_token(1, request(3, 0.0, 800), 4.0)
    assert index.held == [0, 8]


@pytest.mark.parametrize("name", POLICIES)
def test_requests_of_a_worker_that_is_gone_begin_anew_elsewhere(name: str) -> None:
    driver = POLICIES[name](num_workers=3, block_size=100)
    requests = [request(idx, float(idx), 3000, 50) for idx in range(60)]
    simulation = Simulation(Trace(requests, 100), [PLAIN] * 3, driver)
    at_work: list[int] = []

    def gone(now_s: float) -> None:
        at_work.extend(job.request_id for job in simulation._workers[1].jobs())
        simulation.fail_worker(1, now_s)

    def back(now_s: float) -> None:
        assert not simulation._workers[1].jobs()
        assert simulation.index.held[1] == 0
        simulation.restore_worker(now_s)

    simulation.call_at(20.1, gone)
    simulation.call_at(30.1, back)
    simulation.run()
    assert at_work
    assert all(simulation.jobs[idx].done_at_s > 20.1 for idx in at_work)
    assert all(job.at_s < job.answered_at_s <= job.done_at_s < inf for job in simulation.jobs)


def test_a_worker_twice_as_fast_takes_half_the_time() -> None:
    fast = replace(PLAIN, alpha=1e-4, context_s=1e-6)
    slow = fast.times_as_fast(0.5)
    requests = [request(idx, 0.0, 3000, 20) for idx in range(4)]
    for quick, late in zip(served(requests, fast).jobs, served(requests, slow).jobs, strict=True):
        assert late.answered_at_s == pytest.approx(2 * quick.answered_at_s)
        assert late.done_at_s == pytest.approx(2 * quick.done_at_s)


def test_bursts_have_the_same_mean_and_more_spread() -> None:
    trace = Trace([request(idx, float(idx), 100) for idx in range(4000)], 100)
    for burstiness in (1.0, 0.2):
        times = [each.at_s for each in trace.redraw_arrivals(1, 1.0, burstiness).requests]
        gaps = [after - before for before, after in pairwise(times)]
        assert fmean(gaps) == pytest.approx(1.0, rel=0.1)
        assert stdev(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_what_is_left_to_compute_is_the_load_where_a_policy_finds_what_one_cache_would() -> None:
    trace, machines = at_load(tool_agents(1500), [Machine()], 0.7, seed=1), [Machine()]
    outcome = measure(trace, POLICIES["kv"], machines, seed=1)
    _, left_s = work_left(trace.requests, trace.block_size, machines)
    expected = left_s / (trace.requests[-1].at_s - trace.requests[0].at_s)
    assert outcome.load_after_hits == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("make", [conversations, tool_agents])
def test_sessions_are_known_again_by_their_own_prefix(make) -> None:  # type: ignore[no-untyped-def]
    trace = make(600, seed=2).in_sessions()
    last: dict[int, Request] = {}
    for each in trace.requests:
        session = each.blocks[-1] // 100_003  # as these traces name their blocks
        before = last.get(session) if session < 2**40 else None  # negative owners are what sessions share
        assert each.follows == (None if before is None else before.idx)
        assert before is None or each.pause_s == each.at_s - before.at_s
        last[session] = each


def test_what_many_begin_with_makes_no_session_and_a_prompt_sent_again_goes_on_with_it() -> None:
    def prompt(idx: int, *blocks: int) -> Request:
        return Request(idx, float(idx), blocks, 100 * len(blocks) + 1, 5)

    requests = [
        prompt(0, 1, 2),
        prompt(1, 1, 9),
        prompt(2, 1),
        prompt(3, 1, 2, 3),
        prompt(4, 1, 2, 3),
        prompt(5, 1, 2, 3, 4),
        prompt(6),
    ]
    follows = [each.follows for each in Trace(requests, 100).in_sessions().requests]
    assert follows == [None, None, None, 0, 3, 4, None]


def test_a_turn_is_sent_its_pause_after_the_answer_before_however_long_that_took() -> None:
    first = request(0, 0.0, 5000, 100)
    second = Request(1, 2.0, (*first.blocks, 77), 5150, 5)
    trace = Trace([first, second], 100).in_sessions()
    for pace in (1.0, 0.1):
        jobs = served(trace.redraw_arrivals(0, pace).requests).jobs
        assert jobs[1].at_s == pytest.approx(jobs[0].done_at_s + 2.0)


def test_twice_the_load_is_the_same_arrivals_in_half_the_time() -> None:
    trace, machines = conversations(200), [Machine()] * 4
    slow, fast = (at_load(trace, machines, load, seed=3) for load in (0.4, 0.8))
    assert [each.at_s for each in fast.requests] == pytest.approx([each.at_s / 2 for each in slow.requests])
    mean_s = sum(at_load(trace, machines, 0.5, seed).requests[-1].at_s for seed in range(20)) / 20
    assert work_left(trace.requests, trace.block_size, machines)[1] / 4 / mean_s == pytest.approx(0.5, rel=0.1)


def test_recomputation_at_a_price_keeps_a_busy_fleet_from_thrashing() -> None:
    machines = [Machine()] * 4
    trace = at_load(tool_agents(600), machines, 0.9, seed=1)
    priced, blocks = (measure(trace, POLICIES[name], machines, seed=1) for name in ("kv", "kv-blocks"))
    assert priced.pooled_cache_share > blocks.pooled_cache_share + 0.05
    assert priced.ttft_mean_s < 0.8 * blocks.ttft_mean_s


@pytest.mark.parametrize(
    ("make", "load", "machines", "conditions"),
    [
        pytest.param(conversations, 0.7, [Machine(), HALF_AS_FAST] * 4, Conditions(), id="two speeds"),
        pytest.param(tool_agents, 0.7, [*[Machine()] * 7, HALF_AS_FAST], Conditions(), id="one is slow"),
        pytest.param(tool_agents, 0.7, [Machine()] * 8, Conditions(num_prefill=5), id="prefill workers"),
        pytest.param(tool_agents, 0.85, [Machine()] * 8, Conditions(index_delay_s=2.0), id="late events"),
        pytest.param(tool_agents, 0.7, [Machine(cache_tokens=60_000)] * 8, Conditions(), id="small caches"),
        pytest.param(tool_agents, 0.5, [Machine(prefill_s=4e-4)] * 8, Conditions(), id="slow prefill"),
    ],
)
def test_fleets_that_are_harder_to_route_for_wait_less_than_by_dynamos_rule(
    make: Callable[[int, int], Trace], load: float, machines: list[Machine], conditions: Conditions
) -> None:
    trace = at_load(make(800, 2), machines, load, seed=2)
    priced, dynamo = (measure(trace, POLICIES[name], machines, 2, conditions) for name in ("kv", "dynamo"))
    assert priced.ttft_mean_s < 0.9 * dynamo.ttft_mean_s
    assert priced.pooled_cache_share > max(0.84, dynamo.pooled_cache_share)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_a_trace_and_gives_back_what_it_counts(name: str) -> None:
    machines = [Machine()] * 3
    trace = at_load(tool_agents(120), machines, 0.8, seed=0)
    driver: Any = POLICIES[name](num_workers=3, block_size=trace.block_size, seed=0)
    Simulation(trace, machines, driver).run()
    if not isinstance(driver, PricedDriver):  # of which its own tests say so
        assert driver.running == driver.prefill_tokens == driver.tokens_in_flight == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "num_queued", "expected"),
    [
        ("kv-blocks", 8000, {2}),  # 90 blocks against 60, and the worker with the fewest blocks of equals
        ("kv-blocks", 4000, {0}),
        ("dynamo", 8000, {2}),
        ("lmetric", 1500, {0}),  # 2,500 · 2 against 6,000 · 1
        ("lmetric", 2500, {1, 2}),
        ("llm-d", 8000, {0}),  # holds 83 %
        ("llm-d", 500_000, {1, 2}),  # but for 20 s
        ("sglang", 8000, {0}),  # has routed nothing, so that all trees are equal
        ("hashing", 8000, {2}),  # the next on the ring that has no request
        ("least-loaded", 0, {1, 2}),
        ("power-of-two", 0, {1, 2}),
        ("random", 0, {0, 1, 2}),
        ("round-robin", 8000, {0}),
    ],
)
def test_policies_weigh_a_cached_prompt_against_a_queue_by_their_rules(
    name: str, num_queued: int, expected: set[int]
) -> None:
    chosen = set()
    for seed in range(10):
        driver: Any = POLICIES[name](num_workers=3, block_size=100, seed=seed)
        driver.running, driver.prefill_tokens = [1, 0, 0], [num_queued, 0, 0]
        driver.tokens_in_flight = [num_queued, 0, 0]
        chosen.add(driver.route(0.0, "a", list(range(60)), 6000, [50, 0, 0], [50, 1, 0]))
    assert chosen == expected


def test_a_trace_is_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]}\n'
    path.write_text(good + "\n" + good)
    trace = read_trace(path)
    assert trace.requests[0] == Request(0, 0.0, (1, 2), 1100, 7)
    assert len(trace.requests) == 2
    assert len(read_trace(path, 1).requests) == 1
    others = (good.replace(*each) for each in (("1100", "0"), ("1100", "-5"), ("7", "-1"), ("[1, 2, 3]", "5")))
    for bad in ('{"timestamp": 1}', "[]", "x", *others):
        path.write_text(good + bad + "\n")
        with pytest.raises(InvalidValueError, match="line 2"):
            read_trace(path)
    path.write_text("")
    with pytest.raises(InvalidValueError, match="trace"):
        read_trace(path)


def test_a_recording_is_read_part_by_part_as_far_as_it_goes(tmp_path: Path) -> None:
    def line(began: float, timestamp: int, block_size: int = 16, **more: object) -> bytes:
        told = {
            "timestamp": timestamp,
            "input_length": 40,
            "output_length": 3,
            "hash_ids": [1, 2, 3],
            "recording_started_at": began,
        }
        return json.dumps(told | {"block_size": block_size} | more).encode() + b"\n"

    first = gzip.compress(line(1e9, 500) + line(1e9, 100) + line(1e9, 200, status=429))
    second = gzip.compress(
        line(1e9 + 7, 0, status=200) + line(1e9 + 7, 10, hash_ids=[]) + Random(1).randbytes(500).hex().encode()
    )
    for name, data in (("b.jsonl.gz", first), ("a.jsonl.gz", second[:-16]), ("c.jsonl.gz", b"")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "notes.txt").write_text("not a part")
    trace = read_trace(tmp_path)
    assert [round(each.at_s, 3) for each in trace.requests] == [0.0, 0.4, 6.9, 6.91]
    assert [(each.idx, each.blocks) for each in trace.requests] == [(0, (1, 2)), (1, (1, 2)), (2, (1, 2)), (3, ())]
    assert (trace.block_size, len(read_trace(tmp_path, 3).requests)) == (16, 3)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(line(1e9, 0) + line(1e9, 0, block_size=32)))
    with pytest.raises(InvalidValueError, match=r"d.jsonl.gz, line 2: block_size: got 32, expected 16"):
        read_trace(tmp_path)
    for damaged in (first[:10] + b"\xff" * 20, b"plain text", gzip.compress(b"\xff\xfe\n")):
        (tmp_path / "d.jsonl.gz").write_bytes(damaged)
        with pytest.raises(InvalidValueError, match=r"trace: got .*d.jsonl.gz"):
            read_trace(tmp_path)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (  # vllm bench serve --dataset-name custom
            [{"prompt": 300 * "a"}, {"prompt": 300 * "a" + 300 * "b", "output_tokens": 7}],
            [(0.0, 75, 256), (1.0, 150, 7)],
        ),
        (  # aiperf --custom-dataset-type single_turn, and a trace with texts
            [{"text": 600 * "a", "timestamp": 500}, {"text_input": 600 * "a", "timestamp": 2500, "output_length": 3}],
            [(0.0, 150, 256), (2.0, 150, 3)],
        ),
        (  # aiperf --custom-dataset-type multi_turn
            [
                {
                    "session_id": "s",
                    "turns": [{"text": 300 * "a"}, {"text": 600 * "b", "delay": 1500, "output_length": 9}],
                }
            ],
            [(0.0, 75, 256), (1.5, 225, 9)],
        ),
    ],
)
def test_prompts_of_benchmarks_are_read_as_blocks_of_characters(
    tmp_path: Path, lines: list[dict[str, Any]], expected: list[tuple[float, int, int]]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(path)
    assert trace.block_size == 64
    assert [(each.at_s, each.num_tokens, each.num_output_tokens) for each in trace.requests] == expected
    first, second = (each.blocks for each in trace.requests)
    assert [len(first), len(second)] == [num_tokens // 64 for _, num_tokens, _ in expected]
    assert second[: len(first)] == first
    assert len(set(second)) == len(second)


def test_a_line_without_a_prompt_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"output_length": 3, "metrics": {}}')
    with pytest.raises(InvalidValueError, match=r"line 1: got \"\{'output_length': 3\}\", expected timestamp"):
        read_trace(path)


def test_requests_shorter_than_a_block_are_served() -> None:
    assert [job.num_cached_tokens for job in served([request(0, 0.0, 40), request(1, 0.0, 40)]).jobs] == [0, 0]


def test_sessions_that_a_recording_names_are_taken_as_they_are_with_their_pauses(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    told = {"input_length": 100, "output_length": 1, "hash_ids": [1], "block_size": 64}
    lines = [
        {**told, "timestamp": 0, "session": "a"},
        {**told, "timestamp": 1000, "session": "b", "total_s": 2.5},
        {**told, "timestamp": 5000, "session": "a", "pause_s": 0.5},
        {**told, "timestamp": 7000, "session": "b", "total_s": 9.0},
        {**told, "timestamp": 8000, "session": "b"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with path.open("a") as more:  # what was refused has no place in a trace
        more.write('{"timestamp": 9000, "input_length": 0, "output_length": 0, "hash_ids": [], "status": 400}\n')
    turns = read_trace(path).in_sessions().requests
    assert [each.follows for each in turns] == [None, None, 0, 1, 3]
    assert [each.pause_s for each in turns[2:]] == [0.5, 3.5, 0.0]


def test_a_recorded_answer_is_named_by_the_turn_that_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    blocks = [11, 12, 13, 14, 15, 16]
    told = {"timestamp": 0, "input_length": 40, "output_length": 30, "hash_ids": blocks[:2], "block_size": 16}
    turn = told | {"timestamp": 9000, "input_length": 100, "hash_ids": blocks}
    for took, expected in (({"total_s": 2.0}, (13, 14)), ({}, ())):  # which the answer fills
        path.write_text("".join(json.dumps(each | took) + "\n" for each in (told, turn)))
        assert [each.answer_blocks for each in read_trace(path).requests] == [expected, ()]


@pytest.mark.parametrize("make", [conversations, tool_agents])
def test_made_up_sessions_repeat_what_was_said_and_are_the_same_for_a_seed(make) -> None:  # type: ignore[no-untyped-def]
    trace = make(300, seed=1)
    assert trace == make(300, seed=1) != make(300, seed=2)
    assert len(trace.requests) == 300
    said: dict[int, Request] = {}
    num_continued = 0
    for each in trace.requests:
        assert len(each.blocks) == each.num_tokens // trace.block_size
        assert (
            len(each.blocks) + len(each.answer_blocks) == (each.num_tokens + each.num_output_tokens) // trace.block_size
        )
        if (before := said.get(each.blocks[-1] // 100_003)) is not None:
            earlier = before.blocks + before.answer_blocks
            num_continued += each.blocks[: len(earlier)] == earlier
        said[each.blocks[-1] // 100_003] = each
    assert num_continued > 60

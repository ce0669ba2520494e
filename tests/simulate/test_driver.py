"""The driver that any simulator may use: the very policy behind it, and whatever simulators hand it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvist.errors import InvalidValueError
from kvist.router.policy.priced import Dispatched, PricedPolicy
from kvist.router.policy.settings import FETCH_SCALE
from kvist.simulate import make_driver


@pytest.mark.parametrize("seed", range(10))
def test_it_decides_as_the_policy_called_directly_does(seed: int) -> None:
    """A random life: whatever a simulator tells, with workers away, tiers, and requests that begin anew or fail."""
    random, ties, num_tiers = Random(seed), Random(seed), 1 + seed % 2
    driver, policy = make_driver(num_workers=4, block_size=64, seed=seed), PricedPolicy.for_one(4, 64)
    running: dict[int, Dispatched] = {}
    now_s, is_streamed = 0.0, True
    for _ in range(600):
        now_s += random.expovariate(10.0)
        known = random.choice([*running]) if running else None
        match random.choice(
            ("route", "route", "route", "anew", "answered", "answered", "tokens", "finished", "prefer")
        ):
            case "answered" if known is not None:
                is_streamed = True
                running[known].answered(now_s)
                driver.answered(now_s, known)
            case "tokens" if known is not None:
                running[known].add_tokens(5)
                driver.tokens(now_s, known, 5)
            case "finished" if known is not None:
                request = running.pop(known)
                is_streamed = is_streamed and not request.is_waiting
                request.finish(now_s)
                driver.finished(now_s, known)
            case "route" | "anew" | "prefer" as act:
                request_id = known if act == "anew" and known is not None else random.randrange(10**6)
                num_tokens = random.randrange(1, 5000)
                hashes = [random.randrange(3) * 2**62 + idx for idx in range(num_tokens // 64)]
                depths = np.sort([[random.randrange(20) for _ in range(num_tiers)] for _ in range(4)], axis=1)
                held = [random.randrange(5) for _ in range(4)]
                among = random.choice((None, None, sorted(random.sample(range(4), random.randint(1, 4)))))
                here = list(range(4)) if among is None else among
                asked = (hashes, num_tokens, depths if num_tiers > 1 else depths[:, 0], held, among)
                is_fetched = act != "prefer" and random.randrange(5) == 0
                if act != "prefer" and (before := running.pop(request_id, None)) is not None:
                    is_streamed = is_streamed and not before.is_waiting
                    before.finish(now_s)
                scale, ranks = FETCH_SCALE if is_fetched else 1.0, None if among is None else np.array(among)
                prices = policy.weigh(now_s, num_tokens, hashes, depths[here], ranks, scale)
                chosen = policy.choose(prices, [held[idx] for idx in here], ties)
                if act == "prefer":
                    assert driver.prefer(now_s, *asked) == here[chosen]
                    continue
                assert driver.route(now_s, request_id, *asked, is_fetched=is_fetched) == here[chosen]
                options = {"is_streamed": is_streamed, "computes": not is_fetched}
                running[request_id] = policy.dispatched(now_s, here[chosen], prices, chosen, **options)


def test_prompts_stay_where_they_are_cached_though_first_tokens_tell_of_the_asker_and_not_of_workers() -> None:
    """As in a router whose event loop is full: it sends 64 prompts in each turn and hears of the 64 before.

    Each of 127 prefixes is half of a prompt and fits in the four caches once. The workers answer at once: which of them
    seems fast is decided by how many of its answers a turn brings.
    """
    driver, random, caches = (
        make_driver(num_workers=4, block_size=64, seed=1),
        Random(3),
        [dict[int, None]() for _ in range(4)],
    )
    sent: list[int] = []
    now_s, num_found = 0.0, 0
    for turn in range(300):
        random.shuffle(sent)
        for answered in sent:
            now_s += 0.00005
            driver.answered(now_s, answered)
            driver.finished(now_s, answered)
        sent.clear()
        for request_id in range(turn * 64, turn * 64 + 64):
            now_s += 0.0004
            prefix = request_id % 127
            blocks = [1000 + prefix * 8 + idx for idx in range(8)] + [10_000 + request_id * 8 + idx for idx in range(8)]
            depths = [next((idx for idx, block in enumerate(blocks) if block not in cache), 16) for cache in caches]
            chosen = driver.route(now_s, request_id, blocks, 1025, depths, [len(cache) for cache in caches])
            num_found += depths[chosen] * (turn >= 200)
            for block in reversed(blocks):
                caches[chosen].pop(block, None)
                caches[chosen][block] = None
            while len(caches[chosen]) > 1500:
                del caches[chosen][next(iter(caches[chosen]))]
            sent.append(request_id)
    assert num_found / (100 * 64 * 16) > 0.47


def test_lists_arrays_and_signed_hashes_lead_to_the_same_decisions() -> None:
    chosen = []
    for kind in (list, tuple, lambda values: np.array(values, np.uint64), lambda values: np.array(values, np.int32)):
        driver, random = make_driver(num_workers=5, block_size=16, seed=1), Random(1)
        chosen.append([])
        for request_id in range(50):
            num_tokens = random.randrange(1, 2000)
            counts = [np.array([random.randrange(9) for _ in range(5)]) for _ in range(2)]
            chosen[-1].append(
                driver.route(request_id / 50, f"r{request_id}", kind(range(num_tokens // 16)), num_tokens, *counts)
            )
    assert chosen[0] == chosen[1] == chosen[2] == chosen[3]
    assert all(type(idx) is int for idx in chosen[0])


def test_the_seed_decides_among_equals_and_nothing_else_is_random() -> None:
    def choices(seed: int) -> list[int]:
        driver = make_driver(num_workers=16, block_size=16, seed=seed)
        return [driver.route(0.0, idx, [], 10, [0] * 16, [0] * 16) for idx in range(8)]

    assert choices(1) == choices(1)
    assert len({tuple(choices(seed)) for seed in range(5)}) > 1


def test_requests_that_are_not_known_and_calls_that_come_twice_change_nothing() -> None:
    driver = make_driver(num_workers=2, block_size=16)
    driver.answered(0.0, "nobody")
    driver.tokens(0.0, "nobody", 5)
    driver.finished(0.0, "nobody")
    driver.route(1.0, "a", [1, 2], 40, [0, 0], [0, 0])
    for _ in range(2):
        driver.answered(2.0, "a")
    for _ in range(2):
        driver.finished(3.0, "a")
    driver.answered(4.0, "a")
    other = make_driver(num_workers=2, block_size=16)
    other.route(1.0, "a", [1, 2], 40, [0, 0], [0, 0])
    other.answered(2.0, "a")
    other.finished(3.0, "a")
    following = [(5.0 + idx, idx, [idx], 3000 * idx, [0, 0], [0, 0]) for idx in range(20)]
    assert [driver.route(*each) for each in following] == [other.route(*each) for each in following]


def test_where_first_tokens_are_not_told_prompts_are_taken_to_be_computed_in_their_time() -> None:
    driver = make_driver(num_workers=1, block_size=16)

    def wait_s(now_s: float) -> float:
        return float(driver._policy.weigh(now_s, 10, [], [0]).load.wait_s[0])

    driver.route(0.0, "a", [], 10_000, [0], [0])
    driver.finished(20.0, "a")
    driver.route(20.0, "b", [], 10_000, [0], [0])
    assert 0 < wait_s(20.1) < wait_s(20.0)
    assert wait_s(60.0) == 0.0
    driver.answered(61.0, "b")
    driver.route(61.0, "c", [], 10_000, [0], [0])
    assert wait_s(100.0) > 30.0  # c is streamed, and long due


def test_a_request_that_is_routed_again_leaves_where_it_was() -> None:
    driver = make_driver(num_workers=2, block_size=16)
    first = driver.route(1.0, "a", [], 100_000, [0, 0], [0, 0])
    second = driver.route(1.0, "a", [], 100_000, [0, 0], [0, 0])
    driver.finished(1.0, "a")
    assert second == 1 - first  # work handed out of late tells them apart, a queue does not
    assert driver.route(1.0, "b", [], 100, [0, 0], [0, 0]) in (0, 1)


def test_what_would_be_chosen_is_told_without_counting_it_and_tiers_count_by_their_credits() -> None:
    driver, other = (make_driver(num_workers=3, block_size=16, seed=2) for _ in range(2))
    hashes, held = list(range(100)), [1, 2, 3]
    on_host = [(0, 100), (90, 90), (0, 0)]  # which spares three quarters of 100 blocks
    assert driver.prefer(0.0, hashes, 1601, on_host, held) == 1
    assert driver.prefer(0.0, hashes, 1601, [(0, 100), (60, 60), (0, 0)], held) == 0
    assert driver.prefer(0.0, hashes, 1601, [100, 60, 0], held, [1, 2]) == 1
    for idx in range(20):
        chosen = driver.prefer(float(idx), [idx], 500, [0, 0, 0], held)
        assert chosen == driver.route(float(idx), idx, [idx], 500, [0, 0, 0], held)
        assert chosen == other.route(float(idx), idx, [idx], 500, [0, 0, 0], held)


def test_a_prompt_that_was_computed_elsewhere_keeps_nobody_waiting() -> None:
    driver = make_driver(num_workers=1, block_size=16)
    driver.route(0.0, "a", [], 100_000, [0], [0], is_fetched=True)
    work = driver._policy.weigh(0.0, 10, [], [0]).load
    assert work.wait_s[0] == 0.0
    assert work.context_tokens[0] == 100_000


@pytest.mark.parametrize("depths", [[0], [0, 0, 0], []])
def test_counts_that_are_not_one_a_worker_are_refused(depths: list[int]) -> None:
    driver = make_driver(num_workers=2, block_size=16)
    with pytest.raises(InvalidValueError, match="depths"):
        driver.route(0.0, 1, [1], 20, depths, [0, 0])
    with pytest.raises(InvalidValueError, match="held_blocks"):
        driver.route(0.0, 1, [1], 20, [0, 0], depths)


def test_fleets_without_workers_and_blocks_without_tokens_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="num_workers"):
        make_driver(num_workers=0, block_size=16)
    with pytest.raises(InvalidValueError, match="block_size"):
        make_driver(num_workers=1, block_size=0)

"""What regret adds up, against plain models: an exact LRU cache, and requests counted by hand."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from random import Random
from typing import Any

import numpy as np
import pytest

from kvist.router.regret import MAX_SAMPLED, Cause, Regret, Reuse, Routed, sample_of

BLOCK = 16


def routed(hashes: np.ndarray | None = None, **fields: Any) -> Routed:
    known: dict[str, Any] = {
        "model": "m",
        "worker": "http://w",
        "num_tokens": 0 if hashes is None else len(hashes) * BLOCK + 1,
        "held_tokens": 0,
        "routed_tokens": 0,
        "in_flight_tokens": 0,
        "reported_tokens": None,
        "is_read": True,
        "is_exact": True,
        "block_size": BLOCK,
        "sampled": b"" if hashes is None else sample_of(hashes, hashes),
    }
    return Routed(**(known | fields))


def total(regret: Regret, now_s: float = 0.0) -> dict[str, Any]:
    return regret.report(now_s, 600.0)["total"]


def chain(random: np.random.Generator, num_blocks: int) -> np.ndarray:
    return random.integers(0, 1 << 64, num_blocks, dtype=np.uint64)


@pytest.mark.parametrize("capacity", [2_000, 20_000, 60_000])
def test_a_pooled_cache_is_estimated_to_hold_what_an_exact_one_holds(capacity: int) -> None:
    numpy_random, random = np.random.default_rng(1), Random(1)
    prompts = [chain(numpy_random, 1 + int(random.expovariate(1 / 200))) for _ in range(1000)]
    regret, cache, num_hits = Regret(), OrderedDict[int, None](), 0
    for turn in range(6000):
        prompt = prompts[min(999, int(random.paretovariate(0.5)))]
        for block in prompt.tolist():
            if block in cache:
                num_hits += 1
                cache.move_to_end(block)
            else:
                cache[block] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
        regret.add(turn / 100, [routed(prompt)], capacity)
    report = regret.report(60.0, 600.0)
    exact, estimate = num_hits * BLOCK, report["total"]["pooled_cache_tokens"]
    error = 4 * report["sample"]["standard_error"] * report["total"]["prompt_tokens"]
    assert abs(estimate - exact) < max(error, 0.02 * report["total"]["prompt_tokens"])
    evicted = report["total"]["lost_tokens"][Cause.EVICTED]  # no rank held any of it
    assert abs(evicted - exact) < 0.05 * report["total"]["prompt_tokens"]
    assert sum(report["retention_needed_s"].values()) <= sum(report["reuse_distance_blocks"].values())


def test_few_prefixes_that_most_prompts_begin_with_are_counted_whatever_is_sampled_of_them() -> None:
    """Half of what is used is of 90 blocks, of which the sample may have one, none or ten."""
    for seed in range(5):
        numpy_random, random, regret = np.random.default_rng(seed), Random(seed), Regret()
        prefixes = [chain(numpy_random, 30) for _ in range(3)]
        for turn in range(2000):
            prompt = np.concatenate([random.choice(prefixes), chain(numpy_random, 30)])
            regret.add(turn / 100, [routed(prompt, held_tokens=30 * BLOCK)], 10**6)
        report = regret.report(20.0, 600.0)
        assert report["total"]["pooled_cache_tokens"] == pytest.approx(report["total"]["held_tokens"], rel=0.05)
        assert 0.0 < report["sample"]["standard_error"] < 0.03


def test_the_sample_is_bounded_and_keeps_the_order_of_uses() -> None:
    reuse, random = Reuse(), Random(2)
    blocks = [random.randrange(1 << 64) for _ in range(40 * 32 * 1000)][:400_000]
    for now, block in enumerate(blocks):
        reuse.use(block, 0, now, Cause.EVICTED)
    described = reuse.described()
    assert MAX_SAMPLED / 2 - 200 < described["blocks"] <= MAX_SAMPLED
    kept = [block for block in blocks if block in reuse._last_uses]
    for back in (1, 10, 1000):
        found = reuse.use(kept[-back], 0, 1e6, Cause.EVICTED)
        assert found is not None
        assert found[0] == pytest.approx((back - 1) / described["sampling_rate"], abs=3 / described["sampling_rate"])
        assert found[1].used_at_s == blocks.index(kept[-back])


def test_causes_are_told_apart() -> None:
    random, regret = np.random.default_rng(3), Regret()
    prompt = chain(random, 6400)
    size = len(prompt) * BLOCK
    regret.add(0.0, [routed(prompt)], 10**6)
    assert total(regret)["lost_tokens"] == {}
    regret.add(
        1.0,
        [routed(prompt, held_tokens=size, routed_tokens=size - 160, in_flight_tokens=16, reported_tokens=size - 480)],
        10**6,
    )
    assert total(regret)["lost_tokens"] == {Cause.ELSEWHERE: 160, Cause.ENGINE: 320}
    regret.add(2.0, [routed(prompt, variant=7)], 10**6)
    assert total(regret)["lost_tokens"][Cause.VARIANT] == pytest.approx(size, rel=0.2)
    regret.add(3.0, [routed(prompt, variant=7, is_exact=False, reported_tokens=size)], 10**6)
    assert total(regret)["lost_tokens"][Cause.EVICTED] == pytest.approx(size, rel=0.2)
    regret.add(4.0, [routed(prompt, variant=7)], 10**6)
    assert total(regret)["lost_tokens"][Cause.UNKNOWN] == pytest.approx(size, rel=0.2)
    regret.add(5.0, [routed(num_tokens=900, is_read=False)], 10**6)
    told = total(regret)
    assert told["lost_tokens"][Cause.UNREAD] == 900
    assert (told["requests"], told["in_flight_tokens"], told["unpredicted_tokens"]) == (6, 16, 0)
    was_evicted, was_told = (
        told["lost_tokens"][Cause.EVICTED],
        sum(regret.report(5.0, 600.0)["retention_needed_s"].values()),
    )
    regret.add(
        6.0, [routed(prompt, variant=7, held_or_in_flight_tokens=size, identically_rendered_tokens=size // 2)], 10**6
    )
    assert total(regret)["lost_tokens"][Cause.IN_FLIGHT] == size
    regret.add(7.0, [routed(prompt, variant=7, held_tokens=size // 4)], 10**6)
    told = total(regret)
    assert told["lost_tokens"][Cause.RENDERED] == pytest.approx(size / 2, rel=0.2)
    assert told["lost_tokens"][Cause.EVICTED] - was_evicted == pytest.approx(size / 4, rel=0.3)
    assert 0 < sum(regret.report(7.0, 600.0)["retention_needed_s"].values()) - was_told < 100
    regret.add(8.0, [routed(prompt, reported_tokens=480)], 10**6)
    assert total(regret)["unpredicted_tokens"] == 480
    assert told["prompt_tokens_with_report"] == 2 * size + 2
    assert (told["predicted_tokens"], told["reported_tokens"]) == (size - 160, 2 * size - 480)


def test_the_window_ends_and_costliest_prefixes_are_named_by_a_secret() -> None:
    random, regret = np.random.default_rng(4), Regret()
    prompts = [chain(random, 64 * (number + 1)) for number in range(20)]
    for now_s in (0.0, 100.0, 1000.0):
        regret.add(now_s, [routed(prompt) for prompt in prompts], 10**6)
    report = regret.report(1000.0, 120.0)
    assert report["total"]["requests"] == 20
    assert regret.report(1000.0, 3600.0)["total"]["requests"] == 60
    costliest = report["costliest_prefixes"]
    assert len(costliest) == 10
    assert [each["lost_tokens"] for each in costliest] == sorted(
        (each["lost_tokens"] for each in costliest), reverse=True
    )
    assert costliest[0]["length_tokens"] > 10 * 64 * BLOCK
    names = {each["prefix"] for each in costliest}
    other = Regret()
    for now_s in (0.0, 1000.0):
        other.add(now_s, [routed(prompt) for prompt in prompts], 10**6)
    assert names.isdisjoint(each["prefix"] for each in other.report(1000.0, 120.0)["costliest_prefixes"])


def test_rows_and_prefixes_are_bounded() -> None:
    random, regret = np.random.default_rng(5), Regret()
    for turn in range(2):
        requests = [
            routed(chain(np.random.default_rng(number), 64), worker=f"http://{number}") for number in range(6000)
        ]
        regret.add(turn, requests, 10**9)
    report = regret.report(2.0, 600.0)
    assert len(report["by_worker"]) <= 4097
    assert report["total"]["requests"] == 12000
    assert len(regret._buckets[0].prefixes) <= 512
    assert random is not None


async def test_a_router_says_where_hits_went(worker, router, http_bytes) -> None:
    tokens = list(range(1000, 1000 + 64 * 16 + 1))

    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(http_bytes.completion(cached_tokens=512, prompt_tokens=len(tokens))))

    async with worker(answer=answer) as a, worker(answer=answer) as b, router(a.url, b.url, block_size=16) as front:
        front.hold(a.url, tokens[:768])
        front.hold(b.url, tokens[:256])
        assert (await front.complete(tokens)).headers["x-kvist-worker"] == a.url
        await front.complete("text that nobody can read here")
        report = (await front.client.get("/regret?window=1m")).json()
        told = report["total"]
        assert told["requests"] == 2
        assert (told["held_tokens"], told["routed_tokens"], told["reported_tokens"]) == (768, 768, 512)
        assert told["lost_tokens"][Cause.ENGINE] == 256
        assert told["lost_tokens"][Cause.UNREAD] > 0
        assert {row["worker"] for row in report["by_worker"]} <= {a.url, b.url}
        for window in ("soon", "0m", "61m"):
            wrong = await front.client.get(f"/regret?window={window}")
            assert wrong.status_code == 400
            assert f"window: got '{window}', expected a time of up to an hour" in wrong.json()["error"]["message"]


async def test_what_another_worker_was_just_computing_is_told_apart(worker, router, http_bytes, until) -> None:
    tokens, asked, may_answer = list(range(1000, 1000 + 64 * 16 + 1)), [], asyncio.Event()

    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        asked.append(tokens)
        if len(asked) == 1:
            await may_answer.wait()
        writer.write(http_bytes.response(http_bytes.completion(prompt_tokens=len(tokens))))

    async with worker(answer=answer) as a, worker(answer=answer) as b, router(a.url, b.url, block_size=16) as front:
        first = asyncio.create_task(front.complete(tokens, stream=True))
        await until(lambda: asked)

        async def is_late() -> bool:  # so much that the other worker would compute it, too
            holder = a if a.completions else b
            return bool((await front.explain(tokens))["worker"] != holder.url)

        await front.until(is_late)
        await front.complete(tokens)
        told = (await front.client.get("/regret")).json()["total"]
        assert told["lost_tokens"] == {Cause.IN_FLIGHT: 64 * 16}
        may_answer.set()
        await first


async def test_salts_are_told_apart_from_what_was_never_asked(worker, router) -> None:
    tokens = list(range(5000, 5000 + 640 * 16 + 1))
    async with worker() as one, router(one.url, block_size=16) as front:
        salts = map(str, range(1000))

        async def is_told() -> bool:  # once it is known how much the fleet's caches hold
            await front.complete(tokens, cache_salt=next(salts))
            return (await front.client.get("/regret")).json()["total"]["lost_tokens"].keys() == {Cause.VARIANT}

        await front.until(is_told)

"""Overlaps reach the decision: hashes, adapters, ranks, tiers, and what happens without them."""

from __future__ import annotations

import asyncio
from math import gcd
from typing import Any

import pytest

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.types import GroupRule

TOKENS = list(range(100, 164))  # four blocks of 16, ending on a boundary


async def test_the_worker_with_the_longest_prefix_gets_the_request(worker, router) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, block_size=16) as front:
        front.hold(a.url, TOKENS[:16])
        front.hold(b.url, TOKENS[:32])
        answer = await front.complete(TOKENS)
        assert (answer.headers["x-kvist-worker"], answer.headers["x-kvist-overlap-tokens"]) == (b.url, "32")


async def test_the_block_with_the_last_token_is_never_counted(worker, router) -> None:
    async with worker() as one, router(one.url, block_size=16) as front:
        front.hold(one.url, TOKENS)
        for prompt, overlap in ((TOKENS, 48), ([*TOKENS, 1], 64), (TOKENS[:16], 0), (TOKENS[:17], 16)):
            assert (await front.complete(prompt)).headers["x-kvist-overlap-tokens"] == str(overlap)


async def test_adapters_and_salts_have_blocks_of_their_own(worker, router) -> None:
    models = [{"id": "m"}, {"id": "tuned", "parent": "m"}]
    async with worker(models=models) as one, router(one.url, block_size=16) as front:
        radix, rank = front.service.keeper.index.radix, WorkerRank(one.url, 0)
        radix.store(rank, Tier.GPU, None, block_hashes(TOKENS[:16], 16))
        radix.store(rank, Tier.GPU, None, block_hashes(TOKENS[:32], 16, lora_name="tuned"))
        radix.store(rank, Tier.GPU, None, block_hashes(TOKENS[:48], 16, cache_salt="pepper"))
        asks = ({"model": "m"}, {"model": "tuned"}, {"model": "m", "cache_salt": "pepper"})
        answers = [await front.complete(TOKENS, **ask) for ask in asks]
        assert [answer.headers["x-kvist-overlap-tokens"] for answer in answers] == ["16", "32", "48"]


async def test_an_engine_with_eagle_is_matched_by_its_own_hashes(worker, router) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, block_size=16) as front:
        front.hold(a.url, TOKENS[:16])
        eagle_hashes = block_hashes(TOKENS[:49], 16, is_eagle=True)
        front.service.keeper.index.radix.store(WorkerRank(b.url, 0), Tier.GPU, None, eagle_hashes)
        decision = await front.explain(TOKENS)
        overlaps = {one["worker"]: one["overlap_blocks"]["gpu"] for one in decision["candidates"]}
        assert overlaps == {a.url: 1, b.url: 3}
        assert decision["worker"] == b.url


async def test_the_block_with_the_last_token_counts_as_the_one_that_an_engine_of_several_groups_computes_again(
    worker, router
) -> None:
    async with worker() as one, router(one.url, block_size=16) as front:
        radix, rank = front.service.keeper.index.radix, WorkerRank(one.url, 0)
        radix.set_groups(rank, [GroupRule(0, 1, 1), GroupRule(2, 1, 1)])
        for each in (rank, rank.companion):
            radix.store(each, Tier.GPU, None, block_hashes(TOKENS, 16))
        for prompt, overlap in ((TOKENS, 48), ([*TOKENS, 1], 48), (TOKENS[:48], 32), (TOKENS[:47], 16)):
            assert (await front.explain(prompt))["overlap_tokens"] == overlap


async def test_sglang_with_eagle_reuses_no_block_whose_name_covers_the_last_token(worker, router) -> None:
    sglang, vllm = ([{"id": "m", "owned_by": engine}] for engine in ("sglang", "vllm"))
    async with worker(models=sglang) as a, worker(models=vllm) as b, router(a.url, b.url, block_size=16) as front:
        for each in (a, b):
            eagle_hashes = block_hashes(TOKENS, 16, is_eagle=True)
            front.service.keeper.index.radix.store(WorkerRank(each.url, 0), Tier.GPU, None, eagle_hashes)
        for num_tokens, overlaps in ((48, (2, 2)), (49, (2, 3)), (50, (3, 3)), (17, (0, 1))):
            candidates = (await front.explain(TOKENS[:num_tokens]))["candidates"]
            found = {one["worker"]: one["overlap_blocks"]["gpu"] for one in candidates}
            assert (found[a.url], found[b.url]) == overlaps


async def test_a_block_elsewhere_in_the_hierarchy_counts_less(worker, router) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, block_size=16) as front:
        front.hold(a.url, TOKENS[:48], Tier.DISK)
        front.hold(b.url, TOKENS[:16])
        assert (await front.explain(TOKENS))["worker"] == b.url


@pytest.mark.parametrize("sizes", [(16, 32), (32, 48), (64, 16)])
async def test_workers_of_several_block_sizes_are_told_apart_and_compared(worker, router, engine, sizes) -> None:
    """Of one model, without a word of configuration: what each holds counts in tokens, whatever its blocks."""
    tokens = list(range(1000))
    async with worker() as a, worker() as b, router(a.url, b.url) as front:
        with engine("a", block_size=sizes[0]) as first, engine("b", block_size=sizes[1]) as second:
            a.server_info, b.server_info = first.server_info, second.server_info
            unit = gcd(*sizes)
            for held in ({a.url: 200, b.url: 400}, {a.url: 700, b.url: 600}):
                first.store(tokens[: held[a.url]])
                second.store(tokens[: held[b.url]])
                full = {url: held[url] // size * size for url, size in zip(held, sizes, strict=True)}
                for url, num_tokens in full.items():
                    await front.until_overlap(url, tokens, num_tokens // unit)
                decision = await front.explain(tokens)
                best = max(full, key=full.__getitem__)
                assert (decision["worker"], decision["overlap_tokens"]) == (best, full[best])
            assert [(await front.workers())[url]["block_size"] for url in held] == list(sizes)


async def test_a_silent_index_routes_by_load(worker, router) -> None:
    """Nothing is known of any cache, and still every request is served and the fleet shares them."""
    nothing_expected = {"block_size": 16, "expected_cache_tokens": 0}
    async with worker() as a, worker() as b, router(a.url, b.url, **nothing_expected) as front:
        for _ in range(6):
            assert (await front.complete(TOKENS)).status_code == 200
        assert len(a.completions) == len(b.completions) == 3


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
async def test_policies_without_caches_serve_too(worker, router, policy: Any) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, policy=policy) as front:
        assert {(await front.complete(TOKENS)).status_code for _ in range(4)} == {200}


async def test_a_decision_is_explained_without_being_taken(worker, router) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, block_size=16) as front:
        for num_tokens, tier in ((16, Tier.GPU), (32, Tier.HOST), (48, Tier.DISK)):
            front.hold(a.url, TOKENS[:num_tokens], tier)
        answer = await front.client.post("/route", json={"token_ids": TOKENS, "model": "m"})
        decision = answer.json()
        assert (decision["worker"], decision["policy"], decision["rule"]) == (a.url, "kv", "price")
        assert (decision["overlap_tokens"], decision["prompt_tokens"], decision["block_size"]) == (48, 64, 16)
        first, second = decision["candidates"]
        assert first["overlap_blocks"] == {"gpu": 1, "host": 2, "disk": 3, "external": 3}
        assert (second["probability"], second["running_requests"]) == (0, 0)
        blocks_s = [each["seconds"]["compute"] / (16 * 40e-6) for each in (first, second)]
        assert blocks_s == pytest.approx([4 - (1.0 + 0.75 + 0.25), 4], rel=1e-2)
        for each in (first, second):
            assert each["seconds"].pop("cost") == pytest.approx(sum(each["seconds"].values()))
        assert (decision["utilisation"], decision["price_of_computing"]) == (0, 0)
        assert not a.completions


async def test_a_prompt_that_cannot_be_tokenised_says_why(worker, router) -> None:
    async with worker() as one, router(one.url, block_size=16) as front:
        answer = await front.client.post("/route", json={"prompt": "some text", "model": "m"})
        assert answer.json()["rule"] == "price"
        assert "no tokeniser of the model" in answer.json()["untokenized_reason"]


@pytest.mark.parametrize(("num_disturbed", "overlap", "unmatched"), [(3, "32", 0), (10**9, "0", 1)])
async def test_an_index_that_is_written_to_just_now_is_looked_at_again_and_at_last_done_without(
    worker, router, monkeypatch, num_disturbed, overlap, unmatched
) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, block_size=16) as front:
        front.hold(b.url, TOKENS[:32])
        index, num_looks = front.service.keeper.index, 0
        match = index.match

        def disturbed(*arguments: Any) -> Any:
            nonlocal num_looks
            num_looks += 1
            return None if num_looks <= num_disturbed else match(*arguments)

        monkeypatch.setattr(index, "match", disturbed)
        assert (await front.complete(TOKENS)).headers["x-kvist-overlap-tokens"] == overlap
        assert (await front.metrics())["kvist_router_unmatched_total"] == unmatched


async def test_a_client_that_leaves_while_its_prompt_is_looked_up_is_forgotten(
    worker, router, monkeypatch, until
) -> None:
    async with worker() as one, router(one.url, block_size=16) as front:
        looks: list[Any] = []
        monkeypatch.setattr(front.service.keeper.index, "match", lambda *given: looks.append(given))
        monkeypatch.setattr("kvist.router.forward._MAX_MATCH_RETRIES", 10**9)
        asked = asyncio.create_task(front.complete(TOKENS))
        await until(lambda: len(looks) > 2)
        asked.cancel()
        await until(lambda: front.service._server.statistics().num_disconnects)
        monkeypatch.undo()
        assert (await front.complete(TOKENS)).status_code == 200
        assert len(one.completions) == 1

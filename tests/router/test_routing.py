"""Overlaps reach the decision: hashes, adapters, ranks, tiers, and what happens without them."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.events import WorkerRank
from kvist.events.hashing import block_hashes
from kvist.router.index import RankStatus

TOKENS = list(range(100, 164))  # four blocks of 16, ending on a boundary


async def test_the_worker_with_the_longest_prefix_gets_the_request(worker, router, index) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, index=index, block_size=16) as front:
        index.overlaps = {WorkerRank(b.url, 0): (2, 3, 3, 3)}
        answer = await front.complete(TOKENS)
        assert (answer.headers["x-kvist-worker"], answer.headers["x-kvist-overlap-tokens"]) == (b.url, "48")


async def test_the_block_with_the_last_token_is_never_asked_for(worker, router, index) -> None:
    async with worker() as one, router(one.url, index=index, block_size=16) as front:
        await front.complete(TOKENS)
        await front.complete([*TOKENS, 1])
        await front.complete(TOKENS[:16])
        assert index.matched == [block_hashes(TOKENS[:48], 16).tolist(), block_hashes(TOKENS, 16).tolist()]


async def test_adapters_and_salts_hash_differently(worker, router, index) -> None:
    models = [{"id": "m"}, {"id": "tuned", "parent": "m"}]
    async with worker(models=models) as one, router(one.url, index=index, block_size=16) as front:
        await front.complete(TOKENS, model="m")
        await front.complete(TOKENS, model="tuned")
        await front.complete(TOKENS, model="m", cache_salt="pepper")
        assert index.matched == [
            block_hashes(TOKENS[:48], 16).tolist(),
            block_hashes(TOKENS[:48], 16, lora_name="tuned").tolist(),
            block_hashes(TOKENS[:48], 16, cache_salt="pepper").tolist(),
        ]


async def test_a_rank_is_chosen_and_named_where_a_worker_has_several(worker, router, index) -> None:
    async with worker() as one, router(one.url, index=index, block_size=16) as front:
        index.statuses[one.url] = [RankStatus(rank, "live", 10, 0, 0.1) for rank in range(4)]
        index.overlaps = {WorkerRank(one.url, 2): (3,)}
        await front.complete(TOKENS)
        assert one.completions[0].headers["x-data-parallel-rank"] == "2"
        index.statuses[one.url] = index.statuses[one.url][:1]
        await front.client.post(
            "/v1/completions", json={"model": "m", "prompt": TOKENS}, headers={"x-data-parallel-rank": "7"}
        )
        assert "x-data-parallel-rank" not in one.completions[1].headers


async def test_without_a_block_size_requests_are_routed_by_load(worker, router, index) -> None:
    async with worker() as one, router(one.url, index=index) as front:
        assert (await front.complete(TOKENS)).status_code == 200
        assert index.matched == []


async def test_a_silent_index_routes_by_load(worker, router, index) -> None:
    """Nothing is known of any cache, and still every request is served and the fleet shares them."""
    async with worker() as a, worker() as b, router(a.url, b.url, index=index, block_size=16) as front:
        for _ in range(6):
            assert (await front.complete(TOKENS)).status_code == 200
        assert len(a.completions) == len(b.completions) == 3


@pytest.mark.parametrize("policy", ["least-loaded", "power-of-two", "round-robin", "random"])
async def test_policies_without_caches_serve_too(worker, router, policy: Any) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, policy=policy) as front:
        assert {(await front.complete(TOKENS)).status_code for _ in range(4)} == {200}


async def test_a_decision_is_explained_without_being_taken(worker, router, index) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, index=index, block_size=16) as front:
        index.overlaps = {WorkerRank(a.url, 0): (1, 2, 3, 3)}
        answer = await front.client.post("/route", json={"token_ids": TOKENS, "model": "m"})
        decision = answer.json()
        assert (decision["worker"], decision["policy"], decision["rule"]) == (a.url, "kv", "cost")
        assert (decision["overlap_tokens"], decision["prompt_tokens"], decision["block_size"]) == (48, 64, 16)
        first, second = decision["candidates"]
        assert first["overlap_blocks"] == {"gpu": 1, "host": 2, "disk": 3, "external": 3}
        assert first["cost"] == 4 - (1.0 + 0.75 + 0.25)
        assert (second["cost"], second["probability"], second["running_requests"]) == (4, 0, 0)
        assert not a.completions


async def test_a_prompt_that_cannot_be_tokenised_says_why(worker, router, index) -> None:
    async with worker() as one, router(one.url, index=index, block_size=16) as front:
        answer = await front.client.post("/route", json={"prompt": "some text", "model": "m"})
        assert answer.json()["rule"] == "load"
        assert "no model path" in answer.json()["untokenized_reason"]

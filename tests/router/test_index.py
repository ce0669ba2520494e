"""Real event streams into the router: what a worker publishes decides where requests go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvist.errors import InvalidValueError
from kvist.events import Tier
from kvist.events.transports import Endpoint
from kvist.router.config import RouterConfig
from kvist.router.index import FleetIndex

TOKENS = list(range(1000, 1160))  # ten blocks


async def test_a_published_prefix_draws_the_request_and_a_removed_one_does_not(worker, router, engine) -> None:
    async with worker() as a, worker() as b:
        with engine("a") as cache_a, engine("b") as cache_b:
            a.server_info, b.server_info = cache_a.server_info, cache_b.server_info
            async with router(a.url, b.url) as front:
                cache_b.store(TOKENS[:128])
                await front.until_overlap(b.url, TOKENS, 8)
                answer = await front.complete(TOKENS)
                assert (answer.headers["x-kvist-worker"], answer.headers["x-kvist-overlap-tokens"]) == (b.url, "128")
                cache_b.publisher.cleared()
                await front.until_overlap(b.url, TOKENS, 0)
                assert (await front.complete(TOKENS)).headers["x-kvist-worker"] == a.url


async def test_what_was_stored_before_the_router_came_is_learnt(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                rank = (await front.workers())[one.url]["kv_events"]["ranks"][0]
                assert rank == {"rank": 0, "state": "live", "blocks": 10}


async def test_the_blocks_of_a_worker_that_restarted_are_gone(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info, endpoint = cache.server_info, cache.publisher.endpoint
            cache.store(TOKENS)
            async with router(one.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                cache.publisher.close()
                with engine("one", endpoint) as restarted:
                    restarted.store(list(range(32)))
                    await front.until_overlap(one.url, list(range(48)), 2)
                    await front.until_overlap(one.url, TOKENS, 0)
                    source = (await front.workers())[one.url]["kv_events"]["sources"][0]
                    assert source["restarts"] == 1


async def test_a_stream_that_moves_to_another_port_is_found_again(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache, engine("one") as moved:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                one.server_info = moved.server_info
                moved.store(list(range(32)))
                await front.until_overlap(one.url, list(range(48)), 2)
                await front.until_overlap(one.url, TOKENS, 0)


async def test_the_stream_that_a_vllm_announces_is_followed(worker, router, engine) -> None:
    vllm = {"models": [{"id": "m", "owned_by": "vllm"}], "version": {"version": "0.32.0"}}
    metrics = 'vllm:cache_config_info{block_size="32",kv_cache_size_tokens="4096"} 1.0\n'
    async with worker(**vllm, metrics=metrics) as one, router(one.url) as front:

        async def shown() -> list[Any]:
            names = ("engine", "version", "block_size", "cache_size_tokens")
            told = (await front.workers())[one.url]
            return [told[name] for name in names]

        assert await shown() == ["vllm", "0.32.0", 32, 4096]
        with engine("one") as cache:
            endpoint = Endpoint.parse(cache.publisher.endpoint)
            wildcards = [each.replace("127.0.0.1", "*") for each in (endpoint.address, endpoint.replay_address)]
            told = dict(zip(("endpoint", "replay_endpoint"), wildcards, strict=True))
            one.event_sources = {"0": told | {"publisher": "zmq"}}
            cache.store(TOKENS)
            await front.until_overlap(one.url, TOKENS, 9)
            assert await shown() == ["vllm", "0.32.0", 16, 4096]  # the block size of its events


async def test_a_prompt_whose_log_probabilities_are_wanted_is_matched_by_none(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                wanted = {"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}, {"echo": True}, {"logprobs": 1}
                answers = [await front.complete(TOKENS, **fields) for fields in wanted]
                assert [each.headers["x-kvist-overlap-tokens"] for each in answers] == ["0", "0", "144", "144"]


async def test_a_rank_is_chosen_and_named_where_a_worker_has_several(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one", num_ranks=4) as cache:
            one.server_info = cache.server_info
            async with router(one.url) as front:
                cache.store(TOKENS, rank=2)
                await front.until_overlap(one.url, TOKENS, 9)
                await front.until_ranks(one.url, 4)
                decision = await front.explain(TOKENS)
                assert (decision["rank"], len(decision["candidates"])) == (2, 4)
                await front.complete(TOKENS)
                assert one.completions[0].headers["x-data-parallel-rank"] == "2"


async def test_a_node_of_several_takes_its_ranks_from_0_on(worker, router, engine) -> None:
    """As vLLM does with `--data-parallel-hybrid-lb`: its events number the ranks of all nodes."""
    async with worker(models=[{"id": "m", "owned_by": "vllm"}]) as one:
        with engine("one", num_ranks=4) as cache:
            endpoint = Endpoint.parse(cache.publisher.endpoint)
            addresses = {"endpoint": endpoint.address, "replay_endpoint": endpoint.replay_address, "publisher": "zmq"}
            one.event_sources = {"2": addresses}
            async with router(one.url) as front:
                cache.store(TOKENS, rank=3)
                await front.until_overlap(one.url, TOKENS, 9)
                await front.until_ranks(one.url, 4)
                assert (await front.explain(TOKENS))["rank"] == 3
                await front.complete(TOKENS)
                assert one.completions[0].headers["x-data-parallel-rank"] == "1"


async def test_a_worker_chooses_the_rank_while_some_of_its_streams_are_without_events(worker, router, engine) -> None:
    async with worker(models=[{"id": "m", "owned_by": "vllm"}]) as one, router(one.url) as front:
        with engine("one", num_ranks=2) as cache:
            endpoint = Endpoint.parse(cache.publisher.endpoint)
            addresses = {"endpoint": endpoint.address, "replay_endpoint": endpoint.replay_address, "publisher": "zmq"}
            silent = {"endpoint": "tcp://127.0.0.1:9", "replay_endpoint": None, "publisher": "zmq"}
            one.event_sources = {"0": addresses, "1": silent, "2": silent | {"endpoint": "tcp://127.0.0.1:10"}}
            cache.store(TOKENS, rank=1)
            await front.until_overlap(one.url, TOKENS, 9)
            await front.until_ranks(one.url, 2)
            await front.complete(TOKENS)
            assert "x-data-parallel-rank" not in one.completions[-1].headers
            one.event_sources = {"0": addresses}
            while "x-data-parallel-rank" not in one.completions[-1].headers:
                await front.complete(TOKENS)


async def test_a_worker_of_one_rank_is_not_told_which(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                await front.complete(TOKENS)
                assert "x-data-parallel-rank" not in one.completions[0].headers


async def test_streams_are_told_apart_by_tier(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            async with router(one.url) as front:
                cache.store(TOKENS[:64], tier=Tier.HOST)
                cache.store(TOKENS[:32])
                await front.until_overlap(one.url, TOKENS, 2)
                (candidate,) = (await front.explain(TOKENS))["candidates"]
                assert candidate["overlap_blocks"] == {"gpu": 2, "host": 4, "disk": 4, "external": 4}


async def test_a_removed_workers_blocks_leave_the_index(worker, router, engine) -> None:
    async with worker() as one, worker() as other:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url, other.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                await front.client.delete("/workers", params={"url": one.url})
                await front.until_state(one.url, "gone")
                assert {candidate["worker"] for candidate in (await front.explain(TOKENS))["candidates"]} == {other.url}


async def test_streams_name_no_more_ranks_than_configured_and_none_that_their_worker_does_not_have(
    worker, router, engine
) -> None:
    async with worker() as one, worker() as other:
        with engine("one", num_ranks=4) as cache, engine("other", num_ranks=4) as silent:
            one.server_info, other.server_info = cache.server_info, silent.server_info
            other.server_info["data_parallel_size"] = 1
            async with router(one.url, other.url, data_parallel_size=3) as front:

                async def ranks() -> set[tuple[str, int]]:
                    loads = (await front.client.get("/get_loads")).json()["loads"]
                    return {(load["worker"], load["rank"]) for load in loads}

                async def are_all_there() -> bool:
                    return len(await ranks()) == 4

                await front.until(are_all_there)
                assert await ranks() == {(one.url, 0), (one.url, 1), (one.url, 2), (other.url, 0)}


async def test_ranks_that_a_stream_invents_add_no_line_to_the_metrics(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                before = (await front.metrics()).keys()
                for rank in range(1, 128):
                    cache.store(TOKENS[:16], rank=rank)
                refused = (
                    f'kvist_router_event_ranks_refused_total{{source="{cache.publisher.endpoint}",worker="{one.url}"}}'
                )

                async def are_refused() -> bool:
                    return (await front.metrics())[refused] >= 128 - 64

                await front.until(are_refused)
                assert (await front.metrics()).keys() == before


async def test_a_publisher_that_stores_for_ever_gets_no_more_blocks_than_the_cap(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            async with router(one.url, max_blocks=1000) as front:
                for number in range(200):
                    cache.store([number << 10 | token for token in range(50 * 16)])
                cache.store(TOKENS[:16])
                await front.until_overlap(one.url, TOKENS, 1)
                metrics = await front.metrics()
                assert 500 < metrics["kvist_index_blocks"] <= 1000
                assert metrics["kvist_index_bytes"] < 4_000_000


async def test_metrics_tell_how_well_each_cache_is_known(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                samples = await front.metrics()
                assert samples[f'kvist_router_ranks{{state="live",worker="{one.url}"}}'] == 1
                assert samples[f'kvist_router_worker_blocks{{worker="{one.url}"}}'] == 10
                source = f'source="{cache.publisher.endpoint}",worker="{one.url}"'
                for name in (
                    "gaps_total",
                    "restarts_total",
                    "malformed_total",
                    "batches_refused_total",
                    "ranks_refused_total",
                    "age_seconds",
                ):
                    assert samples[f"kvist_router_event_{name}{{{source}}}"] >= 0
                assert samples["kvist_index_blocks"] == 10
                assert samples["kvist_index_bytes"] > 0


async def test_the_turns_of_a_chat_find_their_prefix(worker, router, engine, tmp_path: Path) -> None:
    words = [f"w{idx}" for idx in range(100)]
    tokenizer = Tokenizer(models.WordLevel({word: idx for idx, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    first, second = (
        {"role": "user", "content": " ".join(words[:40])},
        {"role": "user", "content": " ".join(words[40:80])},
    )
    async with worker() as one, worker() as other:
        with engine("one") as cache:
            one.server_info = cache.server_info
            async with router(one.url, other.url, model_path=str(tmp_path)) as front:
                cache.store(list(range(40)))
                await front.until_overlap(one.url, list(range(40)), 2)
                answer = await front.client.post(
                    "/v1/chat/completions", json={"model": "m", "messages": [first, second]}
                )
                assert (answer.headers["x-kvist-worker"], answer.headers["x-kvist-overlap-tokens"]) == (one.url, "32")


async def test_a_stream_tells_the_block_size_of_a_router_that_was_not_told(engine, until: Any) -> None:
    with engine("w") as cache:
        cache.store(TOKENS)
        async with FleetIndex(RouterConfig(), time.monotonic) as index:
            index.follow("w", [cache.publisher.endpoint] * 2)
            assert index._streams["w"].endpoints == (cache.publisher.endpoint,)
            await until(lambda: [status.num_blocks for status in index.ranks("w")] == [10])
            assert index.block_sizes == {"w": 16}


async def test_a_stock_engines_stream_tells_it_too(start_vllm, free_port, until: Any) -> None:
    port = free_port()
    vllm = start_vllm(port)
    async with FleetIndex(RouterConfig(), time.monotonic) as index:
        index.follow("w", [f"tcp://127.0.0.1:{port}"])
        vllm.store(901, TOKENS[:16])
        await until(lambda: [status.num_blocks for status in index.ranks("w")] == [1])
        assert index.block_sizes == {"w": 16}


async def test_a_worker_with_other_blocks_begins_anew(engine, until: Any) -> None:
    async with FleetIndex(RouterConfig(), time.monotonic) as index:
        with engine("w") as cache:
            cache.store(TOKENS)
            index.follow("w", [cache.publisher.endpoint], 16)
            await until(lambda: [status.num_blocks for status in index.ranks("w")] == [10])
            index.follow("w", [cache.publisher.endpoint], 32)
            assert (index.ranks("w"), index.block_sizes) == ([], {"w": 32})
            await until(lambda: [each.failure for each in index.source_statistics()] == ["block_size 16, expected 32"])


async def test_an_endpoint_that_is_no_stream_changes_nothing() -> None:
    async with FleetIndex(RouterConfig(block_size=16), lambda: 0.0) as index:
        index.follow("w", ["tcp://127.0.0.1:50001"])
        for wrong in ("http://127.0.0.1:1", "tcp://127.0.0.1:port", ""):
            with pytest.raises(InvalidValueError):
                index.follow("w", [wrong])
        assert index._streams["w"].endpoints == ("tcp://127.0.0.1:50001",)

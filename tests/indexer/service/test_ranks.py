"""Which rank an engine's blocks are answered under, said or not."""

from __future__ import annotations

import pytest

TOKENS = list(range(1, 21))


def stored(hashes, tokens, medium="GPU"):
    """Return an event in the array form of early vLLM."""
    return ["BlockStored", hashes, None, tokens, 4, None, medium]


@pytest.fixture
def engines(start_vllm, free_port):
    """Return two stock engines with their ports."""
    ports = [free_port(), free_port()]
    return [(start_vllm(port), port) for port in ports]


async def test_engines_that_name_no_rank_have_that_of_their_registration(client, engines, eventually):
    for dp_rank, (engine, port) in zip((0, 3), engines, strict=True):
        engine.publish(stored([1], TOKENS[:4]), rank=None)
        engine.publish(stored([1, 2], TOKENS[: 4 + 4 * bool(dp_rank)]), rank=None)
        assert (await client.register(port, 1, dp_rank=dp_rank)).status_code == 201

    async def both():
        return await client.scores(TOKENS) == {"1": {"0": 4, "3": 8}}

    await eventually(both)
    assert (await client.query(TOKENS))["instances"]["1"]["dp"] == {"0": 4, "3": 8}
    assert (await client.workers())[1]["listeners"]["3"]["ranks"] == {"3": {"state": "live", "num_blocks": 2}}


async def test_ranks_of_the_configuration_count_as_registered_ones(start_index, engines, eventually):
    (engine, port), _ = engines
    engine.publish(stored([1], TOKENS[:4]), rank=None)
    client = await start_index(workers=(f"7:2=tcp://127.0.0.1:{port}",), block_size=4, model_name="default")

    async def is_known():
        return await client.scores(TOKENS) == {"7": {"2": 4}}

    await eventually(is_known)


async def test_an_engine_that_names_a_rank_is_believed(client, engines, eventually):
    (engine, port), _ = engines
    engine.publish(stored([1], TOKENS[:4]), rank=1)
    engine.publish(stored([1, 2], TOKENS[:8]), rank=None)
    await client.register(port, 1, dp_rank=3)

    async def both():
        return await client.scores(TOKENS) == {"1": {"1": 4, "3": 8}}

    await eventually(both)


async def test_streams_of_an_instance_that_name_the_same_rank_are_answered_as_one(client, engines, eventually):
    (first, _), (second, _) = engines
    first.publish(stored([1], TOKENS[:4]), stored([1, 2, 3], TOKENS[:12], "CPU"), rank=0)
    second.publish(stored([1, 2], TOKENS[:8]), rank=0)
    for dp_rank, (_, port) in enumerate(engines):
        await client.register(port, 1, dp_rank=dp_rank)
    deepest = {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 12}

    async def is_one():
        return (await client.query(TOKENS))["instances"] == {"1": deepest}

    await eventually(is_one)
    answer = await client.post("/query", {"token_ids": TOKENS, "model_name": "default"})
    assert answer.text.count('"0":') == 2  # once in scores, once in dp
    assert answer.json()["scores"] == {"1": {"0": 8}}


async def test_what_a_stream_invents_adds_no_line_to_the_metrics(client, engines, eventually):
    async def lines(prefix: str = "kvist_index_") -> set[str]:
        page = (await client.get("/metrics")).text.splitlines()
        return {line.rpartition(" ")[0] for line in page if line.startswith(prefix)}

    (engine, port), _ = engines
    engine.publish(stored([1], TOKENS[:4]), rank=0)
    await client.register(port, 1)

    async def is_known():
        return await client.scores(TOKENS) == {"1": {"0": 4}}

    async def all_came():
        (worker,) = (await client.workers()).values()
        return worker["listeners"]["0"]["counters"]["num_refused_ranks"] == 4096 - 64

    await eventually(is_known)
    await lines(), await client.workers()
    before = await lines()
    for rank in range(4096):
        invented = stored([rank + 2], [rank] * 4, medium=f"tier {rank}") if rank % 2 else [f"Event{rank}", rank]
        engine.publish(invented, rank=rank)
    await eventually(all_came)
    assert await lines() == before
    assert 'kvist_index_stream_ranks{dp_rank="0",instance="1",model="default",state="live"}' in before

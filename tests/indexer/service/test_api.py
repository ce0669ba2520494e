"""The API over real sockets: a stock engine's events in, the peer's shapes out."""

from __future__ import annotations

import msgspec
import pytest

from kvist.events.hashing import local_block_hashes
from kvist.events.transports.received import BUDGET

TOKENS = list(range(1, 21))


@pytest.fixture
def engine(start_vllm, free_port):
    """Return a stock engine; it starts from sequence 0 and can be asked for a replay."""
    port = free_port()
    engine = start_vllm(port)
    engine.port = port
    return engine


def stored(hashes, tokens, parent=None, medium="GPU", **more):
    """Return an event in the array form of early vLLM."""
    return ["BlockStored", hashes, parent, tokens, 4, None, medium, *more.values()]


async def test_a_prompt_scores_the_tokens_of_the_blocks_that_are_held(client, engine, eventually):
    engine.publish(stored([101, 102], TOKENS[:8]))
    assert (await client.register(engine.port)).status_code == 201
    await eventually(lambda: client.scores(TOKENS))
    assert await client.query(TOKENS) == {
        "scores": {"1": {"0": 8}},
        "frequencies": [],
        "instances": {"1": {"longest_matched": 8, "gpu": 8, "dp": {"0": 8}, "cpu": 8, "disk": 8}},
    }
    assert await client.scores(TOKENS[:7]) == {"1": {"0": 4}}
    nothing = {"scores": {}, "frequencies": [], "instances": {}}
    assert await client.query(TOKENS[1:]) == nothing
    assert await client.query([]) == nothing


async def test_tiers_add_up_and_an_instance_has_what_its_best_rank_has(client, engine, eventually):
    engine.publish(
        stored([1, 2], TOKENS[:8]),
        stored([3], TOKENS[8:12], 2, "CPU"),
        stored([4], TOKENS[12:16], 3, "STORAGE"),
        rank=0,
    )
    engine.publish(stored([11, 12, 13], TOKENS[:12], None, "STORAGE"), rank=3)
    await client.register(engine.port)

    async def is_whole():
        return len((await client.query(TOKENS))["instances"].get("1", {}).get("dp", {})) == 2

    await eventually(is_whole)
    assert await client.query(TOKENS) == {
        "scores": {"1": {"0": 8}},
        "frequencies": [],
        "instances": {"1": {"longest_matched": 16, "gpu": 8, "dp": {"0": 8, "3": 0}, "cpu": 12, "disk": 16}},
    }


@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_prompt_may_be_given_by_its_local_hashes(client, engine, eventually, is_signed):
    engine.publish(stored([101, 102], TOKENS[:8]))
    await client.register(engine.port)
    hashes = local_block_hashes(TOKENS, 4)
    if is_signed:
        hashes = [value - (1 << 64) if value >> 63 else value for value in hashes]
    await eventually(lambda: client.scores(TOKENS))
    answer = await client.post("/query_by_hash", {"block_hashes": hashes, "model_name": "default"})
    assert answer.json() == await client.query(TOKENS)


async def test_adapter_and_salt_are_part_of_a_prompt(client, engine, eventually):
    plain = {"type": "BlockStored", "parent_block_hash": None, "block_size": 4, "lora_id": None, "medium": "GPU"}
    engine.publish(
        plain | {"block_hashes": [1], "token_ids": [7] * 4, "lora_name": "ada"},
        plain | {"block_hashes": [2], "token_ids": [8] * 4, "lora_name": None, "cache_salt": "salt"},
    )
    await client.register(engine.port)
    await eventually(lambda: client.scores([8] * 4, cache_salt="salt"))
    assert await client.scores([7] * 4, lora_name="ada") == {"1": {"0": 4}}
    assert await client.scores([7] * 4) == await client.scores([8] * 4) == {}


async def test_an_engine_with_eagle_is_matched_by_one_token_more_a_block(client, engine, eventually):
    told = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [*range(8)]}
    engine.publish(told | {"block_size": 4, "medium": "GPU", "lookahead_token_ids": [[4, 5], [9, 9]]})
    await client.register(engine.port)
    await eventually(lambda: client.scores([*range(8), 9, 10]))
    assert await client.scores([*range(8), 9]) == {"1": {"0": 8}}
    assert await client.scores([*range(8), 8]) == {"1": {"0": 4}}
    assert await client.scores([*range(8)]) == await client.scores([*range(5)]) == {"1": {"0": 4}}
    assert await client.scores([*range(4)]) == {}


async def test_of_a_whole_prompt_the_last_token_is_only_looked_at(client, engine, eventually):
    told = {"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None, "token_ids": TOKENS[:12]}
    told |= {"block_size": 4, "medium": "GPU"}
    sliding = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 6}
    engine.publish(told | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}, told | sliding)
    await client.register(engine.port, endpoint=f"tcp://127.0.0.1:{engine.port}?eagle=drop")
    await client.register(engine.port, 2)

    async def both():
        return len(await client.scores(TOKENS[:12], whole_prompt=True)) == 2

    await eventually(both)
    for num_tokens, dropping, other in ((12, 8, 8), (13, 8, 12), (11, 4, 8), (4, 0, 0)):
        scores = await client.scores(TOKENS[:num_tokens], whole_prompt=True)
        found = {instance: ranks["0"] for instance, ranks in scores.items()}
        assert (found.get("1", 0), found.get("2", 0)) == (dropping, other)
    assert await client.scores(TOKENS[:8]) == {"1": {"0": 4}, "2": {"0": 8}}


async def test_models_and_groups_know_nothing_of_each_other(client, engine, eventually):
    engine.publish(stored([1], TOKENS[:4]))
    await client.register(engine.port, 1)
    await client.register(engine.port, 2, model_name="other")
    await client.register(engine.port, 3, routing_group="blue")
    await eventually(lambda: client.scores(TOKENS))
    await eventually(lambda: client.scores(TOKENS, model_name="other"))
    await eventually(lambda: client.scores(TOKENS, routing_group="blue"))
    assert await client.scores(TOKENS) == {"1": {"0": 4}}
    assert await client.scores(TOKENS, model_name="other") == {"2": {"0": 4}}
    assert await client.scores(TOKENS, tenant_id="blue") == {"3": {"0": 4}}


async def test_workers_and_endpoints_of_the_configuration_are_followed_from_the_start(
    start_index, start_vllm, free_port, eventually
):
    ports = [free_port(), free_port()]
    engines = [start_vllm(port, num_kept=None) for port in ports]
    client = await start_index(
        workers=(f"7=tcp://127.0.0.1:{ports[0]}", f"7:1=tcp://127.0.0.1:{ports[1]}"), block_size=4, model_name="m"
    )
    assert (await client.workers())[7]["endpoints"] == {str(i): f"tcp://127.0.0.1:{ports[i]}" for i in (0, 1)}

    async def both():
        for rank, engine in enumerate(engines):
            engine.publish(stored([rank + 1], TOKENS[:4]), rank=rank)
        return len((await client.scores(TOKENS, model_name="m")).get("7", {})) == 2

    await eventually(both)


async def test_an_instance_that_leaves_takes_its_blocks_and_the_last_one_its_namespace(client, engine, eventually):
    engine.publish(stored([1], TOKENS[:4]))
    await client.register(engine.port, 1)
    await client.register(engine.port, 2)

    async def both():
        return len(await client.scores(TOKENS)) == 2

    await eventually(both)
    body = {"instance_id": 1, "model_name": "default"}
    assert (await client.post("/unregister", body)).status_code == 200
    assert await client.scores(TOKENS) == {"2": {"0": 4}}
    assert (await client.post("/unregister", body)).status_code == 404
    assert (await client.post("/unregister", body | {"instance_id": 2, "dp_rank": 0})).status_code == 200
    answer = await client.post("/query", {"token_ids": TOKENS, "model_name": "default"})
    assert answer.status_code == 404
    assert answer.json() == {"error": "no indexer for model=default routing_group=default"}
    assert (await client.register(engine.port, 1, block_size=8)).status_code == 201


async def test_one_rank_of_an_instance_may_leave(client, start_vllm, free_port, eventually):
    ports = [free_port(), free_port()]
    engines = [start_vllm(port) for port in ports]
    for rank, port in enumerate(ports):
        engines[rank].publish(stored([1], TOKENS[:4]), rank=rank)
        await client.register(port, 1, dp_rank=rank)

    async def both():
        return await client.scores(TOKENS) == {"1": {"0": 4, "1": 4}}

    await eventually(both)
    await client.post("/unregister", {"instance_id": 1, "model_name": "default", "dp_rank": 0})
    assert await client.scores(TOKENS) == {"1": {"1": 4}}


async def test_workers_are_listed_with_state_lag_and_counters(client, engine, eventually):
    engine.publish(stored([1, 2], TOKENS[:8]))
    engine.publish(["BlockRemoved", [2], "GPU"])
    await client.register(engine.port)

    async def is_live():
        return (await client.workers())[1]["listeners"]["0"]["ranks"] == {"0": {"state": "live", "num_blocks": 1}}

    await eventually(is_live)
    worker = (await client.workers())[1]
    listener = worker.pop("listeners")["0"]
    endpoint = f"tcp://127.0.0.1:{engine.port}"
    assert worker == {
        "instance_id": 1,
        "source": "zmq",
        "status": "active",
        "model_name": "default",
        "routing_group": "default",
        "block_size": 4,
        "endpoints": {"0": endpoint},
    }
    assert (listener["endpoint"], listener["status"]) == (endpoint, "active")
    assert (listener["counters"]["num_batches"], listener["counters"]["num_events"]) == (2, 2)
    assert 0 <= listener["lag_s"] < 20
    assert (await client.get("/workers?model_name=other")).json() == []


async def test_another_block_size_in_the_stream_is_told_as_the_listeners_failure(client, engine, eventually):
    engine.publish(["BlockStored", [1], None, TOKENS[:8], 8, None, "GPU"])
    await client.register(engine.port)

    async def has_failed():
        return (await client.workers())[1]["status"] == "failed"

    await eventually(has_failed)
    assert (await client.workers())[1]["listeners"]["0"]["last_error"] == "block_size 8, expected 4"
    assert await client.scores(TOKENS) == {}


async def test_health_says_how_long_the_start_took(client):
    answer = await client.get("/health")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert answer.json()["cold_start_s"] >= 0


async def test_metrics_tell_of_requests_streams_and_blocks(client, engine, eventually, monkeypatch):
    monkeypatch.setattr(BUDGET, "num_refused", 7)
    engine.publish(stored([1, 2], TOKENS[:8]))
    await client.register(engine.port)
    await eventually(lambda: client.scores(TOKENS))
    await client.post("/query", {"token_ids": TOKENS, "model_name": "unknown"})
    page = (await client.get("/metrics")).text
    assert 'kvist_index_requests_total{endpoint="/query",status="404"} 1.0' in page
    assert 'kvist_index_request_seconds_bucket{endpoint="/query",le="+Inf"}' in page
    assert 'kvist_index_blocks{model="default",routing_group="default"} 2.0' in page
    assert 'kvist_index_stream_events_total{dp_rank="0",instance="1",model="default"} 1.0' in page
    assert 'kvist_index_stream_malformed_total{dp_rank="0",instance="1",model="default"} 0.0' in page
    assert "kvist_index_answers_refused_total 7.0" in page


async def test_many_instances_make_valid_json_each_with_its_own_depth(client, start_vllm, free_port, eventually):
    ports = [free_port() for _ in range(4)]
    for number, port in enumerate(ports):
        await client.register(port, number)
    engines = [start_vllm(port) for port in ports]

    async def all_of_them():
        for number, engine in enumerate(engines):
            engine.publish(stored(list(range(1, number + 2)), TOKENS[: 4 * (number + 1)]))
        return len(await client.scores(TOKENS)) == 4

    await eventually(all_of_them)
    expected = {str(number): {"0": 4 * (number + 1)} for number in range(4)}
    assert await client.scores(TOKENS) == expected
    body = {"token_ids": TOKENS, "model_name": "default"}
    assert msgspec.json.decode((await client.post("/query", body)).content)["frequencies"] == []

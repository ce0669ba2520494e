"""A service that starts from its own folder: what was registered is followed again, and what was known counts again."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest

from kvist.errors import InvalidValueError
from kvist.indexer.service import IndexConfig
from kvist.indexer.service.service import IndexService
from kvist.publisher import KvEventPublisher, PublisherLimits

BLOCK_SIZE = 4
PROMPT = list(range(100, 132))
LIMITS = PublisherLimits(coalesce_s=0.001, heartbeat_s=0.05)


@pytest.fixture
def start(tmp_path):
    """Return what starts a service on the test's folder, and a client of it."""

    @asynccontextmanager
    async def start(**config):
        async with (
            IndexService(IndexConfig(port=0, state_dir=str(tmp_path / "state"), **config)) as service,
            httpx.AsyncClient(base_url=service.url, timeout=60) as client,
        ):
            yield client

    return start


@pytest.fixture
def publisher():
    with KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=BLOCK_SIZE, limits=LIMITS) as publisher:
        yield publisher


async def register(client, endpoint, instance_id=1, model="m", block_size=BLOCK_SIZE):
    body = {"instance_id": instance_id, "model_name": model, "block_size": block_size, "endpoint": endpoint}
    assert (await client.post("/register", json=body)).status_code == 201


async def tokens_held(client, instance="1"):
    """Return how many tokens of the prompt an instance has on its GPU."""
    answer = await client.post("/query", json={"token_ids": PROMPT, "model_name": "m"})
    return answer.json()["scores"].get(instance, {}).get("0", 0) if answer.status_code == 200 else 0


async def holds(client, num_tokens):
    return await tokens_held(client) == num_tokens


async def state_of(client):
    return (await client.get("/health")).json()["state"]


async def test_registrations_and_blocks_are_there_again(start, publisher, eventually):
    publisher.stored([1, 2, 3], PROMPT[:12])
    async with start() as client:
        await register(client, publisher.endpoint)
        await eventually(lambda: holds(client, 12))
    publisher.stored([4], PROMPT[12:16], parent_block_hash=3)
    async with start() as client:
        await eventually(lambda: holds(client, 16))

        async def is_proven():
            return (await state_of(client))["is_proven"]

        await eventually(is_proven)
        streams = (await state_of(client))["streams"]
        assert streams == {"loaded": 1, "proven": 1, "cleared": 0, "waiting": 0, "dropped": 0}
        (worker,) = (await client.get("/workers")).json()
        counters = worker["listeners"]["0"]["counters"]
        assert counters["num_snapshots"] == counters["num_cleared"] == 0
        metrics = (await client.get("/metrics")).text
        assert 'kvist_state_streams{fate="proven"} 1.0' in metrics
        assert "kvist_state_save_failures_total 0.0" in metrics
        assert (await client.request("POST", "/unregister", json={"instance_id": 1, "model_name": "m"})).is_success
    async with start() as client:
        assert (await client.get("/workers")).json() == []


async def test_without_a_folder_health_says_nothing_of_it(client):
    assert "state" not in (await client.get("/health")).json()


async def test_a_login_stays_in_no_file_and_its_stream_is_registered_by_somebody_else(start, tmp_path, caplog):
    endpoint = "nats://kvist:secret@127.0.0.1:1/m/w"
    async with start() as client:
        await register(client, endpoint)
    state = (tmp_path / "state" / "index.state").read_bytes()
    assert b"secret" not in state
    assert b"nats://127.0.0.1:1/m/w" in state
    async with start() as client:
        assert (await client.get("/workers")).json() == []
        assert "its login is not saved worker=1:0" in caplog.text
        await register(client, endpoint)


async def test_a_stream_is_followed_again_only_where_endpoints_may_be(start, publisher):
    async with start() as client:
        await register(client, publisher.endpoint)
    async with start(allow_endpoints=("10.0.0.0/8",)) as client:
        assert (await client.get("/workers")).json() == []


async def test_other_block_sizes_of_the_configuration_win(start, publisher, eventually, caplog):
    publisher.stored([1, 2, 3], PROMPT[:12])
    async with start() as client:
        await register(client, publisher.endpoint)
        await eventually(lambda: holds(client, 12))
    workers = (f"1={publisher.endpoint}",)
    async with start(workers=workers, block_size=16, model_name="m") as client:
        assert (await state_of(client))["streams"]["loaded"] == 0
        assert "other block size, or not followed model=m block_sizes=[4] expected=16" in caplog.text

        async def is_refused():
            (worker,) = (await client.get("/workers")).json()
            return worker["listeners"]["0"].get("last_error") == "block_size 4, expected 16"

        await eventually(is_refused)


async def test_a_peer_that_answers_is_fresher_than_the_folder(start, start_index, publisher, eventually):
    publisher.stored([1, 2, 3], PROMPT[:12])
    async with start() as client:
        await register(client, publisher.endpoint)
        await eventually(lambda: holds(client, 12))
    peer = await start_index()
    async with start(peers=(peer.service.url,)) as client:
        assert (await client.get("/workers")).json() == []
        assert (await state_of(client))["streams"]["loaded"] == 0


async def test_a_folder_has_one_service(start):
    async with start():
        with pytest.raises(InvalidValueError, match=r"state_dir: got .*, expected a folder that no other process uses"):
            async with start():
                pass

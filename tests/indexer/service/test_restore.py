"""From one service to another: a dump, and a start from it, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from kvist.http import HttpServer
from kvist.indexer.service.registry import EndpointRules, Registry
from kvist.indexer.service.restore import Restorer
from kvist.publisher import KvEventPublisher, PublisherLimits

BLOCK_SIZE = 4


@pytest.fixture
def publisher():
    """Return a publisher that sends heartbeats often, and keeps everything for replay."""
    limits = PublisherLimits(coalesce_s=0.001, heartbeat_s=0.05)
    with KvEventPublisher("tcp://127.0.0.1:0", worker="w", block_size=BLOCK_SIZE, limits=limits) as publisher:
        yield publisher


class Fleet:
    """Chains that a publisher was told, and whether a service knows them."""

    def __init__(self, publisher, seed=0):
        self._publisher = publisher
        self._rng = random.Random(seed)
        self._next_hash = 1
        self.chains = {}

    def store(self, num_chains, num_blocks=8):
        for _ in range(num_chains):
            tokens = [self._rng.randrange(1 << 32) for _ in range(num_blocks * BLOCK_SIZE)]
            hashes = list(range(self._next_hash, self._next_hash + num_blocks))
            self._next_hash += num_blocks
            self._publisher.stored(hashes, tokens)
            self.chains[hashes[0]] = (hashes, tokens)

    def cut(self, num_chains):
        """Remove the second half of some chains."""
        for first in self._rng.sample(sorted(self.chains), num_chains):
            hashes, tokens = self.chains[first]
            half = len(hashes) // 2
            self._publisher.removed(hashes[half:])
            self.chains[first] = (hashes[:half], tokens)

    async def is_known_to(self, client, instance="1"):
        for hashes, tokens in self.chains.values():
            if await client.scores(tokens) != {instance: {"0": len(hashes) * BLOCK_SIZE}}:
                return False
        return True


async def register(client, publisher, instance_id=1):
    body = {"instance_id": instance_id, "model_name": "default", "block_size": BLOCK_SIZE}
    endpoint = publisher.endpoint.replace("0.0.0.0", "127.0.0.1").replace("*", "127.0.0.1")
    assert (await client.post("/register", body | {"endpoint": endpoint})).status_code == 201


async def is_live(client, instance_id=1):
    ranks = (await client.workers())[instance_id]["listeners"]["0"]["ranks"]
    return bool(ranks) and all(rank["state"] == "live" for rank in ranks.values())


async def test_a_service_started_from_a_peer_knows_what_it_knows_and_goes_on_from_there(
    start_index, client, publisher, eventually
):
    fleet = Fleet(publisher)
    fleet.store(30)
    fleet.cut(10)
    await register(client, publisher)
    await eventually(lambda: fleet.is_known_to(client))
    second = await start_index(peers=(client.service.url,))
    await eventually(lambda: is_live(second))
    assert await fleet.is_known_to(second)
    fleet.cut(5)
    fleet.store(5)
    await eventually(lambda: fleet.is_known_to(second))
    counters = (await second.workers())[1]["listeners"]["0"]["counters"]
    assert counters["num_cleared"] == counters["num_diverged"] == counters["num_recovered"] == 0
    assert counters["num_batches"] < 15


async def test_what_happens_during_the_restore_is_not_missed(start_index, client, publisher, eventually):
    fleet = Fleet(publisher)
    fleet.store(100)
    await register(client, publisher)
    await eventually(lambda: fleet.is_known_to(client))

    async def churn():
        for _ in range(40):
            fleet.store(2)
            fleet.cut(1)
            await asyncio.sleep(0.005)

    churning = asyncio.create_task(churn())
    second = await start_index(peers=(client.service.url,))
    await churning
    await eventually(lambda: fleet.is_known_to(second))
    assert await is_live(second)


def stored(hashes, tokens, parent=None, medium="GPU"):
    return ["BlockStored", hashes, parent, tokens, BLOCK_SIZE, None, medium]


def prompt(number, num_blocks=4):
    return [number * 1000 + idx for idx in range(num_blocks * BLOCK_SIZE)]


async def is_in_state(client, state, instance_id=1):
    ranks = (await client.workers())[instance_id]["listeners"]["0"]["ranks"]
    return bool(ranks) and all(rank["state"] == state for rank in ranks.values())


@pytest.mark.parametrize("num_kept", [10_000, 3, None])
async def test_a_stock_engine_is_taken_over_with_the_names_it_gives_its_blocks(
    start_index, client, start_vllm, free_port, eventually, num_kept
):
    port = free_port()
    engine = start_vllm(port, num_kept=num_kept)
    await client.register(port)

    async def is_heard():
        engine.publish(stored([900], prompt(9, 1)))
        return await client.scores(prompt(9))

    await eventually(is_heard)
    for number in range(1, 9):
        engine.publish(stored([number * 10 + idx for idx in range(4)], prompt(number)))
    engine.remove(13, 23)
    await eventually(lambda: client.scores(prompt(8)))
    second = await start_index(peers=(client.service.url,))
    engine.remove(32, 33)  # by the engine's own names
    engine.publish(stored([103], prompt(1)[12:], 12))
    expected = {1: 16, 2: 12, 3: 8, 4: 16, 8: 16}

    async def is_known():
        return all([await second.scores(prompt(n)) == {"1": {"0": tokens}} for n, tokens in expected.items()])

    await eventually(is_known)
    assert await is_in_state(second, (await client.workers())[1]["listeners"]["0"]["ranks"]["0"]["state"])
    counters = (await second.workers())[1]["listeners"]["0"]["counters"]
    assert counters["num_cleared"] == counters["num_restarts"] == 0


async def test_blocks_of_a_stock_engine_do_not_count_before_it_proves_to_go_on(
    start_index, client, start_vllm, free_port, eventually
):
    port = free_port()
    engine = start_vllm(port)
    engine.publish(stored([1, 2, 3, 4], prompt(1)))
    await client.register(port)
    await eventually(lambda: client.scores(prompt(1)))
    engine.kill()
    second = await start_index(peers=(client.service.url,))
    assert await second.scores(prompt(1)) == {}
    assert await is_in_state(second, "resyncing")
    engine = start_vllm(port)  # another process: it holds nothing of that
    engine.publish(stored([7, 8], prompt(2, 2)))

    async def is_new():
        return await second.scores(prompt(2)) == {"1": {"0": 8}}

    await eventually(is_new)
    assert await second.scores(prompt(1)) == {}


async def test_an_engines_irregular_blocks_are_left_out_and_the_rank_is_partial(
    start_index, client, start_vllm, free_port, eventually
):
    port = free_port()
    engine = start_vllm(port)
    engine.publish(stored([1, 2], prompt(1, 2)), engine.stored(3, prompt(2, 1)) | {"lora_name": "ada"})
    await client.register(port)
    await eventually(lambda: client.scores(prompt(2), lora_name="ada"))
    second = await start_index(peers=(client.service.url,))
    await eventually(lambda: second.scores(prompt(1)))
    assert await second.scores(prompt(2), lora_name="ada") == {}
    assert await is_in_state(second, "partial")
    engine.publish(stored([12], prompt(1)[8:12], 2))

    async def goes_on():
        return await second.scores(prompt(1)) == {"1": {"0": 12}}

    await eventually(goes_on)


async def test_only_what_is_followed_at_the_same_place_is_taken_over(
    start_index, client, start_vllm, free_port, eventually
):
    ports = [free_port(), free_port(), free_port()]
    engines = [start_vllm(port) for port in ports]
    for number, engine in enumerate(engines):
        engine.publish(stored([1], prompt(number, 1)))
    await client.register(ports[0], 1)
    await client.register(ports[1], 2)
    await eventually(lambda: client.scores(prompt(0)))
    await eventually(lambda: client.scores(prompt(1)))
    second = await start_index(
        workers=(f"1=tcp://127.0.0.1:{ports[2]}",), block_size=BLOCK_SIZE, peers=(client.service.url,)
    )
    await eventually(lambda: second.scores(prompt(1)))
    await eventually(lambda: second.scores(prompt(2)))
    assert await second.scores(prompt(1)) == {"2": {"0": 4}}
    assert await second.scores(prompt(2)) == {"1": {"0": 4}}
    assert await second.scores(prompt(0)) == {}


async def test_a_peers_registrations_are_followed_only_where_endpoints_may_be(start_index, client, free_port):
    await client.register(free_port(), 1)
    second = await start_index(peers=(client.service.url,), allow_endpoints=("10.0.0.0/8",))
    assert await second.workers() == {}


async def test_a_peer_asks_for_the_key_that_the_service_has(start_index, free_port, caplog, eventually):
    caplog.set_level(logging.INFO, "kvist.indexer.service.restore")
    first = await start_index(admin_key="secret")
    headers = {"authorization": "Bearer secret"}
    body = {"instance_id": 1, "endpoint": f"tcp://127.0.0.1:{free_port()}", "model_name": "m", "block_size": 4}
    assert (await first.post("/register", body, headers=headers)).status_code == 201
    for key, outcome in (("secret", "restored peer="), ("wrong", "GET /dump answered 401")):
        caplog.clear()
        second = await start_index(peers=(first.service.url,), admin_key=key)
        assert (await second.get("/health")).status_code == 200

        async def is_told(outcome: str = outcome) -> bool:
            return outcome in caplog.text

        await eventually(is_told)


async def test_without_a_peer_that_answers_the_index_starts_empty(start_index, free_port):
    client = await start_index(peers=(f"http://127.0.0.1:{free_port()}",))
    assert await client.workers() == {}


async def read_dump(client):
    answer = await client.get("/dump")
    assert answer.status_code == 200
    return answer.content


class FakePeer:
    """Serves one dump, whatever it is."""

    def __init__(self, dump, workers=b"[]"):
        self._dump = dump
        self._workers = workers

    async def __aenter__(self):
        self._server = HttpServer(self._handle)
        await self._server.__aenter__()
        self.url = f"http://127.0.0.1:{self._server.port}"
        return self

    async def __aexit__(self, *error):
        await self._server.__aexit__(*error)

    async def _handle(self, request, responder):
        body = self._dump if request.path == "/dump" else self._workers
        responder.answer(200, [], body)


def dumps_gone_wrong(dump):
    frames, start = [], 0
    while start < len(dump):
        end = start + 4 + int.from_bytes(dump[start : start + 4], "big")
        frames.append(dump[start:end])
        start = end
    head, *rest = frames
    yield b""
    yield b"nonsense" * 100
    yield dump[:-1]
    yield b"".join(frames[:-1])
    yield b"".join([head, *rest[1:]])
    yield dump + b"\0"
    yield dump + dump
    yield dump.replace(b"\xb0kvist-index-dump\x05", b"\xb0kvist-index-dump\x06")
    yield b"\xff\xff\xff\xff" + dump
    for place in range(0, len(dump), 7):
        yield dump[:place] + bytes([dump[place] ^ 0x41]) + dump[place + 1 :]


async def test_a_dump_gone_wrong_is_dropped_whole(client, publisher, eventually):
    fleet = Fleet(publisher)
    fleet.store(3, num_blocks=2)
    await register(client, publisher)
    await eventually(lambda: fleet.is_known_to(client))
    dump, workers = await read_dump(client), (await client.get("/workers")).content
    registry = Registry(is_held=True)
    async with registry:
        for wrong in dumps_gone_wrong(dump):
            async with FakePeer(wrong, workers) as peer:
                assert not await Restorer(registry, EndpointRules(), None).restore([peer.url]), wrong
            for member in registry:
                assert member.index.ranks() == []
        async with FakePeer(dump, workers) as peer:
            assert await Restorer(registry, EndpointRules(), None).restore([peer.url])


async def test_one_dump_at_a_time_and_a_slow_reader_holds_no_more_than_a_moment(client, publisher, eventually):
    fleet = Fleet(publisher)
    fleet.store(2, num_blocks=2000)
    for _ in range(10):
        fleet.store(1, num_blocks=8000)
    await register(client, publisher)
    await eventually(lambda: fleet.is_known_to(client))
    async with client.http.stream("GET", "/dump") as slow:
        second = await client.get("/dump")
        assert second.status_code == 503
        assert second.json() == {"error": "another dump is under way; try again"}
        assert await fleet.is_known_to(client)
        size_bytes = sum([len(piece) async for piece in slow.aiter_bytes()])
    assert 84_000 * 8 < size_bytes < 84_000 * 20
    assert len(await read_dump(client)) == size_bytes

"""Whatever clients and streams send: an answer that names what is wrong, everything else goes on, memory stays."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import msgspec
import psutil
import pytest
import zmq

TOKENS = list(range(1, 21))
U32, U64 = "an array of integers from 0 to 2**32 - 1", "an array of integers of 64 bits, signed or unsigned"
NAME, RANK = "a string of at most 1024 characters", "an integer from 0 to 4095"
ID, SIZE = "an integer from 0 to 2**64 - 1", "an integer from 1 to 65536"
M = {"model_name": "m"}
NEW = {"instance_id": 9, "endpoint": "tcp://127.0.0.1:9", "model_name": "default", "block_size": 4}


@pytest.fixture
async def known(client, start_vllm, free_port, eventually):
    """Return a client of a service that knows one instance with the blocks of TOKENS, and its engine."""
    port = free_port()
    engine = start_vllm(port)
    engine.publish(["BlockStored", [1, 2, 3, 4, 5], None, TOKENS, 4, None, "GPU"])
    await client.register(port)
    await eventually(lambda: client.scores(TOKENS))
    return client, engine


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/query", M, 422, f"token_ids: missing, expected {U32}"),
        ("/query", {"token_ids": []}, 422, f"model_name: missing, expected {NAME}"),
        ("/query", {"token_ids": [1, -2], **M}, 422, f"token_ids[1]: got -2, expected {U32}"),
        ("/query", {"token_ids": [1, 1 << 32], **M}, 422, f"token_ids[1]: got 4294967296, expected {U32}"),
        ("/query", {"token_ids": [1 << 70], **M}, 422, f"token_ids[0]: got {1 << 70}, expected {U32}"),
        ("/query", {"token_ids": [1, 2.5], **M}, 422, f"token_ids[1]: got 2.5, expected {U32}"),
        ("/query", {"token_ids": [1, "2"], **M}, 422, f'token_ids[1]: got "2", expected {U32}'),
        ("/query", {"token_ids": [1, True], **M}, 422, f"token_ids[1]: got true, expected {U32}"),
        ("/query", {"token_ids": [[1]], **M}, 422, f"token_ids[0]: got an array of 1, expected {U32}"),
        ("/query", {"token_ids": "1", **M}, 422, f'token_ids: got "1", expected {U32}'),
        ("/query", {"token_ids": None, **M}, 422, f"token_ids: got null, expected {U32}"),
        ("/query", {"token_ids": [], "model_name": 5}, 422, f"model_name: got 5, expected {NAME}"),
        ("/query", {"token_ids": [], "model_name": "m", "lora_name": []}, 422, "lora_name: got an array of 0"),
        ("/query", {"token_ids": [], "model_name": "m", "cache_salt": {}}, 422, "cache_salt: got an object of 0"),
        ("/query", {"token_ids": [], "whole_prompt": 1, **M}, 422, "whole_prompt: got 1, expected true or false"),
        ("/query", {"token_ids": [], **M}, 404, "no indexer for model=m routing_group=default"),
        ("/query", b"", 400, "body: not JSON"),
        ("/query", b"{", 400, "body: not JSON"),
        ("/query", b'{"token_ids":[1,2', 400, "body: not JSON"),
        ("/query", b'{"token_ids":[1,],"model_name":"m"}', 400, "body: not JSON"),
        ("/query", b'{"token_ids":[1],"model_name":"\xff"}', 400, "body: not JSON"),
        ("/query", b"[" * 100_000, 400, "body: not JSON"),
        ("/query", b'{"token_ids":' + b"[" * 100_000, 400, "body: not JSON"),
        ("/query", [], 422, "body: got an array of 0, expected an object"),
        ("/query", "text", 422, 'body: got "text", expected an object'),
        ("/query_by_hash", M, 422, f"block_hashes: missing, expected {U64}"),
        ("/query_by_hash", {**M, "block_hashes": [1 << 64]}, 422, f"block_hashes[0]: got {1 << 64}, expected {U64}"),
        ("/query_by_hash", {**M, "block_hashes": [1.5]}, 422, "block_hashes[0]: got 1.5, expected an array"),
        ("/query_by_hash", {"model_name": "m", "block_hashes": []}, 404, "no indexer for model=m"),
        ("/register", NEW | {"instance_id": "1"}, 422, f'instance_id: got "1", expected {ID}'),
        ("/register", NEW | {"instance_id": -1}, 422, f"instance_id: got -1, expected {ID}"),
        ("/register", NEW | {"instance_id": 1 << 64}, 422, f"instance_id: got {1 << 64}, expected {ID}"),
        ("/register", NEW | {"block_size": 0}, 422, f"block_size: got 0, expected {SIZE}"),
        ("/register", NEW | {"block_size": 1 << 31}, 422, f"block_size: got 2147483648, expected {SIZE}"),
        ("/register", NEW | {"dp_rank": 4096}, 422, f"dp_rank: got 4096, expected {RANK}"),
        ("/register", NEW | {"model_name": "x" * 1025}, 422, "model_name: got "),
        ("/register", NEW | {"endpoint": "nonsense"}, 400, "endpoint: got 'nonsense', expected tcp://host:port"),
        ("/register", NEW | {"endpoint": "memory://x"}, 400, "endpoint: got 'memory://x', expected tcp://host:port"),
        ("/register", NEW | {"endpoint": "tcp://h:99999"}, 400, "expected port from 0 to 65535"),
        ("/register", NEW | {"replay_endpoint": "tcp://other:5"}, 400, "replay_endpoint: got 'tcp://other:5'"),
        ("/unregister", {"instance_id": 7, "model_name": "default"}, 404, "instance 7 not found"),
        ("/unregister", {"instance_id": 1, **M}, 404, "instance 1 is registered for model=default"),
        ("/unregister", {"instance_id": 1, "model_name": "default", "dp_rank": 3}, 404, "instance 1 has no dp_rank 3"),
        ("/nothing", {}, 404, "POST /nothing: no such endpoint"),
        ("/workers", {}, 405, "POST /workers: expected GET"),
    ],
)  # fmt: skip
async def test_a_wrong_request_is_refused_by_name_and_changes_nothing(known, path, body, status, message):
    client, _ = known
    answer = await client.post(path, body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert answer.json()["error"].startswith(message) or message in answer.json()["error"]
    assert await client.scores(TOKENS) == {"1": {"0": 20}}
    assert list(await client.workers()) == [1]


async def test_a_method_that_is_not_the_endpoints_is_refused_with_the_one_that_is(client):
    for path, method in (("/query", "POST"), ("/register", "POST"), ("/dump", "GET")):
        answer = await client.http.request("DELETE", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, method)


async def test_a_second_registration_of_a_stream_is_a_conflict(known, free_port):
    client, _ = known
    port = free_port()
    assert (await client.register(port)).json() == {"error": "instance 1 dp_rank 0 already registered"}
    other_size = await client.register(port, 2, block_size=8)
    assert other_size.status_code == 409
    sizes = "existing=4, requested=8"
    assert other_size.json() == {"error": f"block_size mismatch for model=default routing_group=default: {sizes}"}
    other_model = await client.register(port, 1, model_name="m", dp_rank=1)
    assert other_model.status_code == 409
    assert "instance 1 is already registered for model=default" in other_model.json()["error"]
    assert await client.scores(TOKENS) == {"1": {"0": 20}}


async def test_a_body_over_the_limit_is_refused_before_it_is_read(start_index):
    client = await start_index(max_body_bytes=1000)
    body = {"token_ids": list(range(1000)), **M}
    answer = await client.post("/query", body)
    assert answer.status_code == 413
    assert "1000 bytes" in answer.text
    assert (await client.get("/health")).status_code == 200


async def test_registering_needs_json_so_that_no_foreign_page_can_do_it(client):
    answer = await client.post("/register", msgspec.json.encode(NEW), headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert await client.workers() == {}


@pytest.mark.parametrize("path", ["/register", "/unregister"])
async def test_administration_is_on_loopback_or_by_key(start_index, path):
    body = NEW if path == "/register" else {"instance_id": 9, "model_name": "default"}
    client = await start_index()
    assert (await client.post(path, body, headers={"x-forwarded-for": "10.0.0.1"})).status_code == 403
    assert (await client.post(path, body, headers={"host": "example.com"})).status_code == 403
    assert (await client.get("/dump", headers={"host": "example.com"})).status_code == 403
    keyed = await start_index(admin_key="secret")
    refused = await keyed.post(path, body)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert (await keyed.post(path, body, headers={"authorization": "Bearer wrong"})).status_code == 401
    allowed = await keyed.post(path, body, headers={"authorization": "Bearer secret"})
    assert allowed.status_code == (201 if path == "/register" else 404)
    assert (await keyed.get("/dump")).status_code == 401


async def test_queries_need_the_api_key_if_there_is_one_and_probes_do_not(start_index):
    keyed = await start_index(api_key="reader", admin_key="secret")
    query = {"token_ids": TOKENS, **M}
    for ask in (
        lambda **headers: keyed.post("/query", query, **headers),
        lambda **headers: keyed.get("/workers", **headers),
        lambda **headers: keyed.post("/query_by_hash", {"block_hashes": [1], **M}, **headers),
    ):
        refused = await ask()
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await ask(headers={"authorization": "Bearer wrong"})).status_code == 401
        for key in ("reader", "secret", "reader"):  # on one connection, with the same head twice and another between
            assert (await ask(headers={"authorization": f"Bearer {key}"})).status_code != 401
        assert (await ask()).status_code == 401
    assert (await keyed.get("/dump", headers={"authorization": "Bearer reader"})).status_code == 401
    for path in ("/health", "/metrics"):
        assert (await keyed.get(path)).status_code == 200


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://10.1.2.3:5557",
        "tcp://localhost:5557",
        "ipc:///tmp/x",
        "tcp://127.0.0.1:5557?bind=1",
        "nats://127.0.0.1:4222,10.1.2.3:4222/m/w",
    ],
)
async def test_endpoints_outside_the_allowed_networks_are_not_dialled(start_index, endpoint):
    client = await start_index(allow_endpoints=("127.0.0.0/8",))
    answer = await client.post("/register", NEW | {"endpoint": endpoint})
    assert answer.status_code == 403
    assert f"endpoint: got '{endpoint}', expected an address in 127.0.0.0/8" in answer.json()["error"]
    assert (await client.post("/register", NEW)).status_code == 201


@pytest.mark.parametrize("broker", ["nats://h/m/w?creds=", "nats://h/m/w?nkey=", "nats+tls://h/m/w?tls_ca="])
async def test_a_registration_names_no_file_of_this_host(start_index, broker):
    client = await start_index()
    answer = await client.post("/register", NEW | {"endpoint": f"{broker}/etc/hostname"})
    assert answer.status_code == 403
    assert "without files of this host" in answer.text
    assert "/etc/hostname" not in answer.text


async def test_a_brokers_login_is_shown_to_nobody(start_index, free_port, caplog):
    caplog.set_level("INFO")
    client = await start_index(allow_endpoints=("127.0.0.0/8",))
    broker = f"127.0.0.1:{free_port()}"
    answer = await client.post("/register", NEW | {"endpoint": f"nats://user:secret@{broker}/m/w"})
    assert answer.status_code == 201, answer.text
    workers, dump = await client.get("/workers"), await client.get("/dump")
    assert f"nats://{broker}/m/w" in workers.text
    shown = (workers.text, dump.content.decode("latin-1"), caplog.text, (await client.get("/metrics")).text)
    assert not any("secret" in text for text in shown)


async def test_the_number_of_namespaces_and_streams_is_bounded(client, monkeypatch):
    monkeypatch.setattr("kvist.indexer.service.registry.MAX_NAMESPACES", 2)
    monkeypatch.setattr("kvist.indexer.service.registry.MAX_STREAMS", 3)
    for number in range(2):
        assert (await client.register(9, number, model_name=f"m{number}")).status_code == 201
    assert (await client.register(9, 2, model_name="m2")).status_code == 503
    assert (await client.register(9, 3, model_name="m0")).status_code == 201
    assert (await client.register(9, 4, model_name="m0")).status_code == 503
    await client.post("/unregister", {"instance_id": 0, "model_name": "m0"})
    assert (await client.register(9, 4, model_name="m0")).status_code == 201


class HostileStream:
    """A publisher that sends what it likes, numbered as it should be."""

    def __init__(self, port):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._sequence = 0

    def send(self, payload):
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
def hostile_stream():
    """Return a function that starts such a publisher."""
    with ExitStack() as exits:

        def start(port):
            stream = HostileStream(port)
            exits.callback(stream.close)
            return stream

        yield start


def hostile_payloads():
    """Yield messages that are wrong, each in another way."""
    good = msgspec.msgpack.encode([time.time(), [["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU"]], 0])
    yield from (good[:end] for end in range(len(good)))
    yield msgspec.msgpack.encode([time.time(), [["BlockStored", [7], None, [1, 2, 3, 1 << 32], 4, None, "GPU"]], 0])
    yield msgspec.msgpack.encode([time.time(), [["BlockStored", [7], None, [1, 2, 3, -4], 4, None, "GPU"]], 0])
    yield msgspec.msgpack.encode([time.time(), [["BlockStored", [7], None, TOKENS, 20, None, "GPU"]], 0])
    yield msgspec.msgpack.encode([time.time(), [["BlockStored", [7], None, [1, 2, 3, 4], 1 << 31, None, "GPU"]], 0])
    yield msgspec.msgpack.encode([time.time(), [["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU"]], 1 << 31])
    # An array of 2**31 tokens, and one of 2**32 - 1 events, of which nothing follows.
    yield b"\x93\xcb" + bytes(8) + b"\x91\x97\xabBlockStored\x91\x07\xc0\xdd\x80\x00\x00\x00"
    yield b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"
    rng = random.Random(1)
    for _ in range(2000):
        broken = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        yield bytes(broken)


async def test_no_message_of_one_engine_disturbs_another_or_makes_memory_grow(
    known, hostile_stream, free_port, eventually
):
    client, _ = known
    port = free_port()
    hostile = hostile_stream(port)
    await client.register(port, 2)
    payloads = list(hostile_payloads())

    async def is_read_up_to(token: int) -> None:
        """Wait until the last that is sent, a block of this token, is known."""
        stored = ["BlockStored", [token], None, [token] * 4, 4, None, "GPU"]

        async def is_known() -> bool:
            hostile.send(msgspec.msgpack.encode([time.time(), [stored], 0]))  # anew: who connects now missed the others
            return "2" in await client.scores([token] * 4)

        await eventually(is_known)

    async def rss_after(*rounds: int) -> int:
        for number in rounds:
            for payload in payloads:
                hostile.send(payload)
            await is_read_up_to(1000 + number)
        return psutil.Process().memory_info().rss

    await is_read_up_to(1000)
    before = await rss_after(1)
    after = await rss_after(2, 3, 4)
    assert after - before < 8 << 20
    assert (await client.scores(TOKENS))["1"] == {"0": 20}
    assert (await client.workers())[2]["listeners"]["0"]["counters"]["num_malformed"] > 4 * 1000

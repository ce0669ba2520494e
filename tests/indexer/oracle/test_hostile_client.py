"""A client gone wrong: every request is refused with the status and the field that is due, or answered rightly."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import msgspec
import psutil
import pytest

BLOCK_SIZE = 4
MODEL = "asked"
PROMPT = [1, (1 << 32) - 1, 0, 4_000_000_000, 5, 6, 7, 8]
QUERY = {"model_name": MODEL, "token_ids": PROMPT}
MAX_GROWTH_BYTES = 16 << 20
U64_MAX = (1 << 64) - 1
DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def known(service: Any) -> Iterator[dict[str, Any]]:
    """A worker that holds the prompt; yields what it was registered with."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        body = {"instance_id": 1, "model_name": MODEL, "block_size": BLOCK_SIZE}
        body["endpoint"] = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        assert service.call("POST", "/register", body)[0] == 201
        yield body
        assert service.call("POST", "/unregister", {"instance_id": 1, "model_name": MODEL})[0] == 200


@pytest.fixture
def held(
    service: Any, known: dict[str, Any], start_vllm: Callable[..., Any], free_port: Callable[[], int]
) -> Iterator[dict[str, Any]]:
    """The right answer to the prompt, which worker 2 holds."""
    port = free_port()
    start_vllm(port).store(9, PROMPT[:4])
    body = known | {"instance_id": 2, "endpoint": f"tcp://127.0.0.1:{port}"}
    assert service.call("POST", "/register", body | {"replay_endpoint": f"tcp://127.0.0.1:{port + 1}"})[0] == 201
    give_up_s = time.monotonic() + DEADLINE_S
    while not (answer := service.call("POST", "/query", QUERY)[1])["scores"]:
        assert time.monotonic() < give_up_s
        time.sleep(0.002)
    yield answer
    assert service.call("POST", "/unregister", {"instance_id": 2, "model_name": MODEL})[0] == 200


GOOD = {
    "/query": QUERY | {"lora_name": None, "cache_salt": None, "routing_group": None},
    "/query_by_hash": {"model_name": MODEL, "block_hashes": [1, U64_MAX, -1], "routing_group": None},
    "/register": {
        "instance_id": 3,
        "model_name": MODEL,
        "endpoint": "tcp://127.0.0.1:1",
        "block_size": BLOCK_SIZE,
        "dp_rank": 0,
        "replay_endpoint": "tcp://127.0.0.1:2",
        "routing_group": None,
    },
    "/unregister": {"instance_id": 3, "model_name": MODEL, "dp_rank": None, "routing_group": None},
}
REQUIRED = {
    "/query": ("model_name", "token_ids"),
    "/query_by_hash": ("model_name", "block_hashes"),
    "/register": ("instance_id", "model_name", "endpoint", "block_size"),
    "/unregister": ("instance_id", "model_name"),
}
IS_STRING = ("model_name", "endpoint", "lora_name", "cache_salt", "routing_group", "replay_endpoint")
WRONG_STRINGS = (1, 1.5, True, [], {}, ["a"], "x" * 5000)
WRONG_NUMBERS = (-1, 1.5, True, "1", [], {}, [1], 1 << 64, 1 << 70, -(1 << 70), 1e300)
WRONG_ARRAYS = (None, 1, 1.5, True, "1", {}, {"0": 1}, [1, "2"], [None], [[1]], [1.5], [True], [1, 2, {}], [1 << 64])


def wrong_values(field: str) -> tuple[Any, ...]:
    if field == "token_ids":
        return (*WRONG_ARRAYS, [-1], [1 << 32], [1, 2, -5], [1] * 10_000 + [1 << 32])
    if field == "block_hashes":
        return (*WRONG_ARRAYS, [-(1 << 63) - 1])
    return WRONG_STRINGS if field in IS_STRING else WRONG_NUMBERS


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, body in GOOD.items() for field in body])
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_field(
    service: Any, known: dict[str, Any], path: str, field: str
) -> None:
    assert known
    for value in wrong_values(field):
        status, answer = service.call("POST", path, GOOD[path] | {field: value})
        assert status == 422, (value, answer)
        assert answer["error"].startswith(field), (value, answer)


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, names in REQUIRED.items() for field in names])
def test_a_missing_field_is_named(service: Any, known: dict[str, Any], path: str, field: str) -> None:
    assert known
    status, answer = service.call("POST", path, {name: value for name, value in GOOD[path].items() if name != field})
    assert (status, answer["error"].partition(":")[0]) == (422, field)
    status, answer = service.call("POST", path, GOOD[path] | {field: None})
    assert (status, answer["error"].partition(":")[0]) == (422, field)


@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_json_object_is_refused(service: Any, known: dict[str, Any], path: str) -> None:
    assert known
    content = json.dumps(GOOD[path]).encode()
    for cut in range(len(content)):
        assert service.send("POST", path, content[:cut])[0] == 400
    for wrong in (b"null", b"[]", b"1", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"[[]]", b"true"):
        assert service.send("POST", path, wrong)[0] in (400, 422)
    for wrong in (content + b"x", content + b"{}", b"\xef\xbb\xbf" + content, content.replace(b"asked", b"\xff\xfe")):
        assert service.send("POST", path, wrong)[0] == 400
    assert service.call("GET", "/health")[0] == 200


def odd_queries() -> Iterator[bytes]:
    """Yield bodies that are strange in form, right or wrong."""
    tokens = json.dumps(PROMPT)
    name = f'"model_name":"{MODEL}"'
    yield from (f'{{"token_ids":{tokens},{name}{tail}'.encode() for tail in ("}", "} \n\t\r", "}\0", "}}", ",}", ""))
    forms = (
        "{0}",
        "-{0}",
        "+{0}",
        "0{0}",
        "{0}.0",
        "{0}e0",
        "{0}E+1",
        " {0} ",
        "\t{0}\n",
        "0x{0}",
        "{0}_0",
        "{0}n",
        "-0",
    )
    for form in forms:
        yield f'{{"token_ids":[{form.format(1)},2,3,4],{name}}}'.encode()
        yield f'{{"token_ids":[1,2,3,{form.format(4)}],{name}}}'.encode()
    for array in (
        "[,]",
        "[1,]",
        "[,1]",
        "[1 2]",
        "[1,,2]",
        "[",
        "[1",
        "[1,",
        "]",
        "[]]",
        "[[]",
        "[1;2]",
        "[1]x",
        "[ ]",
    ):
        yield f'{{"token_ids":{array},{name}}}'.encode()
        yield f'{{{name},"token_ids":{array}}}'.encode()
    for key in ("token\\u005fids", "\\u0074oken_ids", "token_ids\\u0000", "Token_ids", "token_ids "):
        yield f'{{"{key}":{tokens},{name}}}'.encode()
    yield f'{{"token_ids":[9,9,9,9],"token_ids":{tokens},{name}}}'.encode()
    yield f'{{"token_ids":{tokens},"token_ids":[9,9,9,9],{name}}}'.encode()
    yield f'{{"x":{{"token_ids":[9,9,9,9]}},"token_ids":{tokens},{name}}}'.encode()
    yield f'{{"x":"\\"token_ids\\":[9,9,9,9]","token_ids":{tokens},{name}}}'.encode()
    yield f'{{"x":["token_ids",[9]],{name},"token_ids":{tokens}}}'.encode()
    yield f'{{"x":"\\\\","token_ids":{tokens},{name},"y":"\\\\\\""}}'.encode()
    yield f'{{"token_ids":{tokens},{name},"x":1e99,"y":-1.5E-7,"z":[true,false,null,"\\ud834\\udd1e"]}}'.encode()
    good = json.dumps(QUERY | {"lora_name": None, "cache_salt": ""}).encode()
    rng = random.Random(1)
    for _ in range(3000):
        wrong = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 3))):
            at = rng.randrange(len(wrong))
            wrong[at : at + rng.choice((0, 1, 1, 2))] = rng.choice(
                (b"", b",", b"]", b"[", b'"', b"\\", b"0", b"-", b" ", b"}")
            )
        yield bytes(wrong)


class AsIs(msgspec.Struct):
    """What a query is, read by msgspec alone."""

    model_name: str
    token_ids: list[int]
    routing_group: str | None = None
    tenant_id: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


def expected_status(content: bytes) -> int:
    try:
        msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return 400
    try:
        query = msgspec.json.decode(content, type=AsIs)
    except ValueError:
        return 422
    if any(not 0 <= token < 1 << 32 for token in query.token_ids):
        return 422
    return 200 if query.model_name == MODEL else 404


def test_an_odd_query_is_read_as_json_says_and_answered_as_a_plain_one(service: Any, held: dict[str, Any]) -> None:
    assert service.call("POST", "/query", QUERY) == (200, held)
    for content in odd_queries():
        status, answer = service.send("POST", "/query", content)
        assert status == expected_status(content), content
        if status == 200:
            plain = msgspec.to_builtins(msgspec.json.decode(content, type=AsIs))
            assert (status, json.loads(answer)) == service.call("POST", "/query", plain), content


def test_names_and_numbers_that_clash_or_are_unknown_have_their_status(service: Any, known: dict[str, Any]) -> None:
    assert service.call("POST", "/register", known)[0] == 409
    assert service.call("POST", "/register", known | {"endpoint": "tcp://127.0.0.1:9"})[0] == 409
    assert service.call("POST", "/register", known | {"instance_id": 2, "block_size": 8})[0] == 409
    assert service.call("POST", "/register", known | {"model_name": "another"})[0] == 409
    for endpoint in (
        "",
        "x",
        "tcp://",
        "tcp://*",
        "tcp://127.0.0.1:99999",
        "http://127.0.0.1:80",
        "memory://x",
        "inproc://x",
    ):
        status, answer = service.call("POST", "/register", known | {"instance_id": 2, "endpoint": endpoint})
        assert (status, "endpoint" in answer["error"]) == (400, True), endpoint
    for model in ("nobody's", "", "\0", "é" * 500):
        for path in ("/query", "/query_by_hash", "/unregister"):
            assert service.call("POST", path, GOOD[path] | {"model_name": model, "instance_id": 1})[0] == 404
    assert service.call("POST", "/unregister", GOOD["/unregister"])[0] == 404
    assert service.call("GET", "/query")[0] == 405
    assert service.call("POST", "/workers", {})[0] == 405
    assert service.call("GET", "/nowhere")[0] == 404


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(service: Any) -> None:
    for path in GOOD:
        connection = HTTPConnection("127.0.0.1", service.port, timeout=60)
        connection.putrequest("POST", path)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(1 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


def test_memory_does_not_grow_with_what_is_refused(service: Any, held: dict[str, Any]) -> None:
    process = psutil.Process()
    large = json.dumps(QUERY | {"token_ids": [7] * 2_000_000 + ["x"]}).encode()
    before_bytes = 0
    for _ in range(3):
        assert service.send("POST", "/query", large)[0] == 422
        for content in list(odd_queries())[:500]:
            service.send("POST", "/query", content)
        for number in range(200):
            service.call("POST", "/query", QUERY | {"model_name": f"unknown {number}"})
            service.call("GET", f"/unknown/{number}")
        before_bytes = before_bytes or process.memory_info().rss
    assert service.call("POST", "/query", QUERY) == (200, held)
    assert process.memory_info().rss - before_bytes < MAX_GROWTH_BYTES

"""Who may do what: keys, loopback, and whatever else a client tries, in whatever spelling, no worker gets it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from kvist.http import Request
from kvist.openai.errors import RequestError
from kvist.router.doors.auth import methods_of, plain_path, require_administrator
from kvist.router.doors.service import FLEET_PATHS
from kvist.router.reserved import FIELDS, HEADERS

JSON = {"content-type": "application/json"}


def request(peer: str | None = "127.0.0.1", host: bytes = b"127.0.0.1:30000", **headers: bytes) -> Request:
    fields = [(b"host", host), *((name.replace("_", "-").encode(), value) for name, value in headers.items())]
    return Request("GET", "/workers", fields, b"", (peer, 5000) if peer else None)


@pytest.mark.parametrize("sent", [b"Bearer secret", b"bearer  secret"])
def test_the_right_key_opens(sent: bytes) -> None:
    require_administrator(request("203.0.113.9", authorization=sent), "secret")


@pytest.mark.parametrize("sent", [None, b"secret", b"Bearer", b"Bearer Secret", b"Basic secret", b"Bearer secret\xff"])
def test_anything_else_is_a_401(sent: bytes | None) -> None:
    asked = request(**({} if sent is None else {"authorization": sent}))
    with pytest.raises(RequestError) as refusal:
        require_administrator(asked, "secret")
    assert refusal.value.status == 401


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("127.0.0.1", b"127.0.0.1:30000"),
        ("127.8.8.8", b"localhost"),
        ("::1", b"[::1]:30000"),
        ("::ffff:127.0.0.1", b"localhost:30000"),
    ],
)
def test_without_an_admin_key_loopback_administers(peer: str, host: bytes) -> None:
    require_administrator(request(peer, host), None)


@pytest.mark.parametrize(
    "asked",
    [
        request("10.0.0.8"),
        request("::ffff:10.0.0.8"),
        request(None),
        request(host=b"attacker.example"),
        request(host=b"attacker.example:30000"),
        Request("GET", "/workers", [], b"", ("127.0.0.1", 5000), "1.0"),
        request(x_forwarded_for=b"10.0.0.8"),
        request(forwarded=b"for=10.0.0.8"),
        request(x_real_ip=b"10.0.0.8"),
    ],
)
def test_without_an_admin_key_nobody_else_does(asked: Request) -> None:
    with pytest.raises(RequestError) as refusal:
        require_administrator(asked, None)
    assert (refusal.value.status, refusal.value.code) == (403, "admin_forbidden")
    assert refusal.value.message.startswith("GET /workers is for administrators: ")


async def send(
    front: Any, target: str, body: bytes = b"", method: str = "POST", headers: Any = JSON
) -> tuple[int, dict[str, Any]]:
    """Send exactly this; return the status, and the error if there is one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(front.service.url).port)
    fields = [("host", "127.0.0.1"), ("connection", "close"), ("content-length", str(len(body)))]
    fields += headers.items() if isinstance(headers, dict) else headers
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
    answer = await reader.read()
    writer.close()
    status, content = int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]
    return status, (json.loads(content) or {}).get("error", {}) if status >= 400 else {}


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/%63ompletions", "/v1/completions"),
        ("//v1///completions/", "/v1/completions"),
        ("/v1/./chat/../completions", "/v1/completions"),
        ("/v1/%2e%2e/flush_cache", "/flush_cache"),
        ("/../../v1/completions", "/v1/completions"),
        ("/", "/"),
        ("/v1/models/org/a:b@c", "/v1/models/org/a:b@c"),
    ],
)
def test_a_path_has_one_plain_form(path: str, plain: str) -> None:
    assert plain_path(path) == plain


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat%2Fcompletions",
        "/v1/chat%2fcompletions",
        "/v1/%2563ompletions",
        "/v1/completions%00",
        "/v1/completions%0a",
        "/v1/completions%20",
        "/v1/completions%3Fx",
        "/v1/completions%23",
        "/v1%5Ccompletions",
        "/v1/compl%C3%A9tions",
        "/v1/%ff",
        "/v1/%EF%BC%8Fcompletions",
        "*",
    ],
)
def test_a_path_that_can_be_read_in_two_ways_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match=r"^path: got") as refusal:
        plain_path(path)
    assert refusal.value.status == 400


def test_clients_reach_inference_and_nothing_else() -> None:
    for path in ("/v1/chat/completions", "/v1/responses/r_1/cancel", "/tokenize", "/generative_scoring"):
        assert methods_of(path) == ("POST",)
    assert methods_of("/v1/responses/r-1.2") == ("GET",)
    assert methods_of("/v1/models") == methods_of("/v1/models/org/name") == ("GET", "HEAD")
    for path in (
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flush_cache", "/reset_prefix_cache", "/sleep"),
        *("/wake_up", "/start_profile", "/collective_rpc", "/server_info", "/v1", "/", "/v1/modelsx", "/V1/models"),
        *("/v1/responses/a/b", "/inference/v1/generate", "/v1/chat/completions/render", "/kv_transfer/x"),
    ):
        assert methods_of(path) is None


async def test_the_plain_path_is_what_a_worker_gets(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        assert (await send(front, "//v1/x/..//%63ompletions?a=%2F", b'{"prompt": "x"}'))[0] == 200
        assert (await send(front, "/v1/completions/?b", b'{"prompt": "x"}'))[0] == 200
        assert [received.target for received in one.completions] == ["/v1/completions?a=%2F", "/v1/completions?b"]


async def test_the_rest_of_a_worker_is_for_administrators_and_for_one_worker(worker, router) -> None:
    keys = {"admin_key": "k", "api_key": "c"}
    async with worker() as one, worker() as other, router(one.url, other.url, ready=False, **keys) as front:
        names, key = ("x-kvist-worker", other.url), ("authorization", "Bearer k")
        for path in ("/v1/load_lora_adapter", "/release_memory", "/v1/../sleep", "/v1/%6Coad_lora_adapter"):
            for headers in ([], [names], [names, ("authorization", "Bearer c")]):
                assert (await send(front, path, headers=headers))[0] == 401
            for expected, headers in ((404, [key]), (400, [key, ("x-kvist-worker", "http://nobody:1")])):
                status, error = await send(front, path, headers=headers)
                assert (status, error["param"]) == (expected, "x-kvist-worker")
        assert not one.completions + other.completions
        status, _ = await send(front, "/v1//load_lora_adapter?x=1", b'{"lora": NaN}', headers=[key, names])
        assert (status, one.completions) == (200, [])
        (got,) = other.completions
        assert (got.target, got.body) == ("/v1/load_lora_adapter?x=1", b'{"lora": NaN}')
        assert not {"authorization", "x-kvist-worker"} & got.headers.keys()
        assert (await send(front, "/server_info", method="GET", headers=[key, names]))[0] == 404  # as the worker says
        other.kill()
        status, error = await send(front, "/flush_cache", headers=[key, names])
        assert (status, error["code"]) == (502, "worker_failed")


@pytest.mark.parametrize("path", sorted(FLEET_PATHS))
async def test_all_workers_are_asked_to_flush_or_profile_if_none_is_named(worker, router, http_bytes, path) -> None:
    async def is_busy(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"busy", status=400))

    async with worker() as one, worker() as other, router(one.url, other.url, ready=False, admin_key="k") as front:
        for url in (path, f"/./{path}?timeout=5"):
            assert (await front.client.post(url)).status_code == 401
            assert not one.completions + other.completions
        front.client.headers["authorization"] = "Bearer k"
        assert (await front.client.post(f"{path}?timeout=5", content=b"{}")).status_code == 200
        for each in (one, other):
            (received,) = each.completions
            assert (received.target, received.body) == (f"{path}?timeout=5", b"{}")
            assert "authorization" not in received.headers
        other.answer = is_busy
        answer = await front.client.post(path)
        said = {each["url"]: (each["status"], each["body"]) for each in answer.json()["workers"]}
        assert (answer.status_code, said[one.url][0], said[other.url]) == (400, 200, (400, "busy"))
        other.kill()
        answer = await front.client.post(path)
        assert (answer.status_code, answer.json()["workers"][1]["status"]) == (502, 502)
        assert (await front.client.post(path, headers={"x-kvist-worker": one.url})).status_code == 200


async def test_without_workers_there_is_none_to_flush(router) -> None:
    async with router() as front:
        assert (await front.client.post("/flush_cache")).status_code == 503


async def test_methods_and_models_are_the_endpoints_own(worker, router) -> None:
    async with worker(models=[{"id": "org/m", "object": "model"}]) as one, router(one.url) as front:
        for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/responses/r"), ("POST", "/v1/models")):
            assert (await send(front, path, method=method))[0] == 405
        found = await front.client.get("/v1/models/org/m")
        assert (found.status_code, found.json()) == (200, {"id": "org/m", "object": "model"})
        assert (await front.client.get("/v1/models/other")).status_code == 404
        assert (await send(front, "/v1/responses/r_1", method="GET"))[0] == 200
        assert (await send(front, "/v1/responses/r_1/cancel"))[0] == 200


HANDOFF = b'"kv_transfer_params": {"do_remote_prefill": true}'
PLAIN = b'{"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}], "prompt": "x"%b, %b}'
SPELLINGS = [
    *((PLAIN % (b"", HANDOFF)).decode().encode(code) for code in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le")),
    *((PLAIN % (b"", HANDOFF)).decode().encode(code) for code in ("utf-16-be", "utf-32", "utf-32-le", "utf-32-be")),
    *(PLAIN % (extra, HANDOFF) for extra in (b', "x": NaN', b', "x": Infinity', rb', "x": "\ud800"')),
    *(PLAIN % (extra, HANDOFF) for extra in (b', "x": "\xed\xa0\x80"', b', "x": "\xff"', b', "x": 1e999')),
    *(PLAIN % (b', "x": %b' % extra, HANDOFF) for extra in (b"[" * 5000 + b"]" * 5000, b"1" * 5000)),
    PLAIN % (b"", HANDOFF) + b"x",
    PLAIN % (b"", rb'"kv_transfer_param\u0073": {}'),
    PLAIN % (b"", b'"vllm_xargs": {' + HANDOFF + b'}, "vllm_xargs": {}'),
    PLAIN % (b"", b'"vllm_xargs": {"a": [{' + HANDOFF + b"}]}"),
    PLAIN % (b"", b'"sampling_params": [{"extra_args": {' + HANDOFF + b"}}]"),
    PLAIN % (b"", b'"prompt": [1], ' + HANDOFF),
    b'{"prompt": [1, 2, 3], ' + HANDOFF + b"}",
    b"[" + PLAIN % (b"", HANDOFF) + b"]",
    *(PLAIN % (b"", b'"%b": 1' % name.encode()) for name in sorted(FIELDS)),
]


async def test_no_spelling_of_a_handoff_reaches_a_worker(worker, router) -> None:
    paths = ["/v1/completions", "/v1/%63ompletions", "/v1/chat%2Fcompletions", "/v1//chat/./completions"]
    paths += ["/v1/responses", "/v1/embeddings", "/generate", "/v1/audio/speech", "/v1/responses/r/cancel"]
    kinds: list[dict[str, str]] = [JSON, {}, {"content-type": "text/plain"}]
    async with worker() as one, router(one.url) as front:
        for path in paths:
            for number, body in enumerate(SPELLINGS):
                status, error = await send(front, path, body, headers=kinds[number % 3])
                assert status == 400, (path, body[:300])
                assert error["message"].startswith(("path:", "body:")) or error["param"] in FIELDS
        assert not one.completions
        asked = b'{"prompt": "what are kv_transfer_params?", "tools": [{"data_parallel_rank": 1}]}'
        assert (await send(front, "/v1/completions", asked))[0] == 200


FORM = '--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b\r\n{}\r\n\r\n{{}}\r\n--b--\r\n'


@pytest.mark.parametrize(
    "header",
    [
        'content-disposition: form-data; name="kv_transfer_params"',
        'CONTENT-DISPOSITION: form-data; name="vllm_xargs"',
        'content-disposition: form-data; name="extra_body[kv_transfer_params]"',
        "content-disposition: form-data; name=kv_transfer_params",
        "content-disposition: form-data; name*=utf-8''kv%5Ftransfer_params",
        'content-disposition: form-data; name*0="kv_"; name*1="transfer_params"',
        'content-disposition: form-data; name="a"; name="kv_transfer_params"',
        'content-disposition: form-data; name="kv\\_transfer_params"',
        'content-disposition: form-data;\r\n name="kv_transfer_params"',
        'content-disposition: form-data; name="a"\r\n ; name="kv_transfer_params"',
    ],
)
async def test_no_form_hands_off(worker, router, header: str) -> None:
    kind = {"content-type": "multipart/form-data; boundary=b"}
    audio = 'content-disposition: form-data; name="file"; filename="a b.wav"\r\ncontent-type: audio/wav'
    async with worker() as one, router(one.url) as front:
        status, _ = await send(front, "/v1/audio/transcriptions", FORM.format(header).encode(), headers=kind)
        assert status == 400
        for other in (JSON, {}, {"content-type": "application/x-www-form-urlencoded"}):
            status, error = await send(front, "/v1/audio/transcriptions", b"bootstrap_room=1", headers=other)
            assert (status, error["message"][:13]) == (400, "content-type:")
        assert not one.completions
        assert (await send(front, "/v1/audio/transcriptions", FORM.format(audio).encode(), headers=kind))[0] == 200


async def test_headers_that_place_a_request_or_repack_its_body_are_refused(worker, router) -> None:
    refused = [[(name.decode().upper(), "1")] for name in HEADERS] + [[("x_data_parallel_rank", "1")]]
    refused += [[("content-encoding", "gzip")], [("content-type", "application/json; charset=utf-16")]]
    refused += [[("content-type", 'application/json;charset = "UTF-7"')], [*JSON.items(), ("content-type", "a/b")]]
    async with worker() as one, router(one.url) as front:
        for headers in refused:
            status, error = await send(front, "/v1/completions", b'{"prompt": "x"}', headers=headers)
            assert status == 400, headers
            assert error["message"].partition(":")[0] == headers[0][0].lower()
            assert "b'" not in error["message"]
        assert not one.completions
        for kind in ("application/json; charset=UTF-8", "text/plain"):
            assert (await send(front, "/v1/completions", b'{"prompt": "x"}', headers={"content-type": kind}))[0] == 200


@pytest.mark.parametrize("request_id", ["a" * 129, "a\x9bb", "caf\xe9", "x___prefill_addr_10.0.0.1:1___y"])
async def test_a_request_id_is_short_plain_and_names_no_worker(worker, router, request_id: str) -> None:
    async with worker() as one, router(one.url) as front:
        status, error = await send(front, "/v1/completions", b'{"prompt": "x"}', headers={"x-request-id": request_id})
        assert (status, error["param"]) == (400, "x-request-id")
        said = json.dumps({"prompt": "x", "request_id": request_id}).encode()
        assert (await send(front, "/v1/completions", said))[1]["param"] == "request_id"
        assert not one.completions


ORIGIN = "https://app.example:8443"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def test_pages_of_the_origins_named_may_use_what_clients_may(worker, router, http_bytes) -> None:
    async def open_to_all(_: Any, writer: Any) -> None:
        writer.write(http_bytes.response(b"{}", extra="access-control-allow-origin: *\r\n"))

    path, keys = "/v1/completions", {"api_key": "k", "cors_origins": (ORIGIN,)}
    async with worker(answer=open_to_all) as one, router(one.url, **keys) as front:
        asked = await front.client.options(path, headers={"origin": ORIGIN, **PREFLIGHT})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, ORIGIN)
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        for key, status in (("k", 200), ("wrong", 401)):
            sent = {"authorization": f"Bearer {key}", "origin": ORIGIN}
            answer = await front.client.post(path, json={"prompt": "x"}, headers=sent)
            told = [answer.headers.get_list(name) for name in ("access-control-allow-origin", "vary")]
            assert (answer.status_code, told) == (status, [[ORIGIN], ["origin"]])
        other = {"origin": "https://app.example", "authorization": "Bearer k"}
        for answer in (
            await front.client.options(path, headers=other | PREFLIGHT),
            await front.client.post(path, json={"prompt": "x"}, headers=other),
            await front.client.options("/workers", headers={"origin": ORIGIN, **PREFLIGHT}),
            await front.client.get("/workers", headers={"origin": ORIGIN}),
        ):
            assert "access-control-allow-origin" not in answer.headers
        refused = await front.client.options(path, headers={"origin": ORIGIN, "authorization": "Bearer k"})
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


async def test_any_page_or_none_may_be_let_in(worker, router) -> None:
    sent = {"origin": ORIGIN, **PREFLIGHT}
    async with worker() as one, router(one.url, cors_origins=("*",)) as front:
        assert (await front.client.options("/v1/models/m", headers=sent)).headers["access-control-allow-origin"] == "*"
        assert (await front.client.get("/v1/models/m", headers=sent)).headers["access-control-allow-origin"] == "*"
    async with worker() as one, router(one.url) as front:
        refused = await front.client.options("/v1/completions", headers=sent)
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (405, False)

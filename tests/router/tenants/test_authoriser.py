"""An authoriser says whose a key is: real ones over HTTP, which are slow, dead, lie, or have too much to remember."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from kvist.errors import InvalidValueError
from kvist.router.config import RouterConfig
from kvist.router.doors.embedded import Router
from kvist.router.tenants import authoriser
from kvist.router.tenants.authoriser import Authoriser
from kvist.router.tenants.tenant import Tenant

BODY = {"model": "m", "prompt": "hello"}
CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{", b"not HTTP at all\r\n\r\n"
OTHERS = {"admin_key": "admin", "ready": False}


@dataclass
class Says:
    """What an authoriser says of each key: a tenant, a status, or bytes as they are."""

    http: Any
    keys: dict[str, Any] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, received: Any, writer: asyncio.StreamWriter) -> None:
        await self.gate.wait()
        said = self.keys.get(received.headers["authorization"].removeprefix("Bearer "), 401)
        if isinstance(said, int):
            said = self.http.response(b"nobody's", status=said, extra="location: /elsewhere\r\n")
        writer.write(said if isinstance(said, bytes) else self.http.response(json.dumps(said).encode()))
        if said in CUT:
            writer.close()


@pytest.fixture
def authorising(worker, http_bytes):
    """Runs an authoriser, whose address is its `url` with the path `/verify`."""

    @asynccontextmanager
    async def running(**keys: Any):
        says = Says(http_bytes, keys)
        says.gate.set()
        async with worker(answer=says) as one:
            yield one, says

    return running


async def ask(front: Any, key: str | None, **fields: Any) -> tuple[int, str | None]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await front.client.post("/v1/completions", json=BODY | fields, headers=headers)
    if answer.status_code == 503:
        assert answer.headers["retry-after"] == "1"
    return answer.status_code, answer.json().get("error", {}).get("code")


async def test_the_authoriser_says_who_asks_and_what_for_once_a_key(
    worker, router, tenants, authorising, bearing, tmp_path
) -> None:
    models, log = [{"id": "m"}, {"id": "n"}], tmp_path / "log"
    said = {"acme": {"name": "acme", "models": ["m"], "max_requests": 5}, "gone": 403, "b": {"name": "never asked"}}
    async with worker(models=models) as one, authorising(**said) as (theirs, _):
        options = {"auth_url": theirs.url + "/verify", "tenants": tenants("b"), "access_log": str(log), **OTHERS}
        async with router(one.url, **options) as front:
            for key in ("acme", "acme", "b", "admin"):
                assert await ask(front, key) == (200, None)
            assert await ask(front, "acme", model="n") == (403, "model_not_allowed")
            assert await ask(front, "gone") == await ask(front, "gone") == (403, "key_forbidden")
            assert (
                await ask(front, "no") == await ask(front, "no") == await ask(front, None) == (401, "invalid_api_key")
            )
            sent = [(each.method, each.target, each.headers["authorization"]) for each in theirs.received]
            assert sent == [("GET", "/verify", f"Bearer {key}") for key in ("acme", "gone", "no")]
            assert all("authorization" not in received.headers for received in one.completions)
            theirs.received.clear()
            listed = await front.client.get("/v1/models", headers=bearing("acme"))
            assert [entry["id"] for entry in listed.json()["data"]] == ["m"]
            used = await front.client.get("/usage", headers=bearing("acme"))
            assert [(row["tenant"], row["requests"]) for row in used.json()["usage"]] == [("acme", 2)]
            for path in ("/v1/models", "/v1/models/m", "/usage"):
                for key, status in (("gone", 403), ("no", 401), ("new", 401)):
                    assert (await front.client.get(path, headers=bearing(key))).status_code == status
            assert (await front.client.get("/metrics")).status_code == 401
            assert len(theirs.received) == 1
    told = [(line["status"], line.get("tenant")) for line in map(json.loads, log.read_text().splitlines())]
    assert told[:5] == [(200, "acme"), (200, "acme"), (200, "b"), (200, "default"), (403, "acme")]
    assert {tenant for status, tenant in told if status == 401} == {None, ""}


@pytest.mark.parametrize(
    "said",
    [
        *(500, 302, 404, 204),
        *CUT,
        {},
        [],
        "acme",
        {"name": "default"},
        {"name": ""},
        {"name": "two words"},
        {"name": "acme", "max_requests": 0},
        {"name": "acme", "max_request": 1},
        {"name": "acme", "padding": "x" * 70_000},
    ],
)
async def test_what_is_no_answer_lets_nobody_in_and_is_not_kept(worker, router, authorising, said: Any) -> None:
    async with (
        worker() as one,
        authorising(acme=said) as (theirs, says),
        router(one.url, auth_url=theirs.url, **OTHERS) as front,
    ):
        assert await ask(front, "acme") == (503, "authoriser_unavailable")
        assert await ask(front, "admin") == (200, None)
        assert len(one.completions) == 1
        says.keys["acme"] = {"name": "acme"}
        assert await ask(front, "acme") == (200, None)
        assert {each.target for each in theirs.received} == {"/"}


async def test_slow_and_dead_it_lets_in_those_it_has_told_of_and_nobody_else(worker, router, authorising) -> None:
    async with (
        worker() as one,
        authorising(acme={"name": "acme"}, new={"name": "new"}) as (theirs, says),
        router(one.url, auth_url=theirs.url, auth_timeout_s=0.3, **OTHERS) as front,
    ):
        assert await ask(front, "acme") == (200, None)
        says.gate.clear()
        assert [await ask(front, key) for key in ("acme", "new")] == [(200, None), (503, "authoriser_unavailable")]
        says.gate.set()
        theirs.kill()
        assert [await ask(front, key) for key in ("acme", "new")] == [(200, None), (503, "authoriser_unavailable")]
        answer = await front.client.get("/v1/models", headers={"authorization": "Bearer new"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        await theirs.start()
        assert await ask(front, "new") == (200, None)


async def test_all_who_wait_for_a_key_wait_for_one_answer_also_if_the_first_leaves(
    worker, router, authorising, until
) -> None:
    async with (
        worker() as one,
        authorising(acme={"name": "acme"}) as (theirs, says),
        router(one.url, auth_url=theirs.url, request_timeout_s=30.0, **OTHERS) as front,
    ):
        says.gate.clear()
        first = asyncio.create_task(ask(front, "acme"))
        await until(lambda: theirs.received)
        waiting = [asyncio.create_task(ask(front, "acme")) for _ in range(20)]
        await until(lambda: front.service._server.statistics().num_connections > 20)
        first.cancel()
        await until(lambda: front.service._server.statistics().num_disconnects == 1)
        says.gate.set()
        assert await asyncio.gather(*waiting) == [(200, None)] * 20
        assert len(theirs.received) == 1


async def test_what_it_said_counts_for_a_time_so_that_keys_can_be_changed(authorising) -> None:
    now_s = 100.0
    async with (
        authorising(old={"name": "acme"}) as (theirs, says),
        Authoriser(theirs.url, 30.0, 5.0, lambda: now_s) as asked,
    ):

        def tell(key: bytes) -> object:
            return asked.cached(sha256(key).digest())

        assert await asked.ask(b"old") == Tenant(name="acme")
        assert await asked.ask(b"new") is HTTPStatus.UNAUTHORIZED
        says.keys = {"new": {"name": "acme", "max_requests": 1}}
        now_s += 29.9
        assert (tell(b"old"), tell(b"new")) == (Tenant(name="acme"), HTTPStatus.UNAUTHORIZED)
        now_s += 0.1
        assert (tell(b"old"), tell(b"new")) == (None, None)
        assert await asked.ask(b"old") is tell(b"old") is HTTPStatus.UNAUTHORIZED
        assert await asked.ask(b"new") == tell(b"new") == Tenant(name="acme", max_requests=1)
        assert (len(asked._tenants), len(asked._refusals), theirs.num_disconnects) == (1, 1, 0)


async def test_thousands_of_keys_drive_out_the_oldest_of_their_kind_alone(authorising, monkeypatch, until) -> None:
    monkeypatch.setattr(authoriser, "MAX_KEPT", 100)
    monkeypatch.setattr(authoriser, "MAX_ASKED", 8)
    keys = {f"k{number}": {"name": f"t{number}"} for number in range(150)}
    async with authorising(**keys) as (theirs, says), Authoriser(theirs.url, 30.0, 60.0) as asked:
        for number in range(150):
            assert await asked.ask(b"k%d" % number) == Tenant(name=f"t{number}")
        for number in range(2000):
            assert await asked.ask(b"made up %d" % number) is HTTPStatus.UNAUTHORIZED
        known = [number for number in range(150) if asked.cached(sha256(b"k%d" % number).digest())]
        assert known == [*range(50, 150)]
        assert (len(asked._tenants), len(asked._refusals), len(asked._asked)) == (100, 100, 0)
        says.gate.clear()
        theirs.received.clear()
        waiting = [asyncio.create_task(asked.ask(b"k%d" % number)) for number in range(8)]
        await until(lambda: len(theirs.received) == 8)
        assert await asked.ask(b"one more") is HTTPStatus.SERVICE_UNAVAILABLE
        says.gate.set()
        assert {each.name for each in await asyncio.gather(*waiting)} == {f"t{number}" for number in range(8)}


async def test_all_processes_ask_and_share_what_a_tenant_may_ask(worker, fronts_of, authorising, bearing) -> None:
    async with worker() as one, authorising(acme={"name": "acme", "requests_per_minute": 3}) as (theirs, _):
        config = RouterConfig(worker_urls=(one.url,), port=0, auth_url=theirs.url, shutdown_timeout_s=1.0)
        async with fronts_of(config, 2) as fronts, httpx.AsyncClient(timeout=60, trust_env=False) as client:
            statuses = []
            for number in range(4):
                url = fronts[number % 2].url + "/v1/completions"
                statuses.append((await client.post(url, json=BODY, headers=bearing("acme"))).status_code)
            assert statuses == [200, 200, 200, 429]
            assert len(theirs.received) == 2


@pytest.mark.parametrize(
    "url", ["auth:80", "ftp://auth", "http://auth/", "http://me:secret@auth/v", "http://auth/v?a=b"]
)
def test_where_it_is_must_be_an_address(url: str) -> None:
    with pytest.raises(InvalidValueError, match="auth_url"):
        RouterConfig(auth_url=url)


def test_a_gateway_that_asks_for_decisions_knows_by_itself_who_asks() -> None:
    with pytest.raises(InvalidValueError, match="the gateway knows who asks"):
        Router(RouterConfig(auth_url="http://auth"))

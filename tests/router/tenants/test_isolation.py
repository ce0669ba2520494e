"""What keeps caches apart: salts that nobody else can make, in bodies and in what blocks are called, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvist.errors import InvalidValueError
from kvist.events.hashing import block_hashes
from kvist.router.config import RouterConfig
from kvist.router.tenants.isolation import salt_of
from kvist.router.tenants.tenant import Tenant

SECRET = "a-secret-of-the-fleet"
VLLM = [{"id": "m", "owned_by": "vllm"}]


def test_salts_differ_by_secret_tenant_group_and_what_the_client_gives() -> None:
    a, b = Tenant(name="a"), Tenant(name="b")
    in_a, too = Tenant(name="c", group="a"), Tenant(name="d", group="a")
    given = [None, "x", "\0", "a", "a\0", salt_of(SECRET, a, None)]
    salts = {salt_of(secret, each, salt) for secret in (SECRET, "other") for each in (a, b, in_a) for salt in given}
    assert len(salts) == 2 * 3 * len(given)
    assert salt_of(SECRET, in_a, "x") == salt_of(SECRET, too, "x")
    assert salt_of(SECRET, a, None) == salt_of(SECRET, a, "")  # to engines, too, an empty salt is none
    assert {len(salt) for salt in salts} == {43}  # what looks like the digest of an image has 64


def test_isolation_needs_a_secret() -> None:
    with pytest.raises(InvalidValueError, match="isolation_secret"):
        RouterConfig(isolation="tenant")
    with pytest.raises(InvalidValueError, match=r"^isolation: got 'tenant', expected none without tenants"):
        RouterConfig(isolation="tenant", isolation_secret=SECRET)


async def test_the_engine_gets_the_salt_and_blocks_are_called_by_it(worker, router, tenants, bearing) -> None:
    options = {"tenants": tenants("a", "b"), "isolation": "tenant", "isolation_secret": SECRET, "admin_key": "x"}
    prompt = list(range(64))
    async with worker(models=VLLM) as one, router(one.url, **options, ready=False) as front:
        asked = front.service.keeper.index.match
        names: list[list[int]] = []
        front.service.keeper.index.match = lambda hashes, *rest: names.append(hashes.tolist()) or asked(hashes, *rest)
        for key, more in (("a", {}), ("b", {}), ("a", {"cache_salt": "mine", "max_tokens": 3}), ("x", {})):
            body = {"model": "m", "prompt": prompt, **more}
            answer = await front.client.post("/v1/completions", json=body, headers=bearing(key))
            assert answer.status_code == 200, answer.text
            salt = salt_of(SECRET, Tenant(name="default" if key == "x" else key), more.get("cache_salt"))
            assert json.loads(one.completions[-1].body) == body | {"cache_salt": salt}
            assert block_hashes(prompt, 16, cache_salt=salt).tolist() in names
            names.clear()


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/embeddings", "/generate", "/v1/chat/completions/batch", "/score"]
)
async def test_endpoints_that_take_no_salt_are_refused(worker, router, tenants, bearing, path: str) -> None:
    options = {"tenants": tenants("a"), "isolation": "tenant", "isolation_secret": SECRET}
    async with worker(models=VLLM) as one, router(one.url, **options) as front:
        body = {"model": "m", "prompt": [1], "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = await front.client.post(path, json=body, headers=bearing("a"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_isolated")
        answer = await front.client.post("/tokenize", json=body, headers=bearing("a"))
        assert answer.status_code == 200
        assert [received.target for received in one.completions] == ["/tokenize"]


@pytest.mark.parametrize("models", [[{"id": "m"}], [{"id": "m", "owned_by": "somebody"}]])
async def test_workers_of_other_engines_get_nothing(worker, router, tenants, bearing, models: Any) -> None:
    options = {"tenants": tenants("a"), "isolation": "tenant", "isolation_secret": SECRET}
    async with (
        worker(models=models) as other,
        worker(models=VLLM) as one,
        router(other.url, one.url, **options) as front,
    ):
        for _ in range(8):
            body = {"model": "m", "prompt": "hello"}
            assert (await front.client.post("/v1/completions", json=body, headers=bearing("a"))).status_code == 200
        assert (len(other.completions), len(one.completions)) == (0, 8)
        workers = await front.workers()
        assert "isolates tenants" in workers[other.url]["unavailable_reason"]
        assert workers[one.url]["unavailable_reason"] is None


async def test_what_each_has_used_is_told_to_no_other_tenant(worker, router, tenants, bearing) -> None:
    async with worker() as one, router(one.url, tenants=tenants("a"), admin_key="x", ready=False) as front:
        for key, status in (("a", 401), ("x", 200)):
            assert (await front.client.get("/metrics", headers=bearing(key))).status_code == status
    async with worker() as one, router(one.url, api_key="k", admin_key="x", ready=False) as front:
        assert (await front.client.get("/metrics")).status_code == 200

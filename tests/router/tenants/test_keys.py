"""Whose key it is: files of tenants, hostile keys, models that a tenant may not ask for, and files that break."""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import InvalidValueError
from kvist.http import Request
from kvist.openai.errors import RequestError
from kvist.router.config import RouterConfig
from kvist.router.tenants import keys
from kvist.router.tenants.keys import Keys
from kvist.router.tenants.tenant import DEFAULT, read_tenants

BODY = {"model": "m", "prompt": "hello"}


async def ask(front: Any, key: str | None, **fields: Any) -> tuple[int, str | None]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await front.client.post("/v1/completions", json=BODY | fields, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code")


async def test_each_key_is_its_tenants_and_no_other_opens(worker, router, tenants, tenant, tmp_path) -> None:
    path, log, nobody = tenants(tenant("a", "k1", "k2"), "b"), tmp_path / "log", sha256(b"").hexdigest()
    async with worker() as one:
        options = {"api_key": "own", "admin_key": "admin", "access_log": str(log), "ready": False}
        async with router(one.url, tenants=path, **options) as front:
            for key in ("k1", "k2", "b", "own", "admin"):
                assert await ask(front, key) == (200, None)
            digest = sha256(b"k1").hexdigest()
            for key in (None, "k", "k11", "K1", "a", digest, nobody, "k1 k2", "k1,b", "x" * 5000):
                assert await ask(front, key) == (401, "invalid_api_key")
        assert all("authorization" not in received.headers for received in one.completions)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["tenant"] for line in told if line["status"] == 200][:5] == ["a", "a", "b", "default", "default"]
    assert all("tenant" not in line for line in told if line["status"] == 401)


@pytest.mark.parametrize("sent", [None, b"", b"Bearer", b"Bearer ", b"Bearer  \t", b"Basic a", b"a", b"Bearer a\xff"])
def test_a_key_that_is_empty_or_sent_otherwise_opens_nothing(tenants, tenant, sent: bytes | None) -> None:
    known = Keys(RouterConfig(tenants=tenants("a", tenant("careless", "")), admin_key="x"))
    fields = [] if sent is None else [(b"authorization", sent)]
    with pytest.raises(RequestError) as refusal:
        known.tenant_of(Request("POST", "/v1/completions", fields, b"", None))
    assert refusal.value.status == 401


@pytest.mark.parametrize("sent", [b"Bearer a", b"bearer  a"])
def test_keys_of_settings_are_those_of_one_more_tenant(sent: bytes) -> None:
    asked = Request("POST", "/v1/completions", [(b"authorization", sent)], b"", None)
    for config in (RouterConfig(api_key="a"), RouterConfig(api_key="b", admin_key="a"), RouterConfig(admin_key="x")):
        assert Keys(config).tenant_of(asked) is DEFAULT


async def test_a_key_may_be_sent_as_anthropics_clients_do_and_stays_with_the_router(worker, router, tenants) -> None:
    async with worker() as one:
        async with router(one.url, tenants=tenants("a"), admin_key="x", ready=False) as front:
            for headers, status in (
                ({"x-api-key": "a"}, 200),
                ({"x-api-key": "b"}, 401),
                ({"x-api-key": "b", "authorization": "Bearer a"}, 200),
                ({"x-api-key": "a", "authorization": "Bearer b"}, 401),
                ({"x-api-key": "a", "authorization": "Basic a"}, 401),
            ):
                answer = await front.client.post("/v1/completions", json=BODY, headers=headers)
                assert answer.status_code == status
        async with router(one.url, admin_key="x", ready=False) as front:
            await front.client.post("/v1/completions", json=BODY, headers={"x-api-key": "x"})
            assert (await front.client.get("/workers", headers={"x-api-key": "x"})).status_code == 401
            assert len(one.completions) == 3
            assert all("x-api-key" not in received.headers for received in one.completions)
            await front.client.post("/v1/completions", json=BODY, headers={"x-api-key": "workers-own"})
        assert one.completions[-1].headers["x-api-key"] == "workers-own"


async def test_a_tenant_gets_the_models_it_may_ask_for_by_whatever_name(worker, router, tenants, tenant) -> None:
    path = tenants(tenant("a", models=["m"]), "b")
    models = [{"id": "m"}, {"id": "n"}, {"id": "sql", "parent": "m"}]
    options = {"tenants": path, "aliases": {"mine": {"m": 1.0}, "other": {"n": 1.0}}, "admin_key": "x", "ready": False}
    async with worker(models=models) as one, router(one.url, **options) as front:
        for model, fields in (("m", {}), ("mine", {}), ("m", {"lora_path": "m"})):
            assert await ask(front, "a", model=model, **fields) == (200, None)
        for model, fields in (
            ("n", {}),
            ("sql", {}),
            ("other", {}),
            ("unheard of", {}),
            ("m", {"lora_path": "sql"}),
            ("m", {"lora_path": ["m", "sql"]}),
            (None, {}),
        ):
            assert await ask(front, "a", model=model, **fields) == (403, "model_not_allowed")
        assert await ask(front, "b", model="sql") == (200, None)

        async def listed(key: str) -> set[str]:
            answer = await front.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            return {entry["id"] for entry in answer.json()["data"]}

        assert await listed("a") == {"m", "mine"}
        assert await listed("b") == {"m", "n", "sql", "mine", "other"}
        answer = await front.client.get("/v1/models/n", headers={"authorization": "Bearer a"})
        assert answer.status_code == 404


async def test_a_file_is_followed_and_one_that_breaks_changes_nothing(
    worker, router, tenants, monkeypatch, caplog, until
) -> None:
    monkeypatch.setattr(keys, "CHECK_INTERVAL_S", 0.01)
    path = tenants("a")
    async with worker() as one, router(one.url, tenants=path, admin_key="x", ready=False) as front:
        assert [await ask(front, key) for key in ("a", "b")] == [(200, None), (401, "invalid_api_key")]
        tenants("b")
        await until(lambda: front.service._keys._listed.keys() == {sha256(b"b").digest()})
        assert [await ask(front, key) for key in ("a", "b")] == [(401, "invalid_api_key"), (200, None)]
        for num_broken, broken in enumerate((lambda: Path(path).write_text('{"tenants": ['), Path(path).unlink), 1):
            broken()
            with caplog.at_level(logging.ERROR):
                await until(lambda n=num_broken: sum("tenants not reloaded" in each for each in caplog.messages) == n)
            assert await ask(front, "b") == (200, None)
        tenants("a", "b")
        await until(lambda: len(front.service._keys._listed) == 2)


@pytest.mark.parametrize(
    ("listed", "field"),
    [
        ([{"name": "a", "keys": ["secret"]}], "keys"),
        ([{"name": "a", "keys": []}], "keys"),
        ([{"name": "a"}], "keys"),
        ([{"name": "", "keys": ["0" * 64]}], "name"),
        ([{"name": "a b", "keys": ["0" * 64]}], "name"),
        ([{"name": "default", "keys": ["0" * 64]}], "default"),
        ([{"name": "a", "keys": ["0" * 64], "modles": ["m"]}], "modles"),
        ([{"name": "a", "keys": ["0" * 64]}, {"name": "b", "keys": ["0" * 64]}], "each key once"),
        ([{"name": "a", "keys": ["0" * 64]}, {"name": "a", "keys": ["1" * 64]}], "each name once"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_field(tmp_path: Path, listed: Any, field: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": listed}))
    with pytest.raises(InvalidValueError, match=field) as refusal:
        read_tenants(path)
    assert "secret" not in str(refusal.value)


def test_toml_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenants]]\nname = "a"\nkeys = ["{sha256(b"k").hexdigest()}"]\nmodels = ["m"]\n')
    (found,) = read_tenants(path).items()
    assert (found[0], found[1].name, found[1].models) == (sha256(b"k").digest(), "a", frozenset({"m"}))

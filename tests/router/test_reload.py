"""Another configuration while the router runs: what it names anew comes, what it drops drains, the rest is told."""

from __future__ import annotations

import asyncio
import re
import ssl
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from kvist.errors import InvalidValueError
from kvist.router.config import RELOADED, RouterConfig
from kvist.router.doors.picker import Picker
from kvist.router.doors.service import RouterService
from kvist.settings import parse_values


def given(front: Any, **values: Any) -> RouterConfig:
    return replace(front.service._config, **values)


async def test_a_worker_that_settings_name_again_before_it_has_drained_stays(worker, router, http_bytes, until) -> None:
    go_on = asyncio.Event()

    async def wait(_: Any, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(http_bytes.response(b"{}"))

    async with worker(answer=wait) as one, worker() as two, router(one.url, drain_timeout_s=600.0) as front:
        running = asyncio.create_task(front.complete())
        await until(lambda: one.completions)
        front.service.reload(given(front, worker_urls=(two.url,)))
        await front.until_state(two.url, "healthy")
        assert (await front.workers())[one.url]["state"] == "draining"
        assert (await front.complete()).headers["x-kvist-worker"] == two.url
        front.service.reload(given(front, worker_urls=(one.url,)))
        await front.until_state(two.url, "gone")
        assert (await front.workers())[one.url]["state"] == "healthy"
        go_on.set()
        assert (await running).status_code == 200
        assert (await front.complete()).headers["x-kvist-worker"] == one.url
        front.service.reload(given(front, worker_urls=()))
        await front.until_state(one.url, "gone")


async def test_what_an_administrator_did_to_workers_outlasts_settings_that_do_not_speak_of_them(worker, router) -> None:
    async with worker() as named, worker() as added, worker() as new, router(named.url) as front:
        await front.client.post("/workers", json={"url": added.url})
        await front.client.delete("/workers", params={"url": named.url})
        await front.until_state(named.url, "gone")
        front.service.reload(given(front, worker_urls=(named.url, new.url)))
        assert set(await front.workers()) == {added.url, new.url}


async def test_a_worker_takes_another_role_and_another_stream_from_settings(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        stream = "tcp://127.0.0.1:50003"
        sources = {one.url: (stream,)}
        front.service.reload(given(front, worker_urls=(), decode_worker_urls=(one.url,), kv_event_sources=sources))
        await front.until_sources(one.url, stream)
        assert (await front.workers())[one.url]["role"] == "decode"


async def test_policy_keys_and_bounds_change_and_what_cannot_is_named(worker, router, logged) -> None:
    async with worker() as one, router(one.url, policy="round-robin") as front:
        front.service.reload(given(front, policy="round-robin", admin_key="a", port=1, state_interval_s=1.0))
        assert (await front.client.get("/workers")).status_code == 401
        front.client.headers["authorization"] = "Bearer a"
        assert (await front.explain([1]))["policy"] == "round-robin"
        front.service.reload(given(front, policy="kv"))
        assert (await front.explain([1]))["policy"] == "round-robin"
    assert [line.partition("fields=")[2] for line in logged("kvist.router.config") if "need a restart" in line] == [
        "state_interval_s,port",
        "policy",
    ]


async def test_whatever_a_worker_is_asked_has_the_new_key(worker, router, until, monkeypatch) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.01)

    async def wait(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker(answer=wait) as one, router(one.url, worker_api_key="old", policy="round-robin") as front:
        running = asyncio.create_task(front.complete())  # busy workers are asked for their metrics
        await until(lambda: one.completions)
        front.service.reload(given(front, worker_api_key="new"))
        for _ in range(3):  # what was under way has ended by then
            one.received.clear()
            await until(lambda: {"/health", "/metrics"} <= {received.target for received in one.received})
        assert {received.headers["authorization"] for received in one.received} == {"Bearer new"}
        running.cancel()


@pytest.mark.parametrize("door", [RouterService, Picker])
async def test_certificates_are_renewed_and_those_that_do_not_fit_their_keys_are_not(
    door: type[RouterService | Picker], tmp_path: Path
) -> None:
    authority, trust = trustme.CA(), ssl.create_default_context()
    trust.set_alpn_protocols(["h2", "http/1.1"])
    authority.configure_trust(trust)
    first, second = (authority.issue_cert("127.0.0.1") for _ in range(2))
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"

    def install(certificate: trustme.LeafCert, private_key: trustme.LeafCert) -> None:
        certificate.cert_chain_pems[0].write_to_path(str(chain))
        private_key.private_key_pem.write_to_path(str(key))

    async def shown() -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writer.close()
        return ssl.DER_cert_to_PEM_cert(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))

    install(first, first)
    config = RouterConfig(port=0, policy="round-robin", tls_certificate=str(chain), tls_key=str(key))
    async with door(config) as service:
        port = service.port if isinstance(service, Picker) else int(service.url.rpartition(":")[2])
        assert await shown() == first.cert_chain_pems[0].bytes().decode()
        install(second, first)
        with pytest.raises(InvalidValueError, match="tls_certificate"):
            service.reload(replace(config, admin_key="a"))
        assert service._config.admin_key is None
        assert await shown() == first.cert_chain_pems[0].bytes().decode()
        install(second, second)
        service.reload(config)
        assert await shown() == second.cert_chain_pems[0].bytes().decode()


def test_the_operators_page_names_what_is_reloaded_and_flags_that_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    listed = page.partition("\n- workers: ")[2].partition("\n\nThe log")[0]
    assert set(re.findall(r"`([a-z_]+_[a-z_]+|policy|models|aliases|discover)`", listed)) == RELOADED
    names, known = set(re.findall(r"`--([a-z-]+)`", page)), {each.name for each in fields(RouterConfig)}
    assert {name.replace("-", "_") for name in names} - {"config", "log_level"} <= known
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    assert RouterConfig(**parse_values(RouterConfig, tomllib.loads(settings))).drain_delay_s == 10.0


def test_only_keys_that_exist_are_reloaded() -> None:
    assert {each.name for each in fields(RouterConfig)} >= RELOADED

"""Another configuration while the router runs: what it names anew comes, what it drops drains, the rest is told."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

from kvist.router.config import RELOADED, RouterConfig


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
    async with worker() as one, router(one.url, policy="random") as front:
        front.service.reload(given(front, policy="round-robin", admin_key="a", port=1, state_interval_s=1.0))
        assert (await front.client.get("/workers")).status_code == 401
        front.client.headers["authorization"] = "Bearer a"
        assert (await front.explain([1]))["policy"] == "round-robin"
        front.service.reload(given(front, policy="kv"))
        assert (await front.explain([1]))["policy"] == "round-robin"
    assert [
        line.partition("fields=")[2] for line in logged("kvist.router.doors.service") if "need a restart" in line
    ] == [
        "state_interval_s,port",
        "policy",
    ]


def test_only_keys_that_exist_are_reloaded() -> None:
    assert {each.name for each in fields(RouterConfig)} >= RELOADED

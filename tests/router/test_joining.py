"""A router serves while its index is compiled, by load, and by prefix from when the index has joined."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvist.cli import main
from kvist.indexer import compilation

TOKENS = list(range(1, 70))


async def test_requests_are_routed_by_load_until_the_index_has_joined(worker, router, engine, compiling) -> None:
    with engine("w") as cache:
        cache.store(TOKENS)
        async with worker(server_info=cache.server_info) as one, router(one.url) as front:
            await compiling.started.wait()
            assert (await front.client.get("/health")).json()["cold_start_s"] is None
            answer = await front.client.get("/readiness")
            assert (answer.status_code, answer.json()["ready"], answer.json()["index"]) == (200, True, "compiling")
            (candidate,) = (await front.explain(TOKENS))["candidates"]
            assert candidate["overlap_blocks"]["gpu"] == 0
            assert (await front.complete(TOKENS)).status_code == 200
            assert "kvist_index_blocks" not in await front.metrics()
            compiling.tell(is_done=True)

            async def has_joined() -> bool:
                return (await front.client.get("/readiness")).json()["index"] == "ready"

            await front.until(has_joined)
            assert (await front.client.get("/health")).json()["cold_start_s"] > 0
            await front.until_overlap(one.url, TOKENS, 4)


async def test_a_router_that_stops_ends_the_process_that_compiles(router, compiling) -> None:
    async with router():
        await compiling.started.wait()
    await compiling.ended.wait()


async def test_a_worker_that_says_nothing_keeps_no_router_from_listening(router, monkeypatch) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.FIRST_CHECKS_S", 0.1)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with router(f"http://127.0.0.1:{port}", ready=False, health_timeout_s=3600.0) as front:
            assert (await front.client.get("/health")).status_code == 200


def test_an_index_that_cannot_join_ends_the_command_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilation, "_is_loaded", False)
    monkeypatch.setattr("kvist.indexer.compilation.find_filled", lambda: Path("cache"))
    monkeypatch.setattr("kvist.indexer.compilation.find_spec", lambda _: None)
    assert main(["route", "--port", "0"]) == 2
    assert "numba is not installed: pip install 'kvist[router]'" in capsys.readouterr().err

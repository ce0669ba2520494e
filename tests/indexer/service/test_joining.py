"""A service listens while its index is compiled and restored, and answers queries from when that has joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.cli import main
from kvist.indexer import compilation
from kvist.indexer.service import IndexConfig
from kvist.indexer.service.service import IndexService

TOKENS = list(range(8))


async def test_queries_are_answered_once_the_index_has_joined(
    start_index, start_vllm, free_port, eventually, compiling
) -> None:
    port = free_port()
    start_vllm(port).store(1, TOKENS[:4])
    client = await start_index()
    await compiling.started.wait()
    assert (await client.get("/health")).json()["cold_start_s"] is None
    for path in ("/readiness", "/workers", "/metrics"):
        answer = await client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    query = {"model_name": "default", "token_ids": TOKENS}
    answer = await client.http.post("/query", json=query)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == {"error": "the index is compiling; GET /readiness says when it has joined"}
    compiling.tell(is_done=True)

    async def has_joined() -> bool:
        return (await client.get("/readiness")).status_code == 200

    await eventually(has_joined)
    assert (await client.get("/readiness")).json() == {"ready": True, "index": "ready"}
    assert (await client.get("/health")).json()["cold_start_s"] > 0
    assert (await client.http.post("/query", json=query)).status_code == 404  # nobody has registered
    await client.register(port)
    await eventually(lambda: client.scores(TOKENS))
    assert await client.scores(TOKENS) == {"1": {"0": 4}}


async def test_a_peer_that_has_not_joined_is_none_to_start_from(start_index, compiling, monkeypatch) -> None:
    first = await start_index()
    await compiling.started.wait()
    monkeypatch.setattr(compilation, "_is_loaded", True)
    second = await start_index(peers=(first.service.url,))
    assert (await second.get("/readiness")).status_code == 200
    assert (await first.get("/readiness")).status_code == 503


async def test_a_service_that_stops_ends_the_process_that_compiles(compiling) -> None:
    async with IndexService(IndexConfig(port=0)):
        await compiling.started.wait()
    await compiling.ended.wait()


def test_an_index_that_cannot_join_ends_the_command_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilation, "_is_loaded", False)
    monkeypatch.setattr("kvist.indexer.compilation.find_filled", lambda: Path("cache"))
    monkeypatch.setattr("kvist.indexer.compilation.find_spec", lambda _: None)
    assert main(["index", "--port", "0"]) == 2
    assert "numba is not installed: pip install 'kvist[router]'" in capsys.readouterr().err


async def test_what_an_engine_held_before_is_known_without_waiting_for_a_tick(
    start_index, start_vllm, free_port, eventually, monkeypatch
) -> None:
    monkeypatch.setattr("kvist.events.follow.TICK_S", 3600.0)
    port = free_port()
    start_vllm(port).store(1, TOKENS[:4])
    client = await start_index()
    await client.register(port)
    await eventually(lambda: client.scores(TOKENS))

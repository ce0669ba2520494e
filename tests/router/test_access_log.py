"""One line a request, whatever came of it; what cannot be written in time is counted and holds nobody up."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import InvalidValueError
from kvist.http import Request
from kvist.router import access_log
from kvist.router.access_log import AccessLog

REQUEST = Request("POST", "/v1/completions", [], b"", None)


def write(log: AccessLog, number: int) -> None:
    log.write(REQUEST, str(number).encode(), 200, None)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def ids_of(path: Path) -> list[int]:
    return [int(each["request_id"]) for each in lines_of(path)]


def test_lines_are_written_in_order_at_the_latest_when_the_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps({"request_id": "-1"}) + "\n")
    log = AccessLog(str(path), 1.0)
    for number in range(1000):
        write(log, number)
    log.close()
    assert (ids_of(path), log.num_dropped) == (list(range(-1, 1000)), 0)


async def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path, until, monkeypatch) -> None:
    monkeypatch.setattr(access_log, "FLUSH_INTERVAL_S", 0.01)
    path, moved = tmp_path / "log", tmp_path / "log.1"
    log = AccessLog(str(path), 1.0)
    write(log, 1)
    await until(lambda: path.stat().st_size > 0)
    path.rename(moved)
    write(log, 2)
    await until(lambda: path.exists() and path.stat().st_size > 0)
    log.close()
    assert (ids_of(moved), ids_of(path)) == ([1], [2])


def test_who_does_not_read_costs_lines_and_no_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(access_log, "MAX_WEIGHT", 1000)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log, num_written = AccessLog(str(path), 1.0), 10_000
    for number in range(num_written):
        write(log, number)
    os.set_blocking(reader, True)
    got: list[bytes] = []

    def read() -> None:
        while piece := os.read(reader, 65536):
            got.append(piece)

    reading = threading.Thread(target=read)
    reading.start()
    log.close()
    reading.join()
    os.close(reader)
    numbers = [int(json.loads(text)["request_id"]) for text in b"".join(got).splitlines()]
    assert numbers == sorted(set(numbers))
    assert (len(numbers) + log.num_dropped, log.num_dropped > 0) == (num_written, True)


def test_a_full_disk_costs_lines_that_are_counted_and_told_of(caplog) -> None:
    log = AccessLog("/dev/full", 1.0)
    for number in range(300):
        write(log, number)
    log.close()
    assert log.num_dropped == 300
    assert "access log dropped lines num_dropped=300 reason=[Errno 28]" in caplog.text


def test_a_torn_line_spoils_no_other(tmp_path: Path, monkeypatch) -> None:
    path, system_write, num_calls = tmp_path / "log", os.write, 0

    def write_in_part(descriptor: int, data: memoryview) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError(28, "No space left on device")
        return system_write(descriptor, data[: len(data) // 2] if num_calls == 1 else data)

    monkeypatch.setattr(access_log.os, "write", write_in_part)
    monkeypatch.setattr(access_log, "_WEIGHT_AT_ONCE", 1)
    log = AccessLog(str(path), 1.0)
    for number in range(3):
        write(log, number)
    log.close()
    _, *whole = path.read_text().splitlines()
    assert [json.loads(text)["request_id"] for text in whole] == ["1", "2"]
    assert log.num_dropped == 1


def test_of_a_sample_everything_that_failed_is_there(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "log"), 1e-12)
    for number in range(100):
        log.write(REQUEST, str(number).encode(), 200, None if number % 25 else "why")
    log.close()
    assert (ids_of(tmp_path / "log"), log.num_dropped) == ([0, 25, 50, 75], 0)


@pytest.mark.parametrize("path", ["", "no/such/folder/log"])
async def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, router, path: str) -> None:
    with pytest.raises(InvalidValueError, match="access_log"):
        async with router(policy="round-robin", access_log=str(tmp_path / path)):
            pass


async def test_each_request_has_its_line(worker, router, http_bytes, until, tmp_path: Path) -> None:
    tokens, path = list(range(64)), tmp_path / "log"
    event, leaving = b'data: {"choices": []}\n\n', asyncio.Event()

    async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
        user = json.loads(received.body).get("user")
        if user == "wrong":
            writer.write(http_bytes.response(b'{"error": {}}', status=400))
        elif user is None:
            writer.write(http_bytes.response(http_bytes.completion(cached_tokens=32, prompt_tokens=64)))
        else:
            writer.write(http_bytes.event_stream_head + http_bytes.chunk(event))
            await writer.drain()
            if user == "cut":
                writer.transport.abort()
            leaving.set()

    began = datetime.now(UTC)
    async with worker(answer=answer) as one:
        keys = {"api_key": "k", "block_size": 16, "access_log": str(path), "access_log_sample": 1.0}
        async with router(one.url, **keys) as front:
            front.client.headers["authorization"] = "Bearer k"
            front.hold(one.url, tokens[:48])
            await front.complete(tokens)
            await front.complete("x", user="wrong")
            await front.complete("x", user="cut", stream=True)
            await front.complete("x", model="?" * 1000)
            await front.client.post("/v1/completions", content=b"{", headers={"x-request-id": "mine"})
            await front.client.post("/v1/completions", json={}, headers={"authorization": "Bearer wrong"})
            leaving.clear()
            async with front.client.stream("POST", "/v1/completions", json={"prompt": "x", "user": "u"}):
                await leaving.wait()
            await until(lambda: not front.service._forwarder.load.num_running)
            assert (await front.metrics())["kvist_router_access_log_dropped_total"] == 0
            await front.client.get("/health")
    whole, wrong, cut, unknown, malformed, unauthorized, left = lines_of(path)
    assert began < datetime.fromisoformat(whole["time"]) < datetime.now(UTC) + timedelta(seconds=1)
    assert 0 < whole["first_byte_s"] <= whole["total_s"]
    told = {"input_tokens": 64, "output_tokens": 1, "predicted_cached_tokens": 48, "cached_tokens": 32}
    told |= {"status": 200, "model": "m", "worker": one.url, "num_attempts": 1, "queue_s": 0.0, "error": None}
    told |= {"method": "POST", "path": "/v1/completions"}
    assert told.items() <= whole.items()
    assert (wrong["status"], wrong["worker"], wrong["error"]) == (400, one.url, "answered by the worker")
    assert (cut["status"], one.url in cut["error"], cut["output_tokens"]) == (200, True, None)
    assert (unknown["status"], len(unknown["model"]), unknown["worker"], len(unknown["error"])) == (404, 300, None, 300)
    assert (malformed["status"], malformed["request_id"], malformed["model"]) == (400, "mine", None)
    assert (unauthorized["status"], "API key" in unauthorized["error"]) == (401, True)
    assert (left["status"], left["error"], left["first_byte_s"] > 0) == (200, "the client left", True)


async def test_a_wait_for_room_is_in_the_line(worker, router, until, tmp_path: Path) -> None:
    path, go_on = tmp_path / "log", asyncio.Event()

    async def wait(_: Any, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with (
        worker(answer=wait) as one,
        router(one.url, max_worker_requests=1, max_queued=1, access_log=str(path)) as front,
    ):
        asked = [asyncio.create_task(front.complete("first"))]
        await until(lambda: one.completions)
        asked.append(asyncio.create_task(front.complete("second")))
        await until(lambda: list(front.service._forwarder.admission.queued.values()) == [1])
        assert (await front.complete("third")).status_code == 429
        go_on.set()
        await asyncio.gather(*asked)
        await front.service.__aexit__(None, None, None)
        third, first, second = lines_of(path)
        assert (first["queue_s"], 0 < second["queue_s"] <= second["first_byte_s"]) == (0.0, True)
        assert (third["status"], third["num_attempts"]) == (429, 0)
        assert third["error"] == "too many requests wait for a worker"

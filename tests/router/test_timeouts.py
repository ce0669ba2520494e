"""Each wait for a worker ends when its flag says, and the client is told which it was."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

EVENT = b'data: {"choices": []}\n\n'


@pytest.mark.parametrize(
    ("timeout", "begun", "code", "reason"),
    [
        ("first_byte_timeout_s", None, "worker_failed", "first_byte timeout after 0.05 s"),
        ("idle_timeout_s", EVENT, "worker_failed", "idle timeout after 0.05 s"),
        ("request_timeout_s", None, "request_timeout", "the request was not answered within 0.05 s"),
    ],
)
async def test_a_worker_that_takes_too_long_is_given_up(
    worker, router, http_bytes, timeout: str, begun: bytes | None, code: str, reason: str
) -> None:
    async def hang(_: Any, writer: asyncio.StreamWriter) -> None:
        if begun is not None:
            writer.write(http_bytes.event_stream_head + http_bytes.chunk(begun))
        await asyncio.Event().wait()

    async with worker(answer=hang) as one, router(one.url, **{timeout: 0.05}) as front:
        answer = await front.complete()
        assert answer.status_code == (504 if begun is None else 200)
        error = json.loads(answer.content.removeprefix((begun or b"") + b"data: "))["error"]
        assert error["code"] == code
        assert error["message"].endswith(reason)
        assert front.service._forwarder.load.running_requests(one.url) == 0


async def test_a_stream_that_goes_on_beyond_the_requests_time_ends_and_its_worker_is_not_blamed(
    worker, router, http_bytes
) -> None:
    async def stream(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head)
        while True:
            writer.write(http_bytes.chunk(EVENT))
            await writer.drain()
            await asyncio.sleep(0.001)

    async with worker(answer=stream) as one, router(one.url, request_timeout_s=0.2, breaker_failures=1) as front:
        answer = await front.complete(stream=True)
        *events, last = answer.content.removesuffix(b"\n\n").split(b"\n\n")
        assert set(events) == {EVENT.removesuffix(b"\n\n")}
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "request_timeout"
        assert (await front.workers())[one.url]["circuit"] == "closed"
        one.answer = None
        assert (await front.complete()).status_code == 200


async def test_a_worker_that_does_not_answer_the_handshake_is_given_up(worker, router) -> None:
    async with worker() as one:
        url = one.url.replace("http:", "https:")
        async with router(url, connect_timeout_s=0.05, ready=False) as front:

            async def is_told() -> bool:
                return "no connection within 0.05 s" in (await front.client.get("/readiness")).text

            await front.until(is_told)

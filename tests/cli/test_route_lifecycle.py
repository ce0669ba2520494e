"""`kvist route` as an operator meets it: real processes, real signals, requests under way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from kvist.http import HttpServer, Request, Responder

Until = Callable[[Callable[[], object]], Awaitable[None]]

EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Worker:
    """Begins each stream with what its request's prompt says, and goes on when it is let."""

    server: HttpServer = field(init=False)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    num_completions: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def handle(self, request: Request, responder: Responder) -> None:
        if request.path == "/v1/models":
            responder.answer(200, [], b'{"data": [{"id": "m", "object": "model"}]}')
        elif request.path == "/v1/completions":
            self.num_completions += 1
            asked = json.loads(request.body)
            if asked.get("stream"):
                responder.start(200, [(b"content-type", b"text/event-stream")])
                await responder.write(asked["prompt"].encode())
                await self.go_on.wait()
                await responder.write(EVENT + DONE)
                responder.end()
            else:
                await (self.go_on.wait() if asked["prompt"] == "wait" else asyncio.sleep(0))
                responder.answer(200, [], b"{}")
        else:
            responder.answer(200 if request.path == "/health" else 404, [])


@dataclass
class Router:
    process: Process
    client: httpx.AsyncClient
    url: str

    async def complete(self, prompt: str, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    @asynccontextmanager
    async def stream(self, begun: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the rest of a stream's bytes that has begun with these."""
        body = {"model": "m", "prompt": begun.decode(), "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == begun
            yield pieces

    async def until_ready(self, expected: dict[str, object]) -> None:
        """Wait until `/readiness` shows what is expected."""
        async with asyncio.timeout(180):
            while not expected.items() <= (await self.client.get("/readiness")).json().items():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def logged(self, text: str) -> str:
        """Return the next line of the log that has this text."""
        assert self.process.stderr is not None
        async with asyncio.timeout(180):
            while text not in (line := (await self.process.stderr.readline()).decode()):
                assert line, "the log has ended"
        return line

    async def end(self) -> int:
        async with asyncio.timeout(180):
            return await self.process.wait()


async def until_cut(pieces: AsyncIterator[bytes]) -> bytes:
    """Return the bytes that come before the connection ends in the middle of the answer."""
    read = b""
    try:
        async for piece in pieces:
            read += piece
    except httpx.RemoteProtocolError:
        return read
    pytest.fail(f"a whole answer: {read!r}")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    async with HttpServer(made.handle) as made.server:
        yield made
        made.go_on.set()


@asynccontextmanager
async def running(*flags: str) -> AsyncIterator[Router]:
    command = [sys.executable, "-m", "kvist", "route", "--port", "0", "--policy", "least-loaded", *flags]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[4]
        async with httpx.AsyncClient(base_url=url, timeout=180, trust_env=False) as client:
            yield Router(process, client, url)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_router_that_drains_is_not_ready_takes_requests_and_ends_them_at_a_second_signal(
    worker: Worker, until: Until
) -> None:
    async with running("--worker-urls", worker.url, "--drain-delay-s", "600") as router:
        await router.until_ready({"ready": True})
        async with router.stream(EVENT) as whole, router.stream(b"data: {") as half:
            waiting = asyncio.create_task(router.complete("wait"))
            os.kill(router.process.pid, signal.SIGTERM)
            await router.until_ready({"ready": False, "reason": "draining"})
            assert (await router.client.get("/readiness")).status_code == 503
            assert (await router.complete("now")).status_code == 200
            await until(lambda: worker.num_completions == 4)
            os.kill(router.process.pid, signal.SIGTERM)
            event = await until_cut(whole)
            assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
            assert event.endswith(b"\n\n")
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(half)
            refused = await waiting
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert await router.end() == 0


async def test_listening_ends_at_once_and_a_stream_goes_on_to_its_end(worker: Worker) -> None:
    async with running("--worker-urls", worker.url) as router:
        await router.until_ready({"ready": True})
        port = int(router.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"}")
        async with router.stream(EVENT) as rest:
            os.kill(router.process.pid, signal.SIGTERM)
            assert await reader.read() == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            worker.go_on.set()
            assert b"".join([piece async for piece in rest]) == EVENT + DONE
        writer.close()
        assert await router.end() == 0


async def test_a_stream_that_outlasts_the_shutdown_timeout_is_told_why_it_ends(worker: Worker) -> None:
    async with running("--worker-urls", worker.url, "--shutdown-timeout-s", "0.1") as router:
        assert " descriptors=" in await router.logged("connections allowed max_connections=")
        await router.until_ready({"ready": True})
        async with router.stream(EVENT) as rest:
            os.kill(router.process.pid, signal.SIGTERM)
            event = await until_cut(rest)
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert await router.end() == 0


async def test_settings_are_read_again_when_their_file_changes_and_at_sighup(worker: Worker, tmp_path: Path) -> None:
    other, settings, key = Worker(), tmp_path / "router.toml", tmp_path / "key"

    def write(*lines: str) -> None:
        (tmp_path / "new.toml").write_text("\n".join(lines))
        (tmp_path / "new.toml").rename(settings)

    write(f'worker_urls = ["{worker.url}"]')
    async with HttpServer(other.handle) as other.server, running("--config", str(settings)) as router:
        await router.until_ready({"ready": True})
        assert (await router.complete("a")).status_code == 200
        key.write_text("first\n")
        write(f'worker_urls = ["{other.url}"]', f'api_key = "file:{key}"', "port = 1", 'policy = "kv"')
        assert "changed=worker_urls,api_key" in await router.logged("settings reloaded")
        # The flags win over the file, so the policy is as it was, and so is the port.
        assert (await router.complete("a")).status_code == 401
        router.client.headers["authorization"] = "Bearer first"
        await router.until_ready({"ready": True})  # the other one, which is asked for its health first
        assert (await router.complete("a")).status_code == 200
        assert (worker.num_completions, other.num_completions) == (1, 1)

        write('worker_urls = ["nonsense"]', 'admin_key = "secret one"')
        assert "admin_key: got '***'" in await router.logged("settings not reloaded")
        write("state_interval_s = 1.5", f'api_key = "file:{key}"', f'worker_urls = ["{other.url}"]')
        assert "fields=state_interval_s" in await router.logged("need a restart")
        assert (await router.complete("a")).status_code == 200

        key.write_text("second")
        os.kill(router.process.pid, signal.SIGHUP)
        assert "changed=api_key" in await router.logged("settings reloaded changed=api_key")
        assert (await router.complete("a")).status_code == 401
        router.client.headers["authorization"] = "Bearer second"
        assert (await router.complete("a")).status_code == 200
        os.kill(router.process.pid, signal.SIGTERM)
        assert await router.end() == 0

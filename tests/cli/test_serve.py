from __future__ import annotations

import asyncio
import re
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvist.cli import main
from kvist.cli.serve import reserve
from kvist.engine import bundled_model_path, loading
from kvist.events.codec import decode_batch
from kvist.events.transports import Endpoint, open_subscription
from kvist.events.types import Cleared, Stored

MODEL = str(bundled_model_path())
READY = re.compile(r"kvist serve: (\S+) on (http://127\.0\.0\.1:\d+), (?:KV events on (tcp://\S+)|no KV events)")


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    events: str | None
    process: asyncio.subprocess.Process


@asynccontextmanager
async def serve(*flags: str, preexec_fn: Callable[[], None] | None = None) -> AsyncIterator[Running]:
    """Run the command and wait for its ready line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvist", "--log-level", "warning", "serve", "--model", MODEL, "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=preexec_fn,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(180):
            line = (await process.stdout.readline()).decode()
        match = READY.match(line)
        assert match, line
        yield Running(match[2], match[3], process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # to the end of its pipe, which is else closed whenever that is collected


async def test_it_serves_publishes_and_ends_when_asked() -> None:
    async with (
        serve("--served-model-name", "tiny", "--api-key", "secret") as running,
        httpx.AsyncClient(base_url=running.url, timeout=180, headers={"Authorization": "Bearer secret"}) as client,
    ):
        for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/server_info", 401)):
            assert (await client.get(path, headers={"Authorization": "Bearer other"})).status_code == status
        assert (await client.post("/flush_cache", headers={"Authorization": ""})).json()["error"][
            "code"
        ] == "invalid_api_key"
        del client.headers["Authorization"]
        for key, status in (("other", 401), ("secret", 200)):  # as Anthropic's clients send it
            assert (await client.get("/v1/models", headers={"x-api-key": key})).status_code == status
        client.headers["Authorization"] = "Bearer secret"
        info = (await client.get("/server_info")).json()
        assert info["model"] == "tiny"
        assert info["kv_events"] == {"endpoint": running.events}
        endpoint = Endpoint.parse(info["kv_events"]["endpoint"])
        async with open_subscription(endpoint) as subscription, asyncio.timeout(180):
            stored: list[bytes] = []
            while not stored:  # until the subscription is connected, events pass it by
                await client.post("/flush_cache")
                await client.post("/v1/completions", json={"prompt": list(range(5, 40)), "max_tokens": 1})
                for message in await subscription.receive():
                    batch, _ = decode_batch(message.payload, "test")
                    assert batch.block_size == 16
                    stored += [each.hashes for each in batch.events if isinstance(each, Stored)]
            assert len(set(stored)) == 1
            assert len(stored[0]) == 2 * 8, "35 tokens fill two blocks"
            await client.post("/flush_cache")
            events: list[object] = []
            while not any(isinstance(each, Cleared) for each in events):
                for message in await subscription.receive():
                    events += decode_batch(message.payload, "test")[0].events
        metrics = (await client.get("/metrics")).text
        filtered = re.search(r"^kvist_publisher_events_filtered_total (\S+)", metrics, re.M)
        assert filtered
        assert float(filtered[1]) > 0
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(180):
            assert await running.process.wait() == 0


async def test_requests_in_progress_do_not_hold_up_the_end_and_are_told() -> None:
    ask = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    async with serve("--kv-events", "none") as running, httpx.AsyncClient(base_url=running.url, timeout=180) as client:
        assert (await client.get("/server_info")).json()["kv_events"] is None
        whole = asyncio.create_task(client.post("/v1/completions", json=ask | {"stream": False}))
        async with client.stream("POST", "/v1/completions", json=ask) as response:
            lines = response.aiter_lines()
            await anext(lines)
            async with asyncio.timeout(180):
                while "requests_running 2.0" not in (await client.get("/metrics")).text:
                    pass
            running.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(180):
                rest = [line async for line in lines if line]
                answer = await whole
                assert await running.process.wait() == 0
        assert "the engine has stopped" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert answer.json()["error"]["message"] == "the engine has stopped"


async def test_more_connections_than_descriptors_do_not_make_it_look_dead() -> None:
    limit = resource.RLIMIT_NOFILE, (256, 256)
    async with serve("--kv-events", "none", preexec_fn=lambda: resource.setrlimit(*limit)) as running:
        with ExitStack() as exits:
            for _ in range(300):
                exits.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(running.url).port)))
            async with httpx.AsyncClient(base_url=running.url, timeout=30) as client:
                assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere"], "model path: got '/nowhere', expected a directory with config.json"),
        (["--model", __file__], f"model path: got '{__file__}', expected a directory with config.json (Not a"),
        (["--model", MODEL, "--dtype", "fp16"], "dtype: got 'fp16', expected one of bfloat16, float16, float32\n"),
        (["--model", MODEL, "--block-size", "10"], "block_size: got 10"),
        (["--model", MODEL, "--num-blocks", "3"], "at least 512: one sequence of max_model_len=8192"),
    ],
)
def test_what_cannot_be_served_is_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", MODEL, "--port", str(port)]) == 2
    assert f"host and port: got '127.0.0.1:{port}'" in capsys.readouterr().err


def test_what_is_written_to_a_client_waits_for_nothing() -> None:
    with reserve("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_nobody_waits_for_a_model_that_is_still_being_loaded() -> None:
    with reserve("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_of_two_that_reserved_a_port_the_one_that_listens_late_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with reserve("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        load_engine = loading.load_engine

        def load_late(*arguments: Any) -> Any:
            loaded = load_engine(*arguments)
            first.listen()
            return loaded

        monkeypatch.setattr(loading, "load_engine", load_late)
        assert main(["serve", "--model", MODEL, "--port", str(port)]) == 2
    assert f"host and port: got '127.0.0.1:{port}'" in capsys.readouterr().err

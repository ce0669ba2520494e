"""The service as a whole: HTTPS, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvist.errors import InvalidValueError
from kvist.http import HttpServer, Request, Responder
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService


async def test_clients_are_served_over_https(worker, certificate) -> None:
    async with worker() as one:
        files = {"tls_certificate": str(certificate.chain), "tls_key": str(certificate.chain)}
        config = RouterConfig(worker_urls=(one.url,), port=0, policy="round-robin", **files)
        trust = ssl.create_default_context(cafile=certificate.authority)
        async with (
            RouterService(config) as service,
            httpx.AsyncClient(verify=trust, trust_env=False, timeout=60) as client,
        ):
            assert service.url.startswith("https://")
            assert (await client.get(service.url + "/health")).status_code == 200


async def test_both_doors_can_ask_for_certificates(certificate) -> None:
    chain, authority = str(certificate.chain), str(certificate.authority)
    trust = ssl.create_default_context(cafile=authority)
    door = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    door.load_cert_chain(chain)
    door.verify_mode = ssl.CERT_REQUIRED

    async def answer(request: Request, responder: Responder) -> None:
        body = b'{"data": [{"id": "m", "object": "model"}]}' if request.path == "/v1/models" else b"{}"
        responder.answer(404 if request.path == "/server_info" else 200, [], body)

    async with HttpServer(answer, tls=door) as worker:
        url = f"https://127.0.0.1:{worker.port}"
        files = {"tls_certificate": chain, "tls_key": chain, "client_ca": authority, "worker_ca": authority}
        config = RouterConfig(worker_urls=(url,), port=0, policy="round-robin", **files)
        both = replace(config, worker_certificate=chain, worker_key=chain)
        async with RouterService(both) as service, httpx.AsyncClient(verify=trust, trust_env=False) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get(service.url + "/health")
            trust.load_cert_chain(chain)
            async with httpx.AsyncClient(verify=trust, trust_env=False, timeout=60) as client:
                for _ in range(2):
                    asked = {"model": "m", "prompt": "x"}
                    assert (await client.post(service.url + "/v1/completions", json=asked)).status_code == 200
        async with (
            RouterService(config) as service,
            httpx.AsyncClient(verify=trust, trust_env=False, timeout=60) as client,
        ):
            assert (await client.get(service.url + "/readiness")).status_code == 503


@pytest.mark.parametrize("content", [None, b"no certificate"])
async def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, certificate, content: bytes | None) -> None:
    path, chain = str(tmp_path / "cert.pem"), str(certificate.chain)
    if content is not None:
        (tmp_path / "cert.pem").write_bytes(content)
    for names in (
        {"tls_certificate": path, "tls_key": path},
        {"client_ca": path, "tls_certificate": chain, "tls_key": chain},
        {"worker_certificate": path, "worker_key": path},
        {"worker_ca": path},
    ):
        with pytest.raises(InvalidValueError, match=next(iter(names))):
            async with RouterService(RouterConfig(port=0, policy="round-robin", **names)):
                pass


async def test_the_end_waits_for_running_requests(worker, router, http_bytes, until) -> None:
    go_on = asyncio.Event()

    async def wait(_: Any, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(http_bytes.response(b"{}"))

    async with worker(answer=wait) as one, router(one.url) as front:
        running = asyncio.create_task(front.complete())
        await until(lambda: one.completions)
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await front.service.__aexit__(None, None, None)
        assert (await running).status_code == 200


async def test_what_outlasts_the_shutdown_timeout_is_told_why_as_far_as_it_can_be(
    worker, router, http_bytes, until
) -> None:
    event = b'data: {"choices": []}\n\n'

    async def stream(received: Any, writer: asyncio.StreamWriter) -> None:
        begun = {"whole": event, "half": b"data: {"}.get(json.loads(received.body)["prompt"])
        if begun is not None:
            writer.write(http_bytes.event_stream_head + http_bytes.chunk(begun))
        await asyncio.Event().wait()

    async with worker(answer=stream) as one, router(one.url, shutdown_timeout_s=0.05) as front:
        running = [asyncio.create_task(front.complete(prompt, stream=True)) for prompt in ("whole", "half", "none")]
        load = front.service._forwarder.load
        await until(lambda: len(one.completions) == 3)

        async def has_both_begun() -> bool:
            series = f'kvist_router_time_to_first_byte_seconds_count{{model="m",worker="{one.url}"}}'
            return (await front.metrics())[series] == 2

        await front.until(has_both_begun)
        await front.service.__aexit__(None, None, None)
        whole, half, none = await asyncio.gather(*running, return_exceptions=True)
        assert whole.content.startswith(event)
        error = json.loads(whole.content.removeprefix(event + b"data: "))["error"]
        assert (error["code"], error["type"]) == ("shutting_down", "server_error")
        assert isinstance(half, httpx.RemoteProtocolError)
        assert (none.status_code, none.json()["error"]["code"]) == (503, "shutting_down")
        assert load.running_requests(one.url) == 0


async def test_an_error_in_the_body_of_the_context_comes_out_as_it_is(worker) -> None:
    async with worker() as one:
        with pytest.raises(ZeroDivisionError):
            async with RouterService(RouterConfig(worker_urls=(one.url,), port=0)):
                raise ZeroDivisionError


async def test_a_service_that_is_cancelled_ends(worker) -> None:
    started = asyncio.Event()

    async def serve(url: str) -> None:
        async with RouterService(RouterConfig(worker_urls=(url,), port=0)):
            started.set()
            await asyncio.Event().wait()

    async with worker() as one:
        serving = asyncio.create_task(serve(one.url))
        await started.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_the_first_request_finds_every_worker(worker) -> None:
    async with worker() as one:
        config = RouterConfig(worker_urls=(one.url, "http://127.0.0.1:9"), port=0, policy="round-robin")
        async with RouterService(config) as service, httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert (await client.get(service.url + "/readiness")).json()["workers"]["healthy"] == 1

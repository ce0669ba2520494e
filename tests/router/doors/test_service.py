"""The service as a whole: HTTPS, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvist.errors import InvalidValueError
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService


async def test_clients_are_served_over_https(worker, certificate) -> None:
    async with worker() as one:
        files = {"tls_certificate": str(certificate.chain), "tls_key": str(certificate.chain)}
        config = RouterConfig(worker_urls=(one.url,), port=0, policy="random", **files)
        trust = ssl.create_default_context(cafile=certificate.authority)
        async with (
            RouterService(config) as service,
            httpx.AsyncClient(verify=trust, trust_env=False, timeout=60) as client,
        ):
            assert service.url.startswith("https://")
            assert (await client.get(service.url + "/health")).status_code == 200


@pytest.mark.parametrize("content", [None, b"no certificate"])
async def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cert.pem"
    if content is not None:
        path.write_bytes(content)
    config = RouterConfig(port=0, policy="random", tls_certificate=str(path), tls_key=str(path))
    with pytest.raises(InvalidValueError, match="tls_certificate"):
        async with RouterService(config):
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
        config = RouterConfig(worker_urls=(one.url, "http://127.0.0.1:9"), port=0, policy="random")
        async with RouterService(config) as service, httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert (await client.get(service.url + "/readiness")).json()["workers"]["healthy"] == 1

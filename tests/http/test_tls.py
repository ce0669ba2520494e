"""Both sides speak TLS; a refusal over TLS is still read by the client."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvist.http import ConnectError, Handler, HttpServer, UpstreamPool


@pytest.fixture
async def worker(echo: Handler, certificate: Any) -> AsyncIterator[str]:
    """The base URL of a worker behind TLS."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.chain)
    async with HttpServer(echo, tls=tls) as server:
        yield f"https://127.0.0.1:{server.port}"


@pytest.fixture
def trust(certificate: Any) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate.authority)


async def test_a_worker_behind_tls_is_reached_and_its_connection_reused(worker: str, trust: ssl.SSLContext) -> None:
    used = set()
    async with UpstreamPool(tls=trust) as pool:
        for _ in range(3):
            async with pool.exchange(worker, "POST", "/x", [], b"y" * 100_000) as response:
                assert b"".join([piece async for piece in response.body()]) == b"POST /x " + b"y" * 100_000
            await asyncio.sleep(0)
            used |= pool._workers[worker].connections
        assert len(used) == 1


async def test_a_worker_whose_certificate_is_not_trusted_is_a_connect_error(worker: str) -> None:
    async with UpstreamPool() as pool:
        with pytest.raises(ConnectError, match="certificate"):
            await pool.exchange(worker, "GET", "/", []).__aenter__()


async def test_a_client_speaks_tls_and_reads_a_refusal(worker: str, trust: ssl.SSLContext) -> None:
    async with httpx.AsyncClient(verify=trust, timeout=60) as client:
        assert (await client.get(worker + "/x")).text == "GET /x "
        response: Any = await client.get(worker + "/x", headers={"expect": "nothing"})
        assert response.status_code == 417

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import psutil

from kvist.engine import bundled_model_path

MODEL = str(bundled_model_path())
URL = re.compile(r"http://127\.0\.0\.1:\d+")


@asynccontextmanager
async def serve(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, psutil.Process]]:
    """Run the command with two ranks; yield it, its URL, and rank 1, once it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvist", "--log-level", "error", "serve", "--model", MODEL, "--port", "0"),
        *("--kv-events", "none", "--kv-memory-mib", "32", "--tensor-parallel-size", "2", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(180):
            line = (await process.stdout.readline()).decode()
        match = URL.search(line)
        assert match, line
        children = psutil.Process(process.pid).children()
        yield process, match[0], next(child for child in children if "spawn_main" in " ".join(child.cmdline()))
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(180):
            await process.communicate()  # to the end of its pipes, which rank 1 has too


async def test_it_serves_says_how_many_ranks_and_ends_them_when_asked() -> None:
    async with serve() as (process, url, follower):
        async with httpx.AsyncClient(base_url=url, timeout=180) as client:
            assert (await client.get("/server_info")).json()["tensor_parallel_size"] == 2
            asked = {"prompt": list(range(5, 40)), "max_tokens": 5, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.json()["usage"]["completion_tokens"] == 5
        process.terminate()
        async with asyncio.timeout(180):
            _, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")
        assert not follower.is_running()


async def test_a_killed_follower_ends_the_server_with_an_error_that_names_it() -> None:
    async with serve() as (process, _, follower):
        os.kill(follower.pid, signal.SIGKILL)
        async with asyncio.timeout(180):
            _, errors = await process.communicate()
        assert process.returncode == 1
        assert b"kvist serve: error: tensor-parallel rank 1 has ended with exit code -9" in errors


async def test_a_killed_server_leaves_no_follower(until: Callable[[Callable[[], object]], Awaitable[None]]) -> None:
    async with serve() as (process, _, follower):
        process.kill()
        await until(lambda: not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE)

"""Workers that stand in for engines, as processes, and a client that reads an answer as far as it comes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).parents[1] / "system" / "stand_in_worker.py"


@dataclass
class Answer:
    """One answer, as far as it has come."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def worker(self) -> str | None:
        return self.headers.get("x-kvist-worker")


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def read(
    port: int,
    path: str,
    body: dict[str, Any] | None,
    headers: dict[str, str],
    answer: Answer,
    connection: Connection | None = None,
    method: str | None = None,
) -> Answer:
    """Read the answer to a request on a connection of its own; not whole where the connection ended first."""
    reader, writer = connection or await asyncio.open_connection("127.0.0.1", port)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        lines = {"host": "127.0.0.1", "content-length": str(len(data)), "connection": "close"} | headers
        start = f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1\r\n"
        writer.write(
            (start + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n").encode() + data
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        answer.status = int(head[0].split(" ")[1])
        answer.headers = dict(line.split(": ", 1) for line in head[1:] if line)
        while piece := await reader.read(65536):
            answer.body += piece
            answer.has_begun.set()
        is_chunked = "transfer-encoding" in answer.headers
        length = int(answer.headers.get("content-length", 0))
        answer.is_whole = answer.body.endswith(b"0\r\n\r\n") if is_chunked else len(answer.body) == length
    finally:
        writer.close()
    return answer


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def fetch(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = await read(port_of(url), path, body, {}, Answer())
    parsed: dict[str, Any] = json.loads(answer.body)
    return parsed


@dataclass
class StandIn:
    """A worker's process."""

    url: str
    process: asyncio.subprocess.Process

    async def prompts(self) -> list[str]:
        prompts: list[str] = (await fetch(self.url, "/told"))["prompts"]
        return prompts

    async def order(self, **orders: Any) -> None:
        await fetch(self.url, "/orders", orders)


@asynccontextmanager
async def stand_ins(number: int, **model: str) -> AsyncIterator[list[StandIn]]:
    """Yield so many workers, of model `m` or of what else is said of it."""
    workers, described = [], json.dumps({"id": "m", "object": "model"} | model)
    try:
        for _ in range(number):
            process = await asyncio.create_subprocess_exec(
                sys.executable, STAND_IN, described, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            workers.append(StandIn(f"http://127.0.0.1:{int(await process.stdout.readline())}", process))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            await worker.process.wait()


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait until the condition holds, at most three minutes."""
    async with asyncio.timeout(180):
        while not await condition():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)

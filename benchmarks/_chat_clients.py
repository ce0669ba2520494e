"""Clients that send chats to a router and parse no more of the answers than where they end."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from _chat_fleet import STREAM_END, UNARY_END
from _chats import Chats, Work


@dataclass
class Load:
    """What one work's chats are made of, and what became of them."""

    port: int
    chats: Chats
    work: Work
    latencies_s: list[float] = field(default_factory=list)
    """Of answers that were whole."""
    failures: Counter[str] = field(default_factory=Counter)
    """By status, or "closed" where the connection ended first."""

    next_number: ClassVar[int] = 0
    """Of all loads of this process, so that a fresh chat is sent once."""

    def request(self) -> bytes:
        """Return a chat that no other was."""
        Load.next_number += 1
        body = self.chats.body(self.work, Load.next_number)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        return head + b"authorization: Bearer sk-bench\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def connect(self, on_answer: Callable[[Client], None]) -> Client:
        """Return a new connection, whose answers are told of."""
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: Client(self, on_answer), "127.0.0.1", self.port)
        return client


class Client(asyncio.Protocol):
    """One connection; `on_answer` is called when an answer is whole, or has failed and the connection is closed."""

    def __init__(self, load: Load, on_answer: Callable[[Client], None]) -> None:
        self._load = load
        self._on_answer = on_answer
        self._ending = STREAM_END[-7:] if load.work.is_stream else UNARY_END
        self.is_closed = False
        self._is_waiting = False
        self._status = self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def send(self, due_s: float | None = None) -> None:
        """Send a chat; its latency is counted from when it was due, or from now."""
        request = self._load.request()
        self._is_waiting = True
        self._status = self._last = b""
        self._due_s = time.perf_counter() if due_s is None else due_s
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._status = data[9:12]
        self._last = (self._last + data)[-64:]
        if self._status != b"200":
            self._end(self._status.decode())
        elif self._last.endswith(self._ending) and (not self._load.work.is_stream or b"[DONE]" in self._last):
            self._load.latencies_s.append(time.perf_counter() - self._due_s)
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.is_closed = True
        if self._is_waiting:
            self._end("closed")

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _end(self, failure: str | None) -> None:
        self._is_waiting = False
        if failure is not None:
            self._load.failures[failure] += 1
            self.is_closed = True
            self._transport.close()
        self._on_answer(self)


@dataclass(frozen=True, slots=True)
class Sample:
    """What some time of load was answered with, and what it cost the router."""

    num_answers: int
    cpu_s: float
    latencies_s: list[float]


async def drive(load: Load, num_clients: int, duration_s: float, cpu_s: Callable[[], float], warm_up: int) -> Sample:
    """Keep each client busy; count from when `warm_up` chats were answered and a quarter of the duration is over.

    Raises RuntimeError when an answer fails.
    """
    is_warm, is_stopping, ended = asyncio.Event(), False, asyncio.Event()
    num_running = num_clients

    def next_chat(client: Client) -> None:
        nonlocal num_running
        if len(load.latencies_s) >= warm_up or load.failures:
            is_warm.set()
        if not is_stopping and not load.failures:
            client.send()
            return
        client.close()
        num_running -= 1
        if not num_running:
            ended.set()

    for _ in range(num_clients):
        (await load.connect(next_chat)).send()
    await asyncio.gather(is_warm.wait(), asyncio.sleep(duration_s / 4))
    begun_at, begun_cpu_s = len(load.latencies_s), cpu_s()
    await asyncio.sleep(duration_s)
    latencies_s, used_s = load.latencies_s[begun_at:], cpu_s() - begun_cpu_s
    is_stopping = True
    await ended.wait()
    if load.failures:
        raise RuntimeError(f"{load.work.name}: failed by status: {dict(load.failures)}")
    return Sample(len(latencies_s), used_s, latencies_s)


def raise_descriptor_limit() -> int:
    """Return how many descriptors this process and those it starts may have, now as many as the system lets them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

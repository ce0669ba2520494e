"""Fixtures that any test may use: free ports, and waiting for a condition with a deadline."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

DEADLINE_S = 20.0


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return a function that names a TCP port nobody uses, nor the one after it."""

    def find() -> int:
        while True:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("127.0.0.1", 0))
                port: int = first.getsockname()[1]
                try:
                    second.bind(("127.0.0.1", port + 1))
                except (OSError, OverflowError):
                    continue
                return port

    return find


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Return a coroutine function that polls a condition and fails, naming it, past a deadline."""

    async def poll(condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"never became true: {condition}"
            await asyncio.sleep(0.005)

    return poll


@pytest.fixture
def until_true() -> Callable[[Callable[[], object]], None]:
    """Return `until` for tests that are not asynchronous."""

    def poll(condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"never became true: {condition}"
            time.sleep(0.005)

    return poll

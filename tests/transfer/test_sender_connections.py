"""Connections to ranks, some of which nobody listens for."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
import zmq

from kvist.transfer import receiver as module
from kvist.transfer.receiver import SenderConnections, has_process_ended

ENDPOINTS = [f"tcp://127.0.0.1:{port}" for port in range(1, 5)]


@pytest.fixture
def senders() -> Iterator[SenderConnections]:
    """Return senders of a context that is closed in the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield SenderConnections(context, zmq.Poller(), b"me")
    context.destroy(linger=0)


def test_only_so_many_hosts_are_looked_at_at_once(
    senders: SenderConnections, monkeypatch: pytest.MonkeyPatch, until_true
) -> None:
    go_on, looked_at = threading.Event(), []
    monkeypatch.setattr(senders, "threads", ThreadPoolExecutor(1))
    monkeypatch.setattr(module, "has_process_ended", lambda endpoint: looked_at.append(endpoint) or go_on.wait(60))
    first, second = (senders.connect(endpoint, 0.0) for endpoint in ENDPOINTS[:2])
    assert senders.find_lost(first, [1]) == senders.find_lost(second, [2]) == ()
    until_true(lambda: looked_at == ENDPOINTS[:1])
    go_on.set()
    until_true(lambda: senders.find_lost(second, [2, 4]) == [2])
    assert senders.find_lost(first, [1, 3]) == (), "what it sent before its end may still come"
    assert senders.find_lost(first, [1, 3]) == [1], "those that it was asked for"


@pytest.mark.parametrize(
    ("error", "has_ended"),
    [
        (None, False),
        (ConnectionRefusedError(), True),
        (TimeoutError(), False),
        (OSError(errno.EHOSTUNREACH, "no route"), False),
    ],
)
def test_only_a_host_that_refuses_says_that_a_process_has_ended(
    error: OSError | None, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def connect(address: tuple[str, int], timeout_s: float) -> BytesIO:
        asked.append((address, timeout_s))
        if error is not None:
            raise error
        return BytesIO()

    monkeypatch.setattr(module.socket, "create_connection", connect)
    assert has_process_ended("tcp://[::1]:7101") == has_ended
    assert asked == [(("::1", 7101), 0.2)]

"""A peer that is no ZeroMQ publisher: whatever its bytes, other workers are heard, and the service does not grow."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

BLOCK_SIZE = 4
MODEL = "fuzzed"
MAX_GROWTH_BYTES = 12 << 20
FLOOD_BYTES = 24 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
DEADLINE_S = 180.0
HELLO = GREETING + READY


def flood(piece: bytes) -> Iterator[bytes]:
    """Yield a piece again and again."""
    chunk = piece * max(1, (1 << 20) // len(piece))
    for _ in range(FLOOD_BYTES // len(chunk)):
        yield chunk


def long_frame(flags: int, num_bytes: int) -> bytes:
    return bytes([flags | 2]) + num_bytes.to_bytes(8, "big")


def noise(prefix: bytes) -> Iterator[bytes]:
    yield prefix
    yield random.Random(len(prefix)).randbytes(1 << 16)


SPEECHES: dict[str, Callable[[], Iterator[bytes]]] = {
    "silence": lambda: iter([b""]),
    "noise": lambda: noise(b""),
    "http": lambda: iter([b"HTTP/1.1 200 OK\r\n\r\n" * 100]),
    "half a greeting": lambda: iter([GREETING[:31]]),
    "zmtp 2": lambda: iter([GREETING[:10] + b"\x01" + bytes(53)]),
    "curve": lambda: iter([GREETING.replace(b"NULL\0", b"CURVE")]),
    "noise after the greeting": lambda: noise(GREETING),
    "noise after the handshake": lambda: noise(HELLO),
    "a ready command without end": lambda: iter([GREETING, long_frame(4, (1 << 63) - 1), b"\x05READY" * 1000]),
    "a subscriber": lambda: iter([GREETING, READY.replace(b"PUB", b"SUB")]),
    "a ready command that is cut": lambda: iter([GREETING, b"\x04\x0a\x05READY\x0bSo"]),
    "an error": lambda: iter([GREETING, b"\x04\x0a\x05ERROR\x03bad"]),
    "a frame of 2**63 - 1 bytes": lambda: iter([HELLO, long_frame(1, (1 << 63) - 1), *flood(b"x")]),
    "a frame of 2**64 - 1 bytes": lambda: iter([HELLO, long_frame(0, (1 << 64) - 1), *flood(b"x")]),
    "a payload of 1 GiB": lambda: iter([HELLO, b"\x01\x00\x01\x08" + bytes(8), long_frame(0, 1 << 30), *flood(b"x")]),
    "most of a topic of 24 MiB": lambda: iter([HELLO, long_frame(1, FLOOD_BYTES + 1), *flood(b"x")]),
    "a message without end": lambda: iter([HELLO, *flood(b"\x01\x00")]),
    "a message of long frames": lambda: iter([HELLO, *flood(long_frame(1, 1 << 16) + bytes(1 << 16))]),
    "commands": lambda: iter([HELLO, *flood(b"\x04\x06\x05WHAT?")]),
    "pings whose answers it does not read": lambda: iter([HELLO, *flood(b"\x04\x17\x04PING\x00\x00" + bytes(16))]),
    "empty messages": lambda: iter([HELLO, *flood(b"\x01\x00\x01\x08" + bytes(8) + b"\x00\x00")]),
    "reserved flags": lambda: iter([HELLO, b"\xf8" * 100]),
}


class Peer:
    """A TCP server that says the same to whoever connects, and reads nothing."""

    def __init__(self, port: int, speech: Callable[[], Iterator[bytes]]) -> None:
        self.num_speeches = 0
        self._speech = speech
        self._server = socket.create_server(("127.0.0.1", port))
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            with suppress(OSError):
                client, _ = self._server.accept()
                with client:
                    client.settimeout(0.5)
                    self._speak(client)
                    self.num_speeches += 1
                    with suppress(OSError):
                        client.recv(1)

    def _speak(self, client: socket.socket) -> None:
        with suppress(OSError):
            for piece in self._speech():
                if self._is_closed:
                    return
                client.sendall(piece)

    def close(self) -> None:
        self._is_closed = True
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


@pytest.fixture
def honest(service: Any, start_vllm: Callable[..., Any], free_port: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """Return a function that has a worker store a block and waits until it is answered."""
    port = free_port()
    engine = start_vllm(port)
    body = {"instance_id": 1, "model_name": MODEL, "endpoint": f"tcp://127.0.0.1:{port}", "block_size": BLOCK_SIZE}
    assert service.call("POST", "/register", body | {"replay_endpoint": f"tcp://127.0.0.1:{port + 1}"})[0] == 201

    def check() -> None:
        token_ids = [len(engine.kept), 1, 2, 3]
        engine.store(token_ids[0], token_ids)
        expected = {"1": {"longest_matched": 4, "gpu": 4, "dp": {"0": 4}, "cpu": 4, "disk": 4}}
        give_up_s = time.monotonic() + DEADLINE_S
        while service.call("POST", "/query", {"model_name": MODEL, "token_ids": token_ids})[1]["instances"] != expected:
            assert time.monotonic() < give_up_s
            time.sleep(0.002)

    yield check
    assert service.call("POST", "/unregister", {"instance_id": 1, "model_name": MODEL})[0] == 200


@pytest.mark.parametrize("name", SPEECHES)
def test_no_bytes_on_the_socket_hurt_anybody_else(
    service: Any, honest: Callable[[], None], free_port: Callable[[], int], name: str
) -> None:
    process = psutil.Process()
    honest()
    before_bytes = process.memory_info().rss
    port = free_port()
    peer = Peer(port, SPEECHES[name])
    body = {"instance_id": 2, "model_name": MODEL, "block_size": BLOCK_SIZE}
    assert service.call("POST", "/register", body | {"endpoint": f"tcp://127.0.0.1:{port}?replay_port=none"})[0] == 201
    peak_bytes = 0
    try:
        give_up_s = time.monotonic() + DEADLINE_S
        while peer.num_speeches < 1:
            honest()
            peak_bytes = max(peak_bytes, process.memory_info().rss)
            assert time.monotonic() < give_up_s
        honest()
    finally:
        peer.close()
        assert service.call("POST", "/unregister", {"instance_id": 2, "model_name": MODEL})[0] == 200
    give_up_s = time.monotonic() + DEADLINE_S
    while process.memory_info().rss - before_bytes > MAX_GROWTH_BYTES:  # until the connection is taken down
        assert time.monotonic() < give_up_s
        honest()
    assert peak_bytes - before_bytes < MAX_GROWTH_BYTES + FLOOD_BYTES

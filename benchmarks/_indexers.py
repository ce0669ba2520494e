"""Two index services in their own processes, queried over one kept-alive connection and observed from outside.

`peer` is `dynamo.indexer` of ai-dynamo-runtime, `kvist` is `kvist index`; both get the same flags.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _engines import BLOCK_SIZE, Probe

SIDES = ("peer", "kvist")
CANONICAL = "canonical"
"""`kvist index` once more, for where it hears Kvist's own streams beside the other two on the engines'."""
MODEL = "m"
COMMANDS = {
    "peer": [sys.executable, "-m", "dynamo.indexer"],
    "kvist": [sys.executable, "-m", "kvist", "--log-level", "error", "index"],
}
COMMANDS[CANONICAL] = COMMANDS["kvist"]
START_TIMEOUT_S = 300.0
POLL_S = 0.005
"""How often a waiting client asks: often enough for the wall time of a burst, and 1 % of its CPU."""

_READER = """
import sys, time, urllib.request
started_s = time.monotonic()
with urllib.request.urlopen(sys.argv[1]) as answer:
    print(sum(map(len, iter(lambda: answer.read(1 << 20), b""))), time.monotonic() - started_s)
"""


class Connection:
    """A kept-alive HTTP connection that does next to nothing beside the socket's own work."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 20)
        self._view = memoryview(self._buffer)

    def exchange(self, request: bytes) -> bytes:
        """Send a request and return the answer's body; raises ConnectionError unless its status is 200."""
        self._socket.sendall(request)
        num_bytes, end = 0, -1
        while end < 0:
            num_bytes += self._receive(num_bytes)
            end = self._buffer.find(b"\r\n\r\n", 0, num_bytes)
        head = bytes(self._buffer[:end]).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        while num_bytes < end + 4 + length:
            num_bytes += self._receive(num_bytes)
        body = bytes(self._view[end + 4 : num_bytes])
        if not head.startswith(b"http/1.1 200"):
            raise ConnectionError(f"{head!r}: {body!r}")
        return body

    def _receive(self, offset: int) -> int:
        num_bytes = self._socket.recv_into(self._view[offset:])
        if num_bytes == 0:
            raise ConnectionError("closed by the server")
        return num_bytes

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Indexer:
    """A running index service."""

    def __init__(
        self,
        side: str,
        workers: Mapping[int, str],
        environment: Mapping[str, str] | None = None,
        peer: Indexer | None = None,
    ) -> None:
        """Start it, from a peer's dump if there is one, and return once it answers queries; `start_s` says when."""
        self.side = side
        self.port = _free_port()
        arguments = ["--block-size", str(BLOCK_SIZE), "--port", str(self.port), "--model-name", MODEL]
        arguments += ["--workers", ",".join(f"{worker}={endpoint}" for worker, endpoint in workers.items())]
        arguments += [] if peer is None else ["--peers", f"http://127.0.0.1:{peer.port}"]
        started_s = time.monotonic()
        self._process = subprocess.Popen(
            COMMANDS[side] + arguments,
            env={**os.environ, "RUST_LOG": "error", **(environment or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if side == "peer" else None,
        )
        self.pid = self._process.pid
        self.connection = self._connect(started_s + START_TIMEOUT_S)
        self.start_s = time.monotonic() - started_s

    def _connect(self, give_up_at_s: float) -> Connection:
        while True:
            try:
                connection = Connection(self.port)
                path = b"/health" if self.side == "peer" else b"/readiness"
                connection.exchange(b"GET %b HTTP/1.1\r\nhost: bench\r\n\r\n" % path)
                return connection
            except OSError:
                if time.monotonic() > give_up_at_s or self._process.poll() is not None:
                    raise
                time.sleep(0.005)

    def cpu_s(self) -> float:
        """Return the CPU time of the whole process so far, all threads, user and system, from the kernel's clock."""
        return time.clock_gettime(~self.pid << 3 | 2)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the resident size and its peak."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
        return int(fields["VmRSS"]) * 1024, int(fields["VmHWM"]) * 1024

    def forget_peak(self) -> None:
        """Make the peak of the resident size begin anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def begin_dump(self) -> subprocess.Popen[bytes]:
        """Begin to read a dump in a process of its own, which ends with it and writes its bytes and seconds."""
        url = f"http://127.0.0.1:{self.port}/dump"
        return subprocess.Popen([sys.executable, "-c", _READER, url], stdout=subprocess.PIPE)

    def ask(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the answer to a query."""
        answer: dict[str, Any] = json.loads(self.connection.exchange(query_of(token_ids)))
        return answer

    def await_visible(self, probes: Iterable[Probe], poll_s: float = POLL_S, timeout_s: float = 60.0) -> float:
        """Return the time at which all of the probes' blocks were visible."""
        give_up_at_s = time.monotonic() + timeout_s
        for probe in probes:
            request = query_of(probe.token_ids)
            while held_by(json.loads(self.connection.exchange(request)), probe.stream_idx) != probe.num_held:
                if time.monotonic() > give_up_at_s:
                    raise TimeoutError(f"{self.side} does not show everything that it was sent")
                time.sleep(poll_s)
        return time.monotonic()

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_both(
    stack: ExitStack, endpoints: Mapping[str, Sequence[str]], sides: Sequence[str] = SIDES
) -> dict[str, Indexer]:
    """Start the services, worker N on its side's stream N-1, closed with the stack."""
    indexers = {}
    for side in sides:
        indexers[side] = Indexer(side, {idx + 1: endpoint for idx, endpoint in enumerate(endpoints[side])})
        stack.callback(indexers[side].close)
    return indexers


def query_of(token_ids: Sequence[int]) -> bytes:
    """Return a query as it goes over the wire."""
    body = json.dumps({"token_ids": list(token_ids), "model_name": MODEL}).encode()
    head = b"POST /query HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def held_by(answer: Mapping[str, Any], stream_idx: int) -> int:
    """Return the tokens that an answer says the worker of a stream holds."""
    return int(answer["scores"].get(str(stream_idx + 1), {}).get("0", 0))


def compare(indexers: Mapping[str, Indexer], probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """Ask both the same; return what was not as the engine has it, or not the same, answer for answer."""
    wrong = []
    for probe in probes:
        answers = {side: indexer.ask(probe.token_ids) for side, indexer in indexers.items()}
        expected = {str(probe.stream_idx + 1): {"0": probe.num_held}} if probe.num_held else {}
        is_right = all(answer["scores"] == expected for answer in answers.values())
        if not is_right or len({json.dumps(answer, sort_keys=True) for answer in answers.values()}) > 1:
            wrong.append({"num_tokens": len(probe.token_ids), "expected": expected, **answers})
    return wrong


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port

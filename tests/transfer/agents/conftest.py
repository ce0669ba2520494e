"""Agents of both kinds, and peers of them in processes of their own."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvist.transfer.agents import SharedMemoryAgent, TransferAgent

_PEER = """
import base64, hashlib, json, sys
kind, name, size_bytes, num_regions = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if kind == "nixl":
    from kvist.transfer.agents.nixl import NixlAgent as Agent
else:
    from kvist.transfer.agents import SharedMemoryAgent as Agent
agent = Agent(name)
memories = [agent.allocate(size_bytes) for _ in range(num_regions)]
for memory in memories:
    agent.register(memory.ctypes.data, size_bytes)
def say(**what): print(json.dumps(what), flush=True)
say(addresses=[m.ctypes.data for m in memories], metadata=base64.b64encode(agent.metadata()).decode())
for line in sys.stdin:
    say(digests=[hashlib.sha256(m).hexdigest() for m in memories])
agent.close()
"""


class Peer:
    """A process with an agent and registered memory."""

    def __init__(self, kind: str, name: str, size_bytes: int, num_regions: int) -> None:
        command = [sys.executable, "-c", _PEER, kind, name, str(size_bytes), str(num_regions)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        heard = self._hear()
        self.addresses: list[int] = heard["addresses"]
        self.metadata = base64.b64decode(heard["metadata"])

    def digests(self) -> list[str]:
        """Return the SHA-256 of each of its regions, as it sees them."""
        assert self.process.stdin is not None
        self.process.stdin.write("digests\n")
        self.process.stdin.flush()
        digests: list[str] = self._hear()["digests"]
        return digests

    def kill(self) -> None:
        """Kill it as kill -9 does, and wait until it is gone."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Let it end by itself, if it has not yet."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        # A library may log to the standard output as well.
        while not (line := self.process.stdout.readline()).startswith("{"):
            assert line, "the peer has died"
        heard: dict[str, Any] = json.loads(line)
        return heard


@pytest.fixture(params=["shared_memory", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    """Name each kind of agent."""
    name: str = request.param
    return name


@pytest.fixture
def new_agent(kind: str) -> Iterator[Callable[..., TransferAgent]]:
    """Return a function that makes an agent of the kind, closed at the end."""
    agents: list[TransferAgent] = []

    def make(name: str, **options: Any) -> TransferAgent:
        if kind == "nixl":
            from kvist.transfer.agents.nixl import NixlAgent

            agents.append(NixlAgent(name, **options))
        else:
            agents.append(SharedMemoryAgent(name, **options))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def new_peer(kind: str) -> Iterator[Callable[..., Peer]]:
    """Return a function that starts a peer of the kind in a process of its own."""
    peers: list[Peer] = []

    def start(name: str = "peer", size_bytes: int = 1 << 20, num_regions: int = 1) -> Peer:
        peers.append(Peer(kind, name, size_bytes, num_regions))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()

"""Bounces from processes of their own: bytes arrive, and a sender that is killed costs its transfer, not the room."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

SIZE, COUNT = 1024, 16

_SENDER = """
import base64, json, sys
import numpy as np, torch
torch.set_num_threads(1)
from kvist.transfer.agents import SharedMemoryAgent
from kvist.transfer.bounce import Bounce
from kvist.transfer.copier import TorchCopier
asked = json.loads(sys.stdin.readline())
rank, size, count = asked["rank"], asked["size"], asked["count"]
agent = SharedMemoryAgent(f"sender {rank}")
pool = agent.allocate(size * count)
agent.register(pool.ctypes.data, size * count)
pool[:] = np.random.default_rng(rank).integers(0, 256, size * count, dtype=np.uint8)
bounce = Bounce(agent, TorchCopier([torch.from_numpy(pool)]), lambda: torch.from_numpy(agent.allocate(size * count)))
peer = agent.connect(base64.b64decode(asked["metadata"]))
print("ready", flush=True)
sys.stdin.readline()
offsets = np.arange(count) * size
rows = (pool.ctypes.data + offsets, np.array(asked["targets"]), np.full_like(offsets, size))
list(bounce.send(peer, np.stack(rows, axis=1), asked["base"]))
print("done", flush=True)
sys.stdin.readline()
"""


class Sender:
    """A process that sends what it is asked for, once it is told to."""

    def __init__(self, rank: int, metadata: bytes, base: int, targets: list[int]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", _SENDER], stdin=pipe, stdout=pipe, text=True)
        asked = {"rank": rank, "size": SIZE, "count": COUNT, "base": base, "targets": targets}
        self.say(json.dumps({**asked, "metadata": base64.b64encode(metadata).decode()}))

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Kill it, if it has not been."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def new_sender() -> Iterator[Callable[..., Sender]]:
    senders: list[Sender] = []

    def start(*args: Any) -> Sender:
        senders.append(Sender(*args))
        return senders[-1]

    yield start
    for sender in senders:
        sender.end()


def test_two_processes_fill_one_part_and_the_next_transfer_works_after_one_was_killed(
    new_end: Callable[..., Any], new_sender: Callable[..., Sender]
) -> None:
    target = new_end("target")
    room = target.bounce.reserve(2 * SIZE * COUNT, 2 * COUNT)
    places = np.random.default_rng(5).permutation(2 * COUNT) * SIZE
    targets = [(target.base + places[rank::2]).tolist() for rank in range(2)]
    metadata = target.agent.metadata()
    doomed = target.bounce.reserve(SIZE * COUNT, COUNT)
    victim = new_sender(7, metadata, doomed, targets[0])
    senders = [new_sender(rank, metadata, room + rank * SIZE * COUNT, targets[rank]) for rank in range(2)]
    assert [sender.hear() for sender in (victim, *senders)] == ["ready"] * 3
    victim.end()
    target.bounce.quarantine(doomed)
    assert target.bounce.statistics().quarantined_bytes == SIZE * COUNT
    parts = []
    for rank in (1, 0):
        senders[rank].say("go")
        assert senders[rank].hear() == "done"
        pieces = np.stack([targets[rank], np.full(COUNT, SIZE)], axis=1)
        parts.append((room + rank * SIZE * COUNT, pieces))
    target.bounce.scatter(parts)
    for rank in range(2):
        sent = np.random.default_rng(rank).integers(0, 256, SIZE * COUNT, dtype=np.uint8).reshape(COUNT, SIZE)
        for row, address in zip(sent, targets[rank], strict=True):
            assert np.array_equal(target.pool[address - target.base :][:SIZE], row)
    target.bounce.release(room)
    target.bounce.release(doomed)
    assert target.bounce.statistics().used_bytes == target.bounce.statistics().quarantined_bytes == 0
    assert target.bounce.close()

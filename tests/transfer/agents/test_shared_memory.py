"""What is shared memory's own: which memory it takes, and what it finds out about a peer before it maps anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.agents import PeerUnreachableError, SharedMemoryAgent, finish


@pytest.fixture
def agent() -> Iterator[SharedMemoryAgent]:
    agent = SharedMemoryAgent("writer")
    yield agent
    agent.close()


def forge(metadata: bytes, **changes: object) -> bytes:
    kind, name, regions, details = msgspec.msgpack.decode(metadata)
    pid, [[fd, inode]] = msgspec.msgpack.decode(details)
    pid, files = changes.get("pid", pid), [[changes.get("fd", fd), changes.get("inode", inode)]]
    regions = changes.get("regions", regions)
    return msgspec.msgpack.encode([kind, name, regions, msgspec.msgpack.encode([pid, files])])


def test_memory_of_somebody_else_and_of_a_device_is_refused(agent: SharedMemoryAgent) -> None:
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(InvalidValueError, match="all of what 'writer' allocated there"):
        agent.register(memory.ctypes.data, 4096)
    shared = agent.allocate(4096)
    for size_bytes in (4095, 4097):
        with pytest.raises(InvalidValueError, match="all of what 'writer' allocated there"):
            agent.register(shared.ctypes.data, size_bytes)
    with pytest.raises(InvalidValueError, match="device_idx"):
        agent.register(shared.ctypes.data, 4096, device_idx=0)
    agent.close()


def test_a_peer_that_has_died_or_lies_about_its_files_cannot_be_reached(agent: SharedMemoryAgent) -> None:
    target = SharedMemoryAgent("target")
    address = target.allocate(4096).ctypes.data
    target.register(address, 4096)
    metadata = target.metadata()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for changes in ({"pid": int(dead.stdout)}, {"fd": 99_999}, {"inode": 1}, {"pid": -1}, {"pid": 1 << 62}):
        with pytest.raises(PeerUnreachableError, match="'target' cannot be reached"):
            agent.connect(forge(metadata, **changes))
    with pytest.raises(PeerUnreachableError, match="is not its memory"):
        agent.connect(forge(metadata, regions=[[address, 1 << 30, None]]))
    with pytest.raises(MalformedMessageError, match="1 files, expected one for each of 2 regions"):
        agent.connect(forge(metadata, regions=[[address, 4096, None], [0, 4096, None]]))
    agent.close()
    target.close()


def test_no_number_in_metadata_makes_it_raise_anything_else(agent: SharedMemoryAgent) -> None:
    for region, file in (
        ([1 << 63, 10], [3, 4]),
        ([4096, 10, 1 << 63], [3, 4]),
        ([-5, 10], [3, 4]),
        ([4096, 0], [3, 4]),
        ([4096, -1], [3, 4]),
        ([4096, 10], [-3, 4]),
    ):
        details = msgspec.msgpack.encode([os.getpid(), [file]])
        with pytest.raises(MalformedMessageError):
            agent.connect(msgspec.msgpack.encode(["shared_memory", "target", [region], details]))


def test_a_file_that_is_no_agents_memory_is_never_mapped(agent: SharedMemoryAgent, tmp_path: Path) -> None:
    with (tmp_path / "a file").open("w+b") as other:
        other.truncate(4096)
        file = [other.fileno(), os.fstat(other.fileno()).st_ino]
        details = msgspec.msgpack.encode([os.getpid(), [file]])
        with pytest.raises(PeerUnreachableError, match="is not its memory"):
            agent.connect(msgspec.msgpack.encode(["shared_memory", "target", [[4096, 4096]], details]))


def test_what_a_peer_has_mapped_outlives_the_owner_so_that_a_late_write_does_no_harm(agent: SharedMemoryAgent) -> None:
    source = agent.allocate(4096)
    agent.register(source.ctypes.data, 4096)
    target = SharedMemoryAgent("target")
    address = target.allocate(4096).ctypes.data
    target.register(address, 4096)
    peer = agent.connect(target.metadata())
    assert target.close()
    finish(agent.write(peer, [(source.ctypes.data, address, 4096)]))
    agent.close()


def test_no_descriptor_is_left_over_after_agents_were_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        first, second = SharedMemoryAgent("first"), SharedMemoryAgent("second")
        for one in (first, second):
            one.register(one.allocate(4096).ctypes.data, 4096)
        first.connect(second.metadata())
        second.connect(first.metadata())
        first.close()
        second.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


OVERLAPPING = """
import itertools, os
import msgspec
from kvist.errors import InvalidValueError
from kvist.transfer.agents import SharedMemoryAgent, shared_memory

shared_memory._is_this_process = lambda _: False
writer, target = SharedMemoryAgent("writer"), SharedMemoryAgent("target")
source = writer.allocate(1 << 20)
writer.register(source.ctypes.data, 1 << 20)
large, small = target.allocate(1 << 20), target.allocate(4096)
target.register(large.ctypes.data, 1 << 20)
target.register(small.ctypes.data, 4096)
details = msgspec.msgpack.decode(target.metadata())[3]
base = large.ctypes.data  # the small one is said to lie amid the large one
metadata = ["shared_memory", "target", [[base, 1 << 20], [base + 4096, 4096]], details]
peer = writer.connect(msgspec.msgpack.encode(metadata))
for offset, size in itertools.product((0, 4096, 8192), (4096, 8192, 1 << 20)):
    try:
        list(writer.write(peer, [(source.ctypes.data, base + offset, size)]))
    except InvalidValueError as error:
        print(error)
"""


def test_no_write_leaves_a_mapping_where_regions_overlap() -> None:
    result = subprocess.run([sys.executable, "-c", OVERLAPPING], check=False, capture_output=True, text=True)
    assert result.returncode == 0, (result.returncode, result.stderr)
    assert "within one region of peer 'target'" in result.stdout


SHRUNK = """
import os
import msgspec
from kvist.transfer.agents import PeerUnreachableError, SharedMemoryAgent, shared_memory

shared_memory._is_this_process = lambda _: False
writer, target = SharedMemoryAgent("writer"), SharedMemoryAgent("target")
source = writer.allocate(1 << 20)
writer.register(source.ctypes.data, 1 << 20)
address = target.allocate(1 << 20).ctypes.data
target.register(address, 1 << 20)
pid, [[fd, _]] = msgspec.msgpack.decode(msgspec.msgpack.decode(target.metadata())[3])
try:
    os.ftruncate(fd, 4096)
except PermissionError:
    print("sealed")
own = os.memfd_create("kvist-target")  # as a peer would that wants to
os.ftruncate(own, 1 << 20)
details = msgspec.msgpack.encode([pid, [[own, os.fstat(own).st_ino]]])
try:
    peer = writer.connect(msgspec.msgpack.encode(["shared_memory", "target", [[address, 1 << 20]], details]))
    os.ftruncate(own, 0)
    list(writer.write(peer, [(source.ctypes.data, address, 1 << 20)]))
except PeerUnreachableError as error:
    print(error)
"""


def test_memory_that_its_owner_could_shrink_under_a_write_is_refused() -> None:
    result = subprocess.run([sys.executable, "-c", SHRUNK], check=False, capture_output=True, text=True)
    assert result.returncode == 0, (result.returncode, result.stderr)
    assert result.stdout.startswith("sealed\n")
    assert "is not its memory" in result.stdout


OWN = """
import msgspec
from kvist.transfer.agents import PeerUnreachableError, SharedMemoryAgent

writer = SharedMemoryAgent("writer")
writer.register(writer.allocate(4096).ctypes.data, 4096)
kind, _, regions, details = msgspec.msgpack.decode(writer.metadata())
try:  # as a peer would that wants our own memory written to
    writer.connect(msgspec.msgpack.encode([kind, "target", regions, details]))
except PeerUnreachableError as error:
    print(error)
"""


def test_a_peer_that_says_to_be_this_very_process_is_refused() -> None:
    result = subprocess.run([sys.executable, "-c", OWN], check=True, capture_output=True, text=True)
    assert result.stdout.startswith("peer 'target' cannot be reached: process ")
    assert result.stdout.endswith(" is this one\n")

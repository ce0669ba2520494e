"""What every agent promises, between real processes: the same suite for each kind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.transfer.agents import PeerId, PeerUnreachableError, TransferAgent, Write, WriteFailedError, finish
from kvist.transfer.agents.base import decode_metadata

MIB = 1 << 20

NewAgent = Callable[..., TransferAgent]
NewPeer = Callable[..., Any]


def random_memory(agent: TransferAgent, size_bytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    memory = agent.allocate(size_bytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)
    agent.register(memory.ctypes.data, size_bytes)
    return memory


def reason(write: Write) -> str | None:
    """Move a write on to its end; return why it has failed, None if it has not."""
    try:
        finish(write)
    except WriteFailedError as error:
        return str(error)
    return None


def test_bytes_land_as_they_were_in_many_fragments_of_each_size_and_several_regions(
    new_agent: NewAgent, new_peer: NewPeer
) -> None:
    peer, agent = new_peer(size_bytes=2 * MIB, num_regions=3), new_agent("writer")
    sources = [random_memory(agent, 2 * MIB, seed) for seed in range(3)]
    peer_id = agent.connect(peer.metadata)
    num_fragments = 0
    for region, size_bytes in enumerate((1 << 10, 1 << 14, 1 << 18)):
        order = np.random.default_rng(region).permutation(2 * MIB // size_bytes) * size_bytes
        rows = (sources[region].ctypes.data + order, peer.addresses[region] + order, np.full_like(order, size_bytes))
        assert reason(agent.write(peer_id, np.stack(rows, axis=1))) is None
        num_fragments += len(order)
    assert peer.digests() == [hashlib.sha256(source).hexdigest() for source in sources]
    assert agent.num_fragments_written == num_fragments
    assert agent.bytes_written == 6 * MIB


def test_one_write_may_touch_several_regions_at_both_ends_and_odd_sizes(new_agent: NewAgent, new_peer: NewPeer) -> None:
    peer, agent = new_peer(size_bytes=4096, num_regions=2), new_agent("writer")
    first, second = random_memory(agent, 4096, 1), random_memory(agent, 4096, 2)
    fragments = [
        (first.ctypes.data + 3, peer.addresses[1] + 5, 1001),
        (second.ctypes.data, peer.addresses[0] + 4095, 1),
    ]
    assert reason(agent.write(agent.connect(peer.metadata), fragments)) is None
    expected = np.zeros((2, 4096), np.uint8)
    expected[1, 5:1006] = first[3:1004]
    expected[0, 4095] = second[0]
    assert peer.digests() == [hashlib.sha256(row).hexdigest() for row in expected]


def test_a_write_outside_registered_memory_is_refused_with_names_and_values_before_a_byte_moves(
    new_agent: NewAgent,
) -> None:
    agent, target = new_agent("writer"), new_agent("target")
    source, memory = random_memory(agent, 8192), random_memory(target, 8192)
    target.register(target.allocate(4096).ctypes.data, 4096)
    before = memory.copy()
    peer = agent.connect(target.metadata())
    inside = (source.ctypes.data, memory.ctypes.data, 4096)
    for field, fragment in (
        ("local_address", (source.ctypes.data + 4097, memory.ctypes.data, 4096)),
        ("local_address", (16, memory.ctypes.data, 4096)),
        ("remote_address", (source.ctypes.data, memory.ctypes.data - 1, 4096)),
        ("remote_address", (source.ctypes.data, memory.ctypes.data + 8192, 1)),
    ):
        with pytest.raises(InvalidValueError, match=f"{field}: got '{fragment[2]} bytes at 0x.*within one region of"):
            agent.write(peer, [inside, fragment])
    for size_bytes in (0, -4):
        with pytest.raises(InvalidValueError, match="size_bytes"):
            agent.write(peer, [(source.ctypes.data, memory.ctypes.data, size_bytes)])
    with pytest.raises(InvalidValueError, match="fragments"):
        agent.write(peer, [])
    assert np.array_equal(memory, before)
    assert agent.num_fragments_written == 0


def test_no_region_is_empty_or_taken_back_twice(new_agent: NewAgent) -> None:
    agent = new_agent("writer")
    memory = agent.allocate(8192)
    address = memory.ctypes.data
    agent.register(address, 8192)
    with pytest.raises(InvalidValueError, match="size_bytes"):
        agent.allocate(0)
    agent.deregister(address)
    with pytest.raises(InvalidValueError, match="a region that is registered"):
        agent.deregister(address)
    agent.register(address, 8192)


def test_a_peer_that_is_not_connected_is_refused(new_agent: NewAgent) -> None:
    agent = new_agent("writer")
    source = random_memory(agent, 4096)
    with pytest.raises(InvalidValueError, match="peer: got 'nobody'"):
        agent.write(PeerId("nobody"), [(source.ctypes.data, 0, 1)])
    agent.disconnect(PeerId("nobody"))


def test_a_peer_whose_new_memory_cannot_be_reached_can_still_be_disconnected(new_agent: NewAgent) -> None:
    agent, target = new_agent("writer"), new_agent("target")
    random_memory(target, 4096)
    metadata = decode_metadata(target.metadata(), target.kind)
    peer = agent.connect(target.metadata())
    with pytest.raises((PeerUnreachableError, MalformedMessageError)):
        agent.connect(msgspec.msgpack.encode(msgspec.structs.replace(metadata, details=b"nothing")))
    agent.disconnect(peer)
    assert agent.connect(target.metadata()) == peer


def test_a_peer_can_be_disconnected_and_connected_again_with_more_regions(new_agent: NewAgent) -> None:
    agent, target = new_agent("writer"), new_agent("target")
    source, first = random_memory(agent, 4096, 1), random_memory(target, 4096, 2)
    peer = agent.connect(target.metadata())
    assert reason(agent.write(peer, [(source.ctypes.data, first.ctypes.data, 4096)])) is None
    agent.disconnect(peer)
    with pytest.raises(InvalidValueError, match="peer"):
        agent.write(peer, [(source.ctypes.data, first.ctypes.data, 4096)])
    second = random_memory(target, 4096, 3)
    assert agent.connect(target.metadata()) == peer
    assert reason(agent.write(peer, [(source.ctypes.data, second.ctypes.data, 4096)])) is None
    assert np.array_equal(second, source)
    assert np.array_equal(first, source)


def test_metadata_that_is_broken_or_of_another_kind_is_refused(new_agent: NewAgent, kind: str) -> None:
    agent = new_agent("writer")
    random_memory(agent, 4096)
    metadata = agent.metadata()
    for broken in (b"", metadata[:-1], b"\x91" * 40, metadata + b"x"):
        with pytest.raises((MalformedMessageError, PeerUnreachableError)):
            agent.connect(broken)
    other = metadata.replace(kind.encode(), b"x" * len(kind))
    with pytest.raises(MalformedMessageError, match=f"expected '{kind}'"):
        agent.connect(other)


def test_a_peer_killed_in_the_middle_fails_the_writes_to_it_with_a_reason_and_no_others(
    new_agent: NewAgent, new_peer: NewPeer
) -> None:
    doomed, other = new_peer("doomed", 16 * MIB), new_peer("other", 4096)
    agent = new_agent("writer", write_timeout_s=10.0)
    source = random_memory(agent, 16 * MIB)
    doomed_id, other_id = agent.connect(doomed.metadata), agent.connect(other.metadata)
    offsets = np.arange(16 * MIB // 1024) * 1024
    rows = (source.ctypes.data + offsets, doomed.addresses[0] + offsets, np.full_like(offsets, 1024))
    fragments = np.stack(rows, axis=1)
    writes = [agent.write(doomed_id, fragments) for _ in range(20)]
    for write in writes[1:]:
        next(write, None)
    reason(writes[0])
    doomed.kill()
    last = reason(agent.write(doomed_id, fragments))
    assert last is not None
    assert "doomed" in last or "within 10.0 s" in last
    for write in writes[1:]:
        reason(write)  # each has an end
    assert reason(agent.write(other_id, [(source.ctypes.data, other.addresses[0], 4096)])) is None
    assert other.digests() == [hashlib.sha256(source[:4096]).hexdigest()]


def test_closing_ends_every_write_under_way_and_refuses_later_ones(new_agent: NewAgent, new_peer: NewPeer) -> None:
    peer, agent = new_peer(size_bytes=8 * MIB), new_agent("writer")
    source = random_memory(agent, 8 * MIB)
    offsets = np.arange(8 * MIB // 1024) * 1024
    rows = (source.ctypes.data + offsets, peer.addresses[0] + offsets, np.full_like(offsets, 1024))
    peer_id = agent.connect(peer.metadata)
    writes = [agent.write(peer_id, np.stack(rows, axis=1)) for _ in range(3)]
    for write in writes:
        next(write, None)
    agent.is_closing = True
    assert {reason(write) for write in writes} <= {None, "the agent is closing"}
    assert agent.close()
    assert agent.close()
    with pytest.raises(InvalidValueError, match="peer"):
        agent.write(peer_id, np.stack(rows, axis=1))


def test_an_agent_with_a_write_under_way_leaves_its_memory_registered(new_agent: NewAgent, new_peer: NewPeer) -> None:
    peer, agent = new_peer(size_bytes=8 * MIB), new_agent("writer")
    source = random_memory(agent, 8 * MIB)
    write = agent.write(agent.connect(peer.metadata), [(source.ctypes.data, peer.addresses[0], 8 * MIB)])
    next(write)
    assert not agent.close()
    reason(write)

"""Bounces between real agents: every byte arrives, completion comes after the scatter, and no room is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvist.errors import InvalidValueError
from kvist.transfer.agents import PeerId, SharedMemoryAgent, Write, WriteFailedError, finish
from kvist.transfer.bounce import Bounce
from kvist.transfer.copier import TorchCopier

NewEnd = Callable[..., Any]


class BrokenCopier:
    """A copier that raises, while it has an error."""

    def __init__(self, copier: Any) -> None:
        self.gather, self._scatter = copier.gather, copier.scatter
        self.error: Exception | None = None

    def scatter(self, *args: Any) -> None:
        if self.error is not None:
            raise self.error
        self._scatter(*args)


def failure(sending: Write | None) -> str | None:
    """Move a send on to its end; return why it has failed, None if it has not."""
    assert sending is not None
    try:
        finish(sending)
    except WriteFailedError as error:
        return str(error)
    return None


def fragments_of(source: Any, target: Any, size_bytes: int, count: int, start: int = 0) -> Any:
    order = np.random.default_rng(start).permutation(count) * size_bytes + start
    rows = (source.base + order, target.base + order[::-1], np.full_like(order, size_bytes))
    return np.stack(rows, axis=1)


def part_of(room: int, fragments: Any, offset: int = 0) -> tuple[int, Any]:
    """Return what lies in a room when these fragments were sent there."""
    return room + offset, np.asarray(fragments)[:, 1:]


def expected_pool(target: Any, source: Any, fragments: Any) -> Any:
    pool = np.zeros_like(target.pool)
    for local, remote, size in fragments.tolist():
        pool[remote - target.base : remote - target.base + size] = source.pool[local - source.base :][:size]
    return pool


@pytest.fixture
def ends(new_end: NewEnd) -> tuple[Any, Any]:
    source, target = new_end("source"), new_end("target")
    source.pool[:] = np.random.default_rng(0).integers(1, 256, len(source.pool), dtype=np.uint8)
    return source, target


@pytest.mark.parametrize("size_bytes", [16, 24, 1024])
def test_many_fragments_arrive_by_one_write(ends: tuple[Any, Any], size_bytes: int) -> None:
    source, target = ends
    fragments = fragments_of(source, target, size_bytes, 30)
    room = target.bounce.reserve(30 * size_bytes, 30)
    assert failure(source.bounce.send(source.connect(target), fragments, room)) is None
    assert source.agent.num_fragments_written == 1
    assert not target.pool.any()
    target.bounce.scatter([part_of(room, fragments)])
    assert np.array_equal(target.pool, expected_pool(target, source, fragments))
    target.bounce.release(room)
    assert source.bounce.statistics().num_fragments_sent == 30
    assert source.bounce.statistics().bytes_sent == 30 * size_bytes
    assert source.bounce.statistics().used_bytes == target.bounce.statistics().used_bytes == 0


def test_several_writers_share_one_part_and_may_report_in_any_order(new_end: NewEnd) -> None:
    target, sources = new_end("target"), [new_end(f"rank {rank}") for rank in range(4)]
    room = target.bounce.reserve(4 * 2048, 8)
    parts, expected = [], np.zeros_like(target.pool)
    for rank, source in enumerate(sources):
        source.pool[:] = rank + 1
        fragments = fragments_of(source, target, 1024, 2, start=rank * 2048)
        expected += expected_pool(target, source, fragments)
        parts.append(part_of(room, fragments, offset=rank * 2048))
        assert failure(source.bounce.send(source.connect(target), fragments, parts[-1][0])) is None
    target.bounce.scatter([parts[i] for i in (2, 0, 3, 1)])
    assert np.array_equal(target.pool, expected)
    target.bounce.release(room)
    assert target.bounce.statistics().used_bytes == 0


def test_a_scatter_that_fails_is_its_transfers_alone(new_end: NewEnd) -> None:
    copiers: list[BrokenCopier] = []

    def wrap(copier: Any) -> BrokenCopier:
        copiers.append(BrokenCopier(copier))
        return copiers[-1]

    target = new_end("target", wrap=wrap)
    first, second = target.bounce.reserve(1024, 16), target.bounce.reserve(1024, 16)
    copiers[0].error = RuntimeError("the device is lost")
    pieces = np.array([[target.base, 64]])
    with pytest.raises(RuntimeError, match="the device is lost"):
        target.bounce.scatter([(first, pieces)])
    copiers[0].error = None
    target.bounce.scatter([(second, pieces)])
    target.bounce.release(first)
    target.bounce.release(second)


def test_a_scatter_into_no_pool_fails(ends: tuple[Any, Any]) -> None:
    _, target = ends
    room = target.bounce.reserve(1024, 16)
    with pytest.raises(InvalidValueError, match="within one region of the pools"):
        target.bounce.scatter([(room, np.array([[16, 64]]))])
    assert not target.pool.any()
    target.bounce.release(room)


def test_a_transfer_that_does_not_fit_or_pay_is_not_reserved(new_end: NewEnd) -> None:
    target = new_end("target")
    refused = [(0, 0), (65537, 64), (2049, 1), (8193, 4)]
    assert [target.bounce.reserve(*asked) for asked in refused] == [None] * len(refused)
    assert target.bounce.reserve(8192, 4) is not None


def test_the_sender_asks_again_whether_it_pays_off_since_neighbours_are_joined(ends: tuple[Any, Any]) -> None:
    source, target = ends
    room = target.bounce.reserve(4096, 8)
    joined = np.array([[source.base, target.base, 4096]])
    assert source.bounce.send(source.connect(target), joined, room) is None
    assert source.bounce.statistics().used_bytes == 0
    target.bounce.release(room)


def test_without_room_nothing_is_reserved_until_some_is_given_back(ends: tuple[Any, Any]) -> None:
    _, target = ends
    whole = target.bounce.reserve(65536, 64)
    assert target.bounce.reserve(512, 4) is None
    target.bounce.release(whole)
    found = target.bounce.reserve(512, 4)
    assert found is not None
    target.bounce.release(found)


def test_room_that_was_quarantined_is_free_once_it_is_released(ends: tuple[Any, Any]) -> None:
    _, target = ends
    room = target.bounce.reserve(1024, 4)
    target.bounce.quarantine(room)
    assert target.bounce.statistics().quarantined_bytes == target.bounce.statistics().used_bytes == 1024
    target.bounce.release(room)
    assert target.bounce.statistics().quarantined_bytes == target.bounce.statistics().used_bytes == 0


def test_a_sender_without_room_writes_fragments_as_they_are(new_end: NewEnd) -> None:
    source, target = new_end("source", region_bytes=1024), new_end("target")
    peer = source.connect(target)
    fragments = fragments_of(source, target, 512, 4)
    room = target.bounce.reserve(2048, 4)
    assert source.bounce.send(peer, fragments, room) is None
    transfer = source.agent.write(peer, fragments)
    assert failure(transfer) is None
    assert np.array_equal(target.pool, expected_pool(target, source, fragments))
    target.bounce.release(room)


def test_a_send_that_cannot_be_written_fails_with_a_reason_and_gives_its_room_back(ends: tuple[Any, Any]) -> None:
    source, target = ends
    peer = source.connect(target)
    fragments = fragments_of(source, target, 512, 4)
    reason = failure(source.bounce.send(peer, fragments, 4096))
    assert "remote_address: got '2048 bytes at 0x1000'" in str(reason)
    fragments[0, 0] = 16
    reason = failure(source.bounce.send(peer, fragments, target.base))
    assert "within one region of the pools" in str(reason)
    assert source.bounce.statistics().used_bytes == 0


class CountingAgent(SharedMemoryAgent):
    """An agent that counts what is registered, and refuses the k-th registration."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__("counting")
        self.fails_at = fails_at
        self.registered: list[int] = []
        self.deregistered: list[int] = []

    def register(self, address: int, size_bytes: int, device_idx: int | None = None) -> None:
        if len(self.registered) == self.fails_at:
            raise InvalidValueError("address", address, "room in the device's table")
        super().register(address, size_bytes, device_idx)
        self.registered.append(address)

    def deregister(self, address: int) -> None:
        super().deregister(address)
        self.deregistered.append(address)


def bounce_of(agent: CountingAgent, copier: Any = None) -> Bounce:
    return Bounce(agent, copier, lambda: torch.from_numpy(agent.allocate(4096)))


@pytest.mark.parametrize("step", [0, 1])
def test_a_bounce_that_cannot_be_set_up_leaves_nothing_registered(step: int) -> None:
    agent = CountingAgent(fails_at=step)
    with pytest.raises(InvalidValueError, match="room in the device's table"):
        bounce_of(agent)
    assert agent.deregistered == agent.registered
    agent.close()


def test_closing_takes_each_region_back_once() -> None:
    agent = CountingAgent()
    bounce = bounce_of(agent)
    assert bounce.close()
    assert bounce.close()
    assert sorted(agent.deregistered) == sorted(agent.registered)
    agent.close()


def test_closing_leaves_regions_that_a_room_needs_and_takes_them_back_later(caplog: pytest.LogCaptureFixture) -> None:
    agent = CountingAgent()
    bounce = bounce_of(agent)
    room = bounce.reserve(1024, 4)
    assert room is not None
    bounce.quarantine(room)
    assert not bounce.close()
    assert "bounce regions stay registered" in caplog.text
    assert agent.deregistered == []
    bounce.release(room)
    assert bounce.close()
    assert sorted(agent.deregistered) == sorted(agent.registered)
    agent.close()


class AbandoningAgent(CountingAgent):
    """An agent none of whose writes can be stopped."""

    def write(self, peer: PeerId, fragments: Any) -> Write:  # noqa: ARG002
        yield False
        raise WriteFailedError("not written within 30 s", is_quiescent=False)


def test_room_that_an_abandoned_write_may_still_read_is_quarantined_and_stays_registered() -> None:
    agent = AbandoningAgent()
    pool = agent.allocate(4096)
    bounce = bounce_of(agent, TorchCopier([torch.from_numpy(pool)]))
    halves = np.array([(pool.ctypes.data + offset, 4096 + offset, 32) for offset in (0, 32)])
    assert failure(bounce.send(PeerId("peer"), halves, 4096)) == "not written within 30 s"
    assert bounce.statistics().quarantined_bytes == bounce.statistics().used_bytes == 512
    assert not bounce.close()
    assert agent.deregistered == []
    agent.close()

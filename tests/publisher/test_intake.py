"""A subscription is read while there is room for what it brings, and nothing is lost when there is none."""

from __future__ import annotations

import asyncio

import pytest

from kvist.events.transports import Endpoint, Message, ReplayRequest
from kvist.publisher import PublisherLimits
from kvist.publisher.intake import BoundedSubscription
from kvist.publisher.sidecar import Sidecar


class Brook:
    """A subscription that has a message for whoever asks."""

    num_connects, num_malformed, is_peer_gone, is_caught_up, problem = 3, 1, True, False, "none"

    def __init__(self) -> None:
        self.num_received = 0

    async def receive(self):
        self.num_received += 1
        return [Message(b"t", self.num_received, b"")]

    async def replay(self, request, timeout_s):
        return [Message(b"t", request.start_sequence, str(timeout_s).encode())]


class DirectBrook(Brook):
    """One that can also have its messages taken where they arrive."""

    def take_with(self, take) -> None:
        self.take = take


class Room:
    """Says whether there is room."""

    has_room = True

    def __call__(self) -> bool:
        return self.has_room


@pytest.fixture
def room() -> Room:
    return Room()


async def test_nothing_is_received_before_there_is_room(room, until):
    brook = Brook()
    subscription = BoundedSubscription(brook, room)
    assert [message.sequence for message in await subscription.receive()] == [1]
    room.has_room = False
    receiving = asyncio.create_task(subscription.receive())
    await asyncio.sleep(0)
    assert (receiving.done(), brook.num_received) == (False, 1)
    room.has_room = True
    await until(receiving.done)
    assert [message.sequence for message in receiving.result()] == [2]


async def test_a_receive_that_is_cancelled_while_it_waits_for_room_takes_nothing(room):
    brook = Brook()
    room.has_room = False
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await BoundedSubscription(brook, room).receive()
    assert brook.num_received == 0


def test_messages_taken_where_they_arrive_are_taken_but_the_next_ones_wait_for_room(room):
    brook, taken = DirectBrook(), []
    subscription = BoundedSubscription(brook, room)
    subscription.take_with(lambda messages: taken.append(messages) is None)
    assert brook.take([1])
    room.has_room = False
    assert not brook.take([2])
    assert taken == [[1], [2]]
    subscription.take_with(lambda _: False)
    room.has_room = True
    assert not brook.take([3])
    subscription.take_with(None)
    assert brook.take is None


async def test_all_else_is_as_the_subscription_says(room):
    subscription = BoundedSubscription(Brook(), room)
    subscription.take_with(None)  # which it cannot do, and need not
    async with subscription as entered:
        assert entered is subscription
    assert (subscription.num_connects, subscription.num_malformed, subscription.problem) == (3, 1, "none")
    assert (subscription.is_peer_gone, subscription.is_caught_up) == (True, False)
    assert await subscription.replay(ReplayRequest(None, 7), 2.0) == [Message(b"t", 7, b"2.0")]


async def test_a_sidecar_whose_inbox_is_full_leaves_messages_with_the_engine_and_loses_none(
    start_vllm, free_port, until, monkeypatch
):
    looks: list[bool] = []
    has_room = Sidecar._has_room
    monkeypatch.setattr(Sidecar, "_has_room", lambda sidecar: looks.append(has_room(sidecar)) or looks[-1])
    monkeypatch.setattr("kvist.publisher.sidecar.INBOX_BYTES", 0)
    port, num_blocks = free_port(), 300
    engine = start_vllm(port)
    limits = PublisherLimits(heartbeat_s=0.05)
    endpoints = [Endpoint.parse(f"tcp://127.0.0.1:{port}")]
    with Sidecar(endpoints, to="tcp://127.0.0.1:0", worker="w", limits=limits) as sidecar:
        running = asyncio.create_task(sidecar.run())
        engine.store(0, [0, 1, 2, 3])
        await until(lambda: sidecar.block_size == 4)  # told by the first message, before which all are taken
        num_looks, num_taken = len(looks), sidecar.statistics().num_engine_batches
        for number in range(1, num_blocks):
            engine.store(number, [number * 4 + idx for idx in range(4)])
        await until(lambda: len(looks) > num_looks + 3)
        assert not any(looks[num_looks:])
        assert sidecar.statistics().num_engine_batches == num_taken
        monkeypatch.setattr("kvist.publisher.sidecar.INBOX_BYTES", 1)
        await until(lambda: sidecar.statistics().num_engine_batches == num_blocks)
        await until(lambda: sidecar.statistics().published.ranks[0].num_events == num_blocks)
        statistics = sidecar.statistics()
        assert statistics.published.ranks[0].normaliser.num_blocks == num_blocks
        assert (statistics.num_lost, statistics.published.num_lost_events) == (0, 0)
        running.cancel()

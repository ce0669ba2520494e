"""The delivery contract, the same for every transport: add one to the `kit` fixture and it is held to all of this."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import count

import pytest

from kvist.errors import InvalidValueError
from kvist.events.transports import Message, Publication, ReplayRequest, Subscription
from kvist.events.transports.base import MAX_DRAIN

PROBE = b"probe"


def send(publication: Publication, message: Message) -> None:
    """Send as a publisher does: what the transport cannot take is offered again."""
    give_up_s = time.monotonic() + 180
    while True:
        try:
            return publication.send(message)
        except BlockingIOError:
            assert time.monotonic() < give_up_s
            time.sleep(0.001)


async def connect(publication: Publication, subscription: Subscription) -> None:
    """Send probes until one arrives; what the subscriber joined late for is nobody's loss."""

    async def first_probe() -> None:
        while not any(message.topic == PROBE for message in await subscription.receive()):
            pass

    arrival = asyncio.create_task(first_probe())
    for sequence in count():
        send(publication, Message(PROBE, sequence, b""))
        if (await asyncio.wait([arrival], timeout=0.02))[0]:
            await arrival
            return


async def take(subscription: Subscription, num_messages: int) -> list[Message]:
    """Receive until this many messages came, probes not counted."""
    messages: list[Message] = []
    async with asyncio.timeout(60):
        while len(messages) < num_messages:
            messages += [message for message in await subscription.receive() if message.topic != PROBE]
    return messages


def numbered(num_messages: int, topic: bytes = b"kv/w/0", start: int = 0) -> list[Message]:
    return [Message(topic, start + idx, b"payload %d" % idx) for idx in range(num_messages)]


async def test_messages_arrive_complete_and_in_order(kit):
    publication = kit.publish()
    async with kit.subscribe() as subscription:
        await connect(publication, subscription)
        sent = numbered(500)
        for message in sent:
            send(publication, message)
        assert await take(subscription, 500) == sent


async def test_one_receive_returns_what_is_there_up_to_its_limit(kit):
    publication = kit.publish()
    async with kit.subscribe() as subscription:
        await connect(publication, subscription)
        sent = numbered(MAX_DRAIN + 10)
        for message in sent:
            send(publication, message)
        received = []
        async with asyncio.timeout(60):
            while len(received) < len(sent):
                drained = await subscription.receive()
                assert 0 < len(drained) <= MAX_DRAIN
                received += [message for message in drained if message.topic != PROBE]
        assert received == sent


async def test_every_subscriber_gets_every_message(kit):
    publication = kit.publish()
    async with kit.subscribe() as one, kit.subscribe() as other:
        await connect(publication, one)
        await connect(publication, other)
        send(publication, Message(b"t", 7, b"x"))
        assert await take(one, 1) == await take(other, 1) == [Message(b"t", 7, b"x")]


async def test_ranks_share_one_publication_and_keep_their_topics(kit):
    publication = kit.publish()
    async with kit.subscribe() as subscription:
        await connect(publication, subscription)
        sent = [message for pair in zip(numbered(5, b"a"), numbered(5, b"b"), strict=True) for message in pair]
        for message in sent:
            send(publication, message)
        assert await take(subscription, 10) == sent


async def test_a_gap_and_a_duplicate_travel_as_they_were_sent(kit):
    publication = kit.publish()
    async with kit.subscribe() as subscription:
        await connect(publication, subscription)
        for sequence in (0, 1, 1, 5):
            send(publication, Message(b"t", sequence, b""))
        assert [message.sequence for message in await take(subscription, 4)] == [0, 1, 1, 5]


async def test_a_subscriber_that_came_first_finds_the_publisher(kit):
    async with kit.subscribe() as subscription:
        publication = kit.publish()
        await connect(publication, subscription)
        assert subscription.num_connects > 0


async def test_a_restarted_publisher_is_found_again_and_counted_as_a_new_connection(kit):
    async with kit.subscribe() as subscription:
        first = kit.publish()
        await connect(first, subscription)
        num_connects = subscription.num_connects
        first.close()
        second = kit.publish()
        await connect(second, subscription)
        second.send(Message(b"t", 0, b"again"))
        assert (await take(subscription, 1))[0].payload == b"again"
        assert subscription.num_connects > num_connects


async def test_sending_to_nobody_neither_waits_nor_fails(kit):
    publication = kit.publish()
    for message in numbered(1000):
        send(publication, message)


async def test_a_slow_subscriber_loses_messages_of_its_own_and_delays_nobody(kit, kernel_bytes, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.received.QUEUE_CAPACITY", 50)
    monkeypatch.setattr("kvist.events.transports.zmq.SEND_HWM", 50)
    publication = kit.publish()
    async with kit.subscribe() as slow:
        await connect(publication, slow)
        # More than two connections and a broker between them keep, with the two hand-overs of 16 MiB before them.
        num_sent = (2 * kernel_bytes + (64 << 20)) >> 16 if kit.loses_for_the_slow else 1000
        for sequence in range(num_sent):  # ends although nobody reads
            send(publication, Message(b"t", sequence, bytes(1 << 16)))
        received = await take(slow, 1)
        while received[-1].sequence != num_sent:
            send(publication, Message(b"t", num_sent, b"last"))  # may be lost, too, and be the only one on its way
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    received += await slow.receive()
        sequences = [message.sequence for message in received if message.sequence < num_sent]
        assert sequences == sorted(set(sequences))
        assert len(sequences) < num_sent or not kit.loses_for_the_slow


async def test_closing_delivers_what_was_sent_to_whoever_is_connected(kit):
    publication = kit.publish()
    async with kit.subscribe() as subscription:
        await connect(publication, subscription)
        for message in numbered(2000):
            send(publication, message)
        await asyncio.to_thread(publication.close, 60)
        assert (await take(subscription, 2000))[-1].sequence == 1999


async def test_closing_twice_is_allowed_and_sending_afterwards_raises(kit):
    publication = kit.publish()
    publication.close()
    publication.close()
    with pytest.raises(OSError, match=r"send|closed"):
        publication.send(Message(b"t", 0, b""))


async def test_an_address_in_use_is_an_error_that_names_it(kit):
    kit.publish()
    if kit.is_shared:  # there, epochs tell one publisher from the next
        kit.publish()
        return
    with pytest.raises(InvalidValueError) as error:
        kit.publish()
    assert error.value.field == "endpoint"
    assert kit.url in str(error.value)


async def test_a_cancelled_receive_loses_nothing(kit):
    publication = kit.publish()
    async with kit.subscribe() as subscription:
        await connect(publication, subscription)
        waiting = asyncio.create_task(take(subscription, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        sent = numbered(100)
        for message in sent:
            send(publication, message)
        assert await take(subscription, 100) == sent


async def test_replay_returns_what_is_kept_of_one_topic_from_a_sequence_on(kit, kept):
    kept.messages = numbered(2000, b"a") + numbered(10, b"b")
    kit.publish(kept)
    async with kit.subscribe() as subscription:
        assert await subscription.replay(ReplayRequest(b"a", 1500), 60) == kept.messages[1500:2000]
        assert await subscription.replay(ReplayRequest(b"a", 2000), 60) == []
        assert await subscription.replay(ReplayRequest(b"", 9), 60) == kept.messages[9:2000] + kept.messages[2009:]


async def test_replay_without_a_topic_returns_every_message(kit, kept):
    kept.messages = numbered(10, b"a")
    kit.publish(kept)
    async with kit.subscribe() as subscription:
        replayed = await subscription.replay(ReplayRequest(None, 4), 60)
        assert [(message.sequence, message.payload) for message in replayed] == [m[1:] for m in kept.messages[4:]]


async def test_a_replay_request_arrives_as_it_was_asked(kit, kept):
    kit.publish(kept)
    requests = [ReplayRequest(None, 1), ReplayRequest(b"", 2, 3), ReplayRequest(b"a", 4), ReplayRequest(b"a", 5, 2**63)]
    async with kit.subscribe() as subscription:
        for request in requests:
            assert await subscription.replay(request, 60) == []
    assert kept.requests == requests


async def test_a_subscription_knows_of_no_problem_while_all_is_well(kit):
    publication = kit.publish()
    async with kit.subscribe() as subscription:
        await connect(publication, subscription)
        assert not subscription.is_peer_gone
        assert subscription.problem is None


async def test_replay_is_none_when_nobody_is_there(kit):
    async with kit.subscribe() as subscription:
        assert await subscription.replay(ReplayRequest(b"a", 0), 0.05) is None


async def test_replay_is_none_when_the_publisher_serves_none(kit):
    kit.publish()
    async with kit.subscribe() as subscription:
        assert await subscription.replay(ReplayRequest(b"a", 0), 0.05) is None


async def test_a_cancelled_replay_leaves_the_subscription_usable(kit, kept):
    kept.messages = numbered(3, b"a")
    async with kit.subscribe() as subscription:
        asking = asyncio.create_task(subscription.replay(ReplayRequest(b"a", 0), 30))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        kit.publish(kept)
        assert await subscription.replay(ReplayRequest(b"a", 0), 60) == kept.messages

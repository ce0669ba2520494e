from __future__ import annotations

import asyncio

from kvist.events.transports import Message, ReplayRequest

TOPIC = b"kv/pod-1/0"


class Kept:
    """A replay source that keeps what it is given."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    def replay(self, request: ReplayRequest) -> list[Message]:
        return [message for message in self._messages if message.sequence >= request.start_sequence]


def kept(num_messages: int, size_bytes: int) -> Kept:
    return Kept([Message(TOPIC, sequence, bytes(size_bytes)) for sequence in range(num_messages)])


async def test_an_answer_of_many_pages_arrives_whole_and_reaches_nobody_else(wire):
    async with wire.subscribe() as subscription, wire.subscribe() as other:
        publication = await wire.publish_to(subscription, other)
        publication.serve_replay(kept(100, 20_000))
        assert len(await subscription.replay(ReplayRequest(TOPIC, 20), 60)) == 80
        waiting = asyncio.create_task(other.receive())
        await asyncio.sleep(0)
        publication.send(Message(TOPIC, 7, b"live"))
        assert await waiting == [Message(TOPIC, 7, b"live")]


async def test_questions_of_one_subscriber_are_answered_side_by_side(wire):
    wire.publish().serve_replay(kept(300, 10_000))
    async with wire.subscribe() as subscription:
        asked = [subscription.replay(ReplayRequest(TOPIC, start), 60) for start in range(0, 300, 50)]
        answers = await asyncio.gather(*asked)
    assert [answer[0].sequence for answer in answers] == list(range(0, 300, 50))


async def test_a_question_is_given_up_when_the_broker_goes(wire, until):
    class Endless:
        def replay(self, request: ReplayRequest):
            while True:
                yield Message(TOPIC, request.start_sequence, bytes(100_000))

    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        publication.serve_replay(Endless())
        asking = asyncio.create_task(subscription.replay(ReplayRequest(TOPIC, 0), 1))
        await until(lambda: len(subscription._link._names) > 2)
        wire.broker.kill()
        async with asyncio.timeout(60):
            assert await asking is None


async def test_a_publisher_that_is_gone_is_not_asked(wire, until):
    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        await asyncio.to_thread(publication.close, 60)
        await until(lambda: subscription.is_peer_gone)
        assert await subscription.replay(ReplayRequest(TOPIC, 0), 600) is None


async def test_what_is_not_the_transports_is_counted_and_skipped(wire, until, send, take_until):
    async with wire.subscribe() as subscription, wire.operator() as operator:
        publication = await wire.publish_to(subscription)
        for place, data in ((wire.place, b"{"), (f"{wire.place}/0", b"short"), (f"{wire.place}/0", b"")):
            await operator.publish(place, data, 1)
        await until(lambda: subscription.num_malformed == 3)
        send(publication, 5)
        assert await take_until(subscription, 5) == [5]


async def test_what_is_not_read_in_time_is_lost_newest_first(wire, until, send, take_until, monkeypatch, caplog):
    monkeypatch.setattr("kvist.events.transports.received.QUEUE_CAPACITY", 10)
    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        for sequence in range(50):
            send(publication, sequence)
        await until(lambda: "messages lost" in caplog.text)
        assert (await take_until(subscription, 9))[:10] == list(range(10))


async def test_topics_that_are_no_ranks_come_back_as_they_were(wire):
    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        for topic in (b"", b"kv-events", b"kv/other/0", b"kv/pod-1/01", b"\xff/#+"):
            publication.send(Message(topic, 1, b""))
            assert [message.topic for message in await subscription.receive()] == [topic]

"""A stream is set up as its URL says or not at all, and gives back what it keeps."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import asynccontextmanager

import nats
import nats.js.errors
import pytest
from nats.js.api import StreamConfig

from kvist.errors import InvalidValueError
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.base import WHO_IS_THERE

TOPIC, OTHER_TOPIC = b"kv/pod-1/0", b"kv/pod-1/1"
QUERY = "?jetstream=KV&max_age_s=3600&max_bytes=1000000"


@asynccontextmanager
async def manager_of(server):
    """Return the server's streams, as an operator sees them."""
    client = await nats.connect(f"nats://127.0.0.1:{server.port}")
    try:
        yield client.jsm(timeout=60)
    finally:
        await client.close()


async def until_kept(server, num_messages: int) -> None:
    """Wait until the stream has taken this many messages, which it does behind the server's back."""
    give_up_s = time.monotonic() + 180
    async with manager_of(server) as manager:
        while (num := (await manager.stream_info("KV")).state.last_seq) < num_messages:
            assert time.monotonic() < give_up_s, f"the stream took {num} messages, not {num_messages}"


async def test_a_stream_is_created_once_with_the_urls_limits(wire):
    server = wire.start_server(has_jetstream=True)
    for _ in range(2):
        wire.publish(wire.url(server, query=QUERY))
    wire.publish(wire.url(server, query="?jetstream=KV"))  # says nothing of limits, and takes what there is
    async with manager_of(server) as manager:
        (info,) = await manager.streams_info()
        config = info.config
        assert (config.name, config.subjects) == ("KV", ["kvist.org%2Fmodel.>"])
        assert (config.max_age, config.max_bytes, config.retention, config.discard) == (3600, 10**6, "limits", "old")


async def test_without_limits_a_stream_keeps_a_day_and_a_gibibyte(wire):
    server = wire.start_server(has_jetstream=True)
    wire.publish(wire.url(server, query="?jetstream=KV"))
    async with manager_of(server) as manager:
        config = (await manager.stream_info("KV")).config
        assert (config.max_age, config.max_bytes) == (86_400, 1 << 30)


@pytest.mark.parametrize(
    ("existing", "message"),
    [
        ({"max_age": 60}, "jetstream=KV, max_age_s: got 3600, expected 60.0, which the stream on the server has"),
        ({"max_bytes": 5000}, "jetstream=KV, max_bytes: got 1000000, expected 5000, which"),
        ({"retention": "interest"}, "jetstream=KV, retention: got 'limits', expected 'interest', which"),
        ({"discard": "new"}, "jetstream=KV, discard: got 'old', expected 'new', which"),
        ({"subjects": ["a.>"]}, "jetstream=KV, subjects: got ['kvist.org%2Fmodel.>'], expected ['a.>'], which"),
    ],
)
async def test_other_settings_of_an_existing_stream_are_an_error_and_stay(wire, existing, message):
    server = wire.start_server(has_jetstream=True)
    config = {"name": "KV", "subjects": ["kvist.org%2Fmodel.>"], "max_age": 3600, "max_bytes": 10**6} | existing
    async with manager_of(server) as manager:
        before = (await manager.add_stream(StreamConfig(**config))).config
        with pytest.raises(InvalidValueError) as error:
            await asyncio.to_thread(wire.publish, wire.url(server, query=QUERY))
        assert message in str(error.value)
        assert (await manager.stream_info("KV")).config == before


async def test_subjects_that_another_stream_keeps_are_an_error(wire):
    server = wire.start_server(has_jetstream=True)
    async with manager_of(server) as manager:
        await manager.add_stream(StreamConfig(name="OTHER", subjects=["kvist.>"]))
    with pytest.raises(InvalidValueError, match="subjects overlap"):
        wire.publish(wire.url(server, query=QUERY))


def test_a_server_without_jetstream_is_an_error(wire):
    server = wire.start_server()
    with pytest.raises(InvalidValueError, match="a server with JetStream"):
        wire.publish(wire.url(server, query=QUERY))


async def test_settings_that_turn_out_wrong_later_are_raised_by_whoever_sends(wire, until):
    server = wire.start_server(has_jetstream=True)
    async with manager_of(server) as manager:
        await manager.add_stream(StreamConfig(name="KV", subjects=["a.>"]))
    server.kill()
    publication = wire.publish(wire.url(server, query=QUERY))
    server.start()

    def is_refused() -> bool:
        try:
            publication.send(Message(TOPIC, 0, b""))
        except OSError as error:
            return "subjects" in str(error)
        return False

    await until(is_refused)


async def test_what_a_publisher_left_behind_is_read_from_the_stream(wire):
    server = wire.start_server(has_jetstream=True)
    url = wire.url(server, query=QUERY)
    for publisher_number in range(3):
        publication = wire.publish(url)
        for sequence in range(50):
            payload = b"%d" % publisher_number
            wire.send(publication, sequence, payload=payload)
            if sequence % 2:
                publication.send(Message(OTHER_TOPIC, sequence, payload))
        publication.close(60)
    await until_kept(server, 225)
    sent = [Message(TOPIC, sequence, b"2") for sequence in range(50)]
    other = [Message(OTHER_TOPIC, sequence, b"2") for sequence in range(1, 50, 2)]
    async with wire.subscribe(url) as subscription:
        for start in (0, 1, 37, 49, 50):
            assert await subscription.replay(ReplayRequest(TOPIC, start, epoch=5), 60) == sent[start:]
        assert await subscription.replay(ReplayRequest(OTHER_TOPIC, 48), 60) == other[-1:]
        assert await subscription.replay(ReplayRequest(None, 0), 60) == sent + other
        assert await subscription.replay(ReplayRequest(b"kv/pod-1/7", 0), 60) is None
        assert await subscription.replay(WHO_IS_THERE, 60) is None  # which only a publisher can tell


async def test_a_publisher_that_is_there_is_asked_rather_than_its_stream(wire):
    server = wire.start_server(has_jetstream=True)
    url = wire.url(server, query=QUERY)
    publication = wire.publish(url)
    wire.send(publication, 1)
    await until_kept(server, 1)
    publication.serve_replay(wire.keep([Message(TOPIC, 9, b"from the publisher")]))
    async with wire.subscribe(url) as subscription:
        assert await subscription.replay(ReplayRequest(TOPIC, 0), 60) == [Message(TOPIC, 9, b"from the publisher")]


async def test_a_stream_survives_its_server(wire):
    server = wire.start_server(has_jetstream=True)
    url = wire.url(server, query=QUERY)
    publication = wire.publish(url)
    wire.send(publication, *range(10))
    publication.close(60)
    await until_kept(server, 10)
    server.kill()
    server.start()
    async with wire.subscribe(url) as subscription:
        assert [m.sequence for m in await subscription.replay(ReplayRequest(TOPIC, 0), 60)] == [*range(10)]


async def test_a_stream_forgets_the_oldest_beyond_its_bytes(wire):
    server = wire.start_server(has_jetstream=True)
    url = wire.url(server, query="?jetstream=KV&max_bytes=100000")
    publication = wire.publish(url)
    wire.send(publication, *range(100), payload=bytes(10_000))
    publication.close(60)
    await until_kept(server, 100)
    async with wire.subscribe(url) as subscription:
        sequences = [m.sequence for m in await subscription.replay(ReplayRequest(TOPIC, 0), 60)]
    assert sequences == [*range(100 - len(sequences), 100)]
    assert 5 < len(sequences) < 10


async def test_everything_from_the_streams_beginning_can_be_received_then_what_comes(wire, until):
    server = wire.start_server(has_jetstream=True)
    publication = wire.publish(wire.url(server, query=QUERY))
    wire.send(publication, *range(3000))
    async with wire.subscribe(wire.url(server, query=f"{QUERY}&deliver=all")) as subscription:
        assert await wire.take(subscription, 3000) == [*range(3000)]
        wire.send(publication, 3000)
        assert await wire.take(subscription, 1) == [3000]
        server.kill()
        await until(lambda: subscription.problem is not None)
        server.start()
        await until(lambda: subscription.num_connects == publication._link.num_connects == 2)
        wire.send(publication, 3001)
        assert await wire.take(subscription, 1) == [3001]


@pytest.mark.parametrize("num_before", [3, 30])
async def test_a_stream_that_a_server_lost_is_read_from_the_beginning_of_its_successor(wire, until, num_before):
    server = wire.start_server(has_jetstream=True)
    publication = wire.publish(wire.url(server, query=QUERY))
    wire.send(publication, *range(num_before))
    async with wire.subscribe(wire.url(server, query=f"{QUERY}&deliver=all")) as subscription:
        assert await wire.take(subscription, num_before) == [*range(num_before)]
        server.kill()
        shutil.rmtree(server.folder / "jetstream")
        await until(lambda: subscription.problem is not None)
        server.start()
        await until(lambda: publication._link.num_connects == 2)  # until it knows of its end, it sends over the first
        wire.send(publication, *range(100, 110))
        assert await wire.take(subscription, 10) == [*range(100, 110)]


async def test_a_stream_that_is_not_there_yet_is_a_problem_until_it_is(wire, until, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.MAX_RECONNECT_S", 0.02)
    server = wire.start_server(has_jetstream=True)
    url = wire.url(server, query=QUERY)
    async with wire.subscribe(f"{url}&deliver=all") as subscription:
        await until(lambda: "stream KV cannot be read" in (subscription.problem or ""))
        publication = await asyncio.to_thread(wire.publish, url)
        wire.send(publication, 4)
        assert await wire.take(subscription, 1) == [4]
        assert subscription.problem is None

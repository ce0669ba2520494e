from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import suppress

from kvist.events.transports import Message
from kvist.events.transports.mqtt import MqttLink
from kvist.publisher import KvEventPublisher

PUBLISH_UNTIL_KILLED = """
import sys, time
from kvist.events.transports.broker import BrokerUrl
from kvist.events.transports.mqtt import MqttPublication
from kvist.publisher import KvEventPublisher

publication = MqttPublication(BrokerUrl.parse(sys.argv[1]))
publisher = KvEventPublisher(publication, worker="pod-1", block_size=4)
publisher.stored([1], [1, 2, 3, 4])
time.sleep(600)
"""


async def test_a_publisher_announces_its_worker_and_that_it_is_gone(wire):
    with KvEventPublisher(wire.publish(), worker="pod-1", block_size=4):
        announcement = json.loads(await wire.announced())
    assert announcement | {"publication_id": ""} == {
        "worker": "pod-1",
        "model": "org/model",
        "state": "alive",
        "publication_id": "",
    }
    assert json.loads(await wire.announced())["state"] == "gone"


async def test_a_closed_publication_is_gone_and_the_next_one_is_there_again(wire):
    async with wire.subscribe() as subscription:
        first = await wire.publish_to(subscription)
        assert not subscription.is_peer_gone
        waiting = asyncio.create_task(subscription.receive())
        await asyncio.to_thread(first.close, 60)
        assert await waiting == []
        assert subscription.is_peer_gone
        await wire.publish_to(subscription)
        assert not subscription.is_peer_gone
        assert subscription.num_connects == 2


async def test_a_killed_publisher_is_gone_by_its_last_will(wire, until):
    async with wire.subscribe() as subscription:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PUBLISH_UNTIL_KILLED, wire.url().public)
        try:
            assert (await subscription.receive())[0].topic == b"kv/pod-1/0"
            assert not subscription.is_peer_gone
        finally:
            process.kill()
            await process.wait()
        await until(lambda: subscription.is_peer_gone)
    async with wire.subscribe() as latecomer:
        await until(lambda: latecomer.is_peer_gone)


async def test_nobody_elses_farewell_stays_in_the_place_of_an_announcement(wire):
    async with wire.operator() as operator, wire.subscribe() as subscription:
        await wire.publish_to(subscription)
        alive = await wire.announced()
        late_will = alive.replace(b'"alive"', b'"gone"').replace(b'"publication_id":"', b'"publication_id":"0')
        for data in (late_will, b"", b"rubbish"):
            await operator.publish(wire.place, data, 1, retain=True)
            while await wire.announced() != alive:
                pass
        assert not subscription.is_peer_gone
        assert subscription.num_connects == 1


async def test_closing_waits_until_the_broker_has_everything(wire, send, take_until):
    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        for sequence in range(500):
            send(publication, sequence)
        await asyncio.to_thread(publication.close, 60)
        assert await take_until(subscription, 499) == list(range(500))


async def test_what_the_broker_did_not_acknowledge_is_sent_again_in_order(wire, until, send, take_until, monkeypatch):
    is_subscriber_back = threading.Event()

    subscribe = MqttLink._subscribe

    async def subscribe_behind_it(link, client, name, receive):
        if name.startswith("kvist-ask"):  # the publisher's
            await asyncio.to_thread(is_subscriber_back.wait)
        return await subscribe(link, client, name, receive)

    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        monkeypatch.setattr(MqttLink, "_subscribe", subscribe_behind_it)
        wire.broker.kill()
        for sequence in range(500):
            send(publication, sequence)
        await until(lambda: subscription.problem)
        wire.broker.start()
        await until(lambda: subscription.problem is None)
        is_subscriber_back.set()
        assert await take_until(subscription, 499) == list(range(500))
        assert subscription.num_connects == 2


async def test_a_publication_that_cannot_send_takes_so_much_and_no_more(wire, until):
    publication = wire.publish()
    wire.broker.kill()
    await until(lambda: publication._link.problem)
    num_taken = 0
    with suppress(BlockingIOError):
        while num_taken < 10_000:
            publication.send(Message(b"t", num_taken, bytes(1000)))
            num_taken += 1
    assert 0 < num_taken < 10_000


async def test_closing_while_the_broker_is_away_does_not_wait_for_it(wire, until, send):
    publication = wire.publish()
    wire.broker.kill()
    send(publication, 0)
    await until(lambda: publication._link.problem)
    async with asyncio.timeout(60):
        await asyncio.to_thread(publication.close, 600)


async def test_two_publishers_of_one_worker_are_warned_of(wire, until, caplog):
    wire.publish()
    wire.publish()
    await until(lambda: "another publisher is, or was, the same worker" in caplog.text)

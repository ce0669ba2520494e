from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import aiomqtt
import pytest

from kvist.errors import InvalidValueError, MissingExtraError
from kvist.events.transports import Endpoint, base, open_subscription
from kvist.events.transports.broker import BrokerUrl
from kvist.events.transports.mqtt import MqttSubscription

SECRET = "hunter2"


async def test_a_broker_that_is_down_at_first_is_tried_again_and_said_to_be_away(wire, until, send, take_until):
    wire.broker.kill()
    publication = wire.publish()
    assert "Connection refused" in publication._link.problem
    async with wire.subscribe() as subscription:
        await until(lambda: "Connection refused" in subscription.problem)
        wire.broker.start()
        await until(lambda: subscription.problem is None and subscription.num_connects == 1)
        send(publication, 3)
        assert await take_until(subscription, 3) == [3]
        assert publication._link.problem is None


async def test_a_broker_killed_and_restarted_under_load_loses_no_order_and_is_found_again(wire, until, send):
    sequences: list[int] = []

    async def receive() -> None:
        while True:
            sequences.extend(message.sequence for message in await subscription.receive())

    async def load(until_sequence: int) -> None:
        nonlocal sequence
        while sequence < until_sequence:
            with suppress(BlockingIOError):  # as an outbox that drops: a gap
                send(publication, sequence)
            sequence += 1
            await asyncio.sleep(0)

    sequence = 0
    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        receiving = asyncio.create_task(receive())
        for restart in range(1, 3):
            await load(1000 * restart)
            num_connects = subscription.num_connects
            wire.broker.kill()
            await load(1000 * restart + 500)
            wire.broker.start()
            await until(lambda: subscription.num_connects > num_connects)  # noqa: B023 - awaited in the same round
        while not sequences or sequences[-1] < 3000:
            await load(sequence + 1)
        receiving.cancel()
    first_come = list(dict.fromkeys(sequences))  # what is sent again after a reconnect may have come before
    assert first_come == sorted(first_come)


async def test_a_session_that_is_taken_over_is_won_back_and_the_intruder_not_fought(wire, until, send, take_until):
    if not wire.broker.is_mosquitto:
        pytest.skip("amqtt lets two clients have one id")
    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        client_id, num_connects = publication._link.client_id, publication._link.num_connects
        async with aiomqtt.Client("127.0.0.1", wire.broker.port, identifier=client_id) as intruder:
            await until(lambda: publication._link.num_connects > num_connects)
            with pytest.raises(aiomqtt.MqttError):
                await anext(aiter(intruder.messages))
        send(publication, 8)
        assert await take_until(subscription, 8) == [8]


async def test_a_broker_killed_under_load_leaves_no_trace_in_the_event_loop(wire, until, send, caplog):
    async with wire.subscribe() as subscription:
        publication = await wire.publish_to(subscription)
        for round_idx in range(5):
            for sequence in range(200):
                send(publication, 200 * round_idx + sequence)
            await subscription.receive()
            wire.broker.kill()
            await until(lambda: subscription.problem and publication._link.problem)
            wire.broker.start()
            await until(lambda: subscription.problem is None and publication._link.problem is None)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("userinfo", ["", "kvist:wrong@", "who:is@"])
async def test_wrong_credentials_are_said_and_not_tried_again_soon(
    start_mqtt_broker, wires, until, userinfo, monkeypatch, caplog
):
    monkeypatch.setattr(base, "MIN_RECONNECT_S", 0.001)
    monkeypatch.setattr(base, "MAX_RECONNECT_S", 0.001)
    wire = wires(start_mqtt_broker(password=SECRET))
    num_tries = 0
    plain = MqttSubscription._forget_publication

    async def prepare(*args):
        nonlocal num_tries
        num_tries += 1
        await plain(*args)

    monkeypatch.setattr(MqttSubscription, "_forget_publication", prepare)
    async with wire.subscribe(wire.url(userinfo)) as subscription:
        await until(lambda: "it refuses us: " in subscription.problem)
        publication = wire.publish(wire.url(userinfo))
        await until(lambda: "it refuses us: " in publication._link.problem)
        assert num_tries == 0
    assert caplog.text.count("it refuses us") == 2


async def test_the_right_credentials_are_taken_and_shown_nowhere(start_mqtt_broker, wires, until, caplog):
    caplog.set_level("DEBUG")
    wire = wires(start_mqtt_broker(password=SECRET))
    url = wire.url(f"kvist:{SECRET}@")
    async with wire.subscribe(url) as subscription:
        publication = await wire.publish_to(subscription, url=url)
        wire.broker.kill()
        await until(lambda: subscription.problem and publication._link.problem)
        shown = f"{subscription.problem} {publication._link.problem} {publication.endpoint} {caplog.text}"
    assert SECRET not in shown
    assert publication.endpoint == f"mqtt://127.0.0.1:{wire.broker.port}/org%2Fmodel/pod-1"


async def test_a_stream_over_tls_needs_the_right_authority(start_mqtt_broker, wires, until, certificate):
    wire = wires(start_mqtt_broker(certificate=certificate))
    trusted = wire.url(scheme="mqtts", query=f"?tls_ca={certificate.authority}")
    distrustful_url = wire.url(scheme="mqtts")
    async with wire.subscribe(trusted) as subscription, wire.subscribe(distrustful_url) as distrustful:
        await wire.publish_to(subscription, url=trusted)
        await until(lambda: "its certificate is not trusted" in distrustful.problem)


async def test_a_broker_that_does_not_answer_is_given_up(free_port, until, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.mqtt.CONNECT_TIMEOUT_S", 0.05)
    connections = []
    server = await asyncio.start_server(lambda *streams: connections.append(streams), "127.0.0.1", free_port())
    port = server.sockets[0].getsockname()[1]
    async with MqttSubscription(BrokerUrl.parse(f"mqtt://127.0.0.1:{port}/m/w")) as subscription:
        await until(lambda: "no answer" in subscription.problem)
    server.close()
    for _, writer in connections:
        writer.close()


def test_without_the_extra_it_is_said_which_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvist.events.transports.mqtt")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiomqtt", None)
    with pytest.raises(MissingExtraError, match=r"aiomqtt is not installed: pip install 'kvist\[mqtt\]'"):
        open_subscription(Endpoint.parse("mqtt://127.0.0.1/m/w"))


@pytest.mark.parametrize("query", ["tls_ca=/nowhere.pem", "tls_cert=/nowhere.pem&tls_key=/nowhere.key"])
def test_files_that_cannot_be_used_are_refused_at_once(query):
    with pytest.raises(InvalidValueError, match="tls_ca, tls_cert and tls_key to name PEM files"):
        MqttSubscription(BrokerUrl.parse(f"mqtts://127.0.0.1/m/w?{query}"))


def test_a_host_name_that_cannot_be_is_refused_at_once():
    with pytest.raises(InvalidValueError, match="host"):
        MqttSubscription(BrokerUrl.parse(f"mqtt://{'a' * 64}.example/m/w"))

"""A subscription notices that another publisher speaks, whenever it hears of one."""

from __future__ import annotations

import asyncio

from nats.aio.client import Client


async def test_a_successor_counts_as_a_connection_if_the_first_was_heard_before_the_server_confirmed_it(
    wire, until, monkeypatch
):
    loop, may_be_confirmed, flush = asyncio.get_running_loop(), asyncio.Event(), Client.flush

    async def flush_late(client):
        if asyncio.get_running_loop() is loop:
            await may_be_confirmed.wait()
        await flush(client)

    monkeypatch.setattr(Client, "flush", flush_late)
    url = wire.url(wire.start_server())
    async with wire.subscribe(url) as subscription:
        first = wire.publish(url)
        hearing = asyncio.create_task(wire.take(subscription, 1))
        sequence = 0
        while not hearing.done():  # what is sent before the server knows the subscription is not heard
            wire.send(first, sequence)
            sequence += 1
            await asyncio.wait([hearing], timeout=0.02)
        assert subscription.num_connects == 0
        may_be_confirmed.set()
        await until(lambda: subscription.num_connects == 1)
        first.close()
        wire.send(wire.publish(url), 0)
        await until(lambda: subscription.num_connects == 2)

"""The subscription against ZeroMQ's own PUB and XPUB sockets, as engines have them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Message, ReplayRequest, open_publication
from kvist.events.transports.zmtp import ZmtpSubscription, wire

PUBLISHER = """
import sys, time, zmq
stream = zmq.Context().socket(zmq.PUB)
stream.bind(f"tcp://127.0.0.1:{sys.argv[1]}")
sequence = 0
while True:
    stream.send_multipart([sys.argv[2].encode(), sequence.to_bytes(8, "big"), bytes(1000)])
    sequence += 1
    time.sleep(0.0005)
"""


@pytest.fixture
def publish(free_port):
    """Return a function that binds a publisher's socket and tells where."""
    context = zmq.Context()
    streams = []

    def publish(kind: int = zmq.PUB, **options: int) -> tuple[zmq.Socket[bytes], Endpoint]:
        stream = context.socket(kind)
        streams.append(stream)
        for name, value in options.items():
            stream.setsockopt(getattr(zmq, name), value)
        endpoint = Endpoint(f"tcp://127.0.0.1:{free_port()}", None)
        stream.bind(endpoint.address)
        return stream, endpoint

    yield publish
    context.destroy(linger=0)


@pytest.fixture
def live():
    """Return a function that starts a publisher's process; the life before is killed, and the last one too."""
    processes = []

    def kill() -> None:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        processes.clear()

    def live(port: int, topic: str) -> None:
        kill()
        processes.append(subprocess.Popen([sys.executable, "-c", PUBLISHER, str(port), topic]))

    yield live
    kill()


def send(stream, message: Message) -> None:
    stream.send_multipart([message.topic, message.sequence.to_bytes(8, "big"), message.payload])


async def receive(subscription):
    """Return the messages of the first receive that has any: one may only tell that a peer has connected."""
    while not (messages := await subscription.receive()):
        pass
    return messages


async def first_of(subscription, stream) -> None:
    """Return once the subscriber is heard by the publisher, and nothing of this is left to receive."""
    receiving = asyncio.create_task(receive(subscription))
    while not receiving.done():
        send(stream, Message(b"probe", 0, b""))
        await asyncio.wait([receiving], timeout=0.02)
    send(stream, Message(b"probe", 1, b""))
    block = receiving.result()
    while block[-1].sequence == 0:
        block = await receive(subscription)


async def take(subscription, num_messages: int) -> list[Message]:
    messages: list[Message] = []
    async with asyncio.timeout(60):
        while len(messages) < num_messages:
            messages += await subscription.receive()
    return messages


@pytest.mark.parametrize("kind", [zmq.PUB, zmq.XPUB])
async def test_it_hears_a_publisher_of_either_kind(publish, kind):
    stream, endpoint = publish(kind)
    async with ZmtpSubscription(endpoint) as subscription:
        await first_of(subscription, stream)
        send(stream, Message(b"t", 2**64 - 1, b"x"))
        assert await take(subscription, 1) == [Message(b"t", 2**64 - 1, b"x")]


async def test_a_hundred_thousand_messages_come_in_order_and_none_is_lost(publish):
    stream, endpoint = publish(SNDHWM=0)
    async with ZmtpSubscription(endpoint) as subscription:
        await first_of(subscription, stream)

        def send_all() -> None:
            for sequence in range(100_000):
                send(stream, Message(b"kv/w/0", sequence, b"%d" % sequence))

        sending = asyncio.create_task(asyncio.to_thread(send_all))
        messages = await take(subscription, 100_000)
        await sending
        assert [message.sequence for message in messages] == list(range(100_000))
        assert all(m.payload == b"%d" % m.sequence for m in messages)
        assert subscription.num_malformed == 0


async def test_a_large_message_comes_whole_among_small_ones(publish):
    stream, endpoint = publish()
    sent = [
        Message(b"t", sequence, random.Random(sequence).randbytes(num_bytes))
        for sequence, num_bytes in enumerate([10, 8 << 20, 0, 300_000, 255, 256, 20 << 20, 1])
    ]
    async with ZmtpSubscription(endpoint) as subscription:
        await first_of(subscription, stream)
        for message in sent:
            send(stream, message)
        assert await take(subscription, len(sent)) == sent


async def test_frames_that_are_not_ours_are_counted_and_skipped(publish, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.MAX_MESSAGE_BYTES", 1 << 20)
    stream, endpoint = publish()
    async with ZmtpSubscription(endpoint) as subscription:
        await first_of(subscription, stream)
        for frames in ([b"only a topic"], [b"t", b"short", b"x"], [b"t", bytes(8), bytes(1 << 20)], [b""] * 900):
            stream.send_multipart(frames)
        send(stream, Message(b"t", 9, b"good"))
        assert await take(subscription, 1) == [Message(b"t", 9, b"good")]
        assert subscription.num_malformed == 4
        assert subscription.num_connects == 1


async def test_the_publishers_own_heartbeats_are_answered(publish, monkeypatch, until):
    pongs = []

    def pong(ping_body: bytes) -> bytes:
        pongs.append(ping_body)
        return wire.command(b"PONG", ping_body[2:])

    monkeypatch.setattr("kvist.events.transports.zmtp.wire.pong", pong)
    stream, endpoint = publish(HEARTBEAT_IVL=10, HEARTBEAT_TIMEOUT=60_000, HEARTBEAT_TTL=5000)
    async with ZmtpSubscription(endpoint) as subscription:
        await first_of(subscription, stream)
        await until(lambda: len(pongs) >= 30)
        send(stream, Message(b"t", 0, b"x"))
        assert await take(subscription, 1) == [Message(b"t", 0, b"x")]
        assert subscription.num_connects == 1


async def test_a_peer_of_another_socket_type_is_left(publish, until):
    _, endpoint = publish(zmq.PUSH)
    async with ZmtpSubscription(endpoint) as subscription:
        await until(lambda: subscription.num_malformed)
        assert subscription.num_connects == 0


async def test_a_killed_publisher_is_found_again(free_port, live):
    port = free_port()
    async with ZmtpSubscription(Endpoint(f"tcp://127.0.0.1:{port}", None)) as subscription:
        for life in range(1, 3):
            live(port, f"life-{life}")
            while (await take(subscription, 1))[-1].topic != b"life-%d" % life:
                pass
            assert subscription.num_connects == life


class Proxy:
    """Forwards to a port until it is told to fall silent: both ends stay open, and nothing passes any more."""

    async def listen(self, to_port: int) -> None:
        self.is_silent = False
        self._to_port = to_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = Endpoint(f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}", None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_silent = False
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._forward(source, sink)))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if not self.is_silent:
                    sink.write(data)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


async def test_a_connection_whose_other_end_vanished_is_noticed_and_replaced(publish, monkeypatch, until):
    monkeypatch.setattr("kvist.events.transports.base.PING_INTERVAL_S", 0.02)
    monkeypatch.setattr("kvist.events.transports.base.PING_TIMEOUT_S", 0.5)
    stream, endpoint = publish()
    proxy = Proxy()
    await proxy.listen(int(endpoint.address.rpartition(":")[2]))
    async with ZmtpSubscription(proxy.endpoint) as subscription:
        await first_of(subscription, stream)
        proxy.is_silent = True
        await until(lambda: subscription.num_connects >= 2)
        await first_of(subscription, stream)
        assert subscription.num_malformed == 0
    await proxy.close()


async def test_an_address_may_be_ipv6(kept):
    try:
        publication = open_publication("tcp://[::1]:0")
    except InvalidValueError:
        pytest.skip("this machine has no IPv6")
    kept.messages = [Message(b"t", 0, b"x")]
    publication.serve_replay(kept)
    async with ZmtpSubscription(Endpoint.parse(publication.endpoint)) as subscription:
        assert await subscription.replay(ReplayRequest(b"", 0), timeout_s=60) == kept.messages
        receiving = asyncio.create_task(receive(subscription))
        while not receiving.done():
            publication.send(Message(b"t", 1, b"y"))
            await asyncio.wait([receiving], timeout=0.02)
    publication.close()

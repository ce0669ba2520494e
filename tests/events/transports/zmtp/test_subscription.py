"""The subscription against peers made for the test: bytes on a socket, right and wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import socket
import time
import weakref
from contextlib import suppress

import pytest
from zmtp_splitter import split

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Message, open_subscription
from kvist.events.transports.block import MessageBlock
from kvist.events.transports.zmtp import Reads, ZmtpSubscription
from kvist.events.transports.zmtp.connection import CAPACITY_BYTES


class Peer:
    """Listens, and leaves what to say to the test; each connection is an item of `connections`."""

    async def listen(self) -> None:
        self.connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.endpoint = Endpoint(f"tcp://127.0.0.1:{self.port}", None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await self.connections.put((reader, writer))

    async def accept(self, says: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Wait for a connection and say something there."""
        async with asyncio.timeout(60):
            reader, writer = await self.connections.get()
        writer.write(says)
        return reader, writer

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


@pytest.fixture
async def peer(monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.MIN_RECONNECT_S", 0.002)
    monkeypatch.setattr("kvist.events.transports.base.MAX_RECONNECT_S", 0.01)
    peer = Peer()
    await peer.listen()
    yield peer
    await peer.close()


async def receive(subscription) -> list[Message]:
    """Return the messages of the first receive that has any: one may only tell that a peer has connected."""
    async with asyncio.timeout(60):
        while not (messages := await subscription.receive()):
            pass
        return list(messages)


def numbered(num_messages: int, num_bytes: int = 10) -> list[Message]:
    return [Message(b"t", sequence, sequence.to_bytes(4, "big") * (num_bytes // 4)) for sequence in range(num_messages)]


def test_a_name_that_no_host_can_have_is_an_error_that_names_it():
    with pytest.raises(InvalidValueError, match=r"tcp://a\.\.b:5557"):
        open_subscription(Endpoint.parse("tcp://a..b:5557"))


async def test_a_receive_is_a_block_found_by_the_splitter_it_was_given(peer, say):
    num_calls = 0

    def counting(*arguments):
        nonlocal num_calls
        num_calls += 1
        return split(*arguments)

    async with open_subscription(peer.endpoint, counting) as subscription:
        await peer.accept(say.hello() + say.message(Message(b"t", 7, b"x")))
        block = await subscription.receive()
    assert isinstance(block, MessageBlock)
    assert list(block) == [Message(b"t", 7, b"x")]
    assert num_calls > 0


@pytest.fixture
async def slow_reads():
    reads = Reads(0.05)
    yield reads
    reads.close()


async def test_a_patient_subscription_reads_together_what_comes_close_together_and_misses_nothing(
    peer, say, slow_reads
):
    async with ZmtpSubscription(peer.endpoint, reads=slow_reads) as subscription:
        _, writer = await peer.accept(say.hello())
        messages, received, sizes = numbered(60), [], []
        for start in range(0, 60, 3):  # the first is read at once, those behind it at the end of the delay
            for message in messages[start : start + 3]:
                writer.write(say.message(message))
                await asyncio.sleep(0)
            while len(received) < start + 3:
                received += (block := await receive(subscription))
                sizes.append(len(block))
        assert received == messages
        assert len(sizes) < 60


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x01\x02",
        b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE",
    ],
)
async def test_a_peer_that_speaks_something_else_is_counted_logged_once_and_tried_again(peer, say, says, caplog):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        for _ in range(3):
            await peer.accept(says.ljust(64, b"\0"))
        await peer.accept(say.hello() + say.message(Message(b"t", 0, b"x")))
        assert await receive(subscription) == [Message(b"t", 0, b"x")]
        assert subscription.num_malformed == 3
        assert subscription.num_connects == 1
    assert caplog.text.count("peer left, and tried again") == 1
    assert f"source={peer.endpoint.address}" in caplog.text


async def test_a_connection_that_breaks_off_within_a_message_goes_on_with_the_next_one(peer, say):
    whole = say.message(Message(b"t", 0, b"whole"))
    async with ZmtpSubscription(peer.endpoint) as subscription:
        for num_bytes in (0, 1, len(whole) - 1):
            _, writer = await peer.accept(say.hello() + whole + whole[:num_bytes])
            assert await receive(subscription) == [Message(b"t", 0, b"whole")]
            writer.close()
        assert subscription.num_connects == 3
        assert subscription.num_malformed == 0


async def test_no_receive_brings_messages_of_two_connections(peer, say):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        reader, writer = await peer.accept(say.hello() + say.message(Message(b"old", 0, b"")))
        writer.write_eof()
        await reader.read()  # ends: the connection is closed
        assert subscription.num_connects == 1
        assert await receive(subscription) == [Message(b"old", 0, b"")]
        await peer.accept(say.hello() + say.message(Message(b"new", 0, b"")))
        assert await receive(subscription) == [Message(b"new", 0, b"")]
        assert subscription.num_connects == 2


async def test_who_has_unread_messages_or_a_connection_that_ended_is_not_caught_up(peer, say, until):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        assert not subscription.is_caught_up
        _, writer = await peer.accept(say.hello())
        await until(lambda: subscription.is_caught_up)
        link = subscription._link
        writer.write(say.command(b"PONG"))
        await until(lambda: link.inbox.begin > 0)
        assert subscription.is_caught_up, "a command is no message"
        writer.write(say.message(Message(b"t", 0, b"")))
        await until(lambda: not subscription.is_caught_up)
        await receive(subscription)
        assert subscription.is_caught_up
        writer.close()
        await until(lambda: not subscription.is_caught_up)


async def test_a_consumer_that_does_not_take_stops_the_reading_and_loses_nothing(peer, say, until):
    sent = numbered(1000, num_bytes=64 << 10)
    async with ZmtpSubscription(peer.endpoint) as subscription:
        _, writer = await peer.accept(say.hello())
        writer.write(b"".join(map(say.message, sent)))
        await until(lambda: subscription._link and subscription._link.inbox.is_full)
        assert subscription._link.inbox.capacity == CAPACITY_BYTES
        received = []
        while len(received) < len(sent):
            received += await receive(subscription)
            assert subscription._link.inbox.capacity == CAPACITY_BYTES
    assert received == sent


async def test_what_waited_for_room_is_read_when_there_is_some_and_not_a_turn_later(peer, say, until):
    sent = numbered(3 * CAPACITY_BYTES // 2000, num_bytes=1000)
    async with open_subscription(peer.endpoint, split) as subscription:
        _, writer = await peer.accept(say.hello())
        writer.write(b"".join(map(say.message, sent)))
        await until(
            lambda: (
                subscription._link and subscription._link.inbox.is_full and not writer.transport.get_write_buffer_size()
            )
        )
        taken = []
        for _ in range(2):
            with pytest.raises(StopIteration) as done:
                subscription.receive().send(None)
            taken += done.value.value
        assert taken == sent[: len(taken)]


async def test_the_memory_of_a_large_message_is_given_back(peer, say):
    large = Message(b"t", 0, bytes(3 << 20))
    async with ZmtpSubscription(peer.endpoint) as subscription:
        _, writer = await peer.accept(say.hello() + say.message(large))
        assert await receive(subscription) == [large]
        for sequence in range(2):
            writer.write(say.message(Message(b"t", sequence, b"")))
            await receive(subscription)
        assert subscription._link.inbox.capacity == CAPACITY_BYTES


async def test_the_memory_of_a_large_message_is_given_back_when_its_peer_goes_amid_it(peer, say, until):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        _, writer = await peer.accept(say.hello() + say.message(Message(b"t", 0, bytes(3 << 20)))[:-1])
        await until(lambda: subscription._link and subscription._link.inbox.capacity > CAPACITY_BYTES)
        memory = weakref.ref(subscription._link.inbox.buffer)
        writer.close()
        await peer.accept()
        assert memory() is None


@pytest.mark.parametrize("num_bytes", [0, 100, 1 << 20])
async def test_leaving_gives_all_memory_back_at_once(peer, say, until, num_bytes):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        _, writer = await peer.accept(say.hello() + say.message(Message(b"t", 0, b"x")))
        block = await subscription.receive()
        writer.write(say.message(Message(b"t", 1, bytes(2 << 20)))[:num_bytes])
        await until(lambda inbox=subscription._link.inbox: inbox.end >= min(num_bytes, 1))
        held = [weakref.ref(each) for each in (subscription._link.inbox.buffer, subscription)]
        gc.disable()
    try:
        del subscription
        assert [each() for each in held] == [None, None]
        assert list(block) == [Message(b"t", 0, b"x")]
    finally:
        gc.enable()


@pytest.fixture
def short_pings(monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.PING_INTERVAL_S", 0.01)
    monkeypatch.setattr("kvist.events.transports.base.PING_TIMEOUT_S", 0.2)


@pytest.mark.parametrize("num_bytes", [0, 10, 64, 89])
async def test_a_peer_that_says_no_more_is_left_and_tried_again(peer, say, num_bytes, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.zmtp.sockets.CONNECT_TIMEOUT_S", 0.1)
    async with ZmtpSubscription(peer.endpoint) as subscription:
        reader, _ = await peer.accept(say.hello()[:num_bytes])
        await reader.readexactly(64)
        monkeypatch.setattr("kvist.events.transports.zmtp.sockets.CONNECT_TIMEOUT_S", 60)
        await peer.accept(say.hello() + say.message(Message(b"t", 0, b"x")))
        assert await receive(subscription) == [Message(b"t", 0, b"x")]
        assert subscription.num_malformed == 0


@pytest.mark.usefixtures("short_pings")
async def test_an_older_peer_that_answers_no_ping_may_be_silent(peer, say):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        reader, writer = await peer.accept(say.hello(minor=0))
        for _ in range(40):
            await reader.readuntil(say.command(b"PING", b"\0\0"))
        writer.write(say.message(Message(b"t", 0, b"x")))
        assert await receive(subscription) == [Message(b"t", 0, b"x")]
        assert subscription.num_connects == 1


@pytest.mark.usefixtures("short_pings")
async def test_a_consumer_that_does_not_take_is_not_taken_for_a_silent_peer(peer, say, until, monkeypatch):
    sent = numbered(1000, num_bytes=64 << 10)
    async with ZmtpSubscription(peer.endpoint) as subscription:
        reader, writer = await peer.accept(say.hello())
        writer.write(b"".join(map(say.message, sent)))
        await until(lambda: subscription._link and subscription._link.inbox.is_full)
        for _ in range(40):
            await reader.readuntil(say.command(b"PING", b"\0\0"))
        monkeypatch.setattr("kvist.events.transports.base.PING_TIMEOUT_S", 60)  # this peer does not answer
        received = []
        while len(received) < len(sent):
            received += await receive(subscription)
        assert received == sent
        assert subscription.num_connects == 1


@pytest.mark.usefixtures("short_pings")
async def test_nobody_is_taken_for_silent_by_a_loop_that_was_late(peer, say):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        reader, writer = await peer.accept(say.hello())
        await reader.readuntil(say.command(b"PING", b"\0\0"))
        time.sleep(0.5)  # noqa: ASYNC251 - holds the loop up
        await reader.readuntil(say.command(b"PING", b"\0\0"))
        writer.write(say.message(Message(b"t", 0, b"x")))
        assert await receive(subscription) == [Message(b"t", 0, b"x")]
        assert subscription.num_connects == 1


async def test_a_peer_that_pings_and_never_reads_is_left(peer, say):
    async with ZmtpSubscription(peer.endpoint) as subscription:
        _, writer = await peer.accept(say.hello() + say.message(Message(b"t", 0, b"x")))
        await receive(subscription)
        writer.transport.pause_reading()
        subscription._link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        writer.write(say.command(b"PING", bytes(18)) * 100_000)
        await peer.accept()
        assert subscription.num_malformed == 1


async def test_a_name_is_looked_up_anew_each_time_and_a_failure_is_logged_once(peer, say, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    answers = [socket.gaierror(-2, "Name or service not known")] * 3

    def look_up(host, *_):
        assert host == "engine.invalid"
        if answers:
            raise answers.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with ZmtpSubscription(Endpoint(f"tcp://engine.invalid:{peer.port}", None)) as subscription:
        await peer.accept(say.hello() + say.message(Message(b"t", 0, b"x")))
        assert await receive(subscription) == [Message(b"t", 0, b"x")]
    assert caplog.text.count("not connected, and tried again") == 1


async def test_every_address_of_a_name_is_tried(peer, say, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.zmtp.sockets.CONNECT_TIMEOUT_S", 0.05)
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    def look_up(*_):
        hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]

    async def answer(sock, address):
        if address[0] == "127.0.0.2":
            raise ConnectionRefusedError
        if address[0] == "127.0.0.3":
            await asyncio.Event().wait()
        await connect(sock, address)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(loop, "sock_connect", answer)
    async with ZmtpSubscription(Endpoint(f"tcp://engine.invalid:{peer.port}", None)) as subscription:
        await peer.accept(say.hello() + say.message(Message(b"t", 0, b"x")))
        assert await receive(subscription) == [Message(b"t", 0, b"x")]


@pytest.mark.parametrize("is_taking", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 30, 64, 89, 95, 1 << 20])
async def test_it_can_be_left_at_any_moment(peer, say, is_taking, num_bytes):
    says = (say.hello() + b"".join(map(say.message, numbered(1000, num_bytes=1024))))[:num_bytes]
    async with asyncio.TaskGroup() as tasks, ZmtpSubscription(peer.endpoint) as subscription:
        taking = tasks.create_task(subscription.receive())
        reader, _ = await peer.accept(says)
        await reader.readexactly(64)
        if is_taking:
            await asyncio.sleep(0)
        taking.cancel()
    with suppress(ConnectionError):
        await reader.read()  # ends: the other end is closed
    del subscription, taking
    gc.collect()  # an unclosed socket would be an error here


async def test_it_can_be_left_before_it_is_connected(peer):
    async with ZmtpSubscription(peer.endpoint):
        pass
    subscription = ZmtpSubscription(peer.endpoint)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), subscription:
            await subscription.receive()
    with pytest.raises(ZeroDivisionError):
        async with ZmtpSubscription(peer.endpoint):
            raise ZeroDivisionError


async def test_whatever_a_peer_sends_nothing_is_raised_and_the_next_one_is_heard(peer, say):
    """Random bytes, and good streams with bytes changed, cut out and put in, each on a connection of its own."""
    rng = random.Random(5)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: pytest.fail(str(context)))
    good = say.hello() + b"".join(map(say.message, numbered(50, num_bytes=100)))
    async with ZmtpSubscription(peer.endpoint) as subscription:

        async def take():
            while (await receive(subscription))[-1].topic != b"the end":
                assert subscription._link.inbox.capacity == CAPACITY_BYTES

        taking = asyncio.create_task(take())
        for _ in range(150):
            says = bytearray(good)
            for _ in range(rng.choice([0, 1, 5])):
                at = rng.randrange(len(says))
                says[at : at + rng.choice([0, 1, 10])] = rng.randbytes(rng.choice([0, 1, 10]))
            _, writer = await peer.accept(rng.choice([says, says, rng.randbytes(500), good[:89] + rng.randbytes(500)]))
            writer.close()
        await peer.accept(say.hello() + say.message(Message(b"the end", 0, b"")))
        async with asyncio.timeout(60):
            await taking
        assert subscription.num_malformed > 20

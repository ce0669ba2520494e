"""What is ZeroMQ's alone: the frames on the wire, which engines and their subscribers share, and hostile ones."""

from __future__ import annotations

import asyncio
import re
import select
import socket
import threading
import time
from contextlib import suppress

import pytest
import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Message, ReplayRequest, open_publication, open_subscription
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmtp import replay, wire

END = b"\xff" * 8


class EndlessSource:
    """A replay source that always has more."""

    def replay(self, _):
        while True:
            yield Message(b"t", 0, b"x")


def be64(number: int) -> bytes:
    return number.to_bytes(8, "big")


@pytest.fixture
def open_socket():
    """Return a function that opens a socket of ZeroMQ's own, to stand in for a peer that is not ours."""
    context = zmq.Context()
    sockets = []

    def open_one(kind):
        sockets.append(context.socket(kind))
        sockets[-1].setsockopt(zmq.RCVTIMEO, 60_000)
        return sockets[-1]

    yield open_one
    context.destroy(linger=0)


async def receive(subscription):
    """Return the messages of the first receive that has any: one may only tell that a peer has connected."""
    while not (messages := await subscription.receive()):
        pass
    return messages


async def connected(publisher, subscription):
    """Return once the subscriber is heard by the publisher, and nothing of this is left to receive."""
    receiving = asyncio.create_task(receive(subscription))
    while not receiving.done():
        publisher.send_multipart([b"probe", be64(0), b""])
        await asyncio.wait([receiving], timeout=0.02)
    publisher.send_multipart([b"probe", be64(1), b""])
    received = receiving.result()
    while received[-1].sequence == 0:
        received = await receive(subscription)


@pytest.fixture
def dealer(open_socket):
    return open_socket(zmq.DEALER)


@pytest.fixture
def publication(kept):
    kept.messages = [Message(b"kv/w/0", sequence, b"%d" % sequence) for sequence in range(3)]
    publication = open_publication("tcp://127.0.0.1:0")
    publication.serve_replay(kept)
    yield publication
    publication.close()


def test_a_message_is_topic_sequence_and_payload(open_socket, publication, until_true):
    subscriber = open_socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv/")
    subscriber.connect(Endpoint.parse(publication.endpoint).address)

    def has_arrived():
        publication.send(Message(b"kv/w/0", 258, b"payload"))
        return subscriber.poll(5)

    until_true(has_arrived)
    assert subscriber.recv_multipart() == [b"kv/w/0", b"\0\0\0\0\0\0\1\2", b"payload"]


def test_a_request_without_a_topic_gets_the_older_replies(dealer, publication):
    dealer.connect(Endpoint.parse(publication.endpoint).replay_address)
    dealer.send_multipart([b"", be64(1)])
    replies = [dealer.recv_multipart() for _ in range(3)]
    assert replies == [[b"", be64(1), b"1"], [b"", be64(2), b"2"], [b"", END, b""]]


def test_a_request_with_a_topic_gets_the_topic_in_the_replies(dealer, publication):
    dealer.connect(Endpoint.parse(publication.endpoint).replay_address)
    dealer.send_multipart([b"", be64(2), b"kv/w/0"])
    replies = [dealer.recv_multipart() for _ in range(2)]
    assert replies == [[b"", b"kv/w/0", be64(2), b"2"], [b"", b"", END, b""]]


def test_a_malformed_request_is_ignored_and_the_next_one_answered(dealer, publication):
    dealer.connect(Endpoint.parse(publication.endpoint).replay_address)
    for request in ([b""], [b"", b"short"], [b"", be64(0), b"a", b"b", b"c"]):
        dealer.send_multipart(request)
    dealer.send_multipart([b"", be64(2)])
    assert dealer.recv_multipart() == [b"", be64(2), b"2"]


@pytest.fixture
def with_stuck_client(open_socket, kept, monkeypatch):
    """Return a publication with 64 messages of a MiB to replay, and a client that asked for them and takes none."""
    monkeypatch.setattr("kvist.events.transports.zmq.REPLAY_HWM", 2)
    monkeypatch.setattr("kvist.events.transports.zmq.REPLAY_SEND_TIMEOUT_S", 0.2)
    kept.messages = [Message(b"t", sequence, bytes(1 << 20)) for sequence in range(64)]
    publication = open_publication("tcp://127.0.0.1:0")
    publication.serve_replay(kept)
    stuck = open_socket(zmq.DEALER)
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.connect(Endpoint.parse(publication.endpoint).replay_address)
    stuck.send_multipart([b"", be64(0)])
    assert stuck.poll(60_000), "the replay has begun"
    yield publication
    publication.close()


def test_closing_waits_no_longer_than_ever_for_a_client_that_takes_nothing(with_stuck_client):
    with_stuck_client.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvist-replay"]


def test_a_client_that_takes_nothing_does_not_keep_the_others_waiting_for_ever(with_stuck_client, dealer):
    dealer.connect(Endpoint.parse(with_stuck_client.endpoint).replay_address)
    dealer.send_multipart([b"", be64(63)])
    assert dealer.recv_multipart()[1] == be64(63)


def test_a_client_that_takes_a_little_at_a_time_does_not_keep_the_others_waiting_for_ever(open_socket, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_S", 0.2)
    monkeypatch.setattr("kvist.events.transports.zmq.REPLAY_SEND_TIMEOUT_S", 3600)
    publication = open_publication("tcp://127.0.0.1:0")
    publication.serve_replay(EndlessSource())
    slow, other = open_socket(zmq.DEALER), open_socket(zmq.DEALER)
    for dealer in (slow, other):
        dealer.connect(Endpoint.parse(publication.endpoint).replay_address)
    slow.send_multipart([b"", be64(0)])
    assert slow.recv_multipart()[1] == be64(0)
    other.send_multipart([b"", be64(1)])
    give_up_at_s = time.monotonic() + 180
    while not other.poll(1) and time.monotonic() < give_up_at_s:
        if slow.poll(1):
            slow.recv_multipart()
    has_answer = other.poll(0)
    publication.close()
    assert has_answer


def test_closing_ends_the_replay_thread(publication):
    publication.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvist-replay"]


@pytest.mark.parametrize("replies_have_topics", [False, True])
async def test_the_client_understands_old_and_new_replies(open_socket, replies_have_topics):
    router = open_socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    requests = []

    def serve_one():
        client, *request = router.recv_multipart()
        requests.append(request)
        topic = [b"kv-events"] if replies_have_topics else []
        for sequence, payload in ((be64(4), b"four"), (be64(5), b"five"), (END, b"")):
            router.send_multipart([client, b"", *topic, sequence, payload])

    server = threading.Thread(target=serve_one)
    server.start()
    endpoint = Endpoint("tcp://127.0.0.1:1", f"tcp://127.0.0.1:{port}")
    async with open_subscription(endpoint) as subscription:
        replayed = await subscription.replay(ReplayRequest(None, 4), 60)
    server.join()
    assert requests == [[b"", be64(4)]]
    assert [(message.sequence, message.payload) for message in replayed] == [(4, b"four"), (5, b"five")]
    assert {message.topic for message in replayed} == {b"kv-events" if replies_have_topics else b""}


class LateSource:
    """Answers once it may."""

    def __init__(self):
        self.may_answer = threading.Event()

    def replay(self, _):
        assert self.may_answer.wait(60)
        yield Message(b"t", 4, b"four")


async def test_a_reply_that_is_there_counts_however_late_the_event_loop_is(monkeypatch):
    publication, source = open_publication("tcp://127.0.0.1:0"), LateSource()
    publication.serve_replay(source)
    loop, connect, encoded, late_s, sockets = asyncio.get_running_loop(), replay.connect, replay._encoded, 0, []

    async def connected_to(address):
        sockets.append(await connect(address))
        return sockets[0]

    def encode_and_be_late_once_it_is_sent(request):
        def be_late():
            nonlocal late_s
            source.may_answer.set()
            select.select(sockets, [], [], 60)
            late_s += 100

        loop.call_soon(loop.call_soon, be_late)
        return encoded(request)

    time_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: time_s() + late_s)
    monkeypatch.setattr(replay, "connect", connected_to)
    monkeypatch.setattr(replay, "_encoded", encode_and_be_late_once_it_is_sent)
    monkeypatch.setattr("kvist.events.transports.base.MAX_ANSWER_S", 3600)
    async with open_subscription(Endpoint.parse(publication.endpoint)) as subscription:
        assert await subscription.replay(ReplayRequest(None, 0), 60) == [Message(b"", 4, b"four")]
    assert late_s >= 100
    publication.close()


async def test_frames_of_another_shape_or_size_are_counted_logged_once_and_skipped(open_socket, monkeypatch, caplog):
    monkeypatch.setattr("kvist.events.transports.base.MAX_MESSAGE_BYTES", 1000)
    publisher = open_socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    async with open_subscription(Endpoint(f"tcp://127.0.0.1:{port}", None)) as subscription:
        await connected(publisher, subscription)
        publisher.send_multipart([b"only a topic"])
        publisher.send_multipart([b"t", b"short", b"x"])
        publisher.send_multipart([b"t", be64(8), bytes(1001)])
        publisher.send_multipart([b"t", be64(9), b"good"])
        assert (await receive(subscription))[-1] == Message(b"t", 9, b"good")
        assert subscription.num_malformed == 3
    assert caplog.text.count("malformed message skipped") == 1
    assert f"source=tcp://127.0.0.1:{port} num_frames=1 frame_bytes=[12]" in caplog.text


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{}", "tcp://*:{}", "tcp://0.0.0.0:{}", "ipc://{}", "ipc://@{}"])
async def test_a_subscriber_can_bind_for_an_engine_that_connects(open_socket, free_port, tmp_path, address):
    address = address.format(free_port() if address.startswith("tcp://") else tmp_path / "stream")
    async with open_subscription(Endpoint.parse(f"{address}?bind=1")) as subscription:
        publisher = open_socket(zmq.PUB)
        publisher.connect(re.sub(r"//(\*|0.0.0.0)", "//127.0.0.1", address))
        receiving = asyncio.create_task(receive(subscription))
        while not receiving.done():
            publisher.send_multipart([b"t", be64(0), b"x"])
            await asyncio.wait([receiving], timeout=0.02)
        assert receiving.result()[0] == Message(b"t", 0, b"x")
        if "*" in address or "0.0.0.0" in address:
            assert await subscription.replay(ReplayRequest(None, 0), timeout_s=60) is None


async def test_one_engine_after_the_other_may_connect_to_who_binds(open_socket, tmp_path):
    address = f"ipc://{tmp_path}/stream"
    async with open_subscription(Endpoint.parse(f"{address}?bind=1")) as subscription:
        for num_connects in (1, 2):
            publisher = open_socket(zmq.PUB)
            publisher.connect(address)
            await connected(publisher, subscription)
            assert (subscription.num_connects, subscription.is_caught_up) == (num_connects, True)
            publisher.close(linger=0)


def test_an_address_that_nobody_can_bind_or_connect_to_is_an_error_that_names_it(tmp_path):
    async def enter(url):
        async with open_subscription(Endpoint.parse(url)):
            pass

    for url in (f"ipc://{tmp_path}/no/stream?bind=1", "tcp://192.0.2.1:5557?bind=1", "tcp://*:5557", "tcp://h:0"):
        with pytest.raises(InvalidValueError, match=re.escape(url.partition("?")[0])):
            asyncio.run(enter(url))


async def test_an_address_may_be_ipv6(kept):
    try:
        publication = open_publication("tcp://[::1]:0")
    except InvalidValueError:
        pytest.skip("this machine has no IPv6")
    kept.messages = [Message(b"t", 0, b"x")]
    publication.serve_replay(kept)
    async with open_subscription(Endpoint.parse(publication.endpoint)) as subscription:
        assert await subscription.replay(ReplayRequest(b"", 0), timeout_s=60) == [Message(b"t", 0, b"x")]
        receiving = asyncio.create_task(receive(subscription))
        while not receiving.done():
            publication.send(Message(b"t", 1, b"y"))
            await asyncio.wait([receiving], timeout=0.02)
    publication.close()


def test_port_zero_takes_free_ports_and_the_endpoint_names_both():
    publication = open_publication("tcp://127.0.0.1:0")
    endpoint = Endpoint.parse(publication.endpoint)
    publication.close()
    assert not endpoint.address.endswith(":0")
    assert endpoint.replay_address is not None
    assert not endpoint.replay_address.endswith(":0")


def test_an_interface_this_machine_does_not_have_is_an_error_that_names_it():
    with pytest.raises(InvalidValueError, match=r"no-such-interface"):
        open_publication("tcp://no-such-interface:5557")


def test_a_replay_port_that_is_taken_is_named_as_that(free_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InvalidValueError, match=f"^replay endpoint: got 'tcp://127.0.0.1:{port}', .*use\\)$"):
            open_publication(f"tcp://127.0.0.1:{free_port()}?replay_port={port}")


async def test_a_replay_that_nobody_serves_is_given_up_without_waiting(free_port):
    async with open_subscription(Endpoint.parse(f"tcp://127.0.0.1:{free_port()}")) as subscription:
        async with asyncio.timeout(60):
            assert await subscription.replay(ReplayRequest(None, 0), timeout_s=60) is None


async def answer_for_ever(router, payload):
    """Answer the one question that comes with messages on and on, as long as they are taken."""
    await asyncio.to_thread(router.poll, 10_000)
    client = router.recv_multipart()[0]
    while True:
        with suppress(zmq.Again):
            router.send_multipart([client, b"", b"t", be64(0), payload], zmq.NOBLOCK)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("limit", "value"), [("MAX_ANSWER_BYTES", 2000), ("MAX_ANSWER_S", 0.2)])
async def test_an_answer_that_never_ends_is_given_up(open_socket, monkeypatch, limit, value):
    monkeypatch.setattr(f"kvist.events.transports.base.{limit}", value)
    router = open_socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    async with asyncio.timeout(60), open_subscription(Endpoint.parse(f"tcp://127.0.0.1:1?replay_port={port}")) as asker:
        endless = asyncio.create_task(answer_for_ever(router, b""))
        assert await asker.replay(ReplayRequest(b"", 0), timeout_s=10) is None
        endless.cancel()


@pytest.mark.parametrize(
    "said",
    [wire.frame(bytes(1 << 16), wire.MORE), wire.command(b"PING", bytes(18)) * 2000],
    ids=["a message without end", "questions"],
)
async def test_who_says_on_and_on_what_is_no_answer_is_left_before_that_takes_memory(monkeypatch, said):
    monkeypatch.setattr("kvist.events.transports.base.MAX_MESSAGE_BYTES", 1 << 20)
    num_said, has_left = 0, asyncio.Event()

    async def speak(_, writer):
        nonlocal num_said
        writer.write(wire.GREETING + wire.ready(b"ROUTER"))
        with suppress(ConnectionError):
            while num_said < 1 << 28:
                writer.write(said)
                await writer.drain()
                num_said += len(said)
        writer.close()
        has_left.set()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(60), open_subscription(Endpoint.parse(f"tcp://127.0.0.1:1?replay_port={port}")) as asker:
        assert await asker.replay(ReplayRequest(b"", 0), timeout_s=0.5) is None
        await has_left.wait()
    assert num_said < 128 << 20, "it is left after a thousand frames, none of which is kept"
    server.close()


async def test_an_answer_over_a_local_socket_is_read_to_its_end_after_the_publisher_has_closed_it():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    payload = bytes(1 << 20)  # more than is read at once

    def answer() -> None:
        with theirs:
            theirs.recv(100)
            for sequence, body in ((be64(7), payload), (END, b"")):
                theirs.sendall(wire.frame(b"", wire.MORE) + wire.frame(sequence, wire.MORE) + wire.frame(body))

    answering = asyncio.create_task(asyncio.to_thread(answer))
    with ours:
        answered = await replay._collect(ours, ReplayRequest(None, 7), 60, MalformedCounter("a source"))
    await answering
    assert answered == [Message(b"", 7, payload)]

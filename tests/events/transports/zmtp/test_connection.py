from __future__ import annotations

import random
import re
import socket

import pytest

from kvist.events.transports import Message
from kvist.events.transports.base import MAX_DRAIN
from kvist.events.transports.zmtp.connection import MAX_COMMANDS_WITHIN, MAX_FRAMES
from kvist.events.transports.zmtp.sockets import shake_hands
from kvist.events.transports.zmtp.wire import PeerError

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
SUBSCRIBE = b"\x04\x0a\x09SUBSCRIBE"
OLDER_SUBSCRIBE = b"\x00\x01\x01"
MESSAGE = Message(b"kv/w/0", 258, b"payload")


# The handshake.


async def shaken(says: bytes) -> tuple[int | str, bytes, bytes]:
    """Return what a handshake with a peer comes to, what it has said to it, and what of the peer's was not read."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        theirs.sendall(says)
        try:
            result: int | str = await shake_hands(ours, b"SUB", (b"PUB", b"XPUB"))
        except PeerError as error:
            assert ours.fileno() < 0, "it is closed"
            return error.reason, theirs.recv(1000), b""
        return result, theirs.recv(1000), ours.recv(1000)


async def test_it_greets_and_says_that_it_is_ready_and_reads_nothing_behind_that(say):
    assert await shaken(say.hello() + b"more") == (1, GREETING + READY, b"more")
    assert await shaken(say.hello(minor=0) + b"more") == (0, GREETING + READY, b"more")
    assert await shaken(say.greeting(major=4, minor=0) + say.ready(b"XPUB") + b"more") == (1, GREETING + READY, b"more")


async def test_a_peer_that_goes_or_is_silent_amid_the_handshake_is_an_os_error(say, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.zmtp.sockets.CONNECT_TIMEOUT_S", 0.01)
    for said in (b"", say.greeting()[:9], say.greeting(), say.hello()[:-1]):
        for is_silent in (True, False):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs:
                theirs.sendall(said)
                if not is_silent:
                    theirs.shutdown(socket.SHUT_WR)
                with pytest.raises(TimeoutError if is_silent else ConnectionResetError):
                    await shake_hands(ours, b"SUB", (b"PUB",))
            assert ours.fileno() < 0


def test_it_subscribes_to_all_and_at_a_peer_of_version_3_0_by_a_message(new_fed):
    assert new_fed().connection.take_outgoing() == SUBSCRIBE
    older = new_fed(minor_version=0).connection
    assert older.take_outgoing() == OLDER_SUBSCRIBE
    assert older.take_outgoing() == b""
    assert not older.has_pong, "it need not know what a PING is"


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (lambda _: b"HTTP/1.1 400 Bad Request\r\n", "does not greet as ZMTP 3"),
        (lambda _: b"\x16", "does not greet as ZMTP 3"),
        (lambda _: b"\xff" + bytes(9), "does not greet as ZMTP 3"),
        (lambda _: b"\x01\x00", "does not greet as ZMTP 3"),
        (lambda say: say.greeting()[:10] + b"\x01", "speaks ZMTP 2"),
        (lambda say: say.greeting(major=2), "speaks ZMTP 2"),
        (lambda say: say.greeting(mechanism=b"CURVE"), r"security mechanism b'CURVE'"),
        (lambda say: say.greeting() + say.message(MESSAGE), "before it is ready"),
        (
            lambda say: say.greeting() + say.command(b"ERROR", b"\x07go away"),
            r"b'ERROR' b'\\x07go away', not with READY",
        ),
        (lambda say: say.greeting() + say.command(b"PING", b"\0\0"), "not with READY"),
        (lambda say: say.greeting() + say.command(b"READY"), "names no Socket-Type"),
        (lambda say: say.greeting() + say.command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x04PUB"), "is cut"),
        (lambda say: say.greeting() + say.command(b"READY", b"\x0bSocket"), "is cut"),
        (lambda say: say.greeting() + say.command(b"READY", b"\x00\x00\x00\x00\x00"), "is cut"),
        (lambda say: say.greeting() + say.ready(b"DEALER"), "is a b'DEALER', not a PUB"),
        (lambda say: say.greeting() + say.frame(b"", flags=4), "no name"),
        (lambda say: say.greeting() + say.frame(b"\x09READY", flags=4), "no name"),
        (lambda say: say.greeting() + say.frame(b"", flags=4, num_bytes=1 << 20), "a command has 1048576 bytes"),
    ],
)
async def test_a_peer_that_is_no_publisher_of_ours_is_left_with_a_reason(say, hello, reason):
    told, _, _ = await shaken(hello(say))
    assert re.search(reason, told)


# Messages.


def test_messages_come_out_as_they_were_sent_however_they_are_cut(ready, new_fed, say):
    sent = [
        MESSAGE,
        Message(b"", 0, b""),
        Message(bytes(300), 2**64 - 1, bytes(70_000)),
        Message(b"t" * 255, 2**63, b"p" * 256),
    ]
    stream = b"".join(map(say.message, sent))
    assert ready.feed(stream).messages == sent
    for chunk_bytes in (1, 2, 7, 64, 1000):
        fed = new_fed().feed(stream, chunk_bytes)
        assert fed.messages == sent
        assert fed.malformed.num == 0


def test_a_message_larger_than_the_inbox_comes_whole(new_fed, say):
    large = Message(b"t", 1, random.Random(0).randbytes(8 << 20))
    fed = new_fed(max_bytes=9 << 20).feed(say.message(large) + say.message(MESSAGE), 100_000)
    assert fed.messages == [large, MESSAGE]


def test_more_small_messages_than_a_table_has_rows_come_in_order(ready, say):
    sent = [Message(b"t", sequence, b"") for sequence in range(3 * MAX_DRAIN + 1)]
    assert ready.feed(b"".join(map(say.message, sent))).messages == sent


def test_a_long_length_may_be_small(ready, say):
    frames = [say.frame(b"t", flags=3), say.frame(bytes(8), flags=3), say.frame(b"x", flags=2)]
    assert ready.feed(b"".join(frames)).messages == [Message(b"t", 0, b"x")]
    assert ready.malformed.num == 0


# Commands.


def test_a_ping_is_answered_with_its_context(ready, say):
    ready.feed(say.message(MESSAGE) + say.command(b"PING", b"\x00\x0acontext") + say.message(MESSAGE))
    assert ready.connection.take_outgoing() == say.command(b"PONG", b"context")
    assert ready.messages == [MESSAGE, MESSAGE]


def test_commands_between_the_frames_of_a_message_are_obeyed_once_however_they_are_cut(new_fed, say):
    topic, sequence, payload = say.frames(MESSAGE)
    ping, unknown = say.command(b"PING", b"\0\0c"), say.command(b"NEWS", b"?")
    stream = say.message(MESSAGE) + topic + ping + unknown + sequence + ping + payload + ping + say.message(MESSAGE)
    for chunk_bytes in (1, 3, 1000):
        fed = new_fed().feed(stream, chunk_bytes)
        assert fed.messages == [MESSAGE] * 3
        assert fed.connection.take_outgoing().endswith(SUBSCRIBE + 3 * say.command(b"PONG", b"c"))
        assert fed.malformed.num == 0


def test_whoever_pings_or_answers_is_known_to_answer(new_fed, say):
    fed = new_fed(minor_version=0)
    assert not fed.connection.has_pong
    fed.feed(say.command(b"PONG"))
    assert fed.connection.has_pong


def test_a_ping_of_ours_has_no_context(ready, say):
    ready.connection.ping()
    assert ready.connection.take_outgoing() == say.command(b"PING", b"\0\0")


def test_an_error_ends_the_connection_and_keeps_what_came_before(ready, say):
    with pytest.raises(PeerError, match="reports an error: b'full'"):
        ready.feed(say.message(MESSAGE) + say.command(b"ERROR", b"\x04full") + say.message(MESSAGE))
    assert ready.messages == [MESSAGE]


# What is wrong.


@pytest.mark.parametrize("chunk_bytes", [1, 5, 1000])
def test_a_message_of_other_frames_is_counted_once_and_skipped(new_fed, say, chunk_bytes, caplog):
    wrong = [
        say.malformed(b"only a topic"),
        say.malformed(b""),
        say.malformed(b"topic", bytes(8)),
        say.malformed(b"topic", b"short", b"payload"),
        say.malformed(b"topic", bytes(300), b"payload"),
        say.malformed(b"topic", bytes(8), b"payload", b"and more", b"and more"),
    ]
    stream = b"".join(each + say.message(MESSAGE) for each in wrong)
    fed = new_fed().feed(stream, chunk_bytes)
    assert fed.messages == [MESSAGE] * len(wrong)
    assert fed.malformed.num == len(wrong)
    assert caplog.text.count("malformed message skipped") == 1
    assert "source=a source num_frames=1 frame_bytes=[12]" in caplog.text


def test_a_command_amid_a_message_that_is_skipped_is_obeyed(ready, say):
    ping = say.command(b"PING", b"\0\0")
    ready.feed(say.frame(b"t", flags=1) + say.frame(b"short", flags=1) + ping + say.frame(b"x") + say.message(MESSAGE))
    assert ready.messages == [MESSAGE]
    assert ready.malformed.num == 1
    assert ready.connection.take_outgoing() == say.command(b"PONG")


def test_a_message_above_the_limit_is_skipped_without_buffering_it(new_fed, say, monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.MAX_MESSAGE_BYTES", 1 << 20)
    fed = new_fed(max_bytes=(1 << 20) + (1 << 16))
    at_limit = Message(b"t", 1, bytes((1 << 20) - 1))
    fed.feed(say.message(at_limit) + say.message(MESSAGE), 50_000)
    capacity = fed.inbox.capacity
    huge_payload = say.frame(b"t", flags=1) + say.frame(bytes(8), flags=1) + say.frame(bytes(3 << 20))
    huge_topic = say.frame(bytes(2 << 20), flags=1) + say.frame(bytes(8), flags=1) + say.frame(b"")
    just_too_large = say.message(Message(b"to", 1, bytes((1 << 20) - 1)))
    fed.feed(huge_payload + huge_topic + just_too_large + say.message(MESSAGE), 50_000)
    assert fed.messages == [at_limit, MESSAGE, MESSAGE]
    assert fed.malformed.num == 3
    assert fed.inbox.capacity <= capacity


@pytest.mark.parametrize("claimed", [(1 << 63) - 1, 1 << 62, 1 << 40])
def test_a_frame_that_claims_more_than_will_ever_come_is_skipped_as_long_as_it_comes(ready, say, claimed):
    ready.feed(say.frame(b"", flags=1, num_bytes=claimed) + bytes(1 << 20))
    assert ready.malformed.num == 1
    assert ready.messages == []


@pytest.mark.parametrize("flags", [5, 7, 8, 16, 0x80, 0xFF])
def test_flags_that_mean_nothing_end_the_connection(ready, say, flags):
    with pytest.raises(PeerError, match=f"flags {flags:#04x}"):
        ready.feed(say.message(MESSAGE) + bytes((flags, 1, 0)))
    assert ready.messages == [MESSAGE]


@pytest.mark.parametrize("flags", [1, 0, 4])
def test_a_length_of_more_than_63_bits_ends_the_connection(ready, say, flags):
    with pytest.raises(PeerError, match="has 9223372036854775808 bytes"):
        ready.feed(say.frame(b"", flags=flags, num_bytes=1 << 63))


def test_a_message_without_end_ends_the_connection(ready, say):
    ready.feed(say.frame(b"", flags=1) * MAX_FRAMES)
    with pytest.raises(PeerError, match="more than 1000 frames"):
        ready.feed(say.frame(b"", flags=1))
    assert ready.malformed.num == 1


def test_commands_without_end_between_two_frames_end_the_connection(ready, say):
    topic, *rest = say.frames(MESSAGE)
    for _ in range(3):
        ready.feed(topic + say.command(b"NEWS", bytes(200)) * MAX_COMMANDS_WITHIN + b"".join(rest))
    assert ready.messages == [MESSAGE] * 3
    with pytest.raises(PeerError, match="more than 16 commands between its frames"):
        ready.feed(topic + say.command(b"NEWS") * (MAX_COMMANDS_WITHIN + 1))


@pytest.mark.parametrize("body", [b"", b"\0", bytes(19)])
def test_a_ping_of_another_size_ends_the_connection(ready, say, body):
    with pytest.raises(PeerError, match="a PING has a body of"):
        ready.feed(say.command(b"PING", body))


# Anything at all.


def outcome(fed, stream, chunks):
    """Return everything that can be seen of a stream that comes in these pieces."""
    reason = None
    try:
        for chunk in chunks(stream):
            fed.feed(chunk)
    except PeerError as error:
        reason = error.reason.partition(", but with ")[0]  # what came in one piece
    return fed.messages, fed.malformed.num, fed.connection.take_outgoing(), reason


def a_stream(say, rng):
    """Return what a publisher may say, ordinary and not."""
    parts = []
    for _ in range(rng.randrange(1, 12)):
        topic, sequence, payload = say.frames(Message(b"t" * rng.choice([0, 6, 300]), rng.getrandbits(64), b"p" * 40))
        ping = say.command(b"PING", b"\0\0" + rng.randbytes(2))
        parts.append(
            rng.choice(
                [
                    topic + sequence + payload,
                    topic + sequence + payload,
                    ping,
                    topic + ping + sequence + ping + payload,
                    topic + payload,
                    topic + topic + ping + payload,
                    topic + sequence + topic + payload,
                    say.command(rng.choice([b"PONG", b"NEWS"]), rng.randbytes(3)),
                ]
            )
        )
    return b"".join(parts)


def test_whatever_a_peer_says_is_understood_the_same_in_one_piece_and_in_many(new_fed, say):
    rng = random.Random(3)
    num_errors = num_messages = 0
    for _ in range(1500):
        stream = bytearray(a_stream(say, rng))
        for _ in range(rng.choice([0, 0, 1, 3])):
            at = rng.randrange(rng.choice([0, min(85, len(stream) - 1)]), len(stream))
            match rng.randrange(3):
                case 0:
                    stream[at] = rng.randrange(256)
                case 1:
                    del stream[at : at + rng.randrange(1, 20)]
                case _:
                    stream[at:at] = rng.randbytes(rng.randrange(1, 10))

        def in_pieces(stream):
            while stream:
                num_bytes = rng.choice([1, 2, 9, 50, 200])
                yield bytes(stream[:num_bytes])
                stream = stream[num_bytes:]

        whole = outcome(new_fed(), bytes(stream), lambda stream: [stream])
        assert outcome(new_fed(), bytes(stream), in_pieces) == whole
        num_messages += len(whole[0])
        num_errors += whole[3] is not None
    assert num_messages > 2000
    assert num_errors > 200

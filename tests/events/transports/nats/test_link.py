"""A connection is kept: whatever happens to the server, without a storm, and never in the clear when TLS is wanted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import nats.errors
import pytest

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, Message, ReplayRequest
from kvist.events.transports import nats as nats_link
from kvist.events.transports.broker_link import REFUSED_RETRY_S
from kvist.events.transports.nats import NatsLink

TOPIC = b"kv/pod-1/0"


@pytest.mark.parametrize("module", ["nats", "nkeys"])
def test_without_the_client_the_error_says_what_to_install(module):
    script = f"import sys; sys.modules[{module!r}] = None; from kvist.events.transports import *; "
    opened = subprocess.run(
        [sys.executable, "-c", f"{script} open_publication('nats://127.0.0.1:1/m/w')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"MissingExtraError: {module} is not installed: pip install 'kvist[nats]'" in opened.stderr


async def test_a_server_killed_and_restarted_is_found_again_by_both_ends(wire, until):
    server = wire.start_server()
    publication = wire.publish(wire.url(server))
    async with wire.subscribe(wire.url(server)) as subscription:
        await until(lambda: subscription.num_connects == 1)
        wire.send(publication, 0, 1)
        assert await wire.take(subscription, 2) == [0, 1]
        assert subscription.problem is None
        server.kill()
        await until(lambda: subscription.problem is not None)
        assert f"broker 127.0.0.1:{server.port}" in subscription.problem
        wire.send(publication, 2)
        server.start()
        await until(lambda: subscription.num_connects == publication._link.num_connects == 2)
        assert subscription.problem is None
        # What was handed over meanwhile may have been sent before this end was back, and what follows is not.
        wire.send(publication, 3)
        assert (await wire.take(subscription, 1))[-1:] in ([2], [3])


async def test_a_connection_that_is_reset_with_something_left_to_send_is_replaced(wire, until):
    """As under a publisher whose server is killed: that happens between its sending and the sockets' own."""
    server = wire.start_server()
    async with wire.subscribe(wire.url(server)) as subscription:
        await until(lambda: subscription.num_connects == 1)
        client = subscription._link.client
        client._pending.append(b"PING\r\n")
        client._pending_data_size = 6
        client._transport._io_reader.set_exception(ConnectionResetError())
        await until(lambda: subscription.num_connects == 2)
        publication = wire.publish(wire.url(server))
        wire.send(publication, 5)
        assert await wire.take(subscription, 1) == [5]


async def test_a_server_that_comes_later_gets_what_was_sent_before_it_came(wire, until):
    server = wire.start_server()
    server.kill()
    publication = wire.publish(wire.url(server))
    wire.send(publication, *range(10))
    async with wire.subscribe(wire.url(server)) as subscription:
        await until(lambda: "Connect call failed" in (subscription.problem or ""))
        assert await subscription.replay(ReplayRequest(TOPIC, 0), 0.05) is None
        server.start()
        await until(lambda: subscription.num_connects == 1)
        wire.send(publication, 10)
        assert (await wire.take(subscription, 1))[-1] <= 10


async def test_while_the_server_is_away_the_hand_over_fills_and_refuses(wire, logged):
    server = wire.start_server()
    server.kill()
    publication = wire.publish(wire.url(server))
    with pytest.raises(BlockingIOError):
        wire.send_until_refused(publication)
    publication.close()  # nobody is there to drain to: at once
    publication.close()
    (told,) = logged("kvist.events.transports.broker_stream")
    assert told.startswith("closed before the broker took all messages num=1024 ")


async def test_subscriptions_of_a_loop_share_one_connection_and_hear_their_own(wire, until):
    server = wire.start_server()
    url, other_url = wire.url(server), wire.url(server).replace("pod-1", "pod-2")
    other_model = wire.url(server).replace("%2F", ".")
    publications = [wire.publish(each) for each in (url, other_url, other_model)]
    async with wire.subscribe(url) as one, wire.subscribe(other_url) as other, wire.subscribe(other_model) as third:
        await until(lambda: (one.num_connects, other.num_connects, third.num_connects) == (1, 1, 1))
        assert one._link is other._link is third._link
        for sequence, publication in enumerate(publications):
            wire.send(publication, sequence)
        assert await wire.take(one, 1) == [0]
        assert await wire.take(other, 1) == [1]
        assert await wire.take(third, 1) == [2]
    async with wire.subscribe(url) as again:
        await until(lambda: again.num_connects == 1)
        assert again._link is not one._link


async def test_a_subscription_that_leaves_takes_nothing_from_the_others(wire, until):
    server = wire.start_server()
    url = wire.url(server)
    publication = wire.publish(url)
    async with wire.subscribe(url) as one:
        async with wire.subscribe(url) as other:
            await until(lambda: one.num_connects == other.num_connects == 1)
        wire.send(publication, 7)
        assert await wire.take(one, 1) == [7]
        assert one.num_connects == 1


async def test_two_publications_in_turns_are_counted_once_each(wire, until):
    server = wire.start_server()
    url = wire.url(server)
    publications = [wire.publish(url), wire.publish(url)]
    async with wire.subscribe(url) as subscription:
        await until(lambda: subscription.num_connects == 1)
        for sequence in range(10):
            wire.send(publications[sequence % 2], sequence)
            assert await wire.take(subscription, 1) == [sequence]
        assert subscription.num_connects == 2


async def test_a_message_beyond_max_payload_is_left_to_the_replay(wire, until):
    server = wire.start_server("max_payload: 4096")
    large = Message(TOPIC, 1, bytes(100_000))
    publication = wire.publish(wire.url(server))
    publication.serve_replay(wire.keep([large]))
    async with wire.subscribe(wire.url(server)) as subscription:
        await until(lambda: subscription.num_connects == 1)
        publication.send(large)
        wire.send(publication, 2)
        assert await wire.take(subscription, 1) == [2]
        assert publication.num_too_large == 1
        assert await subscription.replay(ReplayRequest(TOPIC, 1), 60) == [large]


async def test_what_is_no_message_is_counted_and_skipped(wire, until):
    server = wire.start_server()
    publication = wire.publish(wire.url(server))
    async with wire.subscribe(wire.url(server)) as subscription:
        await until(lambda: subscription.num_connects == 1)
        client = await subscription._link.wait_connected()
        await client.publish("kvist.org%2Fmodel.pod-1.0", b"short")
        wire.send(publication, 5)
        assert await wire.take(subscription, 1) == [5]
        await until(lambda: subscription.num_malformed == 1)


@pytest.mark.parametrize(
    "line",
    [
        b"PUB kvist.org%2Fmodel.pod-1.\xff\xfe 3\r\nabc\r\n",
        b"HPUB kvist.org%2Fmodel.pod-1.0 17 20\r\nNATS/1.0 \xff\xfe\xfd \r\n\r\nabc\r\n",
        b"HPUB kvist-ask.org%2Fmodel.pod-1 17 20\r\nNATS/1.0 \xff\xfe\xfd \r\n\r\nabc\r\n",
    ],
)
async def test_a_strangers_message_that_is_no_text_is_skipped(wire, until, line, caplog):
    server = wire.start_server()
    publication = wire.publish(wire.url(server))
    publication.serve_replay(wire.keep([Message(TOPIC, 0, b"kept")]))
    async with wire.subscribe(wire.url(server)) as subscription:
        await until(lambda: subscription.num_connects == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + line * 2 + b"PING\r\n")
        assert await reader.readline() == b"PONG\r\n"
        writer.close()
        await until(lambda: caplog.text.count("unreadable message skipped") == 1)
        wire.send(publication, 0)
        assert await wire.take(subscription, 1) == [0]
        assert await subscription.replay(ReplayRequest(TOPIC, 0), 60) == [Message(TOPIC, 0, b"kept")]
        assert subscription.num_connects == 1


async def test_a_server_that_shuts_down_for_maintenance_is_left_for_another(wire, until):
    leaving, other = wire.start_server(), wire.start_server()
    url = f"nats://127.0.0.1:{leaving.port},127.0.0.1:{other.port}/m/w"
    async with wire.subscribe(url) as subscription:
        await until(lambda: subscription.num_connects == 1)
        client = await subscription._link.wait_connected()
        assert client.connected_url.port == leaving.port
        leaving.signal(signal.SIGUSR2)  # lame duck
        await until(lambda: subscription.num_connects == 2)
        assert (await subscription._link.wait_connected()).connected_url.port == other.port


async def test_a_connection_is_not_made_in_the_clear_when_tls_is_wanted(wire, until):
    received = bytearray()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.9.10","max_payload":1048576,"auth_required":true}\r\n')
        received.extend(await reader.read())
        writer.close()

    async with await asyncio.start_server(pretend, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        async with wire.subscribe(f"nats+tls://user:password@127.0.0.1:{port}/m/w") as subscription:
            await until(lambda: "secure connection" in (subscription.problem or ""))
    assert received == b""


@pytest.mark.parametrize(
    "line",
    [b"HTTP/1.1 400 Bad Request\r\n", b"INFO {\r\n", bytes(1 << 20), b""],
    ids=["HTTP", "cut", "zeros", "nothing"],
)
async def test_a_server_that_is_none_of_natss_is_a_problem(wire, until, line):
    num_visits = 0

    async def pretend(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_visits
        num_visits += 1
        with suppress(ConnectionError):
            writer.write(line)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(pretend, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        async with wire.subscribe(f"nats://127.0.0.1:{port}/m/w") as subscription:
            await until(lambda: num_visits > 1 and f"broker 127.0.0.1:{port}: " in subscription.problem)


class SlowSource:
    """Answers once it may."""

    def __init__(self):
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def replay(self, _):
        self.is_asked.set()
        assert self.may_answer.wait(180)
        return []


async def test_a_question_cancelled_while_the_server_is_away_ends_cancelled(wire, until):
    server, source = wire.start_server(), SlowSource()
    publication = wire.publish(wire.url(server))
    publication.serve_replay(source)
    async with wire.subscribe(wire.url(server)) as subscription:
        await until(lambda: publication._link.client and subscription.num_connects == 1)
        asking = asyncio.create_task(subscription.replay(ReplayRequest(TOPIC, 0), 600))
        await until(source.is_asked.is_set)
        server.kill()
        await until(lambda: subscription._link.client is None)
        asking.cancel()
        source.may_answer.set()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_server_that_reads_nothing_makes_who_sends_wait_and_takes_no_memory(
    wire, until, kernel_bytes, monkeypatch
):
    monkeypatch.setattr(nats_link, "FLUSH_TIMEOUT_S", 0.01)
    server = wire.start_server()
    async with NatsLink(Endpoint.parse(wire.url(server)).broker) as link:
        await until(lambda: link.client)
        server.signal(signal.SIGSTOP)
        transport = link.client._transport._io_writer.transport
        for _ in range((kernel_bytes >> 19) + 32):
            with suppress(nats.errors.Error):  # for it waits in vain
                await link.client.publish("anything", bytes(1 << 19))
            assert transport.get_write_buffer_size() < 8 << 20
        server.signal(signal.SIGCONT)


async def test_a_wrong_authority_is_told_and_tried_again(wire, certificate, until, tmp_path):
    import trustme

    tls = f'tls {{ cert_file: "{certificate.chain}", key_file: "{certificate.chain}" }}'
    server = wire.start_server(tls)
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    async with wire.subscribe(wire.url(server, scheme="nats+tls", query=f"?tls_ca={tmp_path}/other.pem")) as wrong:
        await until(lambda: "certificate verify failed" in (wrong.problem or ""))
    right = wire.url(server, scheme="nats+tls", query=f"?tls_ca={certificate.authority}")
    publication = wire.publish(right)
    assert "tls_ca" not in publication.endpoint
    async with wire.subscribe(right) as subscription:
        await until(lambda: subscription.num_connects == 1)
        wire.send(publication, 3)
        assert await wire.take(subscription, 1) == [3]


async def test_a_refused_login_is_told_and_tried_again_rarely(wire, until, caplog):
    server = wire.start_server('authorization { user: "kvist", password: "right" }')
    url = wire.url(server, "kvist:wrong@")
    publication = wire.publish(url)
    async with wire.subscribe(url) as subscription:
        await until(lambda: "refused the login" in (subscription.problem or ""))
        assert f"127.0.0.1:{server.port}" in subscription.problem
        assert await subscription.replay(ReplayRequest(TOPIC, 0), 0.05) is None
    assert "wrong" not in caplog.text
    publication.close()
    async with NatsLink(wire.parse(url)) as link:
        await link.tried.wait()
        await until(lambda: link._is_refused)
        assert link._retry_s() >= REFUSED_RETRY_S


async def test_a_login_that_is_revoked_ends_in_a_problem_not_in_silence(wire, until):
    server = wire.start_server('authorization { user: "kvist", password: "old" }')
    async with wire.subscribe(wire.url(server, "kvist:old@")) as subscription:
        await until(lambda: subscription.num_connects == 1)
        config = server.folder / "server.conf"
        config.write_text(config.read_text().replace('"old"', '"new"'))
        server.signal(signal.SIGHUP)
        await until(lambda: "refused the login" in (subscription.problem or ""))


async def test_a_subject_that_is_not_permitted_is_a_problem(wire, until):
    permissions = '{ subscribe: { deny: "kvist.>" } }'
    server = wire.start_server(
        f'authorization {{ users: [ {{ user: "u", password: "p", permissions: {permissions} }} ] }}'
    )
    async with wire.subscribe(wire.url(server, "u:p@")) as subscription:
        await until(lambda: "does not permit" in (subscription.problem or ""))


def test_waits_grow_to_their_bound_and_differ(wire):
    link = NatsLink(wire.parse("nats://h/m/w"))
    waits = []
    for num_failures in range(40):
        link._num_failures = min(num_failures, 16)
        waits.append(link._retry_s())
    assert max(waits) <= 0.2 * 1.5
    assert len(set(waits)) == 40
    link._is_refused = True
    assert REFUSED_RETRY_S <= link._retry_s() <= 450


@pytest.mark.parametrize(
    ("query", "scheme"),
    [("?creds=/nowhere", "nats"), ("?nkey=/nowhere", "nats"), ("?tls_ca=/nowhere", "nats+tls")],
)
async def test_a_file_that_is_not_there_is_an_error_at_once(wire, query, scheme):
    url = f"{scheme}://127.0.0.1:1/m/w{query}"
    with pytest.raises(InvalidValueError, match=query[1:].partition("=")[0]):
        wire.publish(url)
    with pytest.raises(InvalidValueError, match=query[1:].partition("=")[0]):
        async with wire.subscribe(url):
            pass

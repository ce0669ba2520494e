"""Streams over NATS: live events on core subjects, replays in pages on subjects of their own, history in JetStream.

docs/transports.md has the subjects, docs/decisions.md why nats-py's own reconnecting is not used.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kvist.errors import InvalidValueError, MissingExtraError

try:
    import nats.errors
    import nkeys
    from nats.aio.client import Client, RawCredentials
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
except ModuleNotFoundError as error:
    raise MissingExtraError("nats", str(error.name).partition(".")[0]) from error

from kvist.events.transports import base
from kvist.events.transports.base import WHO_IS_THERE, Message, ReplayRequest
from kvist.events.transports.broker import PRIVATE_OPTIONS, STREAM, BrokerUrl, Host, pack
from kvist.events.transports.broker_link import BrokerLink, Receive, cancel_and_wait
from kvist.events.transports.broker_replay import PAGE_BYTES
from kvist.events.transports.broker_stream import BrokerPublication, BrokerSubscription
from kvist.events.transports.jetstream import ensure_stream, read_kept, read_stream

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
"""How long a server may take for each step of connecting."""
CLOSE_TIMEOUT_S = 1.0
"""How long closing may take: after a failed TLS handshake a client waits in vain."""
FLUSH_TIMEOUT_S = 5.0
"""How long each send waits for a server that reads nothing."""
HISTORY_TIMEOUT_S = 60.0
FAILURES = (OSError, nats.errors.Error, TimeoutError)

_PAGE_OVERHEAD_BYTES = 256
_CREDENTIALS = re.compile(
    r"-----BEGIN NATS USER JWT-----\s+(\S+)\s+.*-----BEGIN USER NKEY SEED-----\s+(\S+)\s+---", re.DOTALL
)


class NatsPublication(BrokerPublication[Client]):
    """Publishes on core subjects, which a JetStream stream may keep."""

    def __init__(self, url: BrokerUrl) -> None:
        self.num_too_large = 0
        self._has_stream = False
        super().__init__(url)

    def _new_link(self) -> NatsLink:
        login_options(self._url)
        return NatsLink(self._url, self._prepare)

    async def _prepare(self, client: Client) -> None:
        """Ensure that the URL's JetStream stream exists; wrong settings are an error only on the first connection."""
        self._replay_server.page_bytes = min(PAGE_BYTES, client.max_payload - _PAGE_OVERHEAD_BYTES)
        if "jetstream" not in self._url.options:
            return
        try:
            await ensure_stream(client, self._url)
        except InvalidValueError as error:
            if not self._has_stream:
                raise
            _logger.error("JetStream no longer stores events: %s", error)
        self._has_stream = True

    async def _deliver(self, client: Client, messages: Sequence[Message]) -> None:
        for message in messages:
            name = self._url.name(STREAM, self._url.token_of(message.topic))
            try:
                await client.publish(name, pack(self._id, message))
            except nats.errors.MaxPayloadError:
                if self.num_too_large == 0:
                    text = "message larger than the server's max_payload is left to replays, as further ones are"
                    _logger.warning("%s size_bytes=%d", text, len(message.payload))
                self.num_too_large += 1

    async def _send_all(self, client: Client) -> None:
        await super()._send_all(client)
        await client.flush()


class NatsSubscription(BrokerSubscription[Client]):
    """Subscribes over the loop's one connection to the URL's servers; with `deliver=all` to what JetStream keeps."""

    def __init__(self, url: BrokerUrl) -> None:
        super().__init__(url)
        self._num_readings = 0
        self._history_problem: str | None = None
        self._stream_created: datetime | None = None
        self._next_sequence = 1
        """The number in that stream of the first message not read yet, with `deliver=all`."""

    @property
    def num_connects(self) -> int:
        num_connects = self._num_readings if "deliver" in self._url.options else self._link.num_connects
        return num_connects + self._num_successors

    @property
    def problem(self) -> str | None:
        return self._link.problem or self._history_problem

    async def _open(self, exits: AsyncExitStack) -> None:
        self._link = await exits.enter_async_context(shared_link(self._url))
        if "deliver" in self._url.options:
            reading = self._link.use_connections(self._read_history)
            task = asyncio.create_task(reading, name=f"kvist-nats-{self._url.public}")
            exits.push_async_callback(cancel_and_wait, task)
        else:
            await exits.enter_async_context(self._link.subscription(self._url.name(STREAM, "*"), self._on_event))

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask the publisher; if it does not answer, read the stream that the URL names, if any."""
        messages = await super().replay(request, timeout_s)
        client = self._link.client
        # The stream knows which messages were sent, but not which publishers are there.
        if messages is None and client and "jetstream" in self._url.options and request != WHO_IS_THERE:
            with suppress(*FAILURES):
                async with asyncio.timeout(HISTORY_TIMEOUT_S):
                    return await read_kept(client, self._url, request)
        return messages

    async def _read_history(self, client: Client) -> None:
        """Deliver what the stream has from where an earlier connection stopped, then new messages; wait for readers."""
        stream = self._url.options["jetstream"]
        try:
            info = await client.jsm().stream_info(stream)
            if info.created != self._stream_created:  # a server that lost its storage has made another one
                self._stream_created, self._next_sequence = info.created, 1
            start_sequence = min(self._next_sequence, info.state.last_seq + 1)
            pages = read_stream(client, stream, self._url.name(STREAM, "*"), start_sequence, waits=True)
            async with aclosing(pages):
                async for page in pages:
                    if not page:
                        self._num_readings += 1
                        self._history_problem = None
                    for message in page:
                        await self._queue.wait_for_room()
                        self._on_event(message.subject, message.data)
                        self._next_sequence = message.metadata.sequence.stream + 1
        except FAILURES as error:
            self._history_problem = f"stream {stream} cannot be read: {error}"
            raise


class _Client(Client):
    """Refuses a server without TLS if TLS is wanted, which nats-py leaves to the server to say.

    And skips a message whose subject or headers are not text, which anyone may send: nats-py would stop reading.
    """

    num_unreadable = 0

    def __init__(self, *, must_encrypt: bool) -> None:
        super().__init__()
        self.is_over = asyncio.Event()
        """Set once the connection is lost, or the server wants it to end."""
        self._must_encrypt = must_encrypt

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (UnicodeDecodeError, IndexError):
            if self.num_unreadable == 0:
                _logger.warning("unreadable message skipped, further ones are only counted subject=%s", ascii(subject))
            self.num_unreadable += 1

    async def _process_op_err(self, e: Exception) -> None:
        """Drop unsent data, over which nats-py would fail to close and never report that the connection is lost."""
        self._pending, self._pending_data_size = [], 0
        try:
            await super()._process_op_err(e)
        finally:
            self.is_over.set()

    def _connect_command(self) -> bytes:
        if self._must_encrypt and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()


class NatsLink(BrokerLink[Client]):
    """A link to a NATS server, which several subscriptions share."""

    failures = (*FAILURES, ValueError)  # of an unusable file, or a first line that is not NATS

    num_users = 0

    async def _subscribe(self, client: Client, name: str, receive: Receive) -> Subscription:
        async def on_message(message: Msg) -> None:
            receive(message.subject, None if message.headers else message.data)  # only the server sends headers

        return await client.subscribe(name, cb=on_message)

    async def _unsubscribe(self, client: Client, subscription: Subscription) -> None:  # noqa: ARG002 - it has its own
        await subscription.unsubscribe()

    async def _confirm_subscriptions(self, client: Client) -> None:
        await client.flush()

    async def publish(self, name: str, data: bytes, answer: str = "") -> None:
        # If no publisher is there, the server itself answers at once.
        await (await self.wait_connected()).publish(name, data, answer)

    async def _wait_closed(self, client: Client) -> None:
        assert isinstance(client, _Client)
        await client.is_over.wait()
        raise ConnectionError("the connection was lost")

    def _explain(self, error: Exception) -> tuple[str, bool]:
        reason = str(error) or type(error).__name__
        is_refused = any(word in reason.lower() for word in ("authorization", "authentication"))
        return f"it refused the login: {reason}" if is_refused else reason, is_refused

    @asynccontextmanager
    async def _open(self, host: Host) -> AsyncIterator[Client]:
        client = _Client(must_encrypt=self._url.has_tls)
        try:
            await self._connect(client, host)
            yield client
        finally:
            await _close(client)

    async def _connect(self, client: _Client, host: Host) -> None:
        reasons: deque[Exception] = deque(maxlen=1)

        async def on_error(error: Exception) -> None:
            reasons.append(error)
            self._report_error(error, host)

        async def on_lost() -> None:
            client.is_over.set()

        try:
            await client.connect(
                f"nats://{host}",
                name="kvist",
                error_cb=on_error,
                closed_cb=on_lost,
                lame_duck_mode_cb=on_lost if len(self._url.hosts) > 1 else None,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=int(base.PING_INTERVAL_S),
                max_outstanding_pings=int(base.PING_TIMEOUT_S / base.PING_INTERVAL_S) - 1,
                flush_timeout=FLUSH_TIMEOUT_S,
                **login_options(self._url),
            )
        except nats.errors.NoServersError:
            raise reasons[0] if reasons else ConnectionError("no connection") from None
        # Python 3.12 before 3.12.9, and 3.13 before 3.13.2, never make callers of `writelines` wait (its issue 127655).
        writer = client._transport._io_writer  # type: ignore[union-attr]
        writer.writelines = lambda pieces: writer.write(b"".join(pieces))

    def _report_error(self, error: Exception, host: Host) -> None:
        if "permissions violation" in str(error).lower():
            _logger.warning("broker permits no access: %s broker=%s", error, host)
            self.problem = self.forbidden = f"broker {host} does not permit it: {error}"
        elif not isinstance(error, FAILURES):
            _logger.error("unexpected error broker=%s", host, exc_info=error)


async def _close(client: Client) -> None:
    """Close a connection, however far it got, and even when cancelled meanwhile."""

    async def close() -> None:
        with suppress(*FAILURES, AssertionError):  # a client that never connected has no server
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
        writer = getattr(client._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()  # where that took too long

    closing = asyncio.create_task(close(), name="kvist-nats-closing")
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise


_shared_links: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, NatsLink]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_link(url: BrokerUrl) -> AsyncIterator[NatsLink]:
    """Yield the event loop's link with this login, closed by its last user; raises as `login_options` does."""
    login_options(url)
    links = _shared_links.setdefault(asyncio.get_running_loop(), {})
    key = (url.scheme, url.hosts, url.user, url.password, *(url.options.get(name) for name in PRIVATE_OPTIONS))
    if key not in links:
        links[key] = await NatsLink(url).__aenter__()
    link = links[key]
    link.num_users += 1
    try:
        yield link
    finally:
        link.num_users -= 1
        if not link.num_users:
            del links[key]
            await link.__aexit__()


def login_options(url: BrokerUrl) -> dict[str, Any]:
    """Return the client's options for login and TLS; raises InvalidValueError for files that cannot be used."""
    options: dict[str, Any] = {"tls": url.tls_context()}
    if url.password is not None:
        options |= {"user": url.user or "", "password": url.password}
    elif url.user is not None:
        options["token"] = url.user
    if "creds" in url.options:
        options["user_credentials"] = _credentials(url)
    if "nkey" in url.options:
        options["nkeys_seed_str"] = _checked_seed(url, "nkey", _read(url, "nkey").strip())
    return options


def _credentials(url: BrokerUrl) -> RawCredentials:
    found = _CREDENTIALS.search(_read(url, "creds"))
    if found is None:
        raise _invalid(url, "creds", "a user's JWT and the seed of its nkey in it")
    seed = _checked_seed(url, "creds", found[2])
    return RawCredentials(f"-----BEGIN NATS USER JWT-----\n{found[1]}\n-----BEGIN USER NKEY SEED-----\n{seed}\n-----\n")


def _checked_seed(url: BrokerUrl, option: str, seed: str) -> str:
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except (nkeys.NkeysError, ValueError):  # base32's errors are ValueErrors
        raise _invalid(url, option, "the seed of an nkey in it") from None
    return seed


def _read(url: BrokerUrl, option: str) -> str:
    try:
        return Path(url.options[option]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(url, option, f"a file that can be read ({error})") from None


def _invalid(url: BrokerUrl, option: str, expected: str) -> InvalidValueError:
    return InvalidValueError(f"endpoint {url.public}, {option}", url.options[option], expected)

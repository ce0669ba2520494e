"""One connection to a NATS server, kept, and shared by all who want the same in one event loop.

A client connects once, and every reconnect is another client's: nats-py's own loop tries at a fixed pace whatever the
reason, dials servers that the server names, and ends for good when a login is revoked. Here a broker that is away is
tried again with back-off, one that refuses the login every half minute and slower, and only the URL's hosts are
dialled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import nats.errors
import nkeys
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.broker import PRIVATE_OPTIONS, BrokerUrl

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
"""How long a server may take for each step of a connection's start."""
CLOSE_TIMEOUT_S = 1.0
"""How long closing may take: after a failed TLS handshake a client waits for what never comes."""
REFUSED_RETRY_S, MAX_REFUSED_RETRY_S = 30.0, 300.0
"""The wait before a broker that refused the login is asked again: doubled each time."""
FLUSH_TIMEOUT_S = 5.0
"""How long whoever sends waits for a server that takes nothing, each time."""

_MAX_DOUBLINGS = 16
_CREDENTIALS = re.compile(
    r"-----BEGIN NATS USER JWT-----\s+(\S+)\s+.*-----BEGIN USER NKEY SEED-----\s+(\S+)\s+---", re.DOTALL
)

FAILURES = (OSError, nats.errors.Error, TimeoutError)
"""What a client raises when a connection or a server fails."""


class _Client(Client):
    """Speaks to no server without TLS when TLS is wanted: nats-py leaves that to what the server says of itself.

    And goes on behind a message whose subject or headers are no text, which anyone may send: nats-py stops reading.
    """

    must_encrypt = False
    num_unreadable = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (UnicodeDecodeError, IndexError):
            if self.num_unreadable == 0:
                _logger.warning("unreadable message skipped, further ones are only counted subject=%s", ascii(subject))
            self.num_unreadable += 1

    def _connect_command(self) -> bytes:
        if self.must_encrypt and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()


@dataclass(eq=False, slots=True)
class _Interest:
    """A subject somebody wants, through whatever connection there is."""

    subject: str
    received: Callable[[Msg], Awaitable[None]]
    connected: Callable[[], None]
    unsubscribe: Callable[[], Awaitable[None]] | None = field(default=None)


@dataclass(eq=False, slots=True)
class _Shared:
    link: NatsLink
    num_users: int = 0


class NatsLink:
    """Keeps one connection while entered. `client` is None while there is none."""

    def __init__(self, url: BrokerUrl, prepare: Callable[[Client], Awaitable[None]] | None = None) -> None:
        """Check the URL's files; `prepare` is called with each new connection before anyone else uses it.

        Raises InvalidValueError for a file that is not what the URL says.
        """
        self._broker = ",".join(map(str, url.hosts))
        self.client: Client | None = None
        self.problem: str | None = f"broker {self._broker}: not connected yet"
        self.num_dropped = 0
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has ended, well or not."""
        self._url = url
        self._prepare = prepare
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._changed = asyncio.Event()
        self._interests: list[_Interest] = []
        self._left: list[_Interest] = []
        self._num_failures = 0
        self._is_refused = False
        login_options(url)

    async def __aenter__(self) -> Self:
        """Start connecting; returns at once."""
        self._task = asyncio.create_task(self._run(), name=f"kvist-nats {self._broker}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        await end(self._task)

    def subscribe(
        self, subject: str, received: Callable[[Msg], Awaitable[None]], connected: Callable[[], None]
    ) -> Callable[[], None]:
        """Subscribe, again after each reconnect; `connected` is called each time, once the server has the subscription.

        Returns the function that ends it.
        """
        interest = _Interest(subject, received, connected)
        self._interests.append(interest)
        self._changed.set()

        def unsubscribe() -> None:
            self._interests.remove(interest)
            self._left.append(interest)
            self._changed.set()

        return unsubscribe

    async def connected(self) -> Client:
        """Wait for a connection and return its client."""
        while self.client is None:
            self._connected.clear()
            await self._connected.wait()
        return self.client

    async def lost(self) -> None:
        """Wait for the end of the connection there is."""
        await self._lost.wait()

    async def publish(self, subject: str, data: bytes, reply: str = "") -> bool:
        """Send, and return whether there was a connection to send it on; waits while the server takes nothing.

        Raises nats.errors.MaxPayloadError for more than the server takes in one message.
        """
        client = self.client
        if client is None:
            return False
        try:
            await client.publish(subject, data, reply)
        except nats.errors.MaxPayloadError:
            raise
        except FAILURES:
            return False
        return True

    async def flush(self) -> None:
        """Wait until the server has what was sent, or is away."""
        if self.client is not None:
            with suppress(*FAILURES):
                await self.client.flush()

    async def _run(self) -> None:
        for host in itertools.cycle(self._url.hosts):
            self._lost.clear()
            client = _Client()
            client.must_encrypt = self._url.has_tls
            try:
                await self._connect(client, str(host))
                await self._stay(client)
            except (*FAILURES, ValueError) as error:  # of a file that is none, or from the first line of a stranger
                self._note_failure(error, str(host))
            finally:
                self.client = None
                self.tried.set()
                await _close(client)
            await asyncio.sleep(self._retry_s())
            self._num_failures = min(self._num_failures + 1, _MAX_DOUBLINGS)

    async def _connect(self, client: Client, host: str) -> None:
        reasons: deque[Exception] = deque(maxlen=1)

        async def failed(error: Exception) -> None:
            reasons.append(error)
            self._note_error(error)

        async def lost() -> None:
            self._lost.set()

        try:
            await client.connect(
                f"nats://{host}",
                name="kvist",
                error_cb=failed,
                closed_cb=lost,
                lame_duck_mode_cb=lost if len(self._url.hosts) > 1 else None,
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
        # Python 3.12 before 3.12.9, and 3.13 before 3.13.2, never have who calls `writelines` wait (its issue 127655).
        writer = client._transport._io_writer  # type: ignore[union-attr]
        writer.writelines = lambda pieces: writer.write(b"".join(pieces))
        if self._prepare is not None:
            await self._prepare(client)

    async def _stay(self, client: Client) -> None:
        """Serve the connection until it is lost."""
        if self.tried.is_set():
            _logger.info("broker is back broker=%s", self._broker)
        self.problem = None
        self.client = client
        self._connected.set()
        self.tried.set()
        self._left.clear()
        for interest in self._interests:
            interest.unsubscribe = None
        began_s = time.monotonic()
        lost = asyncio.create_task(self._lost.wait(), name="kvist-nats-lost")
        try:
            while not self._lost.is_set():
                self._changed.clear()
                await self._renew(client)
                changed = asyncio.create_task(self._changed.wait(), name="kvist-nats-changed")
                await asyncio.wait([lost, changed], return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            lost.cancel()
            if time.monotonic() - began_s > base.MAX_RECONNECT_S:
                self._num_failures = 0
        raise ConnectionError("the connection was lost")

    async def _renew(self, client: Client) -> None:
        """Bring the server's subscriptions in line with what is wanted."""
        while self._left:
            interest = self._left.pop()
            if interest.unsubscribe is not None:
                await interest.unsubscribe()
        new = [interest for interest in self._interests if interest.unsubscribe is None]
        for interest in new:
            subscription = await client.subscribe(interest.subject, cb=interest.received)
            interest.unsubscribe = subscription.unsubscribe
        if new:
            await client.flush()
            for interest in new:
                interest.connected()

    def _retry_s(self) -> float:
        """Return how long to wait now; never the same, so that a fleet does not come back at once."""
        if self._is_refused:
            return min(REFUSED_RETRY_S * 2.0**self._num_failures, MAX_REFUSED_RETRY_S) * random.uniform(1, 1.5)
        back_off_s = min(base.MIN_RECONNECT_S * 2.0**self._num_failures, base.MAX_RECONNECT_S)
        return back_off_s * random.uniform(0.5, 1.5)

    def _note_failure(self, error: Exception, host: str) -> None:
        reason = str(error) or type(error).__name__
        self._is_refused = any(word in reason.lower() for word in ("authorization", "authentication"))
        problem = f"broker {host}{' refused the login' if self._is_refused else ''}: {reason}"
        if problem != self.problem:
            _logger.warning("no connection, it is tried again: %s", problem)
        self.problem = problem

    def _note_error(self, error: Exception) -> None:
        """Take note of what a client reports by the way."""
        if isinstance(error, nats.errors.SlowConsumerError):
            self.num_dropped += 1
        elif "permissions violation" in str(error).lower():
            _logger.warning("broker does not permit it: %s broker=%s", error, self._broker)
            self.problem = f"broker does not permit it: {error}"
        elif not isinstance(error, FAILURES):
            _logger.error("unexpected error broker=%s", self._broker, exc_info=error)


async def end(task: asyncio.Task[None]) -> None:
    """Cancel the task and wait for its end.

    Again if need be: nats-py waits with `asyncio.wait_for`, which up to Python 3.11 may swallow a cancellation.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=2 * CLOSE_TIMEOUT_S)


async def _close(client: Client) -> None:
    """Close what there is of a connection, also of one that never came to be, and even when cancelled meanwhile."""

    async def close() -> None:
        with suppress(*FAILURES, AssertionError):  # nor was it told which server
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()

    closing = asyncio.create_task(close(), name="kvist-nats-closing")
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, _Shared]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_link(url: BrokerUrl) -> AsyncIterator[NatsLink]:
    """Give the running loop's link with this URL's hosts and login; the last who leaves closes it."""
    links = _shared.setdefault(asyncio.get_running_loop(), {})
    key = (url.scheme, url.hosts, url.user, url.password, *(url.options.get(name) for name in PRIVATE_OPTIONS))
    shared = links.get(key)
    if shared is None:
        shared = links[key] = _Shared(await NatsLink(url).__aenter__())
    shared.num_users += 1
    try:
        yield shared.link
    finally:
        shared.num_users -= 1
        if shared.num_users == 0:
            del links[key]
            await shared.link.__aexit__(None, None, None)


def login_options(url: BrokerUrl) -> dict[str, Any]:
    """Return the client's options for the URL's login and TLS, its files read anew.

    Raises InvalidValueError for a file that cannot be used: nats-py would read one without a login for ever.
    """
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

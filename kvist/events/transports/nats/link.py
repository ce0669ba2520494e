"""One connection to a NATS server, kept, and shared by all who want the same in one event loop.

nats-py's own reconnecting is not used: it tries at a fixed pace whatever the reason, dials servers that the server
names, and ends for good when a login is revoked.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import nats.errors
import nkeys
from nats.aio.client import Client, RawCredentials

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.broker import PRIVATE_OPTIONS, BrokerUrl, Host
from kvist.events.transports.broker_link import BrokerLink

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
"""How long a server may take for each step of a connection's start."""
CLOSE_TIMEOUT_S = 1.0
"""How long closing may take: after a failed TLS handshake a client waits for what never comes."""
FLUSH_TIMEOUT_S = 5.0
"""How long whoever sends waits for a server that takes nothing, each time."""
FAILURES = (OSError, nats.errors.Error, TimeoutError)

_CREDENTIALS = re.compile(
    r"-----BEGIN NATS USER JWT-----\s+(\S+)\s+.*-----BEGIN USER NKEY SEED-----\s+(\S+)\s+---", re.DOTALL
)


class _Client(Client):
    """Speaks to no server without TLS when TLS is wanted: nats-py leaves that to what the server says of itself.

    And goes on behind a message whose subject or headers are no text, which anyone may send: nats-py stops reading.
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

    def _connect_command(self) -> bytes:
        if self._must_encrypt and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()


class NatsLink(BrokerLink[Client]):
    """A link to a NATS server. Several may use its client: for each subject, and for JetStream."""

    failures = (*FAILURES, ValueError)  # of a file that is none, or from the first line of a stranger

    async def _watch(self, client: Client) -> None:
        assert isinstance(client, _Client)
        await client.is_over.wait()
        raise ConnectionError("the connection was lost")

    def _reason(self, error: Exception) -> tuple[str, bool]:
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

        async def failed(error: Exception) -> None:
            reasons.append(error)
            self._note_error(error, host)

        async def lost() -> None:
            client.is_over.set()

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

    def _note_error(self, error: Exception, host: Host) -> None:
        """Take note of what a client reports by the way."""
        if "permissions violation" in str(error).lower():
            _logger.warning("broker does not permit it: %s broker=%s", error, host)
            self.problem = f"broker {host} does not permit it: {error}"
        elif not isinstance(error, FAILURES):
            _logger.error("unexpected error broker=%s", host, exc_info=error)


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


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, tuple[NatsLink, set[object]]]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_link(url: BrokerUrl, user: object) -> AsyncIterator[NatsLink]:
    """Give the loop's link with this login, closed by its last user; raises InvalidValueError as `login_options`."""
    login_options(url)
    links = _shared.setdefault(asyncio.get_running_loop(), {})
    key = (url.scheme, url.hosts, url.user, url.password, *(url.options.get(name) for name in PRIVATE_OPTIONS))
    if key not in links:
        links[key] = (await NatsLink(url).__aenter__(), set())
    link, users = links[key]
    users.add(user)
    try:
        yield link
    finally:
        users.remove(user)
        if not users:
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

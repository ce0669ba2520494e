"""A connection to an MQTT broker: made, made again when it is lost, and slowly where the broker does not want us."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from typing import Any, cast

import aiomqtt
from paho.mqtt import client as mqtt
from paho.mqtt.reasoncodes import ReasonCode

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.broker import BrokerUrl, Host

_logger = logging.getLogger(__name__)
# What the client says of its connection is said in `Connection.problem`.
_client_logger = logging.getLogger(f"{__name__}.client")
_client_logger.setLevel(logging.CRITICAL)

KEEPALIVE_S = 10
"""How long a connection may be quiet before it is tried; the broker gives up a silent client after 1.5 times as long,
and publishes its last will."""
CONNECT_TIMEOUT_S = 5.0
REFUSED_RETRY_S = 60.0
"""The wait, half of it at least, after a refusal: nothing changes until somebody changes the configuration."""
STABLE_S = 5.0
"""A connection that held so long was a good one: the first try after it comes soon."""
QOS = 1

_REFUSALS = range(132, 136)
"""MQTT 5's reason codes, which the client uses for both versions: protocol, client id, credentials, authorisation."""
_SUBSCRIPTION_REFUSED = 128


class RefusedError(aiomqtt.MqttError):
    """The broker does not permit what we need."""


class Connection:
    """Connects as long as `stay` runs, and says in `problem` what is in the way.

    The client id is one's own, and the same each time: a broker that still holds an old connection ends that, its last
    will included, before the new one begins.
    """

    def __init__(self, url: BrokerUrl, own_id: int, will: aiomqtt.Will | None = None) -> None:
        """Raises InvalidValueError for a host that cannot be, and for TLS files that cannot be used."""
        for host in url.hosts:
            try:
                host.name.encode("idna")
            except UnicodeError as error:
                raise InvalidValueError("endpoint", url.public, "host names that can be looked up") from error
        self.problem: str | None = "not connected yet"
        self._url = url
        self.client_id = f"kvist{own_id:016x}"  # no longer than what every broker takes
        self._will = will
        self._tls = url.tls_context()
        if self._tls is not None:
            self._tls.sslsocket_class = _TlsSocket
        self._since: str | None = None
        self._logged_reason: str | None = None

    async def stay(
        self,
        use: Callable[[aiomqtt.Client], Coroutine[Any, Any, None]],
        *,
        closing: asyncio.Event,
        queue_type: Callable[[int], asyncio.Queue[aiomqtt.Message]] = asyncio.Queue,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Connect, hand the client to `use`, and connect again, until that returns or `closing` is set meanwhile.

        `use` calls `is_up` once it has all it needs. `on_failure` is called after each connection that came to nothing.
        """
        wait_s = base.MIN_RECONNECT_S
        for host in cycle(self._url.hosts):
            started_s = time.monotonic()
            try:
                async with _connected(self._client(host, queue_type)) as client:
                    await use(client)
                return
            except aiomqtt.MqttError as error:
                is_refusal = self._failed(host, error)
            on_failure()
            if is_refusal:
                wait_s = REFUSED_RETRY_S
            elif time.monotonic() - started_s > STABLE_S:
                wait_s = base.MIN_RECONNECT_S
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s * random.uniform(0.5, 1.0)):  # not all at once
                    await closing.wait()
            if closing.is_set():
                return
            wait_s = min(2 * wait_s, base.MAX_RECONNECT_S)

    def is_up(self) -> None:
        """Take note that all is well."""
        if self._since is not None:
            _logger.info("connected again url=%s", self._url.public)
        self.problem = self._since = self._logged_reason = None

    def _client(self, host: Host, queue_type: Callable[[int], asyncio.Queue[aiomqtt.Message]]) -> aiomqtt.Client:
        return _Client(
            host.name,
            host.port,
            username=self._url.user,
            password=self._url.password,
            logger=_client_logger,
            identifier=self.client_id,
            will=self._will,
            clean_session=True,
            keepalive=KEEPALIVE_S,
            timeout=CONNECT_TIMEOUT_S,
            tls_context=self._tls,
            max_inflight_messages=0,  # its own window costs a look at every message for each acknowledgement
            queue_type=cast("type[asyncio.Queue[aiomqtt.Message]]", queue_type),
        )

    def _failed(self, host: Host, error: aiomqtt.MqttError) -> bool:
        """Note why there is no connection; return whether the broker refused it."""
        reason, is_refusal = _reason(error)
        if self._since is None:
            self._since = time.strftime("%H:%M:%S UTC", time.gmtime())
        self.problem = f"{reason} (broker {host}, since {self._since})"
        if reason != self._logged_reason:
            _logger.warning("not connected, and tried again: %s url=%s", reason, self._url.public)
        self._logged_reason = reason
        return is_refusal


@asynccontextmanager
async def _connected(client: aiomqtt.Client) -> AsyncIterator[aiomqtt.Client]:
    """Connect, and disconnect at the end.

    The client connects in a thread, which nothing stops: when cancelled meanwhile, its socket must be waited for.
    """
    entering = asyncio.create_task(client.__aenter__(), name="kvist-mqtt-connect")
    try:
        await asyncio.shield(entering)
    except asyncio.CancelledError:
        with suppress(aiomqtt.MqttError):
            await entering
            await client.__aexit__(None, None, None)
        raise
    try:
        yield client
    finally:
        with suppress(aiomqtt.MqttError):
            await client.__aexit__(None, None, None)


async def subscribe(client: aiomqtt.Client, *topics: str) -> None:
    """Subscribe to the topics; raises RefusedError when the broker does not permit one."""
    granted = await client.subscribe([(topic, QOS) for topic in topics])
    codes = [code if isinstance(code, int) else code.value for code in granted]
    for topic, code in zip(topics, codes, strict=True):
        if code >= _SUBSCRIPTION_REFUSED:
            raise RefusedError(f"no permission to subscribe to {topic}")


def _reason(error: aiomqtt.MqttError) -> tuple[str, bool]:
    """Return why there is no connection, in words, and whether trying again soon is no use."""
    if isinstance(error, RefusedError):
        return str(error), True
    if isinstance(error, aiomqtt.MqttCodeError) and isinstance(error.rc, ReasonCode):
        is_refusal = error.rc.value in _REFUSALS
        return f"it refuses us: {error.rc}" if is_refusal else str(error.rc), is_refusal
    cause = error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}", True
    if isinstance(cause, TimeoutError):
        return f"no answer in {CONNECT_TIMEOUT_S:g} s", False
    return (cause.strerror or str(cause)) if isinstance(cause, OSError) else "connection lost", False


class _Client(aiomqtt.Client):
    """A client that watches its socket at once when it has something to write there.

    aiomqtt 2.5 does so by `call_soon_threadsafe`. If the connection is lost meanwhile, the socket's number is watched,
    though it is closed or another's by then; and a wake-up of the loop for each packet is a tenth of what one costs.
    """

    def _on_socket_register_write(self, client: mqtt.Client, userdata: object, sock: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # it connects, in a thread
            super()._on_socket_register_write(client, userdata, sock)
            return
        loop.add_writer(sock.fileno(), self._write, client)

    def _write(self, client: mqtt.Client) -> None:
        try:
            client.loop_write()
        except OSError as error:
            if not self._disconnected.done():
                self._disconnected.set_exception(error)


class _TlsSocket(ssl.SSLSocket):
    """A socket that is closed when its handshake fails, which the client does not do."""

    def do_handshake(self, block: bool = False) -> None:
        """Do the handshake."""
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise

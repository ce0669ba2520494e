"""A connection to an MQTT broker, kept."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import aiomqtt
from paho.mqtt import client as mqtt
from paho.mqtt.reasoncodes import ReasonCode

from kvist.errors import InvalidValueError
from kvist.events.transports.broker import BrokerUrl, Host
from kvist.events.transports.broker_link import BrokerLink

# What the client says of its connection is said in `MqttLink.problem`.
_client_logger = logging.getLogger(f"{__name__}.client")
_client_logger.setLevel(logging.CRITICAL)

KEEPALIVE_S = 10
"""How long a connection may be quiet before it is tried; the broker gives up a silent client after 1.5 times as long,
and publishes its last will."""
CONNECT_TIMEOUT_S = 5.0
QOS = 1

_REFUSALS = range(132, 136)
"""MQTT 5's reason codes, which the client uses for both versions: protocol, client id, credentials, authorisation."""
_SUBSCRIPTION_REFUSED = 128


class RefusedError(aiomqtt.MqttError):
    """The broker does not permit what we need."""


class MqttLink(BrokerLink[aiomqtt.Client]):
    """A link to an MQTT broker, which hands each message on where it arrives.

    The client id is one's own, and the same each time: a broker that still holds an old connection ends that, its last
    will included, before the new one begins.
    """

    failures = (aiomqtt.MqttError,)

    def __init__(
        self,
        url: BrokerUrl,
        own_id: int,
        prepare: Callable[[aiomqtt.Client], Awaitable[None]],
        receive: Callable[[aiomqtt.Message], None],
        will: aiomqtt.Will | None = None,
    ) -> None:
        """Raises InvalidValueError for a host that cannot be, and for TLS files that cannot be used."""
        super().__init__(url, prepare)
        for host in url.hosts:
            try:
                host.name.encode("idna")
            except UnicodeError as error:
                raise InvalidValueError("endpoint", url.public, "host names that can be looked up") from error
        self.client_id = f"kvist{own_id:016x}"  # no longer than what every broker takes
        self._receive = receive
        self._will = will
        self._tls = url.tls_context()
        if self._tls is not None:
            self._tls.sslsocket_class = _TlsSocket

    @asynccontextmanager
    async def _open(self, host: Host) -> AsyncIterator[aiomqtt.Client]:
        client = _Client(
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
            queue_type=cast("type[asyncio.Queue[aiomqtt.Message]]", partial(_Doorway, self._receive)),
        )
        # The client connects in a thread, which nothing stops: when cancelled meanwhile, its socket must be waited for.
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

    async def _watch(self, client: aiomqtt.Client) -> None:
        async for _ in client.messages:
            raise AssertionError("messages are handed on where they arrive")

    def _reason(self, error: Exception) -> tuple[str, bool]:
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


async def subscribe(client: aiomqtt.Client, *topics: str) -> None:
    """Subscribe to the topics; raises RefusedError when the broker does not permit one."""
    granted = await client.subscribe([(topic, QOS) for topic in topics])
    codes = [code if isinstance(code, int) else code.value for code in granted]
    for topic, code in zip(topics, codes, strict=True):
        if code >= _SUBSCRIPTION_REFUSED:
            raise RefusedError(f"no permission to subscribe to {topic}")


class _Doorway(asyncio.Queue[aiomqtt.Message]):
    """Hands each message on where it arrives: the client's own queue costs a task for each."""

    def __init__(self, receive: Callable[[aiomqtt.Message], None], maxsize: int = 0) -> None:
        super().__init__(maxsize)
        self._hand_on = receive

    def put_nowait(self, item: aiomqtt.Message) -> None:
        self._hand_on(item)


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
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise

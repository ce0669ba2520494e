"""Streams through an MQTT 3.1.1 broker, at least once (QoS 1): docs/transports.md has the topics.

A publisher announces its worker in one retained JSON object, which people can read as well. Its last will, and the end
of a clean one, is an announcement that it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec

from kvist.errors import InvalidValueError, MissingExtraError

try:
    import aiomqtt
    from paho.mqtt import client as mqtt
    from paho.mqtt.reasoncodes import ReasonCode
except ModuleNotFoundError as error:
    raise MissingExtraError("mqtt", str(error.name)) from error

from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports.base import Message
from kvist.events.transports.broker import STREAM, BrokerUrl, Host, pack
from kvist.events.transports.broker_link import BrokerLink, Receive
from kvist.events.transports.broker_stream import WINDOW, BrokerPublication, BrokerSubscription

_logger = logging.getLogger(__name__)
# What the client logs of its connection is in `MqttLink.problem`.
_client_logger = logging.getLogger(f"{__name__}.client")
_client_logger.setLevel(logging.CRITICAL)

KEEPALIVE_S = 10
"""How long a connection may be quiet before a ping; the broker gives up a silent client after 1.5 times as long, and
publishes its last will."""
CONNECT_TIMEOUT_S = 5.0
PAGE_BYTES = 64 << 10
"""Bytes in a page of an answer: AWS IoT takes no message above 128 KiB."""
QOS = 1
FAREWELL_TIMEOUT_S = 0.5
UNSUBSCRIBE_TIMEOUT_S = 1.0

_REFUSALS = range(132, 136)
"""MQTT 5's reason codes, which the client uses for both versions: protocol, client id, credentials, authorisation."""
_SUBSCRIPTION_REFUSED = 128


class Announcement(msgspec.Struct, frozen=True):
    """Says who publishes under a topic; `publication_id` tells one start of a publisher from the next."""

    worker: str
    model: str
    state: Literal["alive", "gone"]
    publication_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


_decode = msgspec.json.Decoder(Announcement).decode


def decode_announcement(data: bytes) -> Announcement | None:
    """Return the announcement in JSON, None for anything else."""
    with suppress(*DECODE_ERRORS):
        return _decode(data)
    return None


class MqttPublication(BrokerPublication[aiomqtt.Client]):
    """Announces its worker, and sends again what was not acknowledged; raises InvalidValueError for its TLS files."""

    def __init__(self, url: BrokerUrl) -> None:
        self._is_displaced = False
        self._has_warned = False
        super().__init__(url)

    def _new_link(self) -> MqttLink:
        self._replay_server.page_bytes = PAGE_BYTES
        self._topic = self._url.name(STREAM)
        alive = Announcement(self._url.worker or "", self._url.model, "alive", f"{self._id:016x}")
        self._alive = msgspec.json.encode(alive)
        self._gone = msgspec.json.encode(msgspec.structs.replace(alive, state="gone"))
        will = aiomqtt.Will(self._topic, self._gone, QOS, retain=True)
        return MqttLink(self._url, self._id, self._announce, will)

    async def _announce(self, client: aiomqtt.Client) -> None:
        await client.publish(self._topic, self._alive, QOS, retain=True)

    async def _send_all(self, client: aiomqtt.Client) -> None:
        client.pending_calls_threshold = 2 * WINDOW
        try:
            async with self._link.subscription(self._topic, self._on_announcement):
                await super()._send_all(client)
        finally:
            with suppress(aiomqtt.MqttError):
                await client.publish(self._topic, self._gone, QOS, retain=True, timeout=FAREWELL_TIMEOUT_S)

    async def _deliver(self, client: aiomqtt.Client, messages: Sequence[Message]) -> None:
        """Send all at once, and wait for the acknowledgements: a dead broker is found by its keepalive."""
        if self._is_displaced:
            self._is_displaced = False
            await self._announce(client)
        try:
            async with asyncio.TaskGroup() as tasks:
                for message in messages:
                    topic = self._url.name(STREAM, self._url.token_of(message.topic))
                    sending = client.publish(topic, pack(self._id, message), QOS, timeout=math.inf)
                    tasks.create_task(sending, name="kvist-mqtt-publish")
        except* aiomqtt.MqttError as failed:
            raise failed.exceptions[0] from None

    def _on_announcement(self, _: str, data: bytes | None) -> None:
        """Announce again after somebody else's announcement, such as a late last will; warn of other publishers."""
        theirs = decode_announcement(data or b"")
        if theirs is None or theirs.state == "gone":
            self._is_displaced = True
            self._arrived.set()
        elif theirs.publication_id != f"{self._id:016x}" and not self._has_warned:
            self._has_warned = True
            _logger.warning("another publisher is, or was, the same worker url=%s", self._url.public)


class MqttSubscription(BrokerSubscription[aiomqtt.Client]):
    """Follows one worker, whose publisher announces that it is gone, or else its last will does."""

    def __init__(self, url: BrokerUrl) -> None:
        """Raises InvalidValueError for TLS files that cannot be used."""
        super().__init__(url)
        self.is_peer_gone = False
        """Whether the latest publication has ended, by its own announcement or its last will."""
        self._topic = self._url.name(STREAM)
        self._publication_id: int | None = None
        self._link = MqttLink(self._url, secrets.randbits(64), self._forget_publication)

    async def _open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self._link)
        await exits.enter_async_context(self._link.subscription(self._topic, self._on_announcement))
        await exits.enter_async_context(self._link.subscription(f"{self._topic}/+", self._on_event))

    async def _forget_publication(self, _: aiomqtt.Client) -> None:
        self._publication_id = None

    def _on_announcement(self, _: str, data: bytes | None) -> None:
        if not data:
            return  # somebody removed the announcement
        announcement = decode_announcement(data)
        if announcement is None:
            self._malformed.count_message([len(self._topic), len(data)])
            return
        publication_id = int(announcement.publication_id, 16)
        if announcement.state == "alive":
            self._on_publication(publication_id)
        elif self._publication_id in (None, publication_id):
            self.is_peer_gone = True
            self._queue.wake_receiver()

    def _on_publication(self, publication_id: int) -> None:
        super()._on_publication(publication_id)
        self._publication_id = publication_id
        self.is_peer_gone = False


class RefusedError(aiomqtt.MqttError):
    """The broker does not permit what we need."""


class MqttLink(BrokerLink[aiomqtt.Client]):
    """A link to an MQTT broker.

    Its client id is its own and always the same, so a broker that still holds an old connection ends that, and
    publishes its last will, before the new one begins.
    """

    failures = (aiomqtt.MqttError,)

    def __init__(
        self,
        url: BrokerUrl,
        own_id: int,
        prepare: Callable[[aiomqtt.Client], Awaitable[None]],
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
        self._will = will
        self._tls = url.tls_context()
        if self._tls is not None:
            self._tls.sslsocket_class = _TlsSocket

    async def _subscribe(self, client: aiomqtt.Client, name: str, receive: Receive) -> str:  # noqa: ARG002 - as below
        (granted,) = await client.subscribe(name, QOS)
        if (granted if isinstance(granted, int) else granted.value) >= _SUBSCRIPTION_REFUSED:
            raise RefusedError(f"no permission to subscribe to {name}")
        return name

    async def _unsubscribe(self, client: aiomqtt.Client, subscription: str) -> None:
        await client.unsubscribe(subscription, timeout=UNSUBSCRIBE_TIMEOUT_S)

    async def publish(self, name: str, data: bytes, answer: str = "") -> None:  # noqa: ARG002 - no broker tells
        await (await self.wait_connected()).publish(name, data, QOS)

    def _dispatch(self, message: aiomqtt.Message) -> None:
        """Pass a message to those who subscribed to its topic."""
        topic, wildcard = message.topic.value, f"{message.topic.value.rpartition('/')[0]}/+"
        for receive, name in tuple(self._names.items()):
            if name in (topic, wildcard):
                receive(topic, message.payload if isinstance(message.payload, bytes) else b"")

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
            max_inflight_messages=0,  # its own window scans all messages at each acknowledgement
            queue_type=cast("type[asyncio.Queue[aiomqtt.Message]]", partial(_CallbackQueue, self._dispatch)),
        )
        # The client connects in a thread, which nothing stops: if cancelled meanwhile, wait for it and disconnect.
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

    async def _wait_closed(self, client: aiomqtt.Client) -> None:
        async for _ in client.messages:
            raise AssertionError("messages are dispatched where they arrive")

    def _explain(self, error: Exception) -> tuple[str, bool]:
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


class _CallbackQueue(asyncio.Queue[aiomqtt.Message]):
    """Passes each message to a callback at once: reading the client's own queue costs a task for each."""

    def __init__(self, on_message: Callable[[aiomqtt.Message], None], maxsize: int = 0) -> None:
        super().__init__(maxsize)
        self._on_message = on_message

    def put_nowait(self, item: aiomqtt.Message) -> None:
        self._on_message(item)


class _Client(aiomqtt.Client):
    """A client that begins to watch its socket for writing at once.

    aiomqtt 2.5 does so by `call_soon_threadsafe`: if the connection is lost meanwhile, it watches a descriptor that is
    closed or another's by then; and waking the loop for each packet is a tenth of what a packet costs.
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

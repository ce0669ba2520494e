"""The publisher's end of a stream over NATS."""

from __future__ import annotations

import logging
from collections import deque

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message
from kvist.events.transports.broker import ASK, STREAM, BrokerUrl, pack
from kvist.events.transports.broker_publication import BrokerPublication
from kvist.events.transports.broker_replay import PAGE_BYTES
from kvist.events.transports.nats.history import ensure_stream
from kvist.events.transports.nats.link import NatsLink, login_options

_logger = logging.getLogger(__name__)

_PAGE_OVERHEAD_BYTES = 256


class NatsPublication(BrokerPublication[Client]):
    """Publishes on core subjects, which a JetStream stream may keep.

    Opening raises InvalidValueError for a file of the URL's that cannot be used, and for a stream that has other
    settings; for that the first answer of the server is waited for, though not long.
    """

    def __init__(self, url: BrokerUrl) -> None:
        self.num_too_large = 0
        self._unsent: deque[Message] = deque()
        self._has_stream = False
        super().__init__(url)

    def _new_link(self) -> NatsLink:
        login_options(self._url)
        return NatsLink(self._url, self._prepare)

    async def _prepare(self, client: Client) -> None:
        """Have the stream that keeps what is sent on this connection, and hear questions."""
        if "jetstream" in self._url.options:
            await self._ensure_stream(client)
        self._answers.page_bytes = min(PAGE_BYTES, client.max_payload - _PAGE_OVERHEAD_BYTES)

        async def received(message: Msg) -> None:
            self._answers.receive(message.data)

        await client.subscribe(self._url.name(ASK), cb=received)
        await client.flush()

    async def _ensure_stream(self, client: Client) -> None:
        try:
            await ensure_stream(client, self._url)
        except InvalidValueError as error:
            if not self._has_stream:
                self._loop.fail(error)
                raise
            _logger.error("events are no longer kept: %s", error)
        self._has_stream = True

    async def _send_all(self, client: Client) -> None:
        while True:
            while self._unsent:
                await self._send_event(client, self._unsent[0])
                self._unsent.popleft()
            self._unsent.extend(await self._loop.receive())
            if not self._unsent:
                break
        await client.flush()

    async def _send_event(self, client: Client, message: Message) -> None:
        try:
            await client.publish(self._url.name(STREAM, self._url.token_of(message.topic)), pack(self._id, message))
        except nats.errors.MaxPayloadError:
            if self.num_too_large == 0:
                text = "message larger than the server's max_payload is left to replays, as further ones are"
                _logger.warning("%s size_bytes=%d", text, len(message.payload))
            self.num_too_large += 1

    async def _send_page(self, client: Client, name: str, page: bytes) -> None:
        await client.publish(name, page)

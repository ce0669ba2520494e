"""The publisher's end of a stream over NATS."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Coroutine
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message, ReplaySource
from kvist.events.transports.broker import ANSWER, ASK, STREAM, BrokerUrl, pack
from kvist.events.transports.broker_loop import OPEN_WAIT_S, BrokerLoop
from kvist.events.transports.broker_replay import PAGE_BYTES, Answers
from kvist.events.transports.nats.history import ensure_stream
from kvist.events.transports.nats.link import NatsLink

_logger = logging.getLogger(__name__)

_PAGE_OVERHEAD_BYTES = 256


class NatsPublication:
    """Sends from a thread of its own. While the server is away what is sent waits, up to the hand-over's capacity."""

    def __init__(self, url: BrokerUrl) -> None:
        """Start connecting; a server that is away, or refuses the login, is tried again and again.

        Raises InvalidValueError for a file of the URL's that cannot be used, and for a JetStream stream that has other
        settings; for that the first answer of the server is waited for, though not long.
        """
        self.num_too_large = 0
        self._url = url
        self._id = secrets.randbits(64)
        self._source: ReplaySource | None = None
        self._has_source = asyncio.Event()
        self._can_be_asked = threading.Event()
        self._is_prepared = False
        self._conflict: InvalidValueError | None = None
        self._has_conflict = asyncio.Event()
        self._link: NatsLink | None = None
        self._loop = BrokerLoop(f"nats stream {url.public}", self._serve)
        self._loop.start()

    @property
    def endpoint(self) -> str:
        """The URL a subscriber uses, without the login."""
        return self._url.public

    def serve_replay(self, source: ReplaySource) -> None:
        """Answer replay requests from `source`; returns once they arrive, if the server is there."""
        self._source = source
        self._loop.call(self._has_source.set)
        if self._link is not None and self._link.client is not None:
            self._can_be_asked.wait(OPEN_WAIT_S)

    def send(self, message: Message) -> None:
        """Hand the message to the client's thread; never waits."""
        self._loop.put(message)

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait up to `timeout_s` for the server to take what was sent, then disconnect."""
        self._loop.close(timeout_s)

    async def _serve(self) -> None:
        async with NatsLink(self._url, self._prepare) as link:
            self._link = link
            await self._first_of(link.tried.wait())
            self._loop.opened()
            sending = asyncio.create_task(self._send_all(link), name="kvist-nats-sending")
            answering = asyncio.create_task(self._answer(link), name="kvist-nats-answering")
            done, _ = await asyncio.wait([sending, answering], return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            for task in done:
                task.result()

    async def _prepare(self, client: Client) -> None:
        """Have the stream that keeps what is sent on this connection."""
        if "jetstream" not in self._url.options:
            return
        try:
            await ensure_stream(client, self._url)
        except InvalidValueError as error:
            if self._is_prepared:
                _logger.error("events are no longer kept: %s", error)
            else:
                self._conflict = error
                self._has_conflict.set()
                raise
        self._is_prepared = True

    async def _send_all(self, link: NatsLink) -> None:
        """Send what is handed over until the publication is closed, and let the server take it."""
        while messages := await self._loop.take():
            for message in messages:
                while not await self._send(link, message):
                    if self._loop.closing.is_set():
                        return  # there is nobody to drain to
                    await self._first_of(link.connected())
        await link.flush()

    async def _send(self, link: NatsLink, message: Message) -> bool:
        subject = self._url.name(STREAM, self._url.token_of(message.topic))
        try:
            return await link.publish(subject, pack(self._id, message))
        except nats.errors.MaxPayloadError:
            if self.num_too_large == 0:
                text = "message larger than the server's max_payload is left to replays, as further ones are"
                _logger.warning("%s size_bytes=%d", text, len(message.payload))
            self.num_too_large += 1
            return True

    async def _answer(self, link: NatsLink) -> None:
        """Answer questions for a replay."""
        await self._has_source.wait()
        assert self._source is not None
        answers = Answers(self._source)

        async def received(message: Msg) -> None:
            answers.receive(message.data)

        def connected() -> None:
            if link.client is not None:
                answers.page_bytes = min(PAGE_BYTES, link.client.max_payload - _PAGE_OVERHEAD_BYTES)
            self._can_be_asked.set()

        async def send(name: str, page: bytes) -> None:
            await link.publish(self._url.name(ANSWER, name), page)

        link.subscribe(self._url.name(ASK), received, connected)
        await answers.serve(send)

    async def _first_of(self, wanted: Coroutine[Any, Any, object]) -> None:
        """Wait for it, but no longer than until the publication is closed; raises if the stream has other settings."""
        waits = [asyncio.create_task(wait) for wait in (wanted, self._loop.closing.wait(), self._has_conflict.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._conflict is not None:
            raise self._conflict

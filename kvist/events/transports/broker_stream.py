"""Both ends of a stream on a broker, as far as they are the same for NATS and MQTT.

The brokers' clients are asyncio, and publishers are not: a publication has a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import islice
from typing import Generic

from kvist.contexts import ComposedContext
from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message, ReplayRequest, ReplaySource
from kvist.events.transports.broker import ANSWER, ASK, BrokerUrl, unpack
from kvist.events.transports.broker_link import BrokerLink, ClientT, cancel_and_wait, wait_first
from kvist.events.transports.broker_replay import ReplayClient, ReplayServer
from kvist.events.transports.received import MalformedCounter, MessageQueue

_logger = logging.getLogger(__name__)

CAPACITY = 1024
"""Messages that wait for the broker; further ones wait in the publisher, which drops its oldest if it must."""
CAPACITY_BYTES = 16 << 20
"""The same bound in bytes of payload; a single message may exceed it."""
WINDOW = 64
"""Messages sent before the broker must have taken them; if the connection is lost, these are sent again."""
OPEN_WAIT_S = 2.0
"""How long opening a publication waits to learn whether the broker accepts it; one that is away is tried later."""

_STOP_TIMEOUT_S = 3.0
_MAX_KNOWN_PUBLICATIONS = 8


class BrokerPublication(ABC, Generic[ClientT]):
    """Sends from a thread of its own; while the broker is away, messages wait, up to the capacity.

    Opening raises InvalidValueError for settings in the URL that turn out wrong soon; if later, sending raises it as an
    OSError.
    """

    def __init__(self, url: BrokerUrl) -> None:
        self.endpoint = url.public
        self._url = url.with_worker(None)
        self._id = secrets.randbits(64)
        self._replay_server = ReplayServer()
        self._messages: deque[Message] = deque()  # changed and read under the lock
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._arrived, self._closing = asyncio.Event(), asyncio.Event()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._link = self._new_link()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{url.scheme} stream {url.public}", daemon=True)
        self._thread.start()
        self._opened.wait(OPEN_WAIT_S)
        if self._failure is not None:
            raise self._failure

    @abstractmethod
    def _new_link(self) -> BrokerLink[ClientT]:
        """Return the link; raises InvalidValueError for files of no use."""

    @abstractmethod
    async def _deliver(self, client: ClientT, messages: Sequence[Message]) -> None:
        """Send messages, in order, and return once they need not be sent again; may be called with none."""

    def serve_replay(self, source: ReplaySource) -> None:
        self._replay_server.source = source

    def send(self, message: Message) -> None:
        if self._failure is not None:
            raise OSError(f"cannot send: {self._failure}") from self._failure
        if self._is_closed:
            raise BrokenPipeError(f"{self.endpoint} is closed")
        with self._lock:
            num_bytes = self._num_bytes + len(message.payload)
            if self._messages and (len(self._messages) >= CAPACITY or num_bytes > CAPACITY_BYTES):
                raise BlockingIOError(f"{self.endpoint} is full")
            must_wake = not self._messages
            self._messages.append(message)
            self._num_bytes = num_bytes
        if must_wake:
            self._call(self._arrived.set)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what still waits for up to `timeout_s`, then end; idempotent, from any thread but its own."""
        is_first, self._is_closed = not self._is_closed, True
        self._call(self._closing.set)
        self._call(self._arrived.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._task is not None:
            self._call(self._task.cancel)
            self._thread.join(_STOP_TIMEOUT_S)
        if is_first and self._messages:
            text = "closed before the broker took all messages num=%d url=%s"
            _logger.warning(text, len(self._messages), self.endpoint)

    def _call(self, function: Callable[[], object]) -> None:
        """Call the function in the event loop soon, from any thread; no-op once that has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass  # did not drain in time
        except BaseException as error:
            self._failure = error
            if not isinstance(error, (OSError, InvalidValueError)):
                raise
        finally:
            self._opened.set()

    async def _serve(self) -> None:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        async with self._link as link, link.subscription(self._url.name(ASK), self._on_question):
            sending = asyncio.create_task(link.use_connections(self._send_all), name="kvist-broker-sending")
            try:
                await wait_first(self._closing.wait(), link.tried.wait(), link.running)
                if not link.running.done():
                    self._opened.set()
                    await wait_first(self._closing.wait(), link.running, sending)
                if link.client is not None:  # else there is nobody to send to
                    await wait_first(link.lost.wait(), sending)
            finally:
                await cancel_and_wait(sending)
                await self._replay_server.close()
            for task in (link.running, sending):
                if task.done() and not task.cancelled():
                    task.result()

    async def _send_all(self, client: ClientT) -> None:
        """Send what waits and what comes until the publication is closed."""
        while True:
            self._arrived.clear()
            with self._lock:
                messages = list(islice(self._messages, WINDOW))
            await self._deliver(client, messages)
            with self._lock:
                for message in messages:
                    self._messages.popleft()
                    self._num_bytes -= len(message.payload)
            if not messages:
                if self._closing.is_set():
                    break
                await self._arrived.wait()

    def _on_question(self, _: str, data: bytes | None) -> None:
        self._replay_server.receive(data or b"", self._send_page)

    async def _send_page(self, question: str, page: bytes) -> None:
        if self._link.client is not None:  # else the subscriber gets no answer, and asks again
            with suppress(*self._link.failures):
                await self._link.publish(self._url.name(ANSWER, question), page)


class BrokerSubscription(ComposedContext, Generic[ClientT]):
    """Follows one worker over a link; each publication that comes after another counts as a connection, too.

    A subclass sets `_link`, enters it and subscribes over it in `_open`.
    """

    is_peer_gone = False
    is_caught_up = True
    _link: BrokerLink[ClientT]

    def __init__(self, url: BrokerUrl) -> None:
        """`url` names a worker."""
        self._url = url.with_worker(None)
        self._malformed = MalformedCounter(url.public)
        self._queue = MessageQueue(url.public)
        # Several, since messages of a publication may come before and after its connection counts.
        self._publications: deque[int] = deque(maxlen=_MAX_KNOWN_PUBLICATIONS)
        self._num_successors = 0

    @property
    def num_connects(self) -> int:
        return self._link.num_connects + self._num_successors

    @property
    def num_malformed(self) -> int:
        return self._malformed.num

    @property
    def problem(self) -> str | None:
        return self._link.problem

    async def receive(self) -> list[Message]:
        return await self._queue.receive()

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask the publisher, once the broker is there; None at once if the publisher is known to be gone."""
        if self.is_peer_gone:
            return None
        client = ReplayClient(request)
        answer = self._url.name(ANSWER, client.name)
        with suppress(TimeoutError, *self._link.failures):
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(timeout_s):
                    await self._link.wait_connected()
                    await stack.enter_async_context(self._link.subscription(answer, client.receive))
                return await client.ask(partial(self._link.publish, self._url.name(ASK), answer=answer), timeout_s)
        return None

    def _on_event(self, name: str, data: bytes | None) -> None:
        token = name.rpartition("/" if self._url.is_mqtt else ".")[2]
        unpacked = unpack(self._url.topic_of(token), data or b"", self._malformed)
        if unpacked is not None:
            self._on_publication(unpacked[0])
            self._queue.put(unpacked[1])

    def _on_publication(self, publication_id: int) -> None:
        """Record which publication something came from."""
        if publication_id not in self._publications:
            self._num_successors += bool(self._publications)
            self._publications.append(publication_id)

"""The publisher's end of a stream on a broker, but for what its client does.

Brokers' clients are asyncio, and publishers are not: a publication has a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message, ReplaySource
from kvist.events.transports.broker import ANSWER, BrokerUrl
from kvist.events.transports.broker_link import BrokerLink, ClientT, end, first_of
from kvist.events.transports.broker_replay import PAGE_BYTES, Answers

CAPACITY = 1024
"""Messages on their way to the client; beyond them the publisher keeps its own, and drops the oldest if it must."""
CAPACITY_BYTES = 16 << 20
"""The same bound in bytes of payload; a single message may exceed it."""
OPEN_WAIT_S = 2.0
"""How long opening a publication waits to hear whether the broker takes it. One that is away is tried again later."""

_STOP_TIMEOUT_S = 3.0


class BrokerLoop:
    """Runs `serve` in a thread of its own and brings it messages, in order, without making their sender wait.

    `serve` gets them from `receive` until that returns none: the publication was closed. It then drains what its client
    still holds, and returns. What it raises ends the publication: `put` raises it from then on.
    """

    def __init__(self, name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._serve = serve
        self._lock = threading.Lock()
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        self._opened = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self.closing = asyncio.Event()
        """Set when the publication is closed: then there is no use in waiting for a broker any more."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, wait_s: float = OPEN_WAIT_S) -> None:
        """Start the thread, and wait up to `wait_s` for `opened`; raises InvalidValueError if `serve` did by then."""
        self._thread.start()
        self._opened.wait(wait_s)  # if that is not enough, `serve` goes on trying
        if self._failure is not None:
            raise self._failure

    def opened(self) -> None:
        """Let `start` return; called by `serve` when it knows whether the broker can be used."""
        self._opened.set()

    def put(self, message: Message) -> None:
        """Hand a message over; raises BlockingIOError if full, BrokenPipeError if closed, OSError if `serve` failed."""
        if self._failure is not None:
            raise OSError(f"cannot send: {self._failure}") from self._failure
        if self._is_closing:
            raise BrokenPipeError(f"{self._name} is closed")
        with self._lock:
            num_bytes = self._num_bytes + len(message.payload)
            if self._messages and (len(self._messages) >= CAPACITY or num_bytes > CAPACITY_BYTES):
                raise BlockingIOError(f"{self._name} is full")
            must_wake = not self._messages
            self._messages.append(message)
            self._num_bytes = num_bytes
        if must_wake:
            self.call(self._arrived.set)

    def call(self, function: Callable[[], object]) -> None:
        """Call the function in the loop soon, from any thread; no-op once it has ended."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            assert self._loop is not None
            if not self._loop.is_closed():
                raise

    def fail(self, error: Exception) -> None:
        """End the publication with this error; called in the loop."""
        self._failure = error
        self._opened.set()
        assert self._task is not None
        self._task.cancel()

    async def receive(self) -> list[Message]:
        """Wait for messages and return all that are here, oldest first; none when closed and all were taken."""
        while True:
            with self._lock:
                if self._messages or self._is_closing:
                    messages = list(self._messages)
                    self._messages.clear()
                    self._num_bytes = 0
                    return messages
                self._arrived.clear()
            await self._arrived.wait()

    def close(self, timeout_s: float = 5.0) -> None:
        """Let `serve` drain for up to `timeout_s`, then end it; idempotent, from any thread but the loop's."""
        self._is_closing = True
        self.call(self.closing.set)
        self.call(self._arrived.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._task is not None:
            self.call(self._task.cancel)
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass  # did not drain in time
        except BaseException as error:
            self._failure = error
            if not isinstance(error, (OSError, InvalidValueError)):
                raise
        finally:
            self._opened.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        await self._serve()


class BrokerPublication(ABC, Generic[ClientT]):
    """Sends from a thread of its own. While the broker is away what is sent waits, up to the hand-over's capacity."""

    def __init__(self, url: BrokerUrl, page_bytes: int = PAGE_BYTES) -> None:
        self._url = url.with_worker(None)
        self._id = secrets.randbits(64)
        self._answers = Answers(page_bytes=page_bytes)
        self.endpoint = url.public
        self._loop = BrokerLoop(f"{url.scheme} stream {url.public}", self._serve)
        self.send, self.close = self._loop.put, self._loop.close
        self._link = self._new_link()
        self._loop.start()

    @abstractmethod
    def _new_link(self) -> BrokerLink[ClientT]:
        """Return the link, which hears questions once it is up; raises InvalidValueError for files of no use."""

    @abstractmethod
    async def _send_all(self, client: ClientT) -> None:
        """Send what the loop has until the publication is closed and the broker has it all, or this is cancelled."""

    @abstractmethod
    async def _send_page(self, client: ClientT, name: str, page: bytes) -> None:
        """Send part of an answer."""

    @property
    def problem(self) -> str | None:
        return self._link.problem

    def serve_replay(self, source: ReplaySource) -> None:
        self._answers.source = source

    async def _serve(self) -> None:
        async with self._link as link:
            await first_of(self._loop.closing.wait(), link.tried.wait())
            self._loop.opened()
            sending = asyncio.create_task(link.stay(self._send_all), name="kvist-broker-sending")
            answering = asyncio.create_task(self._answer_all(link), name="kvist-broker-answering")
            try:
                await first_of(self._loop.closing.wait(), sending, answering)
                if self._loop.closing.is_set() and link.client is not None:  # else there is nobody to drain to
                    await first_of(link.lost(), sending, answering)
            finally:
                for task in (sending, answering):
                    await end(task)
            for task in (sending, answering):
                if not task.cancelled():
                    task.result()

    async def _answer_all(self, link: BrokerLink[ClientT]) -> None:
        async def send(question: str, page: bytes) -> None:
            if link.client is not None:  # else the asker hears nothing, and asks again
                with suppress(*link.failures):
                    await self._send_page(link.client, self._url.name(ANSWER, question), page)

        await self._answers.serve(send)

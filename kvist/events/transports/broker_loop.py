"""A thread with an event loop for one publication: brokers' clients are asyncio, publishers are not."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message

CAPACITY = 1024
"""Messages on their way to the client; beyond them the publisher keeps its own, and drops the oldest if it must."""
CAPACITY_BYTES = 16 << 20
"""The same bound in bytes of payload; a single message may exceed it."""
OPEN_WAIT_S = 2.0
"""How long opening a publication waits to hear whether the broker takes it. One that is away is tried again later."""

_STOP_TIMEOUT_S = 3.0


class BrokerLoop:
    """Runs `serve` in a thread of its own and brings it messages, in order, without making their sender wait.

    `serve` takes them with `take` until that returns none, which means that the publication was closed; it then drains
    what its client still holds, and returns. What it raises ends the publication: `put` raises it from then on.
    """

    def __init__(self, name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._serve = serve
        self._lock = threading.Lock()
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        self._opened: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self.closing = asyncio.Event()
        """Set when the publication is closed: then there is no use in waiting for a broker any more."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, wait_s: float = OPEN_WAIT_S) -> None:
        """Start the thread, and wait up to `wait_s` for `opened`; raises InvalidValueError if `serve` did by then."""
        self._thread.start()
        with suppress(TimeoutError):  # then `serve` goes on trying
            self._opened.result(wait_s)

    def opened(self) -> None:
        """Let `start` return; called by `serve` when it knows whether the broker can be used."""
        if not self._opened.done():
            self._opened.set_result(None)

    def put(self, message: Message) -> None:
        """Hand a message over without waiting.

        Raises BlockingIOError when full, BrokenPipeError once closed, and OSError when `serve` has failed.
        """
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

    async def take(self) -> list[Message]:
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

    def close(self, timeout_s: float) -> None:
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
            if not self._opened.done():
                self._opened.set_exception(error)
            if not isinstance(error, (OSError, InvalidValueError)):
                raise
        finally:
            self.opened()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        await self._serve()

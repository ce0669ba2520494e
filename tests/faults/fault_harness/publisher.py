"""A publisher in simulated time: the real one, but for its thread, whose work is done by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvist.events.engine_events import EngineEvent
from kvist.publisher.publisher import KvEventPublisher
from kvist.publisher.stream import Streams

RETRY_S = 0.02
T = TypeVar("T")


class SteppedPublisher(KvEventPublisher):
    """Passes, heartbeats and copies happen when the loop comes to them; `noted` is called after each pass."""

    noted: Callable[[SteppedPublisher], None] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loop = asyncio.get_running_loop()
        self._pass_is_due = False
        self._beating = self._loop.create_task(self._beat())
        self._note()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def streams(self) -> Streams:
        return self._streams

    def report(self, event: EngineEvent) -> None:
        super().report(event)
        self._step_in(self._limits.coalesce_s)

    def call_between_batches(self, function: Callable[[Streams], T], *, is_urgent: bool = False) -> Future[T]:
        result = super().call_between_batches(function, is_urgent=is_urgent)
        while not result.done():
            self._publish_pass()
        self._note()
        return result

    def finish(self) -> None:
        """End as `close` does, when all is out."""
        self._publish_pass()
        self._send_heartbeats()
        self.kill()

    def kill(self) -> None:
        """End at once: nothing more is sent, answered or drained."""
        self._beating.cancel()
        self._closing.set()
        self._wake.set()
        self._thread.join()
        self._publication.close(0)

    def close(self) -> None:
        self.finish()

    def _run(self) -> None:
        self._closing.wait()

    def _step_in(self, delay_s: float) -> None:
        if not self._pass_is_due:
            self._pass_is_due = True
            self._loop.call_later(delay_s, self._step)

    def _step(self) -> None:
        self._pass_is_due = False
        if self._closing.is_set():
            return
        self._publish_pass()
        self._note()
        if self._outbox or self._inbox:
            self._step_in(RETRY_S)

    async def _beat(self) -> None:
        while True:
            self._step()
            self._send_heartbeats()
            self._responder.drop_old_copies(self._loop.time())
            await asyncio.sleep(self._limits.heartbeat_s)

    def _note(self) -> None:
        if self.noted is not None:
            self.noted(self)

"""TensorRT-LLM pushes no events: it is polled from its event loop. docs/engines.md has an example."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeAlias

from kvist.events import EngineCleared
from kvist.events.dialects.trtllm import TrtllmDecoder
from kvist.publisher.publisher import KvEventPublisher

_logger = logging.getLogger(__name__)

MIN_IDLE_S, MAX_IDLE_S, IDLE_GROWTH = 0.005, 0.020, 1.5
"""The wait before an engine that had no events is polled again; it grows while the engine stays idle."""
CLOSE_TIMEOUT_S = 5.0

_Raw: TypeAlias = Mapping[str, Any]

# The errors by which the engine says that its queue is empty, and that there is no queue before the first request.
_EMPTY_ERRORS = (IndexError, asyncio.QueueEmpty)
_NOT_READY_ERRORS = (AssertionError, RuntimeError)
_NOT_READY_TEXT = "not properly instantiated"


def next_idle_s(idle_s: float, num_events: int) -> float:
    """Return how long to wait after a poll that brought `num_events`, given the wait before it: 0 after data."""
    if num_events > 0:
        return 0.0
    return min(MAX_IDLE_S, max(MIN_IDLE_S, idle_s * IDLE_GROWTH))


class AsyncTrtllmPoller:
    """Reports all events of a TensorRT-LLM engine, in order, to a publisher that nobody else reports to.

    Each event is reported as it comes, in the engine's own event loop. The engine's iterator ends when no event came
    within its timeout, and the engine is polled again; closing may take as long as that timeout. A gap in the engine's
    numbers means that it dropped events, one of which may have been a removal: their rank is cleared.
    """

    def __init__(
        self, poll: Callable[[], AsyncIterable[_Raw | Iterable[_Raw]]], publisher: KvEventPublisher, *, block_size: int
    ) -> None:
        """Poll from `async with` on; `poll` returns an iterator of events, or of lists of them."""
        self._poll = poll
        self._publisher = publisher
        self._decoder = TrtllmDecoder(block_size)
        self._ranks: set[int] = set()
        self._has_waited = False
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_malformed = 0

    @property
    def num_gaps(self) -> int:
        """Return how many events did not have the number after the one before."""
        return self._decoder.num_gaps

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="kvist-trtllm")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Report the events that the engine still has, and stop; raises the error that ended polling, if any."""
        task, self._task = self._task, None
        if task is None:
            return
        self._is_closing.set()
        try:
            await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
        finally:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _run(self) -> None:
        """Poll until closing begins; an error that ends polling before clears every rank, and is raised."""
        try:
            idle_s = 0.0
            while not self._is_closing.is_set():
                idle_s = next_idle_s(idle_s, await self._report_all(is_last=False))
                with suppress(TimeoutError):
                    async with asyncio.timeout(idle_s):
                        await self._is_closing.wait()
            await self._report_all(is_last=True)
        except Exception as error:
            _logger.error("polling stopped, all ranks cleared: %r", error)
            for rank in self._ranks:
                self._publisher.report(EngineCleared(rank))
            raise

    async def _report_all(self, *, is_last: bool) -> int:
        """Report events until the iterator ends or, unless it is the last one, closing begins; return how many."""
        num_events = 0
        try:
            events = self._poll()
            try:
                async for item in events:
                    num_events += self._report([item] if isinstance(item, Mapping) else list(item))
                    if self._is_closing.is_set() and not is_last:
                        break
            finally:
                if isinstance(events, AsyncGenerator):
                    await events.aclose()
        except _EMPTY_ERRORS:
            pass
        except _NOT_READY_ERRORS as error:
            if _NOT_READY_TEXT not in str(error):
                raise
            if not self._has_waited:
                self._has_waited = True
                _logger.info("no events before the engine's first request: %s", error)
        return num_events

    def _report(self, raw: Sequence[_Raw]) -> int:
        batch = self._decoder.decode(raw)
        for event in batch.events:
            self._ranks.add(event.rank)
            self._publisher.report(event)
        if batch.num_malformed_events:
            if self.num_malformed == 0:
                _logger.warning("malformed events skipped num_malformed=%d", batch.num_malformed_events)
            self.num_malformed += batch.num_malformed_events
        return len(raw)

"""TensorRT-LLM pushes no events: it is polled, from a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from kvist.events import EngineCleared
from kvist.events.dialects import trtllm
from kvist.publisher.publisher import KvEventPublisher

_logger = logging.getLogger(__name__)

MIN_IDLE_S, MAX_IDLE_S, IDLE_GROWTH = 0.005, 0.020, 1.5
"""The wait before an engine that had nothing to say is asked again; it grows while the engine stays idle."""
CLOSE_TIMEOUT_S = 5.0


def next_idle_s(idle_s: float, num_events: int) -> float:
    """Return how long to wait after a poll that brought `num_events`, given the wait before it: 0 after data."""
    if num_events > 0:
        return 0.0
    return min(MAX_IDLE_S, max(MIN_IDLE_S, idle_s * IDLE_GROWTH))


class TrtllmPoller:
    """Reports everything that a TensorRT-LLM engine hands out, in order, to a publisher that nobody else reports to.

        with KvEventPublisher("tcp://*:5567", worker="pod-1", block_size=32) as publisher:
            with TrtllmPoller(lambda: llm.get_kv_cache_events(timeout=0), publisher, block_size=32):
                serve(llm)

    Events that the engine dropped, which its numbering tells, clear their rank: one of them may have been a removal.
    """

    def __init__(
        self, poll: Callable[[], Iterable[Mapping[str, Any]]], publisher: KvEventPublisher, *, block_size: int
    ) -> None:
        """Start polling; `poll` returns the events since its last call, without waiting, and raises to end it all."""
        self._poll = poll
        self._publisher = publisher
        self._block_size = block_size
        self._tracker = trtllm.EventIdTracker()
        self._ranks: set[int] = set()
        self._failure: BaseException | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvist-trtllm", daemon=True)
        self.num_malformed = 0
        self._thread.start()

    @property
    def num_gaps(self) -> int:
        """Return how many events did not have the number after the one before."""
        return self._tracker.num_gaps

    def close(self) -> None:
        """Report what the engine still has to hand out, and stop; raises what ended polling, if anything did."""
        self._is_closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        """Return the poller, which runs already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _run(self) -> None:
        try:
            idle_s = 0.0
            while not self._is_closing.wait(idle_s):
                idle_s = next_idle_s(idle_s, self._report_all())
            self._report_all()
        except BaseException as error:
            self._failure = error
            _logger.error("polling stopped, and every rank is cleared: %r", error)
            for rank in self._ranks:
                self._publisher.report(EngineCleared(rank))
            raise

    def _report_all(self) -> int:
        raw = list(self._poll())
        batch = trtllm.decode(raw, self._block_size, self._tracker)
        for event in batch.events:
            self._ranks.add(event.rank)
            self._publisher.report(event)
        if batch.num_malformed_events:
            if self.num_malformed == 0:
                _logger.warning("malformed events skipped num_malformed=%d", batch.num_malformed_events)
            self.num_malformed += batch.num_malformed_events
        return len(raw)

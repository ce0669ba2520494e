"""The embedded hook: an engine's thread reports its cache, a background thread publishes it."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, Self, TypeVar, Unpack

import numpy as np

from kvist.errors import InvalidValueError
from kvist.events import EngineCleared, EngineCreated, EngineEvent, EngineHash, EngineRemoved, EngineStored
from kvist.events.engine_events import Place, StoredFacts, Window
from kvist.events.transports import Publication, open_publication
from kvist.events.types import MAX_RANKS, WorkerRank
from kvist.publisher import buffers
from kvist.publisher.filter import block_size_of
from kvist.publisher.snapshot import ReplayResponder
from kvist.publisher.stream import (
    RankState,
    RankStream,
    StreamOptions,
    Streams,
    message_of,
    new_epoch,
    topic_of,
    with_companions,
)

_logger = logging.getLogger(__name__)
_Items = TypeVar("_Items", bound=Sequence[object])
_T = TypeVar("_T")

_NUM_EVENTS_A_PASS = 4096
"""Events taken before their batches are sent, so that a flood is not held back until it ends."""
_RETRY_S = 0.02
"""The wait before batches are offered again to a transport that was full."""


class KvEventPublisher:
    """Publishes what an engine's thread reports, in that order, and never makes it wait or raises there.

    It is the `EventSink` to give to an engine: `created`, `stored`, `removed` and `cleared` may be called from one
    thread at a time, copy what they are given and return within microseconds. A background thread filters, hashes,
    batches, sends, and sends a heartbeat for each rank.

    Nothing is lost silently. When the engine outruns the thread by `inbox_capacity` events, the surplus is counted and
    the rank is published as cleared at that point: so the index may lack blocks, but has none that is gone.
    When the transport breaks, it is logged, stands in `failure` and in the statistics, and is raised by `close`; until
    then the engine goes on, and its events are counted as lost.

    Threads do not survive a fork: make the publisher in the process that reports. One inherited by a fork publishes
    nothing; its first report logs that, and `close` raises.
    """

    def __init__(
        self,
        transport: str | Publication,
        *,
        worker: str,
        block_size: int | None,
        num_ranks: int = 1,
        limits: buffers.PublisherLimits | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        """Bind `transport`, a URL (`kvist.events.transports.endpoint`) or a publication to take over, and start.

        `block_size` must be the engine's; without one, call `learn_block_size` before all reports. Ranks below
        `num_ranks` send heartbeats from the start; others from their first event on.
        """
        if block_size is not None and block_size <= 0:
            raise InvalidValueError("block_size", block_size, "a positive number of tokens, the engine's")
        topic_of(WorkerRank(worker, 0))  # raises for a name that no topic can carry
        self._worker = worker
        self.block_size = block_size
        """The engine's, None while it is neither given nor learnt."""
        self._limits = buffers.PublisherLimits() if limits is None else limits
        self._epoch = new_epoch(time.time(), random.Random())
        self._new_stream = partial(RankStream, epoch=self._epoch, **options)
        self._streams: dict[int, RankStream] = {}
        for rank in range(num_ranks):
            self._stream(rank)
        self._outbox = buffers.Outbox(self._limits.outbox_capacity)
        self._replay_buffer = buffers.ReplayBuffer(self._limits.replay_max_batches, self._limits.replay_max_bytes)
        self._inbox = buffers.Inbox()
        # Ranks whose loss is marked in the inbox and that reported nothing since. Only the engine's thread uses it.
        self._lossy_ranks: set[int] = set()
        self.num_lost_events = 0
        """How many events were lost since the start because the background thread lagged, or had ended."""
        self.failure: BaseException | None = None
        """What ended publishing, None while all is well; `close` raises it."""
        self._num_malformed = 0
        self._sent_facts: list[object] = []
        self._is_inherited = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._close_at_s = float("inf")
        self._publication = open_publication(transport, worker) if isinstance(transport, str) else transport
        self.endpoint = self._publication.endpoint
        """The URL a subscriber connects to, with real port numbers."""
        call = partial(self.call_between_batches, is_urgent=True)
        self._responder = ReplayResponder(worker, self._epoch, self._streams, self._replay_buffer, call)
        self._publication.serve_replay(self._responder)
        self._thread = threading.Thread(target=self._run, name="kvist-publisher", daemon=True)
        self._thread.start()
        _publishers.add(self)

    def created(self, *, window: Window, group: int | None = None, rank: int = 0) -> None:
        self.report(EngineCreated(window, group, rank))

    def stored(
        self, block_hashes: Sequence[EngineHash | None], token_ids: Sequence[int], **facts: Unpack[StoredFacts]
    ) -> None:
        """Report a chain of blocks, parent first; a NumPy array of tokens is copied fastest."""

        def read() -> EngineStored:
            if (lengths := facts.get("block_lengths")) is not None:
                facts["block_lengths"] = _copied(lengths)
            if (mm_hashes := facts.get("mm_hashes")) is not None:
                facts["mm_hashes"] = tuple(map(tuple, mm_hashes))
            assert self.block_size is not None
            return EngineStored(_copied(block_hashes), _copied(token_ids), self.block_size, **facts)

        self._report_read(facts.get("rank", 0), read)

    def removed(self, block_hashes: Sequence[EngineHash], **place: Unpack[Place]) -> None:
        self._report_read(place.get("rank", 0), lambda: EngineRemoved(_copied(block_hashes), **place))

    def cleared(self, *, rank: int = 0) -> None:
        self.report(EngineCleared(rank))

    def learn_block_size(self, events: Iterable[EngineEvent]) -> bool:
        """Learn the block size from these events, if they tell it; return whether it is known now.

        Only then may they be reported.
        """
        if self.block_size is None:
            self.block_size = block_size_of(events)
            if self.block_size is not None:
                _logger.info("block size found worker=%s block_size=%d", self._worker, self.block_size)
        return self.block_size is not None

    def report(self, event: EngineEvent) -> None:
        """Report any engine event; its sequences are kept as they are and must not be changed any more."""
        try:
            if len(self._inbox) >= self._limits.inbox_capacity or self._closing.is_set() or self.failure is not None:
                self._record_loss(event.rank)
                return
            self._lossy_ranks.discard(event.rank)
        except Exception as error:  # noqa: BLE001 - as below
            self._report_malformed(None, error)
            return
        self._inbox.append(event)
        if not self._wake.is_set():
            self._wake.set()

    @property
    def num_waiting_events(self) -> int:
        """How many reports wait for the background thread; from any thread."""
        return len(self._inbox)

    def call_between_batches(self, function: Callable[[Streams], _T], *, is_urgent: bool = False) -> Future[_T]:
        """Have the publisher's thread call a function once all events reported so far are in closed batches.

        An urgent call does not wait for the events in the inbox. Returns the future result, which is cancelled if the
        thread ends before the call. Callable from any thread.
        """
        call = buffers.Call(function, Future())
        (self._inbox.appendleft if is_urgent else self._inbox.append)(call)
        self._wake.set()
        if not self._thread.is_alive():  # and will not process the inbox any more
            call.result.cancel()
        return call.result

    def set_complete(self, completeness: Mapping[int, bool]) -> None:
        """Have ranks say behind what was reported so far whether they lack no block, also before their first event."""

        def set_streams(_: Streams) -> None:
            for rank, is_complete in completeness.items():
                if _is_rank(rank):
                    self._stream(rank).set_complete(is_complete)

        self.call_between_batches(set_streams)

    def resume(self, ranks: Mapping[int, RankState]) -> None:
        """Continue ranks that an earlier publisher published, before anything of them is reported here."""

        def resume_streams(_: Streams) -> None:
            for rank, state in ranks.items():
                self._stream(rank).resume(state)

        self.call_between_batches(resume_streams)

    def statistics(self) -> buffers.PublisherStatistics:
        """Return the counters as they are now; from any thread."""
        return buffers.PublisherStatistics(
            num_waiting_events=len(self._inbox),
            num_lost_events=self.num_lost_events,
            num_malformed=self._num_malformed,
            num_waiting_batches=len(self._outbox),
            num_dropped_batches=self._outbox.num_dropped,
            num_sent_messages=self._outbox.num_sent,
            num_sent_bytes=self._outbox.num_sent_bytes,
            num_snapshots=self._responder.num_snapshots,
            failure=None if self.failure is None else str(self.failure),
            ranks=MappingProxyType({rank: stream.statistics() for rank, stream in tuple(self._streams.items())}),
        )

    def close(self) -> None:
        """Publish what was reported, then stop, within `close_timeout_s`; raises what had ended publishing, if any.

        What does not get out in time is counted as lost. Idempotent; what is reported afterwards is counted as lost.
        """
        if self._is_inherited and self.failure is not None:
            raise self.failure  # the locks, threads and sockets are another process's
        if is_first := not self._closing.is_set():
            # A quarter of the time is the transport's, to deliver what it was given.
            self._close_at_s = time.monotonic() + self._limits.close_timeout_s * 0.75
            self._closing.set()
            self._wake.set()
        self._thread.join()
        if is_first:
            self.num_lost_events += self._inbox.drop()  # what came while the thread ended
            self._publication.close(self._limits.close_timeout_s * 0.25)
            if self.failure is not None:
                raise self.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _report_read(self, rank: int, read: Callable[[], EngineEvent]) -> None:
        """Report an event that is read from an engine's own objects."""
        try:
            event = read()
        except Exception as error:  # noqa: BLE001 - what those objects raise when they are read
            self._report_malformed(rank, error)
        else:
            self.report(event)

    def _report_malformed(self, rank: Any, error: Exception) -> None:
        """Report an event that could not be read: the background thread counts it, and clears its rank."""
        if len(self._inbox) < self._limits.inbox_capacity:
            self._inbox.append(buffers.Malformed(rank, error))
            self._wake.set()
        else:
            self._record_loss(rank)

    def _record_loss(self, rank: int) -> None:
        """Count a lost event, and clear its rank at this place of the inbox, once."""
        self.num_lost_events += 1
        if _is_rank(rank) and rank not in self._lossy_ranks:
            self._lossy_ranks.add(rank)
            self._inbox.append(EngineCleared(rank))
            if self.num_lost_events == 1:
                reason = self.failure if self._is_inherited else "the rank is published as cleared"
                _logger.error("engine event lost: %s rank=%d", reason, rank)

    def on_fork(self) -> None:
        """Mark this as a copy that a fork made, which cannot publish; called in the new process."""
        self._is_inherited = True
        self.num_lost_events = 0
        self._lossy_ranks.clear()
        self.failure = InvalidValueError("publisher", "inherited by a fork", "one made in the process that reports")

    def _run(self) -> None:
        try:
            self._publish_until_closing()
            while (self._inbox or self._outbox) and time.monotonic() < self._close_at_s:
                self._publish_pass()
                time.sleep(_RETRY_S if self._outbox else 0)
            self._send_heartbeats()
            self.num_lost_events += self._inbox.drop()
        except BaseException as error:
            self.num_lost_events += self._inbox.drop()
            self.failure = error
            _logger.error("publishing stopped: %r endpoint=%s", error, self._publication.endpoint)
            if not isinstance(error, OSError):
                raise

    def _publish_until_closing(self) -> None:
        heartbeat_at_s = time.monotonic()
        while not self._closing.is_set():
            wait_s = max(0.0, heartbeat_at_s - time.monotonic())
            if self._wake.wait(min(wait_s, _RETRY_S) if self._outbox else wait_s):
                self._closing.wait(self._limits.coalesce_s)
            self._wake.clear()
            self._publish_pass()
            if time.monotonic() >= heartbeat_at_s or self._heartbeat_facts() != self._sent_facts:
                self._send_heartbeats()
                self._responder.drop_old_copies(time.monotonic())
                heartbeat_at_s = time.monotonic() + self._limits.heartbeat_s

    def _publish_pass(self) -> None:
        """Process a part of the inbox, up to the first call, and send the batches; then make that call."""
        num_events_a_slice = self._limits.num_events_a_slice
        call = None
        for event_idx in range(min(len(self._inbox), _NUM_EVENTS_A_PASS)):
            item = self._inbox.popleft()
            if isinstance(item, buffers.Call):
                call = item
                break
            self._admit(item)
            # Losing events, now or at the end, must not be nearer than disturbing the engine.
            must_hurry = self._closing.is_set() or len(self._inbox) > self._limits.inbox_capacity // 4
            if event_idx % num_events_a_slice == num_events_a_slice - 1 and not must_hurry:
                time.sleep(0)
        if self._inbox:
            self._wake.set()
        timestamp_s = time.time()
        for stream in with_companions(self._streams).values():
            for batch in stream.close_batches(timestamp_s):
                message = message_of(batch)
                self._replay_buffer.append(message)  # before it is sent, or a subscriber could ask in vain
                self._outbox.put(message)
        self._outbox.flush(self._publication)
        if call is not None and call.result.set_running_or_notify_cancel():
            call.result.set_result(call.function(self._streams))

    def _admit(self, item: EngineEvent | buffers.Malformed) -> None:
        """Pass an event to its rank's stream; count it as malformed if its rank is not one."""
        if not _is_rank(item.rank):
            self._num_malformed += 1
            if self._num_malformed == 1:
                _logger.warning("malformed event, no rank: %r worker=%s", item, self._worker)
        elif isinstance(item, buffers.Malformed):
            self._stream(item.rank).admit_malformed(item.error)
        else:
            self._stream(item.rank).admit(item)

    def _heartbeat_facts(self) -> list[object]:
        """Return what only heartbeats say; one is sent at once when it changes."""
        streams = tuple(self._streams.values())
        return [(each.is_exact, each.is_expressible, each.rules_version) for each in streams]

    def _send_heartbeats(self) -> None:
        if self._outbox:
            return  # a heartbeat would only report what is still on its way as missing
        timestamp_s, self._sent_facts = time.time(), self._heartbeat_facts()
        for stream in with_companions(self._streams).values():
            message = message_of(stream.heartbeat(timestamp_s))
            self._replay_buffer.keep_heartbeat(message)
            self._outbox.put(message)
            self._outbox.flush(self._publication)  # each at once: an outbox may be smaller than there are ranks

    def _stream(self, rank: int) -> RankStream:
        rank = int(rank)  # which may be one of NumPy's, that cannot be sent
        if rank not in self._streams:
            assert self.block_size is not None
            self._streams[rank] = self._new_stream(WorkerRank(self._worker, rank), self.block_size)
        return self._streams[rank]


_publishers: weakref.WeakSet[KvEventPublisher] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [*map(KvEventPublisher.on_fork, _publishers)])


def _is_rank(rank: object) -> bool:
    return isinstance(rank, int | np.integer) and 0 <= int(rank) < MAX_RANKS


def _copied(items: _Items) -> _Items:
    """Return a copy of the items, or a tuple as it is."""
    if isinstance(items, np.ndarray):
        return items.copy()
    return items if isinstance(items, tuple) else tuple(items)  # type: ignore[return-value]  # still a sequence

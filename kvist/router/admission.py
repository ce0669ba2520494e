"""Queues, one a model and bounded, for requests that no worker has room for; where they go is decided afterwards.

    room      a worker has room if it has less in flight than its bound, and has not asked for a pause (`fleet.worker`)
    one       the policy may find a full worker worth waiting for: such requests wait in a queue of that worker's own
    order     by priority, lower first, then by tenants' shares, then by arrival; a request that comes while others
              wait, waits too
    shares    virtual time advances with what is served, and a tenant that has had its share of it starts later
              (start-time fair queueing: Goyal, Vin and Cheng, 1996)
    end       when a worker has room, when the deadline has passed (503), or when a full queue has no place (429)

Where no bounds are set, nothing is checked. The policy decides which worker takes a request; admission only tells it
which ones cannot, and for how long that may be.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from http import HTTPStatus
from operator import attrgetter
from typing import Protocol, TypeAlias
from zlib import crc32

from kvist.http import Deadline, LoopClock, Request
from kvist.openai.errors import RequestError
from kvist.openai.requests import Fields, with_fields, without_field
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.worker import Worker
from kvist.router.policy.decision import Role
from kvist.router.prompts import FORM_PATHS, ParsedRequest
from kvist.router.tenants.rows import Field
from kvist.router.tenants.tenant import Tenant

TIMEOUT_HEADER = b"x-kvist-queue-timeout"
"""In which a client says how many seconds it would wait, if that is less than the router's own limit."""

MAX_RETRY_AFTER_S = 60
_RECHECK_S = 0.05
"""How often a front checks for room itself, in case it has missed that another front woke it."""
_RETRY_SHARE = 0.2
_MAX_RETRIES = 100.0
"""Each request earns a fifth of a retry. So many may be saved up, or as many as requests are running."""


QueueKey: TypeAlias = tuple[str | None, str | None]
"""A model, and the worker that its requests wait for: None for any, ANY_STANDALONE for any that needs no other."""

ANY_STANDALONE = "alone"
"""Stands for all workers that need no other to answer, in the place of one worker's URL."""


class Waiter(Protocol):
    """A request that waits."""

    def on_room(self) -> None:
        """A worker has room now."""

    def on_refused(self, error: RequestError) -> None:
        """The request waited in vain."""


@dataclass(slots=True, eq=False)
class Place:
    """A request's place in a line; sorted, the first to be served comes first.

    `came_at` is a virtual time, and `span` what the request takes of that: its work over its tenant's share.
    """

    priority: int
    number: int
    queue: QueueKey
    waiter: Waiter
    since_s: float
    tenant: str
    came_at: float
    span: float
    deadline: Deadline | None = None
    has_left: bool = False
    waited_s: float = 0.0

    def __lt__(self, other: Place) -> bool:
        return (self.priority, self.since_s, self.number) < (other.priority, other.since_s, other.number)


@dataclass(slots=True, eq=False)
class Line:
    """The requests of one tenant in one queue.

    In virtual time the first starts where the tenant's last served request finishes, but not before it came. The others
    have no times yet, so that a request that leaves the line costs its tenant nothing.
    """

    places: list[Place] = field(default_factory=list)
    span: float = 0.0
    rank: tuple[int, float, float, int] = (0, 0.0, 0.0, 0)
    """Priority, start, arrival and number of the first; all but the last are compared between fronts, too."""


@dataclass(slots=True, eq=False)
class Admission:
    """Knows which workers have room and which requests wait. It belongs to the event loop; `now_s` is monotonic."""

    fleet: Fleet
    load: LoadTracker
    now_s: Callable[[], float]
    clock: LoopClock
    """Measures deadlines, leaving out the time by which the event loop is late."""
    max_queued: int
    """How many requests may wait for a model."""
    max_prefill_tokens: int | None = None
    """A worker with so many uncached tokens in flight has no room for more; None for the bound that was learnt."""
    max_requests: int | None = None
    """How many requests the whole fleet is given at a time."""
    max_fleet_prefill_tokens: int | None = None
    """With so many uncached tokens in flight in the whole fleet nobody has room for more."""
    rejections: Counter[str] = field(default_factory=Counter)
    """By cause: `queue full`, `timeout`, `displaced`, `shed`."""
    _queues: dict[QueueKey, dict[str, Line]] = field(default_factory=dict)
    """Lines by tenant; none is empty."""
    _num_arrived: int = 0
    _mean_wait_s: float = 1.0
    can_do_all: Callable[[Worker], bool] = lambda _: True
    """Says whether a worker needs no other to answer."""
    wake_front: Callable[[int], None] = lambda _: None
    """Wakes the front of this number, as a request that waits there may be the next."""
    _is_scheduled: bool = False
    _recheck: asyncio.TimerHandle | None = None
    _retries: float = _MAX_RETRIES

    def __post_init__(self) -> None:
        self.load.on_freed = self.admit_waiting_soon
        self.fleet.on_room = lambda _: self.admit_waiting_soon()

    # Who has room.

    @property
    def _is_bounded(self) -> bool:
        limits = self.max_prefill_tokens, self.max_requests, self.max_fleet_prefill_tokens
        return bool(self.fleet.bounded) or any(limit is not None for limit in limits)

    def has_room(self, worker: Worker) -> bool:
        """Return whether the worker may be given one more request."""
        capacity, num_running = worker.capacity, self.load.running_requests(worker.url)
        bound = capacity.bound(0 if capacity.warms_from is None else self.load.num_steps(worker.url))
        if capacity.paused_until_s > self.now_s() or (bound is not None and num_running >= bound):
            return False
        if self.max_prefill_tokens is None:
            most = capacity.max_prefill_work
            return most is None or self.load.prefill_work(worker.url) < most
        return num_running == 0 or self.load.prefill_tokens(worker.url) < self.max_prefill_tokens

    def full_workers(self, model: str | None, excluded: Collection[str]) -> dict[str, float]:
        """Return which of the workers that could take the request have no room, and for how many seconds.

        Seconds are inf where they are not known, or where enough requests wait for that worker. Empty where all are
        full.
        """
        if not self._is_bounded:
            return {}
        workers = self.fleet.routable(model, excluded)
        full_workers = {worker.url: self._room_in_s(worker, model) for worker in workers if not self.has_room(worker)}
        return full_workers if self._can_answer(workers, lambda worker: worker.url not in full_workers) else {}

    def _room_in_s(self, worker: Worker, model: str | None) -> float:
        capacity, num_queued = worker.capacity, self.load.num_queued(_queue_number((model, worker.url)))
        is_closed = capacity.warms_from is not None or capacity.paused_until_s > self.now_s()
        if is_closed or not capacity.ends_a_second or num_queued >= self.max_queued:
            return math.inf
        bound = capacity.max_requests
        # A worker full of prefill tokens alone has none to wait for: its price counts their computation already.
        num_over = 0 if bound is None else max(0, self.load.running_requests(worker.url) + 1 - bound)
        return (num_over + num_queued) / capacity.ends_a_second

    def would_wait(self, model: str | None, excluded: Collection[str] = ()) -> bool:
        """Return whether a request for this model would have to wait now, if the excluded workers did not take it."""
        if not self._is_bounded:
            return False
        queue = model, None
        waits_elsewhere = self.load.other_queue_head(self.now_s(), _queue_number(queue)) is not None
        return queue in self._queues or waits_elsewhere or not self._has_room_for(queue, excluded)

    def shed(self, model: str | None, excluded: Collection[str]) -> None:
        """Raise RequestError (429) if a request that does not wait would have to."""
        if self.would_wait(model, excluded):
            raise self._refusal("shed", HTTPStatus.TOO_MANY_REQUESTS, "no worker has room for what may be dropped")

    def pause(self, worker: Worker, retry_after: bytes | None) -> None:
        """Give a worker that is too busy no requests for as long as it asks for, within bounds."""
        if self.fleet.get(worker.url) is not worker:  # it was removed
            return
        is_number = retry_after is not None and retry_after.isdigit()
        pause_s = min(float(retry_after or 0), MAX_RETRY_AFTER_S) if is_number else 1.0
        worker.capacity.paused_until_s = max(worker.capacity.paused_until_s, self.now_s() + pause_s)
        self.fleet.bounded.add(worker.url)
        self.fleet.on_paused(worker)
        asyncio.get_running_loop().call_later(pause_s, self.admit_waiting)

    # Who waits.

    def enter(
        self,
        waiter: Waiter,
        model: str | None,
        priority: int,
        timeout_s: float,
        tenant: Tenant,
        work: Callable[[], float],
        since_s: float,
        worker: str | None = None,
    ) -> Place | None:
        """Return the request's place in the queue, or None if it may be sent at once; a `worker` has its own queue.

        `work` counts against the tenant's share; requests without any are served by arrival, which was at `since_s`.
        Raises RequestError (429) if the queue is full of requests that go before it.
        """
        if worker is None and not self.would_wait(model):
            return None
        queue = model, worker
        self._num_arrived, number = self._num_arrived + 1, _queue_number(queue)
        span = work() / tenant.share
        came_at = self.load.tenants.virtual_time if span else 0.0
        place = Place(priority, self._num_arrived, queue, waiter, since_s, tenant.name, came_at, span)
        if self.load.num_queued(number) >= self.max_queued:
            lines = self._queues.get(queue, {})
            own_span = span + (lines[tenant.name].span if tenant.name in lines else 0.0)
            longest = max(lines.values(), key=lambda line: (line.places[-1].priority, line.span), default=None)
            if longest is None or (priority, own_span) >= (longest.places[-1].priority, longest.span):
                raise self._refusal("queue full", HTTPStatus.TOO_MANY_REQUESTS, "too many requests wait for a worker")
            displaced = longest.places[-1]
            self.leave(displaced)
            text = "more urgent requests wait for a worker"
            displaced.waiter.on_refused(self._refusal("displaced", HTTPStatus.TOO_MANY_REQUESTS, text))
        place.deadline = Deadline(self.clock, lambda _: self._on_timeout(place, timeout_s))
        place.deadline.set("queue", since_s + timeout_s - self.now_s())
        line = self._queues.setdefault(queue, {}).setdefault(tenant.name, Line())
        insort(line.places, place)
        line.span += span
        if line.places[0] is place:
            self._update_rank(line)
        self.load.add_queued(number, 1)
        self._publish_head()
        return place

    def leave(self, place: Place, *, is_served: bool = False) -> None:
        """Remove a place from its queue, as a worker has room or the request has ended. Idempotent."""
        if not place.has_left:
            place.has_left, place.waited_s = True, self.now_s() - place.since_s
            if place.deadline is not None:
                place.deadline.close()
            lines = self._queues[place.queue]
            line = lines[place.tenant]
            del line.places[bisect_left(line.places, place)]
            line.span -= place.span
            if is_served and place.span:
                self.load.tenants.advance(line.rank[1])
                self.load.tenants.write(place.tenant, Field.FINISH, line.rank[1] + place.span)
            if not line.places:
                del lines[place.tenant]
            if not lines:
                del self._queues[place.queue]
            self._update_ranks(place.tenant)
            self.load.add_queued(_queue_number(place.queue), -1)
            self._publish_head()

    def admit_waiting_soon(self) -> None:
        """Admit in the event loop's next turn, if requests wait: whatever made room may not be done yet."""
        if self._queues and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.admit_waiting)
        elif not self._queues and self._is_one_of_several:
            self._wake_next_front()

    def admit_waiting(self) -> None:
        """Admit requests that there is room for, in order over all queues, as those may share workers."""
        self._is_scheduled = False
        if self._is_one_of_several:
            self._update_ranks()
            self._publish_head()
        heads = [(_first(lines).rank, queue) for queue, lines in self._queues.items()]
        heapify(heads)
        while heads:
            rank, queue = heappop(heads)
            if queue not in self._queues:
                continue
            line = _first(self._queues[queue])
            if line.rank > rank:  # its tenant was served elsewhere
                heappush(heads, (line.rank, queue))
                continue
            place = line.places[0]
            if not self._is_first(line) or not self._has_room_for(queue):
                continue
            self.leave(place, is_served=True)
            if queue in self._queues:
                heappush(heads, (_first(self._queues[queue]).rank, queue))
            self._mean_wait_s += (place.waited_s - self._mean_wait_s) / 16
            try:
                place.waiter.on_room()
            except BaseException:
                self.admit_waiting_soon()  # the others
                raise
        self._wake_next_front()

    def _update_rank(self, line: Line) -> None:
        first = line.places[0]
        start = max(first.came_at, self.load.tenants.read(first.tenant)[-1]) if first.span else 0.0
        line.rank = first.priority, start, first.since_s, first.number

    def _update_ranks(self, tenant: str | None = None) -> None:
        """Update the ranks of the lines of one tenant, or of all, as requests have been served."""
        for lines in self._queues.values():
            for line in lines.values() if tenant is None else filter(None, [lines.get(tenant)]):
                self._update_rank(line)

    # Several fronts keep one order: each publishes its first request, and admits none before an earlier one elsewhere.

    @property
    def _is_one_of_several(self) -> bool:
        return self.load.board.num_fronts > 1

    def _is_first(self, line: Line) -> bool:
        first = self.load.other_queue_head(self.now_s(), _queue_number(line.places[0].queue))
        return first is None or line.rank[:3] <= first[:3]

    def _wake_next_front(self) -> None:
        first = self.load.other_queue_head(self.now_s())
        if first is not None and (not self._queues or not self._is_first(self._head())):
            self.wake_front(first[-1])

    def _head(self) -> Line:
        return min(map(_first, self._queues.values()), key=_rank)

    def _publish_head(self) -> None:
        """Publish the first request for other fronts, and again before they take this front for a dead one."""
        if not self._is_one_of_several:
            return
        if self._recheck is not None:
            self._recheck.cancel()
            self._recheck = None
        if self._queues:
            head = self._head()
            self.load.set_queue_head(_queue_number(head.places[0].queue), *head.rank[:3], self.now_s())
            self._recheck = asyncio.get_running_loop().call_later(_RECHECK_S, self.admit_waiting)
        else:
            self.load.set_queue_head(0, 0, 0.0, 0.0, self.now_s())

    @property
    def queued(self) -> Counter[str | None]:
        """Return how many wait, by model."""
        queued = Counter[str | None]()
        for (model, _), lines in self._queues.items():
            queued[model] += sum(len(line.places) for line in lines.values())
        return queued

    def _has_room_for(self, queue: QueueKey, excluded: Collection[str] = ()) -> bool:
        if self.max_requests is not None and self.load.num_running >= self.max_requests:
            return False
        most_tokens = self.max_fleet_prefill_tokens
        if most_tokens is not None and self.load.all_prefill_tokens() >= most_tokens:
            return False
        model, url = queue
        workers, now_s = self.fleet.routable(model, excluded), self.now_s()
        # A request whose worker has left or pauses waits for any; where there is none, routing refuses the request.
        its_own = [each for each in workers if each.url == url and each.capacity.paused_until_s <= now_s]
        its_own = [*filter(self.can_do_all, workers)] if url == ANY_STANDALONE else its_own
        has_room = any(map(self.has_room, its_own or workers)) and self._can_answer(workers, self.has_room)
        return not workers or has_room

    def _can_answer(self, workers: list[Worker], has_room: Callable[[Worker], bool]) -> bool:
        """Return whether a worker with room can answer, alone or with a prefill worker that has room.

        Prefill workers answer only where there are no others.
        """
        prefill = [worker for worker in workers if worker.role is Role.PREFILL]
        answering = [worker for worker in workers if worker.role is not Role.PREFILL] or prefill

        def can_begin() -> bool:
            return any(map(has_room, prefill)) if prefill else not any(map(self.can_do_all, answering))

        return any(has_room(worker) and (self.can_do_all(worker) or can_begin()) for worker in answering)

    def _on_timeout(self, place: Place, timeout_s: float) -> None:
        self.leave(place)
        text = f"no worker was free within {timeout_s:g} s"
        place.waiter.on_refused(self._refusal("timeout", HTTPStatus.SERVICE_UNAVAILABLE, text))

    def _refusal(self, cause: str, status: HTTPStatus, text: str) -> RequestError:
        self.rejections[cause] += 1
        retry_after_s = max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_wait_s)))
        return RequestError(status, text, code=cause.replace(" ", "_"), retry_after_s=retry_after_s)

    # Retries.

    def may_retry(self) -> bool:
        """Return whether one more request may be sent on to another worker, and count it."""
        saved = min(self._retries, max(_MAX_RETRIES, self.load.num_running))
        may_retry = saved >= 1.0
        self._retries = saved - may_retry
        return may_retry

    def on_first_attempt(self) -> None:
        """Count a request that is sent for the first time."""
        self._retries += _RETRY_SHARE


_rank = attrgetter("rank")


def _first(lines: dict[str, Line]) -> Line:
    return min(lines.values(), key=_rank)


def _queue_number(queue: QueueKey) -> int:
    return 1 + crc32(" ".join(filter(None, queue)).encode())


def priority_of(fields: Fields, best: int, *, is_administrator: bool) -> int:
    """Return a request's priority, lower first, in 32 bits; clients may only worsen theirs."""
    priority = fields.get("priority")
    if type(priority) is not int:
        return best
    priority = max(-(2**31), min(priority, 2**31 - 1))
    return priority if is_administrator else max(best, priority)


def with_priority(body: bytes, parsed: ParsedRequest, priority: int, worker: Worker, *, by_default: bool) -> bytes:
    """Return the body with its priority for a worker that schedules by it, else without; by default if it says neither.

    Forms have none.
    """
    says = worker.identity.uses_priority
    if body and parsed.path not in FORM_PATHS and (by_default if says is None else says):
        is_there = priority == parsed.fields.get("priority", 0)
        return body if is_there else with_fields(body, {"priority": priority})
    return without_field(body, parsed.fields, "priority")


def timeout_of(request: Request, longest_s: float) -> float:
    """Return how long the request may wait; raises RequestError (400)."""
    text = request.header(TIMEOUT_HEADER)
    if text is None:
        return longest_s
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s < math.inf:
        name, given = TIMEOUT_HEADER.decode(), text.decode("latin-1")
        message = f"{name}: got {given!r:.100}, expected seconds, 0 or more"
        raise RequestError(HTTPStatus.BAD_REQUEST, message, param=name)
    return min(timeout_s, longest_s)

"""Requests that no worker has room for stand in one bounded queue a model, and are decided when they leave it.

    room      a worker has less in flight than its bound, and has not asked to be spared (`fleet.worker`)
    seat      a full worker may be worth waiting for: whom the policy finds that in a queue of that worker's own
    order     by priority, lower first, then by tenants' shares, then by arrival; who comes when others wait, waits, too
    shares    virtual time goes on with what is served; who has had its share of it starts later (start-time fair
              queueing: Goyal, Vin and Cheng, 1996)
    out       when a worker has room, or the deadline has passed (503), or a full queue has no place for it (429)

Where nothing is bounded, nothing is looked at. Which worker takes a request is the policy's to say: here it is only
said who cannot, and how long that may be.
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
from kvist.openai.requests import Fields
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.worker import Worker
from kvist.router.policy.decision import Role
from kvist.router.tenants.rows import Field
from kvist.router.tenants.tenant import DEFAULT, Tenant

TIMEOUT_HEADER = b"x-kvist-queue-timeout"
"""By which a client says how many seconds it would wait, if that is less than the router's own limit."""

MAX_RETRY_AFTER_S = 60
_LOOK_S = 0.05
"""How often a front looks for room that another one has seen: it is told, but may have missed it."""
_RETRY_SHARE = 0.2
_MAX_RETRIES = 100.0
"""Retries that may be saved up, or as many as requests run: a fifth of all may be sent on when all is counted."""


Queue: TypeAlias = tuple[str | None, str | None]
"""A model's, or of its requests those that wait for one worker, or for any that needs no other."""

ALONE = "alone"
"""Stands for workers that need no other to answer, in the place of one's URL."""


class Waiter(Protocol):
    """A request that waits."""

    def on_room(self) -> None:
        """A worker has room now."""

    def on_refused(self, error: RequestError) -> None:
        """The wait was in vain."""


@dataclass(slots=True, eq=False)
class Place:
    """A request's place in a line, best first when sorted; from its end on it `is_left`, having `waited_s`.

    It came at a virtual time, and takes a span of that: its work over its tenant's share.
    """

    priority: int
    number: int
    queue: Queue
    waiter: Waiter
    since_s: float
    tenant: str
    came_at: float
    span: float
    deadline: Deadline | None = None
    is_left: bool = False
    waited_s: float = 0.0

    def __lt__(self, other: Place) -> bool:
        return (self.priority, self.since_s, self.number) < (other.priority, other.since_s, other.number)


@dataclass(slots=True, eq=False)
class Line:
    """Those of one tenant that wait in one queue. The first starts where what its tenant had served before finishes,
    in virtual time, but not before it came; the others have no times yet, so that who leaves costs its tenant nothing.
    """

    places: list[Place] = field(default_factory=list)
    span: float = 0.0
    rank: tuple[int, float, float, int] = (0, 0.0, 0.0, 0)
    """Of the first: its priority, start, arrival and number; all but the last are compared between fronts, too."""


@dataclass(slots=True, eq=False)
class Admission:
    """Who has room, and who waits. All times are those of `now_s`, a monotonic clock; it belongs to the event loop."""

    fleet: Fleet
    load: LoadTracker
    now_s: Callable[[], float]
    clock: LoopClock
    """By which nobody waits too long for what a loop that is late has not done yet."""
    max_queued: int
    """So many requests may wait for a model."""
    max_prefill_tokens: int | None = None
    """A worker with so many uncached tokens in flight has no room for more."""
    max_requests: int | None = None
    """So many requests the whole fleet is given at a time."""
    rejections: Counter[str] = field(default_factory=Counter)
    """By cause: `queue full`, `timeout`, `displaced`, `shed`."""
    _queues: dict[Queue, dict[str, Line]] = field(default_factory=dict)
    """By tenant; nobody's line is empty."""
    _num_arrived: int = 0
    _mean_wait_s: float = 1.0
    can_do_all: Callable[[Worker], bool] = lambda _: True
    """Says whether a worker needs no other to answer."""
    ring: Callable[[int], None] = lambda _: None
    """Wakes the front that has this number: what waits there may have its turn."""
    _is_due: bool = False
    _next_look: asyncio.TimerHandle | None = None
    _retries: float = _MAX_RETRIES

    def __post_init__(self) -> None:
        self.fleet.on_room = self.load.on_freed = self.pump_soon

    # Who has room.

    @property
    def _is_bounded(self) -> bool:
        return bool(self.fleet.bounded) or self.max_prefill_tokens is not None or self.max_requests is not None

    def has_room(self, worker: Worker) -> bool:
        """Return whether the worker may be given one more request."""
        capacity, num_running = worker.capacity, self.load.running_requests(worker.url)
        bound = capacity.bound(0 if capacity.warms_from is None else self.load.num_steps(worker.url))
        if capacity.paused_until_s > self.now_s() or (bound is not None and num_running >= bound):
            return False
        most = self.max_prefill_tokens
        return most is None or num_running == 0 or self.load.prefill_tokens(worker.url) < most

    def full(self, model: str | None, excluded: Collection[str]) -> dict[str, float]:
        """Return who has no room for the request, of those who could take it, and for how long; nobody where all are.

        Seconds are inf where nobody knows them, or where enough wait for that worker.
        """
        if not self._is_bounded:
            return {}
        workers = self.fleet.routable(model, excluded)
        full = {worker.url: self._seat_s(worker, model) for worker in workers if not self.has_room(worker)}
        return full if self._are_enough(workers, lambda worker: worker.url not in full) else {}

    def _seat_s(self, worker: Worker, model: str | None) -> float:
        capacity, num_queued = worker.capacity, self.load.num_queued(_number_of((model, worker.url)))
        bound, is_paused = capacity.max_requests, capacity.paused_until_s > self.now_s()
        if bound is None or is_paused or not capacity.ends_a_second or num_queued >= self.max_queued:
            return math.inf
        num_before = max(0, self.load.running_requests(worker.url) - bound) + num_queued
        return (num_before + 1) / capacity.ends_a_second

    def would_wait(self, model: str | None, excluded: Collection[str] = ()) -> bool:
        """Return whether a request for this model would stand in the queue now, if these did not take it."""
        if not self._is_bounded:
            return False
        queue = model, None
        waits_elsewhere = self.load.other_queue_head(self.now_s(), _number_of(queue)) is not None
        return queue in self._queues or waits_elsewhere or not self._has_room_for(queue, excluded)

    def shed(self, model: str | None, excluded: Collection[str]) -> None:
        """Raise RequestError (429) if a request that does not wait would have to."""
        if self.would_wait(model, excluded):
            raise self._refusal("shed", HTTPStatus.TOO_MANY_REQUESTS, "no worker has room for what may be dropped")

    def pause(self, worker: Worker, retry_after: bytes | None) -> None:
        """Spare a worker that said it is too busy, for as long as it asks for, within bounds; none that was removed."""
        if self.fleet.get(worker.url) is not worker:
            return
        is_number = retry_after is not None and retry_after.isdigit()
        pause_s = min(float(retry_after or 0), MAX_RETRY_AFTER_S) if is_number else 1.0
        worker.capacity.paused_until_s = max(worker.capacity.paused_until_s, self.now_s() + pause_s)
        self.fleet.bounded.add(worker.url)
        self.fleet.on_paused(worker)
        asyncio.get_running_loop().call_later(pause_s, self.pump)

    # Who waits.

    def enter(
        self,
        waiter: Waiter,
        model: str | None,
        priority: int,
        timeout_s: float,
        tenant: Tenant = DEFAULT,
        work: Callable[[], float] = lambda: 0.0,
        since_s: float | None = None,
        worker: str | None = None,
    ) -> Place | None:
        """Return the request's place in the queue, or None if it may be sent at once; or its place in a `worker`'s.

        It is so much work, of which its tenant has its share; what is none goes by arrival, now or `since_s`. Raises
        RequestError (429) if the queue is full of requests that are not behind it.
        """
        if worker is None and not self.would_wait(model):
            return None
        queue, now_s = (model, worker), self.now_s()
        since_s = now_s if since_s is None else since_s
        self._num_arrived, number = self._num_arrived + 1, _number_of(queue)
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
        place.deadline.set("queue", since_s + timeout_s - now_s)
        line = self._queues.setdefault(queue, {}).setdefault(tenant.name, Line())
        insort(line.places, place)
        line.span += span
        if line.places[0] is place:
            self._set_start(line)
        self.load.add_queued(number, 1)
        self._show()
        return place

    def leave(self, place: Place, *, is_served: bool = False) -> None:
        """Give the place up, as a worker was found or nobody waits any more. Idempotent."""
        if not place.is_left:
            place.is_left, place.waited_s = True, self.now_s() - place.since_s
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
            self._set_starts(place.tenant)
            self.load.add_queued(_number_of(place.queue), -1)
            self._show()

    def pump_soon(self) -> None:
        """Look for room in the loop's next turn, if anybody waits: whatever gave room may not be done yet."""
        if self._queues and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.pump)
        elif not self._queues and self._is_one_of_several:
            self._ring_next()

    def pump(self) -> None:
        """Send whom there is room for, the first first, whatever their queues: those may share workers."""
        self._is_due = False
        if self._is_one_of_several:
            self._set_starts()
            self._show()
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
                self.pump_soon()  # the others
                raise
        self._ring_next()

    def _set_start(self, line: Line) -> None:
        first = line.places[0]
        start = max(first.came_at, self.load.tenants.read(first.tenant)[-1]) if first.span else 0.0
        line.rank = first.priority, start, first.since_s, first.number

    def _set_starts(self, tenant: str | None = None) -> None:
        """Have lines, of one tenant or all, start where what was served before them finishes."""
        for lines in self._queues.values():
            for line in lines.values() if tenant is None else filter(None, [lines.get(tenant)]):
                self._set_start(line)

    # Among several fronts, the first first: each shows its first, and takes no slot before another's.

    @property
    def _is_one_of_several(self) -> bool:
        return self.load.board.num_fronts > 1

    def _is_first(self, line: Line) -> bool:
        first = self.load.other_queue_head(self.now_s(), _number_of(line.places[0].queue))
        return first is None or line.rank[:3] <= first[:3]

    def _ring_next(self) -> None:
        first = self.load.other_queue_head(self.now_s())
        if first is not None and (not self._queues or not self._is_first(self._head())):
            self.ring(first[-1])

    def _head(self) -> Line:
        return min(map(_first, self._queues.values()), key=_rank)

    def _show(self) -> None:
        """Show others what waits, and again before they take this front for one that has stopped."""
        if not self._is_one_of_several:
            return
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        if self._queues:
            head = self._head()
            self.load.set_queue_head(_number_of(head.places[0].queue), *head.rank[:3], self.now_s())
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_S, self.pump)
        else:
            self.load.set_queue_head(0, 0, 0.0, 0.0, self.now_s())

    @property
    def queued(self) -> Counter[str | None]:
        """Return how many wait, by model."""
        queued = Counter[str | None]()
        for (model, _), lines in self._queues.items():
            queued[model] += sum(len(line.places) for line in lines.values())
        return queued

    def _has_room_for(self, queue: Queue, excluded: Collection[str] = ()) -> bool:
        if self.max_requests is not None and self.load.num_running >= self.max_requests:
            return False
        model, url = queue
        workers, now_s = self.fleet.routable(model, excluded), self.now_s()
        # Whose worker has left, or asks to be spared, waits for any; where there is nobody, who chooses says so.
        its_own = [each for each in workers if each.url == url and each.capacity.paused_until_s <= now_s]
        its_own = [*filter(self.can_do_all, workers)] if url == ALONE else its_own
        return not workers or self._are_enough(its_own or workers, self.has_room)

    def _are_enough(self, workers: list[Worker], has_room: Callable[[Worker], bool]) -> bool:
        """Return whether one with room answers alone, or goes on with what another with room computes.

        Prefill workers answer only where there are no others.
        """
        prefill = [worker for worker in workers if worker.role is Role.PREFILL]
        answering = [worker for worker in workers if worker.role is not Role.PREFILL] or prefill

        def can_begin() -> bool:
            return any(map(has_room, prefill)) if prefill else not any(map(self.can_do_all, answering))

        return any(has_room(worker) and (self.can_do_all(worker) or can_begin()) for worker in answering)

    def _on_timeout(self, place: Place, timeout_s: float) -> None:
        self.leave(place)
        text = f"no worker had room within {timeout_s:g} s"
        place.waiter.on_refused(self._refusal("timeout", HTTPStatus.SERVICE_UNAVAILABLE, text))

    def _refusal(self, cause: str, status: HTTPStatus, text: str) -> RequestError:
        self.rejections[cause] += 1
        retry_after_s = max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_wait_s)))
        return RequestError(status, text, code=cause.replace(" ", "_"), retry_after_s=retry_after_s)

    # Retries.

    def may_retry(self) -> bool:
        """Return whether one more request may be sent on to another worker, and count it."""
        saved = min(self._retries, max(_MAX_RETRIES, self.load.num_running))
        is_left = saved >= 1.0
        self._retries = saved - is_left
        return is_left

    def on_first_attempt(self) -> None:
        """Count a request that is sent for the first time."""
        self._retries += _RETRY_SHARE


_rank = attrgetter("rank")


def _first(lines: dict[str, Line]) -> Line:
    return min(lines.values(), key=_rank)


def _number_of(queue: Queue) -> int:
    return 1 + crc32(" ".join(filter(None, queue)).encode())


def priority_of(fields: Fields, best: int, *, is_administrator: bool) -> int:
    """Return how urgent a request says it is, lower first, in 32 bits; a client may only worsen its own."""
    priority = fields.get("priority")
    if type(priority) is not int:
        return best
    priority = max(-(2**31), min(priority, 2**31 - 1))
    return priority if is_administrator else max(best, priority)


def timeout_of(request: Request, longest_s: float) -> float:
    """Return how long the request would wait; raises RequestError (400)."""
    text = request.header(TIMEOUT_HEADER)
    if text is None:
        return longest_s
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s < math.inf:
        name = TIMEOUT_HEADER.decode()
        raise RequestError(
            HTTPStatus.BAD_REQUEST, f"{name}: got {text!r:.100}, expected seconds, 0 or more", param=name
        )
    return min(timeout_s, longest_s)

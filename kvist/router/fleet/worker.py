"""One engine as the router sees it: its health, its circuit, what it says of itself, and how many requests it may have.

Health follows from periodic checks, the circuit from real requests; both are state machines without clock or I/O.
A worker is given as many requests at a time as it runs, by its own reports, and a small reserve:

    it has a queue of its own    the bound falls to what it ran of late plus the reserve, so that no batch runs dry
    it has hardly a queue        the bound grows by a quarter, until it no longer limits: the worker may take more
    it has nothing to do         the bound is dropped
    it never reports             there is no bound, unless a fixed one is configured
    it is a prefill worker       likewise
    its prompts pile up          the bound is what it computes in some seconds, by its learnt speed
    it is new among busy others  it warms up: a few requests at first, and one more for each first byte and each end

The reserve waits in the worker's own queue; all other requests wait at the router, which chooses their worker late.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from kvist.router.fleet.identity import Identity
from kvist.router.policy.decision import Role

if TYPE_CHECKING:
    from kvist.router.fleet.rendering import Rendering


MIN_RESERVE = 4
RESERVE_SHARE = 4
"""The reserve is at least so small a part of what runs (docs/decisions.md) …"""
RESERVES_A_SECOND = 10
"""… and at least what ends in so small a part of a second, which the router needs to replace many that end at once."""
WARM_UP_REQUESTS = 4
WARM_UP_STEPS = 512
"""How many requests a new worker may have at first, and after how many first bytes and ends it is warm."""
_NO_LIMIT_FACTOR = 4
"""A bound of so many times the requests in flight is dropped, as it limits nothing."""
MAX_PREFILL_S = 8.0
"""A worker has no room with prompts that it computes in so long: a net for fleets that are too small, not a means to
keep queues short (docs/decisions.md)."""
_PEAK_DECAY = 0.9
"""From report to report, of the most that ran: requests that end together leave a batch half empty for a moment."""
_ENDS_AVERAGED = 8
"""The rate of ends is averaged over so many reports."""

_GAUGE = re.compile(
    rb"(?m)^(?:vllm:num_requests_|sglang:num_|kvist_engine_requests_)(running|waiting|running_reqs|queue_reqs)"
    rb"(?:\{[^}\n]*\})? ([0-9.e+]+)$"
)

_UNKNOWN = frozenset({None, "auto"})
"""What a worker says of its cache's block size or type if that depends on other settings."""


class LoadReport(NamedTuple):
    """How many requests a worker says are in its batch, and in its own queue."""

    num_running: int
    num_waiting: int


def parse_report(page: bytes) -> LoadReport | None:
    """Return what a metrics page of vLLM, SGLang or Kvist's engine reports, over all ranks; None for any other page."""
    counts = {True: 0.0, False: 0.0}
    matches = _GAUGE.findall(page)
    try:
        for name, value in matches:
            counts[name.startswith(b"running")] += float(value)
        return LoadReport(int(counts[True]), int(counts[False])) if matches else None
    except (ValueError, OverflowError):
        return None


@dataclass(slots=True)
class Capacity:
    """How many requests a worker may have; `paused_until_s` is set while it has asked for none.

    `warms_from` is its number of steps (`LoadTracker.num_steps`) when it began to warm up, None once it is warm.
    """

    fixed_requests: int | None = None
    learnt_requests: int | None = None
    paused_until_s: float = 0.0
    warms_from: int | None = None
    ends_a_second: float = 0.0
    """How many of its requests have ended in a second of late."""
    max_prefill_work: float | None = None
    """With so much work of streamed prompts, in units of `policy.work`, it has no room; None for any."""
    _num_running: int = 0
    _peak_running: float = 0.0
    _ended: Sequence[int] = ()

    @property
    def max_requests(self) -> int | None:
        """Return how many requests a warm worker may have at a time, None if any number."""
        return self.learnt_requests if self.fixed_requests is None else self.fixed_requests

    def bound(self, num_steps: int) -> int | None:
        """Return how many requests it may have at a time after so many steps, None if any number."""
        most = self.max_requests
        if self.warms_from is None:
            return most
        warm_up = WARM_UP_REQUESTS + max(0, num_steps - self.warms_from)  # the count of a front that died is lost
        return warm_up if most is None else min(most, warm_up)

    def learn(self, report: LoadReport | None, num_in_flight: int, ended: Sequence[int] = ()) -> None:
        """Update the rate of ends, and the bound if there is a report; call it once a second.

        So many of the router's requests are in flight, `ended` so far at each front. If other routers send to the
        worker, too, each reduces its bound by its share of what is too much.
        """
        # A count that begins or falls is of a front or router that came or left.
        num_just_ended = sum(max(0, now - before) for before, now in zip(self._ended, ended, strict=False) if before)
        self._ended = ended
        self.ends_a_second += (num_just_ended - self.ends_a_second) / _ENDS_AVERAGED
        if report is None:
            return
        num_more, self._num_running = report.num_running - self._num_running, report.num_running
        self._peak_running = max(report.num_running, self._peak_running * _PEAK_DECAY)
        peak = int(self._peak_running)
        if num_more == peak == report.num_running:  # it has just begun: how fast requests end is not known yet
            return
        # A batch that has grown by so many may take as many more from the worker's queue until the next report.
        reserve = max(MIN_RESERVE, peak // RESERVE_SHARE, num_just_ended // RESERVES_A_SECOND, num_more)
        excess = report.num_running + report.num_waiting - peak - reserve
        bound = self.learnt_requests
        if excess > 0 and num_in_flight:
            share = min(1.0, num_in_flight / (report.num_running + report.num_waiting))
            self.learnt_requests = max(MIN_RESERVE, num_in_flight - int(excess * share))
        elif bound is not None and report.num_waiting < reserve // 2:
            grown = bound + max(MIN_RESERVE, bound // 4)
            self.learnt_requests = grown if grown < _NO_LIMIT_FACTOR * max(MIN_RESERVE, num_in_flight) else None

    def learn_prefill(self, prefill_work: float, work_a_second: float) -> None:
        """Update the bound of prompts from the work in flight and the speed; there is none before half of it is."""
        most = MAX_PREFILL_S * work_a_second
        self.max_prefill_work = most if prefill_work > most / 2 else None

    def reset(self) -> None:
        """Drop what was learnt of a worker that is idle now, as its next requests may be of another kind."""
        self.learnt_requests, self._num_running, self._peak_running = None, 0, 0.0
        self.max_prefill_work = None


@dataclass(slots=True)
class HealthGauge:
    """A verdict on a worker's health, which `num_failures` failed or two passed checks in a row change.

    `is_healthy` is None before the first verdict; a single passed check is enough for that one.
    """

    num_failures: int = 3
    is_healthy: bool | None = None
    _streak: int = 0
    """Checks in a row that contradict the verdict."""

    def record(self, passed: bool) -> bool:
        """Record the result of a check and return whether the verdict changed."""
        if passed == self.is_healthy:
            self._streak = 0
            return False
        self._streak += 1
        needed = 2 if passed else self.num_failures
        if self._streak < needed and not (passed and self.is_healthy is None):
            return False
        self.is_healthy, self._streak = passed, 0
        return True

    def set_unhealthy(self) -> None:
        """Set the verdict to unhealthy at once."""
        self.is_healthy, self._streak = False, 0


Change: TypeAlias = Literal["begin", "succeed", "fail", "abandon"]


class CircuitState(StrEnum):
    """Whether requests may reach a worker: closed lets all through, open none, half-open one trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True)
class CircuitBreaker:
    """Open after `num_failures` failed requests in a row; `cooldown_s` later one trial request decides.

        closed ── num_failures in a row ──> open ── cooldown, next request ──> half-open
           ^                                  ^────────── trial failed ───────────┤
           └──────────────────────────────────────────── trial succeeded ─────────┘

    A trial that ends without a verdict (its client left) leaves the circuit open, ready for the next trial.
    """

    num_failures: int = 5
    cooldown_s: float = 10.0
    state: CircuitState = CircuitState.CLOSED
    failures_in_a_row: int = 0
    retry_at_s: float = 0.0
    on_change: Callable[[Change, float], None] = lambda *_: None
    """Is called with the name of the method below that changed the circuit, and the time if that matters."""

    def allows(self, now_s: float) -> bool:
        """Return whether a request may be sent now."""
        if self.state is CircuitState.OPEN:
            return now_s >= self.retry_at_s
        return self.state is CircuitState.CLOSED

    def begin(self) -> bool:
        """Count a request that `allows` let through and return whether it is the trial of an open circuit."""
        if self.state is not CircuitState.OPEN:
            return False
        self.state = CircuitState.HALF_OPEN
        self.on_change("begin", 0.0)
        return True

    def succeed(self, *, is_trial: bool = False) -> None:
        """Record that a request succeeded: the circuit closes.

        Of a trial others are told also where the circuit is closed here: they may hear of its beginning later.
        """
        if is_trial or self.state is not CircuitState.CLOSED or self.failures_in_a_row:
            self.state, self.failures_in_a_row = CircuitState.CLOSED, 0
            self.on_change("succeed", 0.0)

    def fail(self, now_s: float) -> None:
        """Record that a request failed."""
        self.failures_in_a_row += 1
        if self.state is CircuitState.HALF_OPEN or self.failures_in_a_row >= self.num_failures:
            self.state = CircuitState.OPEN
            self.retry_at_s = now_s + self.cooldown_s
        self.on_change("fail", now_s)

    def abandon(self) -> None:
        """Record that a trial ended without a verdict, even if this process was not told yet that it had begun."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.OPEN
        self.on_change("abandon", 0.0)

    def doubt(self) -> None:
        """Make the next failure open the circuit, as requests of another router fail, which may be that one's fault."""
        self.failures_in_a_row = max(self.failures_in_a_row, self.num_failures - 1)

    def apply(self, what: Change, now_s: float) -> None:
        """Apply a change that the same circuit made in another process, as reported to its `on_change`."""
        if what == "fail":
            self.fail(now_s)
        else:
            getattr(self, what)()


class WorkerState(StrEnum):
    """Only a healthy worker takes requests."""

    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Worker:
    """One engine. `event_error` says why its announced events are not followed.

    `was_checked` is set after the first health check, whether it passed or not. A configured role wins over the
    announced one. `rendering` is None while the router has not compared tokens with the worker.
    """

    url: str
    configured_event_sources: tuple[str, ...]
    health: HealthGauge
    breaker: CircuitBreaker
    identity: Identity = field(default_factory=Identity)
    is_draining: bool = False
    event_error: str | None = None
    last_failure: str | None = None
    was_checked: asyncio.Event = field(default_factory=asyncio.Event)
    configured_role: Role | None = None
    registered_by: tuple[str, ...] = ()
    """Who wants the worker: settings, an administrator, or sources by their names."""
    rendering: Rendering | None = None
    model_ids: frozenset[str | None] | None = None
    """The models that it says it serves, None before it has said so."""
    engine: str | None = None
    """Which engine it is, by its own word or its model list's; None if neither says."""
    adapters: frozenset[str | None] = frozenset()
    capacity: Capacity = field(default_factory=Capacity)
    on_silence: set[Callable[[float], None]] = field(default_factory=set)
    """Called when it was silent for so many seconds, for each request of this process without a first byte."""
    num_given_up: int = 0
    """How often it was given up because it sent nothing."""

    @property
    def state(self) -> WorkerState:
        """Return where the worker is in its life."""
        if self.is_draining:
            return WorkerState.DRAINING
        if self.health.is_healthy is None:
            return WorkerState.STARTING
        return WorkerState.HEALTHY if self.health.is_healthy else WorkerState.UNHEALTHY

    @property
    def role(self) -> Role:
        """Return the configured role or, without one, the announced role."""
        return self.identity.role if self.configured_role is None else self.configured_role

    @property
    def can_fetch(self) -> bool:
        """Return whether it can decode a prompt that a prefill worker computed."""
        return self.role is Role.DECODE or (self.role is Role.BOTH and bool(self.identity.transfer_endpoints))

    def set_identity(self, identity: Identity) -> None:
        """Update what the worker says of itself, and what follows from that."""
        self.identity = identity
        if identity.models is not None:
            self.model_ids = frozenset(model.id for model in identity.models)
            self.adapters = frozenset(model.id for model in identity.models if model.parent is not None)
        owners = (model.entry.get("owned_by") for model in identity.models or ())
        self.engine = identity.engine or next((owner for owner in owners if isinstance(owner, str)), None)

    def give_up(self, silent_s: float) -> None:
        """Tell the requests that it has not begun to answer that it has sent nothing for so long."""
        self.num_given_up += 1
        for on_silence in [*self.on_silence]:
            on_silence(silent_s)

    def has_compatible_cache(self, other: Worker) -> bool:
        """Return whether the workers can exchange cache blocks, by their models and their blocks' sizes and types."""
        ours, theirs = self.identity.cache_block, other.identity.cache_block
        if ours != theirs and any(
            pair[0] != pair[1] and _UNKNOWN.isdisjoint(pair) for pair in zip(ours, theirs, strict=True)
        ):
            return False
        return self.model_ids is None or other.model_ids is None or not self.model_ids.isdisjoint(other.model_ids)

    def serves(self, model: str | None) -> bool:
        """Return whether the worker serves the model; one that has not said what it serves is taken to serve any."""
        return model is None or self.model_ids is None or model in self.model_ids

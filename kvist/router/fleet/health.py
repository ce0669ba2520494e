"""Two state machines per worker, without clock or I/O: health from periodic checks, a circuit from real requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias


@dataclass(slots=True)
class HealthGauge:
    """One check never decides about a worker that has a verdict: `num_failures` or `num_successes` in a row do.

    `is_healthy` is None before the first verdict, which one passed check makes.
    """

    num_failures: int = 3
    num_successes: int = 2
    is_healthy: bool | None = None
    _streak: int = 0
    """Checks in a row that contradict the verdict."""

    def record(self, passed: bool) -> bool:
        """Take the result of a check and return whether the verdict changed."""
        if passed == self.is_healthy:
            self._streak = 0
            return False
        self._streak += 1
        needed = self.num_successes if passed else self.num_failures
        if self._streak < needed and not (passed and self.is_healthy is None):
            return False
        self.is_healthy, self._streak = passed, 0
        return True

    def give_up(self) -> None:
        """Take a failure that decides at once."""
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
    """Is told what changed the circuit: which of the methods below, and when if that is of interest."""

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

    def succeed(self) -> None:
        """Take a request's success: the circuit closes."""
        if self.state is not CircuitState.CLOSED or self.failures_in_a_row:
            self.state, self.failures_in_a_row = CircuitState.CLOSED, 0
            self.on_change("succeed", 0.0)

    def fail(self, now_s: float) -> None:
        """Take a request's failure."""
        self.failures_in_a_row += 1
        if self.state is CircuitState.HALF_OPEN or self.failures_in_a_row >= self.num_failures:
            self.state = CircuitState.OPEN
            self.retry_at_s = now_s + self.cooldown_s
        self.on_change("fail", now_s)

    def abandon(self) -> None:
        """Take the end of a trial that proved nothing."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.OPEN
            self.on_change("abandon", 0.0)

    def doubt(self) -> None:
        """Open at the next failure: requests of another router fail there, which may be its own fault."""
        self.failures_in_a_row = max(self.failures_in_a_row, self.num_failures - 1)

    def apply(self, what: Change, now_s: float) -> None:
        """Take what changed the same circuit in another process, as `on_change` was told there."""
        if what == "fail":
            self.fail(now_s)
        else:
            getattr(self, what)()

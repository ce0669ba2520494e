"""Health and circuit, step by step with a clock in the test's hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvist.router.fleet.worker import CircuitBreaker, CircuitState, HealthGauge


def test_a_new_worker_is_healthy_after_one_passed_check() -> None:
    gauge = HealthGauge(num_failures=3)
    assert gauge.is_healthy is None
    assert gauge.record(True)
    assert gauge.is_healthy


def test_failures_must_come_in_a_row() -> None:
    gauge = HealthGauge(num_failures=3)
    gauge.record(True)
    verdicts = []
    for passed in (False, False, True, False, False, False):
        gauge.record(passed)
        verdicts.append(gauge.is_healthy)
    assert verdicts == [True, True, True, True, True, False]


def test_an_unhealthy_worker_needs_two_passed_checks() -> None:
    gauge = HealthGauge(num_failures=1)
    gauge.record(False)
    assert gauge.is_healthy is False
    assert [gauge.record(passed) for passed in (True, False, True, True)] == [False, False, False, True]
    assert gauge.is_healthy


def test_a_worker_that_never_passed_becomes_unhealthy_too() -> None:
    gauge = HealthGauge(num_failures=2)
    assert [gauge.record(False), gauge.record(False)] == [False, True]
    assert gauge.is_healthy is False


def test_a_circuit_opens_after_failures_in_a_row_and_waits() -> None:
    breaker = CircuitBreaker(num_failures=2, cooldown_s=10.0)
    breaker.fail(0.0)
    breaker.succeed()
    breaker.fail(1.0)
    assert breaker.allows(1.0)
    breaker.fail(2.0)
    assert breaker.state is CircuitState.OPEN
    assert not breaker.allows(11.9)
    assert breaker.allows(12.0)


def test_one_trial_at_a_time_decides() -> None:
    breaker = CircuitBreaker(num_failures=1, cooldown_s=10.0)
    breaker.fail(0.0)
    assert breaker.begin()
    assert breaker.state is CircuitState.HALF_OPEN
    assert not breaker.allows(99.0)
    breaker.fail(10.0)
    assert breaker.state is CircuitState.OPEN
    assert not breaker.allows(19.0)
    assert breaker.begin()
    breaker.succeed()
    assert breaker.state is CircuitState.CLOSED


def test_a_trial_without_a_verdict_leaves_room_for_the_next() -> None:
    breaker = CircuitBreaker(num_failures=1, cooldown_s=10.0)
    breaker.fail(0.0)
    breaker.begin()
    breaker.abandon()
    assert breaker.allows(10.0)


def test_requests_through_a_closed_circuit_are_no_trials() -> None:
    breaker = CircuitBreaker()
    assert not breaker.begin()
    breaker.abandon()
    assert breaker.state is CircuitState.CLOSED


@given(st.lists(st.sampled_from(["succeed", "fail", "send", "abandon", "wait"]), max_size=60))
def test_a_circuit_is_never_stuck(steps: list[str]) -> None:
    """Whatever happened, the cooldown later and with no trial under way a request may be sent."""
    breaker, now_s, is_trial = CircuitBreaker(num_failures=3, cooldown_s=5.0), 0.0, False
    for step in steps:
        if step == "wait":
            now_s += 2.0
        elif step == "send" and breaker.allows(now_s):
            is_trial = breaker.begin() or is_trial
        elif step == "succeed":
            breaker.succeed()
            is_trial = False
        elif step == "fail":
            breaker.fail(now_s)
            is_trial = False
        elif step == "abandon" and is_trial:
            breaker.abandon()
            is_trial = False
    assert is_trial or breaker.allows(now_s + 5.0)

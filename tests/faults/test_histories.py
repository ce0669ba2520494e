"""Random lives under faults, in simulated time: whatever happened, the index is soon exactly what the engines hold."""

from __future__ import annotations

import logging

import pytest
from fault_harness.fleet import Tally
from fault_harness.plan import STEPS, Plan, Step, plan_of
from fault_harness.play import play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

STEP = st.builds(Step, st.sampled_from(sorted(STEPS)), st.integers(0, 7), st.integers(0, 1 << 16))


@pytest.fixture(autouse=True)
def quiet():
    """Every fault is logged, as it should be; a million lines slow the histories down."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def play_all(seeds, kinds: tuple[str, ...], tally: Tally) -> None:
    for seed in seeds:
        tally.add(play(plan_of(seed, kinds)))


def test_the_index_is_the_union_of_what_publishers_hold(seeds, tally):
    play_all(seeds or range(100), ("embedded",), tally)


def test_what_stock_engines_tell_is_exact_or_partial_and_nothing_is_invented(seeds, tally):
    play_all(seeds or range(100), ("stock",), tally)


def test_what_sidecars_that_forget_tell_is_exact_or_partial_and_nothing_is_invented(seeds, tally):
    play_all(seeds or range(50), ("sidecar",), tally)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param("embedded", 100_060, id="right by chance before a clock that went back is believed"),
        pytest.param("stock", 100_467, id="an engine speaks before it is connected to"),
        pytest.param("stock", 100_874, id="taken over from a peer that lags behind an engine's restart"),
        pytest.param("stock", 101_675, id="messages of a process before, unread while the next one answers"),
        pytest.param("stock", 100_007, id="a rank that was whole, and was told in part"),
    ],
)
def test_what_went_wrong_once_does_not_again(kind, seed):
    play(plan_of(seed, (kind,)))


@given(seed=st.integers(0, 1 << 16), steps=st.lists(STEP, max_size=40))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_short_history_leads_astray(seed, steps):
    plan = plan_of(seed)
    play(Plan(seed, plan.kinds, plan.settings, tuple(steps)))


def test_a_seed_tells_all_of_a_history():
    first, second = play(plan_of(7)), play(plan_of(7))
    assert first == second


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kinds", [("embedded",), ("stock",), ("sidecar",), ("embedded", "stock")], ids="-".join)
def test_a_soak_of_histories(kinds, seeds, tally):
    play_all(seeds or range(100_000, 105_000), kinds, tally)

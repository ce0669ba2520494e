"""Rates learnt from recordings, of workers whose rates are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import InvalidValueError
from kvist.simulate.fleet import Simulation, at_load
from kvist.simulate.peers import POLICIES
from kvist.simulate.rates import fit, read_rates
from kvist.simulate.trace import TraceLine, tool_agents
from kvist.simulate.worker import Machine


def recorded(machines: list[Machine], load: float) -> Iterator[TraceLine]:
    """Yield what a router would have recorded of a fleet."""
    trace = at_load(tool_agents(1200), machines, load, seed=1)
    driver: Any = POLICIES["least-loaded"](num_workers=len(machines), block_size=trace.block_size)
    simulation = Simulation(trace, machines, driver)
    workers: dict[int, int] = {}
    route = driver.route

    def note(now_s: float, request_id: int, *rest: Any) -> int:
        workers[request_id] = route(now_s, request_id, *rest)
        return workers[request_id]

    driver.route = note
    simulation.run()
    for job in simulation.jobs:
        yield TraceLine(
            timestamp=1e3 * job.at_s - 250,
            queue_s=0.25,
            input_length=job.request.num_tokens,
            output_length=job.request.num_output_tokens,
            worker=f"w{workers[job.request_id]}",
            first_byte_s=job.answered_at_s - job.at_s + 0.25,
            total_s=job.done_at_s - job.at_s + 0.25,
            predicted_cached_tokens=10**6,  # what the worker says counts
            cached_tokens=job.num_cached_tokens,
        )


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_the_rates_of_each_worker_are_learnt_from_its_answers(load: float) -> None:
    fast = Machine()
    slow = replace(fast, step_s=0.02, prefill_s=200e-6, context_s=0.1e-6, alpha=1e-4)
    fits = fit(recorded([fast, slow], load))
    assert list(fits) == ["w0", "w1"]
    for machine, learnt in ((fast, fits["w0"]), (slow, fits["w1"])):
        assert learnt.error < 0.05
        assert learnt.machine.step_s == pytest.approx(machine.step_s, rel=0.15)
        for num_tokens in (500, 4000, 40_000):
            expected_s = machine.prefill_time_s(0, num_tokens)
            assert learnt.machine.prefill_time_s(0, num_tokens) == pytest.approx(expected_s, rel=0.1)
        assert learnt.machine.context_s == pytest.approx(machine.context_s, rel=0.2 if load < 0.5 else 0.6)


def test_what_is_no_streamed_answer_teaches_nothing() -> None:
    lines = list(recorded([Machine()], 0.3))
    left_out = [
        TraceLine(timestamp=5.0, input_length=100, output_length=0, worker="w0", status=503, total_s=9.0),
        TraceLine(
            timestamp=5.0, input_length=10, output_length=9, worker="w0", streamed=False, first_byte_s=9, total_s=9
        ),
        TraceLine(timestamp=5.0, input_length=100, output_length=9, worker="w0", total_s=9.0),
    ]
    assert fit([*lines, *left_out]) == fit(lines)
    with pytest.raises(InvalidValueError, match="streamed answers in the recording: got 19"):
        fit(lines[:19])


def test_a_file_of_rates_is_read_and_bad_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"a": asdict(Machine()), "b": {"prefill_s": 1e-3}}))
    assert read_rates(path) == [Machine(), Machine(prefill_s=1e-3)]
    for bad in ("{}", "[]", "x", '{"a": {"prefill_s": 0}}', '{"a": {"prefill_s": "fast"}}', '{"a": {"speed": 3}}'):
        path.write_text(bad)
        with pytest.raises(InvalidValueError, match="rates"):
            read_rates(path)

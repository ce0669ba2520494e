"""When messages are due."""

from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.replay.script import Pace


def test_messages_are_spaced_as_recorded_by_the_speed(make):
    records = make.records(*(make.batch(i) for i in range(4)), step_ms=500)
    for speed, expected in ((1.0, [0.0, 0.5, 1.0, 1.5]), (4.0, [0.0, 0.125, 0.25, 0.375]), (None, [0.0] * 4)):
        pace = Pace(speed)
        assert [pace.due_s(0, record) for record in records] == pytest.approx(expected)


def test_no_time_passes_between_sessions_and_rounds(make):
    first = make.records(make.batch(0), make.batch(1), step_ms=1000)
    second = [record._replace(session=1, time_ns=record.time_ns + 10**15) for record in first]
    pace = Pace()
    due = [pace.due_s(round_idx, record) for round_idx in range(2) for record in first + second]
    assert due == pytest.approx([0, 1, 1, 2, 2, 3, 3, 4])


def test_due_times_never_decrease(make):
    first, second = make.records(make.batch(0), make.batch(1))
    pace = Pace()
    pace.due_s(0, first)
    assert pace.due_s(0, second._replace(time_ns=5)) == 0.0


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_that_is_none_is_refused(speed):
    with pytest.raises(InvalidValueError, match="speed"):
        Pace(speed)

"""Which messages are meant."""

from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.replay import RecordedSource
from kvist.replay.script import Moment, Selection, worker_of


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("0", Moment(0.0, is_unix=False)),
        ("12.5", Moment(12.5, is_unix=False)),
        ("1763650000.5", Moment(1763650000.5, is_unix=True)),
        ("2025-11-20T14:46:40Z", Moment(1763650000.0, is_unix=True)),
        ("2025-11-20T15:46:40+01:00", Moment(1763650000.0, is_unix=True)),
    ],
)
def test_a_moment_is_seconds_unix_time_or_iso(text, moment):
    assert Moment.parse("--since", text) == moment


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "2025-13-01"])
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(InvalidValueError, match="--until: got"):
        Moment.parse("--until", text)


def test_a_range_has_its_beginning_and_not_its_end(make):
    records = make.records(*(make.batch(i) for i in range(5)), step_ms=1000)
    unix_s = make.time_ns / 1e9
    for since, until in ((Moment(1, False), Moment(3, False)), (Moment(unix_s + 1, True), Moment(unix_s + 3, True))):
        since_ns, until_ns = Selection(since=since, until=until).times_ns(make.time_ns)
        assert [record.message.sequence for record in records if since_ns <= record.time_ns < until_ns] == [1, 2]


def test_a_worker_is_whom_the_batch_names_else_the_source(make):
    engine = RecordedSource("pod-9", "tcp://h:1")
    (ours,) = make.records(make.batch(0, worker="gpu-0"))
    (theirs,) = make.records(make.engine_batch(0), source=engine)
    (broken,) = make.records(make.batch(0)._replace(payload=b"\xc1"), source=engine)
    assert [worker_of(record) for record in (ours, theirs, broken)] == ["gpu-0", "pod-9", "pod-9"]
    assert [Selection({"pod-9"}).has_worker(record) for record in (ours, theirs, broken)] == [False, True, True]
    assert all(Selection().has_worker(record) for record in (ours, theirs, broken))

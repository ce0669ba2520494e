"""Writing recordings: rotation, going on where one ended or was torn, and being killed."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from kvist.errors import InvalidValueError
from kvist.replay import RecordedSource, RecordingError, RecordingReader, RecordingWriter

WRITE_FOR_EVER = """
import sys
from pathlib import Path
from kvist.events.transports import Message
from kvist.replay import RecordedSource, RecordingWriter
writer = RecordingWriter(Path(sys.argv[1]), [RecordedSource("s", "tcp://h:1")], rotate_bytes=1 << 20)
sequence = 0
while True:
    writer.add(0, Message(b"t", sequence, sequence.to_bytes(8, "big") * 2000), sequence * 100_000_000, 0)
    sequence += 1
    if sequence == 2000:
        print("going", flush=True)
"""


def test_a_block_is_written_once_it_is_a_second_old_or_large(make, tmp_path):
    with RecordingWriter(tmp_path / "r", [make.source]) as writer, RecordingReader(tmp_path / "r") as reader:
        writer.add(0, make.batch(0), 0, 0)
        writer.flush_if_due(999_999_999)
        assert reader.read() is None
        writer.flush_if_due(1_000_000_000)
        assert len(reader.read()) == 1
        writer.add(0, make.batch(1, make.stored(*range(40_000))), 1, 0)
        assert len(reader.read()) == 1


def test_a_set_of_files_is_read_as_one(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    make.write(tmp_path / "r", records, rotate_bytes=8192)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    assert all(part.stat().st_size <= 8192 for part in parts)
    assert make.read(tmp_path / "r") == records


def test_a_message_larger_than_the_rotation_size_gets_a_file_of_its_own(make, tmp_path):
    payload = random.Random(0).randbytes(20_000)
    records = make.records(*(make.batch(0)._replace(payload=payload) for _ in range(3)), step_ms=2000)
    make.write(tmp_path / "r", records, rotate_bytes=8192)
    assert len(list(tmp_path.iterdir())) == 3
    assert make.read(tmp_path / "r") == records


def test_appending_begins_a_session_behind_what_is_there(make, tmp_path):
    first, second = make.records(make.batch(0), make.batch(1)), make.records(make.batch(2))
    make.write(tmp_path / "r", first)
    make.write(tmp_path / "r", second, appends=True)
    assert make.read(tmp_path / "r") == first + [record._replace(session=1) for record in second]


@pytest.mark.parametrize("rotate_bytes", [None, 8192])
def test_appending_goes_on_in_the_last_file(make, tmp_path, rotate_bytes):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(200)), step_ms=400)
    for session in range(3):
        make.write(tmp_path / "r", records, rotate_bytes=rotate_bytes, appends=session > 0)
    assert make.read(tmp_path / "r") == [record._replace(session=n) for n in range(3) for record in records]


def test_appending_cuts_a_torn_end_off_at_every_place_it_may_be_torn(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(i)) for i in range(12)), step_ms=350)
    whole = make.write(tmp_path / "r", records).read_bytes()
    for cut in range(0, len(whole), 7):
        path = tmp_path / f"cut{cut}"
        path.write_bytes(whole[:cut])
        before = make.read(path)
        with RecordingWriter(path, [make.source], appends=True) as writer:
            assert (writer.torn.num_bytes if writer.torn else 0) <= cut
            writer.add(0, make.batch(99), 0, 0)
        read = make.read(path)
        assert read[: len(before)] == before
        assert [record.message.sequence for record in read[len(before) :]] == [99]


def test_appending_to_what_is_no_recording_or_damaged_changes_nothing(make, tmp_path):
    damaged = bytearray(make.write(tmp_path / "r", make.records(make.batch(0))).read_bytes())
    damaged[-30] ^= 1
    for data in (b"a letter to my aunt", bytes(damaged)):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(RecordingError):
            RecordingWriter(tmp_path / "x", appends=True)
        assert (tmp_path / "x").read_bytes() == data


def test_what_exists_is_not_overwritten(make, recording):
    path = recording(make.batch(0))
    with pytest.raises(InvalidValueError, match="a new file, or one to be appended to"):
        RecordingWriter(path)
    assert len(make.read(path)) == 1


def test_a_leftover_part_is_not_taken_into_a_new_recording(tmp_path):
    (tmp_path / "r.1").write_bytes(b"")
    with pytest.raises(InvalidValueError, match=r"r\.1"):
        RecordingWriter(tmp_path / "r")


def test_two_writers_of_one_file_are_one_too_many(make, tmp_path):
    with (
        RecordingWriter(tmp_path / "r", [make.source]),
        pytest.raises(InvalidValueError, match="nobody is writing"),
    ):
        RecordingWriter(tmp_path / "r", [make.source], appends=True)


def test_a_source_may_be_added_at_any_time(make, tmp_path):
    other = RecordedSource("late", "tcp://h:1", "sglang")
    records = make.records(make.batch(0), make.batch(1)) + make.records(make.batch(0), source=other)
    make.write(tmp_path / "r", records)
    assert make.read(tmp_path / "r") == records


def test_rotation_below_a_few_frames_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="rotate_bytes: got 10, expected at least 4096 bytes"):
        RecordingWriter(tmp_path / "r", rotate_bytes=10)
    assert not list(tmp_path.iterdir())


def test_what_a_recorder_had_written_when_it_was_killed_is_read_and_appended_to(make, tmp_path):
    path = tmp_path / "r"
    with subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "going\n"
        os.kill(process.pid, signal.SIGKILL)
    with RecordingReader(path) as reader:
        sequences = [record.message.sequence for record in reader]
        assert not reader.is_ended
    assert len(sequences) >= 1980
    assert sequences == list(range(len(sequences)))
    with RecordingWriter(path, [make.source], appends=True) as writer:
        writer.add(0, make.batch(7), 0, 0)
    assert [record.message.sequence for record in make.read(path)] == [*sequences, 7]


def test_when_the_disk_is_full_that_is_raised_and_what_was_written_is_read(make, tmp_path, monkeypatch):
    writer = RecordingWriter(tmp_path / "r", [make.source])
    writer.add(0, make.batch(0), 0, 0)
    writer.flush()
    writer.add(0, make.batch(1), 0, 0)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"), writer:
            writer.flush()
    assert full.call_count == 1
    assert [record.message.sequence for record in make.read(tmp_path / "r")] == [0]


def test_what_was_added_is_written_whatever_else_goes_wrong(make, tmp_path):
    writer = RecordingWriter(tmp_path / "r", [make.source])
    writer.add(0, make.batch(0), 0, 0)
    with pytest.raises(ConnectionError), writer:
        raise ConnectionError
    assert len(make.read(tmp_path / "r")) == 1

"""Writing recordings: parts, going on behind what is there, being killed, and disks that are full."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from mcap.reader import make_reader

from kvist.errors import InvalidValueError
from kvist.replay import RecordedSource, RecordingError, RecordingReader, RecordingWriter
from kvist.replay import writer as writer_module

WRITE_FOR_EVER = """
import sys
from pathlib import Path
from kvist.events.transports import Message
from kvist.replay import RecordedSource, RecordingWriter
source = RecordedSource("s", "tcp://h:1")
writer = RecordingWriter(Path(sys.argv[1]), [source], rotate_bytes=1 << 20)
sequence = 0
while True:
    writer.add(source, Message(b"t", sequence, sequence.to_bytes(8, "big") * 2000), sequence * 100_000_000)
    sequence += 1
    if sequence == 2000:
        print("going", flush=True)
"""


def parts_of(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_chunk_is_written_once_it_is_a_second_old_or_large(make, tmp_path):
    path = tmp_path / "r"
    with RecordingWriter(path, [make.source]) as writer:
        writer.add(make.source, make.batch(0), 0)
        writer.flush_if_due(999_999_999)
        assert len(make.read(path)) == 0
        writer.flush_if_due(1_000_000_000)
        assert len(make.read(path)) == 1
        writer.add(make.source, make.batch(1, make.stored(*range(40_000))), 1)
        assert len(make.read(path)) == 2


def test_a_set_of_files_is_read_as_one(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    make.write(tmp_path / "r.mcap", records, rotate_bytes=8192)
    assert {"r.mcap", "r.1.mcap", "r.2.mcap"} <= {*parts_of(tmp_path)}
    assert make.read(tmp_path / "r.mcap") == records


def test_a_part_ends_with_the_chunk_that_brings_it_to_its_size(make, tmp_path):
    payload = random.Random(0).randbytes(20_000)
    records = make.records(*(make.batch(0)._replace(payload=payload) for _ in range(3)), step_ms=2000)
    make.write(tmp_path / "r", records, rotate_bytes=8192)
    assert parts_of(tmp_path) == ["r", "r.1", "r.2"]
    assert make.read(tmp_path / "r") == records


def test_a_part_that_would_need_too_much_memory_is_followed_by_another(make, tmp_path, monkeypatch):
    """Whoever makes topics up, or sends anything every second for weeks, costs files and no memory."""
    monkeypatch.setattr(writer_module, "MAX_CHUNKS_A_PART", 50)
    monkeypatch.setattr(writer_module, "MAX_CHANNELS_A_PART", 40)
    topics = [make.batch(0)._replace(topic=number.to_bytes(4, "big")) for number in range(300)]
    numbers = [make.batch(0)._replace(sequence=number << 32) for number in range(100)]
    for name, messages, step_ms in (
        ("topics", topics * 3, 30),
        ("numbers", numbers, 30),
        ("slow", topics[:1] * 200, 1000),
    ):
        records = make.records(*messages, step_ms=step_ms)
        (tmp_path / name).mkdir()
        make.write(tmp_path / name / "r", records)
        assert len(parts_of(tmp_path / name)) >= 3
        assert make.read(tmp_path / name / "r") == records


def test_appending_begins_a_session_in_a_part_of_its_own_behind_what_is_there(make, tmp_path):
    first, second = make.records(make.batch(0), make.batch(1)), make.records(make.batch(2))
    before = make.write(tmp_path / "r", first).read_bytes()
    make.write(tmp_path / "r", second, appends=True)
    make.write(tmp_path / "r", second, appends=True, rotate_bytes=8192)
    assert (tmp_path / "r").read_bytes() == before
    later = [record._replace(session=session) for session in (1, 2) for record in second]
    assert make.read(tmp_path / "r") == first + later


def test_appending_to_what_was_cut_anywhere_changes_nothing_of_it(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(i)) for i in range(12)), step_ms=350)
    whole = make.write(tmp_path / "r", records).read_bytes()
    for cut in range(0, len(whole), 23):
        path = tmp_path / f"cut{cut}"
        path.write_bytes(whole[:cut])
        before = make.read(path)
        with RecordingWriter(path, [make.source], appends=True) as writer:
            writer.add(make.source, make.batch(99), make.time_ns)
        with RecordingReader(path) as reader:
            read = list(reader)
            assert sum(torn.num_bytes for torn in reader.torn) <= cut
            assert all(torn.path == path for torn in reader.torn)
        assert read[: len(before)] == before
        assert [record.message.sequence for record in read[len(before) :]] == [99]
        assert path.read_bytes() == whole[:cut]


def test_appending_goes_on_behind_a_part_that_a_crash_left_empty(make, tmp_path):
    first = make.write(tmp_path / "r", make.records(make.batch(0)))
    for number in (1, 2):
        make.write(first, make.records(make.batch(number)), appends=True)
        os.truncate(tmp_path / f"r.{number}", 20)
    make.write(first, make.records(make.batch(3)), appends=True)
    read = make.read(first)
    assert [(record.session, record.message.sequence) for record in read] == [(0, 0), (1, 3)]


def test_appending_goes_on_behind_the_last_part_when_the_first_were_deleted(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(200)), step_ms=400)
    make.write(tmp_path / "r.mcap", records, rotate_bytes=8192)
    names = parts_of(tmp_path)
    (tmp_path / "r.mcap").unlink()
    make.write(tmp_path / "r.mcap", records, appends=True)
    assert parts_of(tmp_path) == sorted([*names, f"r.{len(names)}.mcap"])[: len(names)] or "r.mcap" not in names[1:]
    assert (tmp_path / f"r.{len(names)}.mcap").exists()
    read = make.read(tmp_path / "r.mcap")
    assert read[-len(records) :] == [record._replace(session=1) for record in records]


def test_appending_to_what_is_no_recording_changes_nothing(tmp_path):
    (tmp_path / "x").write_bytes(b"a letter to my aunt")
    with pytest.raises(RecordingError, match="expected a recording of events, an MCAP file"):
        RecordingWriter(tmp_path / "x", appends=True)
    assert parts_of(tmp_path) == ["x"]


def test_what_exists_is_not_overwritten_nor_taken_into_a_new_recording(make, recording, tmp_path):
    path = recording(make.batch(0))
    with pytest.raises(InvalidValueError, match="a new file, or one to be appended to"):
        RecordingWriter(path)
    assert len(make.read(path)) == 1
    (tmp_path / "r.1.mcap").write_bytes(b"")
    with pytest.raises(InvalidValueError, match=r"r\.mcap"):
        RecordingWriter(tmp_path / "r.mcap")


def test_two_writers_of_one_recording_are_one_too_many(make, tmp_path):
    with RecordingWriter(tmp_path / "r", [make.source], rotate_bytes=4096) as writer:
        for number in range(2):
            with pytest.raises(InvalidValueError, match="nobody is writing"):
                RecordingWriter(tmp_path / "r", [make.source], appends=True)
            for _ in range(3):
                payload = random.Random(number).randbytes(5000)
                writer.add(make.source, make.batch(0)._replace(payload=payload), 0)


def test_rotation_below_a_few_records_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="rotate_bytes: got 10, expected at least 4096 bytes"):
        RecordingWriter(tmp_path / "r", rotate_bytes=10)
    assert not parts_of(tmp_path)


def test_what_a_recorder_had_written_when_it_was_killed_is_read_and_appended_to(make, tmp_path):
    path = tmp_path / "r"
    with subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "going\n"
        os.kill(process.pid, signal.SIGKILL)
    with RecordingReader(path) as reader:
        sequences = [record.message.sequence for record in reader]
    assert len(sequences) >= 1980
    assert sequences == list(range(len(sequences)))
    with RecordingWriter(path, [make.source], appends=True) as writer:
        writer.add(make.source, make.batch(7), 0)
    assert [record.message.sequence for record in make.read(path)] == [*sequences, 7]


def test_when_the_disk_is_full_that_is_raised_with_the_file_and_what_was_written_is_read(make, tmp_path, monkeypatch):
    writer = RecordingWriter(tmp_path / "r", [make.source])
    writer.add(make.source, make.batch(0), 0)
    writer.flush()
    writer.add(make.source, make.batch(1), 0)
    full = Mock(side_effect=[3, OSError(errno.ENOSPC, "No space left on device")])
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(OSError, match=rf"{tmp_path / 'r'}.*No space left"), writer:
            writer.flush()
    assert full.call_count == 2
    assert [record.message.sequence for record in make.read(tmp_path / "r")] == [0]


def test_what_was_added_is_written_whatever_else_goes_wrong(make, tmp_path):
    writer = RecordingWriter(tmp_path / "r", [make.source])
    writer.add(make.source, make.batch(0), 0)
    with pytest.raises(ConnectionError), writer:
        raise ConnectionError
    assert len(make.read(tmp_path / "r")) == 1


def test_other_tools_read_messages_with_their_topics_and_times(make, tmp_path):
    messages = [make.batch(i, make.stored(i)) for i in range(40)]
    records = make.records(*messages, step_ms=300)
    path = make.write(
        tmp_path / "r.mcap", [*records, *make.records(make.engine_batch(2**40, timestamp_s=float("nan")))]
    )
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        read = list(reader.iter_messages(topics=["pod-1/kv/w/0"], starting_at=records[10].time_ns))
        assert [message.data for _, _, message in read] == [message.payload for message in messages[10:]]
        assert [message.log_time for _, _, message in read] == [record.time_ns for record in records[10:40]]
        assert {message.publish_time for _, _, message in read} == {1_763_650_000_500_000_000}
        assert reader.get_summary().statistics.message_count == 41
        (engines,) = reader.iter_messages(topics=["pod-1"])
        assert engines[2].publish_time == make.time_ns
        assert [metadata.name for metadata in reader.iter_metadata()] == ["kvist.recording"]


def test_a_topic_as_large_as_a_message_may_be_is_recorded(make, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_CHANNEL_BYTES", 1 << 20)
    messages = [make.batch(0)._replace(topic=bytes([number]) * size) for number, size in ((1, 60 << 20), (2, 1 << 21))]
    records = make.records(*messages, make.batch(1))
    path = make.write(tmp_path / "r", records)
    assert make.read(path) == records
    assert parts_of(tmp_path) == ["r", "r.1", "r.2"]


def test_a_next_part_that_cannot_be_begun_leaves_the_one_before_whole_and_other_files_alone(make, tmp_path):
    payload = random.Random(0).randbytes(5000)
    message = make.batch(0)._replace(payload=payload)
    writer = RecordingWriter(tmp_path / "r", rotate_bytes=4096)
    writer.add(make.source, message, 0)
    writer.flush()
    (tmp_path / "r.1").mkdir()
    with pytest.raises(InvalidValueError, match="File exists"):
        writer.add(make.source, message, 1)
    others = [os.open(os.devnull, os.O_RDWR) for _ in range(8)]  # one of them has the number of the closed file
    writer.close()
    for other in others:
        os.close(other)
    (tmp_path / "r.1").rmdir()
    assert [record.message for record in make.read(tmp_path / "r")] == [message]


def test_sources_of_any_name_and_topics_of_any_bytes_come_back(make, tmp_path):
    sources = [make.source, RecordedSource("späte/Quelle", "tcp://h:1", "sglang")]
    records = [
        record._replace(message=record.message._replace(topic=topic, sequence=sequence))
        for source in sources
        for topic in (b"", b"\xff\x00", "ö".encode())
        for sequence in (0, 2**32 - 1, 2**32, 2**64 - 1)
        for record in make.records(make.batch(0), source=source)
    ]
    path = make.write(tmp_path / "r", records)
    assert make.read(path) == records
    with RecordingReader(path) as reader:
        assert reader.sources() == sources

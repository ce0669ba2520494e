"""Reading recordings that are whole, growing, cut, damaged, foreign, or of another version."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.replay import RecordingError, RecordingReader, RecordingWriter
from kvist.replay.frames import HEADER_BYTES, PREAMBLE, FrameKind, pack_frame, unpack_header


def frame_starts(data: bytes) -> list[int]:
    """Return where each frame begins, and the end."""
    starts = [len(PREAMBLE)]
    while starts[-1] < len(data):
        header = unpack_header(data[starts[-1] : starts[-1] + HEADER_BYTES])
        starts.append(starts[-1] + HEADER_BYTES + header.stored_bytes)
    return starts


@pytest.fixture(scope="module")
def whole(make, tmp_path_factory):
    """Return the bytes of a recording of twelve messages in four blocks, and its records."""
    records = make.records(*(make.batch(i, make.stored(i + 1)) for i in range(12)), step_ms=350)
    path = make.write(tmp_path_factory.mktemp("whole") / "r", records)
    return path.read_bytes(), records


def read_up_to_damage(path: Path):
    """Return the records in front of whatever is wrong, and what that is."""
    records = []
    with RecordingReader(path) as reader:
        try:
            records += reader
        except RecordingError as error:
            return records, error
        return records, reader.torn


def num_before(whole, offset):
    """Return how many records lie in whole frames in front of an offset."""
    data, _ = whole
    starts = frame_starts(data)
    num_blocks = sum(
        1 for start, end in pairwise(starts) if end <= offset and data[start : start + 4] == FrameKind.BLOCK.value
    )
    return num_blocks * 3


def test_what_was_written_is_read_byte_for_byte_and_with_its_times(whole, tmp_path):
    data, records = whole
    (tmp_path / "r").write_bytes(data)
    with RecordingReader(tmp_path / "r") as reader:
        assert list(reader) == records
        assert reader.torn is None
        assert reader.is_ended
        assert reader.num_bytes_read == reader.size_bytes == len(data)
    assert len(frame_starts(data)) - 1 == 7  # a start, another with the source, four blocks, an end


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_cut_anywhere_every_whole_frame_is_read_and_the_rest_reported(whole, tmp_path_factory, data):
    size = len(whole[0])
    cut = data.draw(st.integers(0, size - 1))
    path = tmp_path_factory.mktemp("cut") / "r"
    path.write_bytes(whole[0][:cut])
    records, torn = read_up_to_damage(path)
    assert records == whole[1][: num_before(whole, cut)]
    last_start = max([0, *(start for start in frame_starts(whole[0]) if start <= cut)])
    assert torn == (None if last_start == cut else (path, last_start, cut - last_start))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_with_any_byte_altered_every_frame_before_it_is_read_and_the_damage_placed(whole, tmp_path_factory, data):
    place = data.draw(st.integers(0, len(whole[0]) - 1))
    altered = bytearray(whole[0])
    altered[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("altered") / "r"
    path.write_bytes(altered)
    records, error = read_up_to_damage(path)
    assert records == whole[1][: num_before(whole, place)]
    assert isinstance(error, RecordingError)
    assert error.path == path
    frame = max([0, *(start for start in frame_starts(whole[0]) if start <= place)])
    assert error.offset == (frame if place >= len(PREAMBLE) else 6 if place >= 6 else 0)
    assert str(path) in str(error)
    assert f"byte {error.offset}" in str(error)
    assert error.expected


@given(noise=st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_whatever_stands_in_a_file_reading_raises_nothing_but_its_own_error(whole, tmp_path_factory, noise):
    for data in (noise, PREAMBLE + noise, whole[0] + noise):
        path = tmp_path_factory.mktemp("noise") / "r"
        path.write_bytes(data)
        read_up_to_damage(path)


@given(body=st.binary(max_size=60), kind=st.sampled_from(FrameKind))
@settings(max_examples=100, deadline=None)
def test_a_well_framed_body_that_says_something_else_is_an_error_at_its_frame(whole, tmp_path_factory, body, kind):
    path = tmp_path_factory.mktemp("body") / "r"
    before = whole[0][: frame_starts(whole[0])[3]]
    path.write_bytes(before + pack_frame(kind, b"\xc1" + body))
    records, error = read_up_to_damage(path)
    assert len(records) == 3
    assert isinstance(error, RecordingError)
    assert error.offset == len(before)


def test_another_file_is_refused_at_once(tmp_path):
    path = tmp_path / "r"
    path.write_bytes(b"PK\x03\x04 something else")
    with RecordingReader(path) as reader, pytest.raises(RecordingError, match="expected a recording") as refused:
        reader.read()
    assert refused.value.offset == 0


def test_a_later_version_is_refused_with_both_numbers(whole, tmp_path):
    path = tmp_path / "r"
    path.write_bytes(whole[0][:6] + b"\x09\x00" + whole[0][8:])
    with RecordingReader(path) as reader, pytest.raises(RecordingError, match="found version 9, expected version 1"):
        reader.read()


def test_a_message_of_a_source_that_was_not_named_is_an_error(make, tmp_path):
    with RecordingWriter(tmp_path / "r", [make.source]) as writer:
        writer.add(1, make.batch(0), 0, 0)
    with RecordingReader(tmp_path / "r") as reader, pytest.raises(RecordingError, match="unknown source"):
        reader.read()


def test_a_compressed_body_that_is_longer_than_it_says_is_an_error(tmp_path, whole):
    frame = bytearray(pack_frame(FrameKind.BLOCK, bytes(100_000)))
    from kvist.replay import frames

    lengths = bytearray(frame[:20])
    lengths[8:12] = (50_000).to_bytes(4, "little")
    path = tmp_path / "r"
    start = whole[0][: frame_starts(whole[0])[1]]
    path.write_bytes(start + bytes(lengths) + frames._check(bytes(lengths)) + frame[24:])
    _, error = read_up_to_damage(path)
    assert isinstance(error, RecordingError)


def test_a_reader_follows_what_is_being_written_through_its_rotation(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    read = []
    with RecordingWriter(tmp_path / "r", [make.source], rotate_bytes=4096) as writer:
        reader = RecordingReader(tmp_path / "r")
        for record in records:
            writer.add(0, record.message, record.mono_ns, record.wall_ns)
            while (block := reader.read()) is not None:
                read += block
            assert not reader.is_ended
        assert writer.num_parts > 3
        assert len(records) - 3 <= len(read) < len(records)
    with reader:
        read += reader
        assert read == records
        assert reader.is_ended


def test_a_reader_takes_a_half_written_frame_once_it_is_whole(whole, tmp_path):
    path = tmp_path / "r"
    starts = frame_starts(whole[0])
    path.write_bytes(whole[0][: starts[1] + 30])
    with RecordingReader(path) as reader:
        assert reader.read() is None
        assert reader.torn == (path, starts[1], 30)
        path.write_bytes(whole[0])
        assert reader.read() == whole[1][:3]


def test_a_middle_part_that_was_cut_is_an_error_and_not_an_end(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    path = make.write(tmp_path / "r", records, rotate_bytes=4096)
    data = path.read_bytes()
    for cut, found in ((len(data) - 1, "bytes of a frame"), (frame_starts(data)[-2], "the end of the file")):
        path.write_bytes(data[:cut])
        with RecordingReader(path) as reader, pytest.raises(RecordingError, match=found):
            list(reader)


def test_a_part_of_another_recording_is_an_error(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    make.write(tmp_path / "a", records, rotate_bytes=4096)
    make.write(tmp_path / "b", records, rotate_bytes=4096)
    (tmp_path / "b.1").rename(tmp_path / "a.1")
    with (
        RecordingReader(tmp_path / "a") as reader,
        pytest.raises(RecordingError, match=r"a\.1: byte 8: found part 1 of"),
    ):
        list(reader)


def test_files_in_another_order_are_an_error(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    make.write(tmp_path / "a", records, rotate_bytes=4096)
    (tmp_path / "a.1").rename(tmp_path / "b")
    (tmp_path / "a.2").rename(tmp_path / "a.1")
    with RecordingReader(tmp_path / "a") as reader, pytest.raises(RecordingError, match=r"found part 2 of .* part 1"):
        list(reader)


def test_lengths_that_agree_but_were_not_written_are_damage_and_no_torn_end(whole, tmp_path):
    data, offset = bytearray(whole[0]), frame_starts(whole[0])[-2]
    for place in (offset + 4, offset + 8):
        data[place : place + 4] = (1 << 20).to_bytes(4, "little")
    path = tmp_path / "r"
    path.write_bytes(data)
    records, error = read_up_to_damage(path)
    assert records == whole[1]
    assert isinstance(error, RecordingError)
    assert error.offset == offset


def test_the_sources_are_told_without_reading_what_they_said(make, tmp_path):
    other = type(make.source)("pod-2", "tcp://h:2", "sglang")
    records = make.records(*(make.batch(i) for i in range(5))) + make.records(make.batch(0), source=other)
    path = make.write(tmp_path / "r", records)
    with RecordingReader(path) as reader:
        assert reader.sources() == [make.source, other]
    assert make.read(path) == records


def test_the_sources_before_the_damage_are_told(whole, tmp_path):
    path = tmp_path / "r"
    path.write_bytes(whole[0][:-30] + b"x" * 60)
    with RecordingReader(path) as reader:
        assert [source.name for source in reader.sources()] == ["pod-1"]
    path.write_bytes(b"a letter to my aunt")
    with RecordingReader(path) as reader:
        assert reader.sources() == []


def test_what_is_left_of_a_recording_is_read_from_any_of_its_files_on(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    make.write(tmp_path / "r", records, rotate_bytes=4096)
    whole_size = sum(part.stat().st_size for part in tmp_path.iterdir())
    first_size = (tmp_path / "r").stat().st_size
    (tmp_path / "r").unlink()
    with RecordingReader(tmp_path / "r.1") as reader:
        read = list(reader)
        assert reader.size_bytes == reader.num_bytes_read == whole_size - first_size
    assert 0 < len(read) < len(records)
    assert read == records[-len(read) :]

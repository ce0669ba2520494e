"""Reading recordings that are whole, growing, cut, damaged, foreign, hostile, or of another version."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from mcap.data_stream import RecordBuilder
from mcap.opcode import Opcode
from mcap.records import Channel, Chunk
from mcap.stream_reader import StreamReader
from mcap.writer import MCAP0_MAGIC, CompressionType, Writer

from kvist.replay import RecordedSource, RecordingError, RecordingReader, RecordingWriter
from kvist.replay.recording import ABOUT


def records_of(data: bytes) -> list[tuple[int, int, int]]:
    """Return kind, start and end of each of a file's records."""
    found, offset = [], len(MCAP0_MAGIC)
    while offset + 9 <= len(data):
        kind, length = struct.unpack_from("<BQ", data, offset)
        found.append((kind, offset, offset + 9 + length))
        offset += 9 + length
        if kind == Opcode.FOOTER:
            break
    return found


@pytest.fixture(scope="module")
def whole(make, tmp_path_factory):
    """Return the bytes of a recording of twelve messages in four chunks, and its records."""
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
    """Return how many messages lie in whole chunks in front of an offset."""
    return 3 * sum(1 for kind, _, end in records_of(whole[0]) if kind == Opcode.CHUNK and end <= offset)


def test_what_was_written_is_read_byte_for_byte_and_with_its_times(whole, tmp_path):
    data, records = whole
    (tmp_path / "r").write_bytes(data)
    with RecordingReader(tmp_path / "r") as reader:
        assert list(reader) == records
        assert reader.torn == []
        assert (reader.num_bytes_read, reader.num_bytes) == (len(data), len(data))
    assert sum(kind == Opcode.CHUNK for kind, _, _ in records_of(data)) == 4


def test_cut_at_any_byte_every_whole_chunk_is_read_and_the_rest_reported(whole, tmp_path):
    data, records = whole
    path, starts = tmp_path / "r", {0, *(start for _, start, _ in records_of(data))}
    for cut in range(0, len(data), 3):
        path.write_bytes(data[:cut])
        read, torn = read_up_to_damage(path)
        assert read == records[: num_before(whole, cut)]
        assert len(torn) <= 1
        begun = max(start for start in starts if start <= cut)
        assert all(each == (path, begun, cut - begun) for each in torn)


def test_what_looks_like_a_message_behind_the_end_of_the_data_is_none(whole, tmp_path):
    written, records = whole
    altered = bytearray(written)
    data_end = next(start for kind, start, _ in records_of(written) if kind == Opcode.DATA_END)
    in_summary = next(start for kind, start, _ in records_of(written) if kind == Opcode.CHANNEL and start > data_end)
    altered[in_summary] = Opcode.MESSAGE
    (tmp_path / "r").write_bytes(altered)
    assert read_up_to_damage(tmp_path / "r") == (records, [])


def test_a_record_that_claims_the_end_of_the_data_as_its_own_is_an_error(whole, tmp_path):
    altered = bytearray(whole[0])
    before, data_end = next(pair for pair in pairwise(records_of(whole[0])) if pair[1][0] == Opcode.DATA_END)
    struct.pack_into("<Q", altered, before[1] + 1, data_end[2] - before[1] - 9)
    (tmp_path / "r").write_bytes(altered)
    read, error = read_up_to_damage(tmp_path / "r")
    assert read == whole[1]
    assert isinstance(error, RecordingError)
    assert "expected the end of its data" in str(error)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_with_any_byte_altered_that_is_an_error_and_what_was_read_before_it_was_written(whole, tmp_path_factory, data):
    written, records = whole
    place = data.draw(st.integers(0, len(written) - 1))
    altered = bytearray(written)
    altered[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("altered") / "r"
    path.write_bytes(altered)
    read, error = read_up_to_damage(path)
    messages, written_messages = ([record.message for record in each] for each in (read, records))
    assert messages[: num_before(whole, place)] == written_messages[: num_before(whole, place)]
    behind = iter(written_messages)
    assert all(message in behind for message in messages)  # in their order, if not all
    data_end = next(start for kind, start, _ in records_of(written) if kind == Opcode.DATA_END)
    if place < data_end:
        assert isinstance(error, RecordingError)
        assert str(path) in str(error)
    else:  # the summary only repeats what was read
        assert read == records


@given(noise=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_whatever_stands_in_a_file_reading_raises_nothing_but_its_own_error(whole, tmp_path_factory, noise):
    footer = records_of(whole[0])[-1][1]
    for data in (noise, MCAP0_MAGIC + noise, whole[0] + noise, whole[0][:footer] + noise):
        path = tmp_path_factory.mktemp("noise") / "r"
        path.write_bytes(data)
        read_up_to_damage(path)


def with_chunk(whole, content: bytes, **altered) -> bytes:
    """Return a recording whose first chunk has this content, as it says itself but for what is altered."""
    start = next(start for kind, start, _ in records_of(whole[0]) if kind == Opcode.CHUNK)
    fields = {
        "compression": "",
        "data": content,
        "message_start_time": 0,
        "message_end_time": 0,
        "uncompressed_crc": zlib.crc32(content),
        "uncompressed_size": len(content),
    }
    builder = RecordBuilder()
    Chunk(**(fields | altered)).write(builder)
    return whole[0][:start] + builder.end()


MESSAGE = struct.pack("<BQHIQQ", Opcode.MESSAGE, 22 + 3, 1, 5, 7, 7) + b"abc"
CHANNEL = struct.pack("<BQ", Opcode.CHANNEL, 50)


@given(
    content=st.one_of(
        st.binary(max_size=60),
        st.binary(max_size=60).map(lambda noise: MESSAGE + noise),
        st.binary(max_size=60).map(lambda noise: CHANNEL + noise),
        st.tuples(st.sampled_from([3, 4, 5]), st.integers(0, 2**64 - 1), st.binary(max_size=40)).map(
            lambda parts: struct.pack("<BQ", *parts[:2]) + parts[2]
        ),
    )
)
@settings(max_examples=200, deadline=None)
def test_a_whole_chunk_that_says_anything_at_all_is_an_error_or_is_read(whole, tmp_path_factory, content):
    path = tmp_path_factory.mktemp("chunk") / "r"
    path.write_bytes(with_chunk(whole, content))
    read, error = read_up_to_damage(path)
    assert read == []
    assert isinstance(error, RecordingError) == (content not in (b"",)) or isinstance(error, list)


@pytest.mark.parametrize(
    "altered",
    [
        {"uncompressed_crc": 1},
        {"uncompressed_size": 5},
        {"compression": "zstd"},
        {"compression": "lz4"},
        {"compression": "brotli"},
        {"compression": "zstd", "data": zstandard.compress(b"another")},
    ],
)
def test_a_chunk_that_is_not_what_it_says_is_an_error(whole, tmp_path, altered):
    (tmp_path / "r").write_bytes(with_chunk(whole, MESSAGE, **altered))
    read, error = read_up_to_damage(tmp_path / "r")
    assert (read, isinstance(error, RecordingError)) == ([], True)


READ_WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from kvist.replay import RecordingError, RecordingReader
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for name in sys.argv[1:]:
    with RecordingReader(Path(name)) as reader:
        try:
            list(reader)
        except RecordingError as error:
            print(type(error).__name__)
"""


def test_files_that_claim_to_be_larger_than_memory_are_errors_and_cost_none(whole, tmp_path):
    bomb = zstandard.ZstdCompressor().compressobj(size=1 << 34)  # the frame says 16 GiB
    framed = bomb.compress(bytes(1 << 20)) + bomb.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    streamed = zstandard.ZstdCompressor().compressobj()  # the frame says nothing
    endless = b"".join(streamed.compress(bytes(1 << 20)) for _ in range(300)) + streamed.flush()
    files = {
        "framed": with_chunk(whole, b"", compression="zstd", data=framed, uncompressed_size=1 << 34),
        "lies": with_chunk(whole, b"", compression="zstd", data=framed, uncompressed_size=100),
        "endless": with_chunk(whole, b"", compression="zstd", data=endless, uncompressed_size=100),
        "large": with_chunk(whole, b"", compression="zstd", data=endless, uncompressed_size=1 << 40),
        "length": whole[0][: records_of(whole[0])[2][1]] + struct.pack("<BQ", Opcode.CHUNK, 1 << 62) + bytes(100),
    }
    start = next(start for kind, start, _ in records_of(whole[0]) if kind == Opcode.CHUNK)
    channel, channels = RecordBuilder(), RecordBuilder()
    told = {"name": "n" * (40 << 20), "url": "", "engine": "vllm", "topic": "", "sequence_base": "0"}
    Channel(0, "t", "", told, 0).write(channel)
    content = bytearray(channel.end())
    for number in range(1, 8):  # 40 MiB each, in 4 kB
        content[9] = number
        squeezed = zstandard.compress(content)
        Chunk("zstd", squeezed, 0, 0, zlib.crc32(content), len(content)).write(channels)
    files["channels"] = whole[0][:start] + channels.end()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", READ_WITH_LITTLE_MEMORY, *(str(tmp_path / name) for name in files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout.split(), done.stderr) == (["RecordingError"] * len(files), "")


def test_another_file_is_refused_at_once(tmp_path):
    path = tmp_path / "r"
    path.write_bytes(b"PK\x03\x04 something else")
    with RecordingReader(path) as reader, pytest.raises(RecordingError, match="expected a recording") as refused:
        reader.read()
    assert refused.value.offset == 0


@pytest.mark.parametrize(
    ("profile", "about", "text"),
    [
        ("ros2", None, "an MCAP file of profile 'ros2'"),
        ("kvist", None, "found messages, expected what kvist.recording tells before them"),
        ("kvist", '{"version": 9}', "found version 9, expected version 2"),
        ("kvist", '{"version": 2}', "missing required field"),
        ("kvist", "[]", "Expected `object`, got `array`"),
        ("kvist", '{"version":2,"recording":"a","part":0,"session":0,"sources":[["s","",9]]}', "Expected `str`"),
        ("kvist", '{"version":2,"recording":"a","part":0,"session":0,"sources":[["s","","gpt"]]}', "vllm"),
    ],
)
def test_an_mcap_file_that_is_no_recording_of_this_version_is_refused(tmp_path, profile, about, text):
    with (tmp_path / "r").open("wb") as file:
        mcap = Writer(file)
        mcap.start(profile)
        if about is not None:
            mcap.add_metadata(ABOUT, {"about": about})
        mcap.add_message(mcap.register_channel("t", "", 0), 1, b"", 1)
        mcap.finish()
    _, error = read_up_to_damage(tmp_path / "r")
    assert isinstance(error, RecordingError)
    assert text in str(error)


def test_what_another_tool_wrote_anew_without_chunks_or_compression_is_read(whole, tmp_path):
    data, records = whole
    for number, options in enumerate(({"use_chunking": False}, {"compression": CompressionType.NONE})):
        path = tmp_path / str(number)
        with path.open("wb") as file:
            mcap = Writer(file, **options)
            mcap.start("kvist")
            channels = {}
            for record in StreamReader(io.BytesIO(data)).records:
                kind = type(record).__name__
                if kind == "Metadata":
                    mcap.add_metadata(record.name, record.metadata)
                elif kind == "Channel" and record.id not in channels:
                    told = (record.topic, record.message_encoding, 0, record.metadata)
                    channels[record.id] = mcap.register_channel(*told)
                elif kind == "Message":
                    numbers = (record.log_time, record.data, record.publish_time, record.sequence)
                    mcap.add_message(channels[record.channel_id], *numbers)
            mcap.finish()
        assert read_up_to_damage(path) == (records, [])


def test_what_is_being_written_is_read_up_to_its_last_whole_chunk(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    with RecordingWriter(tmp_path / "r", [make.source], rotate_bytes=4096) as writer:
        for number, record in enumerate(records, 1):
            writer.add(record.source, record.message, record.time_ns)
            if number % 20 == 0:
                read, torn = read_up_to_damage(tmp_path / "r")
                assert number - 3 <= len(read) < number
                assert (read, torn) == (records[: len(read)], [])
        assert writer.num_parts > 3
    assert read_up_to_damage(tmp_path / "r") == (records, [])


def test_a_reader_beside_writers_that_are_killed_reads_what_they_wrote_and_nothing_else(make, tmp_path):
    """Others go on behind what is torn, while another thread reads there: old and new bytes are never joined."""
    path, num_sessions = tmp_path / "r", 12
    messages = [make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(40)]
    make.write(path, [])

    def write():
        for _ in range(num_sessions):
            make.write(path, make.records(*messages, step_ms=400), appends=True, rotate_bytes=4096)
            last = max(tmp_path.iterdir(), key=lambda part: int(part.suffix[1:] or 0))
            os.truncate(last, last.stat().st_size - 40)  # as if it had been killed while it closed the file

    thread = threading.Thread(target=write)
    thread.start()
    read = []
    while thread.is_alive() or len(read) < num_sessions * len(messages):
        read = make.read(path)
        assert [record.message for record in read] == (messages * num_sessions)[: len(read)]
    thread.join()
    assert [record.session for record in read] == [n for n in range(1, num_sessions + 1) for _ in messages]


def test_a_file_that_is_closed_while_it_is_read_is_whole(whole, tmp_path):
    path = tmp_path / "r"
    _, start, _ = [record for record in records_of(whole[0]) if record[0] == Opcode.CHUNK][1]
    path.write_bytes(whole[0][: start + 30])
    with RecordingReader(path) as reader:
        read = reader.read()
        assert read == whole[1][:3]
        path.write_bytes(whole[0])
        assert [*read, *reader] == whole[1]
        assert reader.torn == []


def test_behind_a_part_that_was_cut_amid_a_session_the_next_ones_are_read(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    path = make.write(tmp_path / "r", records, rotate_bytes=4096)
    data = path.read_bytes()
    _, start, end = records_of(data)[5]
    for cut, torn in ((len(data) - 9, []), (end, []), (end - 1, [(path, start, end - 1 - start)])):
        path.write_bytes(data[:cut])
        read, found = read_up_to_damage(path)
        numbers = [record.message.sequence for record in read]
        assert numbers == sorted(numbers)
        assert read == [records[number] for number in numbers]
        assert (len(read) < 300, found) == (cut <= end, torn)


def test_a_part_of_another_recording_or_in_another_place_is_an_error(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    make.write(tmp_path / "a", records, rotate_bytes=4096)
    make.write(tmp_path / "b", records, rotate_bytes=4096)
    (tmp_path / "b.1").rename(tmp_path / "a.1")
    with (
        RecordingReader(tmp_path / "a") as reader,
        pytest.raises(RecordingError, match=r"a\.1: .* part 1 of"),
    ):
        list(reader)
    (tmp_path / "a.2").rename(tmp_path / "a.1")
    with RecordingReader(tmp_path / "a") as reader, pytest.raises(RecordingError, match=r"found part 2 of .* part 1"):
        list(reader)


def test_the_sources_are_told_without_reading_what_they_said(make, tmp_path):
    other = type(make.source)("pod-2", "tcp://h:2", "sglang")
    records = make.records(*(make.batch(i) for i in range(5))) + make.records(make.batch(0), source=other)
    path = make.write(tmp_path / "r", records)
    third = type(make.source)("pod-3", "tcp://h:3")
    make.write(path, make.records(make.batch(0), source=third), appends=True)
    with RecordingReader(path) as reader:
        assert reader.sources() == [make.source, other, third]
        assert len(list(reader)) == 7
    (tmp_path / "letter").write_bytes(b"a letter to my aunt")
    with RecordingReader(tmp_path / "letter") as reader:
        assert reader.sources() == []


@pytest.mark.parametrize("name", ["r.mcap", "r"])
def test_what_is_left_of_a_recording_is_read_by_the_name_of_its_first_part(make, tmp_path, name, logged):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    path = make.write(tmp_path / name, records, rotate_bytes=4096)
    path.unlink()
    with RecordingReader(path) as reader:
        assert reader.sources() == [make.source]
        read = list(reader)
    assert 0 < len(read) < len(records)
    assert read == records[-len(read) :]
    assert len(logged("kvist.replay.reader")) == 1


def test_a_part_under_another_name_is_an_error(make, tmp_path):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    make.write(tmp_path / "r.mcap", records, rotate_bytes=4096)
    (tmp_path / "r.2.mcap").rename(tmp_path / "cut-out.mcap")
    with RecordingReader(tmp_path / "cut-out.mcap") as reader, pytest.raises(RecordingError, match="found part 2 of"):
        list(reader)


def test_a_missing_part_is_named_and_all_others_are_read(make, tmp_path, logged):
    records = make.records(*(make.batch(i, make.stored(*range(i * 9, i * 9 + 9))) for i in range(300)), step_ms=400)
    path = make.write(tmp_path / "r.mcap", records, rotate_bytes=4096)
    with RecordingReader(path) as reader:
        for number in (1, 2):
            (tmp_path / f"r.{number}.mcap").unlink()
        read = list(reader)
        assert reader.num_bytes_read == sum(part.stat().st_size for part in tmp_path.iterdir()) < reader.num_bytes
    num_before = next(idx for idx, (one, other) in enumerate(zip(read, records, strict=False)) if one != other)
    assert num_before < len(read) < 300
    assert read == records[:num_before] + records[num_before - len(read) :]
    (told,) = logged("kvist.replay.reader")
    assert told.endswith(f"all messages up to r.3.mcap are lost path={tmp_path / 'r.1.mcap'}")


def test_sources_of_parts_behind_a_missing_one_are_found(make, tmp_path):
    path = make.write(tmp_path / "r", make.records(make.batch(0)))
    for number in (1, 2):
        source = RecordedSource(f"pod-{number + 1}", "tcp://h:1")
        make.write(path, make.records(make.batch(0), source=source), appends=True)
    (tmp_path / "r.1").unlink()
    with RecordingReader(path) as reader:
        assert [source.name for source in reader.sources()] == ["pod-1", "pod-3"]

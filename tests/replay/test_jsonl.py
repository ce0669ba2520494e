"""JSON lines: lossless both ways, and the form that others use."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.events import Cleared
from kvist.events.transports import Message
from kvist.replay import Record, RecordedSource, RecordingError
from kvist.replay.jsonl import JsonlReader, to_line

# Bytes that vLLM 0.33.0's own encoder wrote: hashes as digests of 32 bytes, map headers that are longer than needed.
BYTE_HASHES = bytes.fromhex(
    "93cb3ff800000000000092de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420000000"
    "000000000000000000000000000000000000000000f23456789abcdef0b1706172656e745f626c6f636b5f68617368c0a974"
    "6f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f7261"
    "5f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420000000000000000000"
    "000000000000000000000000000000f23456789abcdef0a66d656469756da3475055c0"
)


def through(path: Path, records, form="message"):
    path.write_bytes(b"".join(to_line(record, form) for record in records))
    with JsonlReader(path) as reader:
        read = []
        while (some := reader.read()) is not None:
            read += some
    return read


def test_every_message_comes_back_as_it_was(make, tmp_path):
    other = RecordedSource("pod-2", "tcp://h:2?engine=sglang", "sglang")
    records = make.records(
        make.batch(0, make.stored(1, 2**64 - 1), Cleared(), make.removed(3)),
        make.heartbeat(1, 2**63, 2**64 - 1),
        make.engine_batch(2**64 - 1, make.engine_stored(-5, tokens=[1, 2, 3, 4])),
        Message(b"\xff\x00", 3, b"\xc1 no batch"),
        Message(b"kv-events", 4, BYTE_HASHES),
        Message(b"", 5, msgspec.msgpack.encode([float("nan"), [], None])),
    ) + [record._replace(session=1) for record in make.records(make.engine_batch(0), source=other)]
    assert through(tmp_path / "lines", records) == records


@given(
    payload=st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
            max_leaves=12,
        ).map(msgspec.msgpack.encode),
    ),
    topic=st.binary(max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_whatever_the_payload_the_line_gives_it_back(tmp_path_factory, payload, topic):
    record = Record(0, RecordedSource("s", "tcp://h:1"), 6, Message(topic, 7, payload))
    assert through(tmp_path_factory.mktemp("any") / "lines", [record]) == [record]


def test_a_line_says_what_it_is_in_words_and_has_bytes_only_where_they_are_needed(make):
    (record,) = make.records(make.batch(3, make.stored(1), make.removed(2)))
    line = json.loads(to_line(record, "message"))
    assert line == {
        "source": "pod-1",
        "url": "tcp://127.0.0.1:5557",
        "time_ns": make.time_ns,
        "topic": "kv/w/0",
        "seq": 3,
        "batch": [
            *("kvist1", "w", 0, 7, 3, 4, 1763650000.5),
            [["stored", "0x0100000000000000", None, 0], ["removed", "0x0200000000000000", 0]],
        ],
    }
    (engines,) = make.records(Message(b"", 4, BYTE_HASHES))
    line = json.loads(to_line(engines, "message"))
    assert "payload" in line
    assert line["batch"][1][1]["block_hashes"] == ["0x" + "0" * 48 + "f23456789abcdef0"]


def test_an_altered_batch_counts_once_its_bytes_are_taken_out(make, tmp_path):
    (record,) = make.records(make.batch(3, make.stored(1)))
    line = json.loads(to_line(record, "message"))
    line["batch"][1] = "another"
    (tmp_path / "lines").write_text(json.dumps(line) + "\n\n")
    with JsonlReader(tmp_path / "lines") as reader:
        (read,) = reader.read()
    assert read.message.payload == make.batch(3, make.stored(1), worker="another").payload


def test_the_form_of_others_is_written_and_read(make, tmp_path):
    stored = make.engine_stored(9, tokens=[1, 2, 3, 4])
    records = make.records(
        make.engine_batch(0, stored, timestamp_s=1763650000.25),
        make.engine_batch(
            1, ["BlockStored", [b"\x01" * 32], b"\x02" * 32, [1], 1, None, "GPU"], timestamp_s=1763650001.0
        ),
        make.engine_batch(2, ["BlockRemoved", [b"\x01" * 32], "GPU"], rank=None, timestamp_s=1763650001.5),
        make.batch(3, make.stored(1)),
    )
    lines = [json.loads(to_line(record, "batch")) for record in records]
    assert lines[0] == {"seq": 0, "batch": [1763650000.25, [stored], 0]}
    assert lines[1]["batch"][1] == [["BlockStored", ["0x" + "01" * 32], "0x" + "02" * 32, [1], 1, None, "GPU"]]
    read = through(tmp_path / "trace.jsonl", records, "batch")
    assert [record.message for record in read] == [record.message for record in records]
    assert {record.source for record in read} == {RecordedSource("trace", "")}
    assert [record.time_ns - read[0].time_ns for record in read] == [0, 750_000_000, 1_250_000_000, 1_250_000_000]


def test_what_is_no_batch_has_no_line_in_the_form_of_others(make):
    (record,) = make.records(Message(b"", 3, b"\xc1"))
    assert to_line(record, "batch") is None


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        '{"batch": [1.0, [], 0]}',
        '{"seq": -1, "batch": [1.0, [], 0]}',
        '{"seq": 18446744073709551616, "batch": [1.0, [], 0]}',
        '{"seq": 1}',
        '{"seq": 1, "batch": {}}',
        '{"seq": 1, "batch": ["later", [], 0]}',
        '{"seq": 1, "batch": [1e300, [], 0]}',
        '{"seq": 1, "payload": "%%%"}',
        '{"seq": 1, "source": "s", "batch": [1.0, [], 0]}',
        '{"seq": 1, "source": "s", "time_ns": -1, "batch": [1.0, [], 0]}',
        '{"seq": 1, "batch": [1.0, [], 36893488147419103232]}',
    ],
)
def test_a_wrong_line_is_an_error_at_its_byte_after_those_before_it(make, tmp_path, text):
    (record,) = make.records(make.engine_batch(0))
    good = to_line(record, "message")
    (tmp_path / "lines").write_bytes(good + good + text.encode() + b"\n" + good)
    with JsonlReader(tmp_path / "lines") as reader:
        assert reader.read() == [record, record]
        with pytest.raises(RecordingError, match="expected a JSON object") as refused:
            reader.read()
    assert (refused.value.offset, refused.value.path) == (2 * len(good), tmp_path / "lines")


def test_the_sources_are_told(make, tmp_path):
    records = make.records(make.batch(0)) + make.records(make.batch(0), source=RecordedSource("b", "tcp://h:1"))
    (tmp_path / "lines").write_bytes(b"".join(to_line(record, "message") for record in records))
    with JsonlReader(tmp_path / "lines") as reader:
        assert [source.name for source in reader.sources()] == ["pod-1", "b"]

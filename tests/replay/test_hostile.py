"""Messages that say anything at all: everything that looks into them counts or passes them on, and raises nothing."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from index_invariants import check_invariants

from kvist.errors import InvalidValueError
from kvist.events.transports import Message, ReplayRequest
from kvist.radix import RadixIndex
from kvist.replay import Record, RecordedSource
from kvist.replay.blocks import SentBuffer
from kvist.replay.indexing import IndexPlayer
from kvist.replay.script import Line, Script
from kvist.replay.statistics import StatisticsCollector, curves, statistics_json, statistics_tables

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
EVENTS = st.lists(
    st.one_of(
        ANYTHING,
        st.tuples(
            st.sampled_from(["stored", "removed", "cleared", "heartbeat", "BlockStored", "BlockRemoved"]), ANYTHING
        ),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "?"])},
            optional=dict.fromkeys(("block_hashes", "token_ids", "block_size", "parent_block_hash"), ANYTHING),
        ),
        st.fixed_dictionaries(
            {
                "type": st.just("BlockStored"),
                "block_hashes": st.lists(st.integers(-(2**63), 2**64 - 1), max_size=3),
                "token_ids": st.lists(st.integers(-5, 2**32 + 5), max_size=9),
                "block_size": st.integers(0, 5),
                "parent_block_hash": st.none() | st.integers(0, 9),
            }
        ),
        st.tuples(st.just("stored"), st.binary(max_size=24), st.none() | st.integers(0, 2**64 - 1), st.integers(0, 9)),
    ),
    max_size=4,
)
SMALL = st.sampled_from([0, 1, 2, 2**63, 2**64 - 2])
PAYLOADS = st.one_of(
    st.binary(max_size=40),
    ANYTHING.map(msgspec.msgpack.encode),
    st.tuples(st.floats(), EVENTS, st.none() | st.integers(-1, 5000)).map(msgspec.msgpack.encode),
    st.tuples(
        st.just("kvist1"),
        st.text(max_size=3),
        st.integers(0, 5000),
        SMALL,
        SMALL,
        st.integers(0, 5),
        st.floats(),
        EVENTS,
    ).map(msgspec.msgpack.encode),
)
SOURCES = st.sampled_from([RecordedSource("a", ""), RecordedSource("b", "", "sglang")])
RECORDS = st.lists(
    st.builds(
        Record,
        st.integers(0, 2),
        SOURCES,
        st.integers(0, 2**63),
        st.builds(Message, st.binary(max_size=6), SMALL, PAYLOADS),
    ),
    max_size=6,
)


@given(records=RECORDS)
@settings(max_examples=150, deadline=None)
def test_statistics_tell_what_they_can(records):
    collector = StatisticsCollector()
    for record in records:
        collector.add(record)
    statistics = collector.result()
    assert statistics.num_messages == len(records)
    assert [*statistics_tables(statistics)]
    json.dumps(statistics_json(statistics))
    assert all(curves(statistics.spans).values())


@given(records=RECORDS)
@settings(max_examples=150, deadline=None)
def test_looping_and_replaying_whatever_a_recording_says_raises_nothing_but_that_epochs_end(
    make, tmp_path_factory, records
):
    path = make.write(tmp_path_factory.mktemp("hostile") / "r", records)
    buffer = SentBuffer(200)
    with suppress(InvalidValueError):
        for lines in Script(path, num_rounds=2).lines():
            for line in lines:
                buffer.append(line.record.message)
    list(buffer.replay(ReplayRequest(None, 0)))


@given(records=RECORDS)
@settings(max_examples=100, deadline=None)
def test_an_index_is_fed_what_can_be_indexed(records):
    index = RadixIndex()
    player = IndexPlayer(index)
    player.apply(Line(0, record) for record in records)
    assert player.report().to_text()
    check_invariants(index)

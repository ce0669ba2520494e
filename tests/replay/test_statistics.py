"""What is told about a recording: against hand-counted streams, and against a naive count of random ones."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree

import pytest

from kvist.charts import svg_document
from kvist.events import Cleared, WorkerRank
from kvist.replay import RecordedSource
from kvist.replay.statistics import (
    MAX_SPANS,
    Span,
    StatisticsCollector,
    charts,
    statistics_json,
    statistics_tables,
)


def told(records):
    collector = StatisticsCollector()
    for record in records:
        collector.add(record)
    return collector.result()


def test_blocks_are_followed_from_store_to_removal_and_back(make):
    statistics = told(
        make.records(
            make.batch(0, make.stored(1, 2, 3)),
            make.batch(1, make.stored(4, parent=3), make.stored(1)),
            make.batch(2, make.removed(2, 4), make.removed(99)),
            make.batch(3, make.stored(2, parent=1)),
            make.heartbeat(4, 3, 5),
            make.batch(4, Cleared()),
            step_ms=1000,
        )
    )
    rank = statistics.ranks[WorkerRank("w", 0)]
    assert (rank.num_stored, rank.num_stored_again) == (5, 1)
    assert (rank.num_removed, rank.num_cleared) == (5, 1)
    assert (rank.num_live, rank.num_live_peak) == (0, 4)
    assert (statistics.num_distinct, statistics.num_live_distinct) == (4, 0)
    assert statistics.lifetimes_s == {0.512: 1, 1.024: 1}
    assert statistics.duration_s == 5.0


def test_a_store_after_a_clearing_is_no_store_after_a_removal(make):
    events = [make.stored(1), make.removed(1), make.stored(1), Cleared(), make.stored(1)]
    statistics = told(make.records(*(make.batch(n, event) for n, event in enumerate(events))))
    rank = statistics.ranks[WorkerRank("w", 0)]
    assert (rank.num_stored, rank.num_stored_again) == (3, 1)


def test_sharing_is_told_by_how_many_ranks_hold_a_block(make):
    messages = [make.batch(0, make.stored(1, 2), rank=rank) for rank in range(3)]
    messages += [make.batch(1, make.stored(3, parent=2), rank=0), make.batch(1, make.removed(2), rank=1)]
    statistics = told(make.records(*messages))
    assert statistics.holders == {1: 1, 2: 1, 3: 1}
    assert statistics.num_live_distinct == 3


def test_gaps_duplicates_and_a_beginning_amid_the_stream_are_told(make):
    statistics = told(make.records(*(make.batch(i, make.stored(i)) for i in (5, 5, 8)), make.batch(0, epoch=9)))
    (source,) = statistics.sources
    assert (source.num_gaps, source.num_duplicates, source.num_restarts) == (1, 1, 1)
    assert not source.is_from_start
    _, (columns, rows), *_ = statistics_tables(statistics)
    assert dict(zip(columns, rows[0], strict=True)) == {
        "source": "pod-1",
        "URL": "tcp://127.0.0.1:5557",
        "stream": "canonical, recorded from its middle: earlier blocks are unknown",
        "block size": "4",
        "messages": "4",
        "bytes": str(statistics.sources[0].num_bytes),
        "gaps": "1",
        "duplicates": "1",
        "restarts": "1",
    }
    assert statistics.ranks[WorkerRank("w", 0)].num_live == 0  # the later epoch holds nothing of the earlier one's


def test_an_engines_blocks_are_counted_as_those_of_the_published_group(make):
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    sliding = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 512}
    tokens = list(range(8))
    source = RecordedSource("pod-1", "tcp://h:1")
    messages = [
        make.engine_batch(
            0, make.engine_stored(1, 2, tokens=tokens, **full), make.engine_stored(7, tokens=tokens[:4], **sliding)
        ),
        make.engine_batch(1, {**make.engine_removed(2), "group_idx": 0}, {"type": "Unheard"}),
    ]
    statistics = told(make.records(*messages, source=source))
    rank = statistics.ranks[WorkerRank("pod-1", 0)]
    assert (rank.num_stored, rank.num_removed, rank.num_live) == (2, 1, 1)
    assert (statistics.sources[0].num_ignored_events, statistics.sources[0].block_sizes) == (1, (4,))


def test_an_engine_that_was_started_anew_holds_nothing_of_before(make):
    stored = [make.engine_stored(n, tokens=[n, 1, 2, 3]) for n in range(3)]
    messages = [make.engine_batch(0, stored[0]), make.engine_batch(1, stored[1])]
    messages.append(make.engine_batch(0, stored[2], timestamp_s=99.0))
    statistics = told(make.records(*messages))
    assert statistics.ranks[WorkerRank("pod-1", 0)].num_live == 1
    assert statistics.sources[0].num_restarts == 1


def test_what_is_no_batch_is_counted(make):
    statistics = told(make.records(make.batch(0)._replace(payload=b"\xc1"), make.engine_batch(0, "no event", 5)))
    assert (statistics.sources[0].num_malformed, statistics.sources[0].num_malformed_events) == (1, 2)


@pytest.mark.parametrize("seed", range(5))
def test_random_streams_are_counted_as_by_hand(make, seed):
    rng = random.Random(seed)
    held = [set() for _ in range(3)]
    messages, numbers, num_stored = [], [0] * 3, 0
    for _ in range(400):
        rank = rng.randrange(3)
        blocks = rng.sample(range(1, 60), rng.randrange(1, 6))
        if rng.random() < 0.02:
            event, held[rank] = Cleared(), set()
        elif rng.random() < 0.6:
            event = make.stored(*blocks)
            num_stored += len(set(blocks) - held[rank])
            held[rank] |= set(blocks)
        else:
            event = make.removed(*blocks)
            held[rank] -= set(blocks)
        messages.append(make.batch(numbers[rank], event, rank=rank))
        numbers[rank] += 1
    statistics = told(make.records(*messages))
    assert [each.num_live for each in statistics.ranks.values()] == [len(blocks) for blocks in held]
    assert sum(each.num_stored for each in statistics.ranks.values()) == num_stored
    everything = [block for blocks in held for block in blocks]
    assert sum(n * count for n, count in statistics.holders.items()) == len(everything)
    assert statistics.num_live_distinct == len(set(everything))
    assert statistics.spans[-1].num_live == len(everything)
    total = sum(span.events_per_s for span in statistics.spans) * (statistics.spans[1].start_s)
    assert total == pytest.approx(len(messages))


def test_a_gap_clears_its_rank_as_in_an_index(make):
    messages = [make.batch(0, make.stored(1, 2)), make.batch(2, make.stored(3)), make.batch(0, make.stored(9), rank=1)]
    statistics = told(make.records(*messages))
    assert {rank.rank: each.num_live for rank, each in statistics.ranks.items()} == {0: 1, 1: 1}
    first = statistics.ranks[WorkerRank("w", 0)]
    assert (first.num_stored, first.num_removed, first.num_cleared, first.num_live_peak) == (3, 2, 1, 2)
    assert statistics.lifetimes_s == {}


def test_a_timeline_of_any_length_has_a_bound(make):
    messages = [make.batch(number, make.stored(number)) for number in range(10_000)]
    spans = told(make.records(*messages, step_ms=10_000)).spans
    assert MAX_SPANS / 2 < len(spans) <= MAX_SPANS
    assert sum(span.events_per_s for span in spans) * spans[1].start_s == pytest.approx(10_000)
    assert spans[-1].num_live == 10_000
    assert spans[0].num_live == int(spans[1].start_s // 10) + 1  # what was live at its end


def test_a_quiet_span_has_the_blocks_of_the_one_before(make):
    spans = told(make.records(make.batch(0, make.stored(1)), make.batch(1, make.stored(2)), step_ms=35)).spans
    assert [span.num_live for span in spans] == [1, 1, 1, 2]
    assert [span.events_per_s for span in spans] == [100, 0, 0, 100]


def test_the_tables_and_the_json_have_the_figures(make):
    statistics = told(make.records(*(make.batch(i, make.stored(i + 1)) for i in range(50))))
    overview, _, ranks, blocks = statistics_tables(statistics)
    assert (overview[0][:4], overview[1][0][:4]) == (
        ["messages", "events", "sessions", "distinct"],
        ["50", "50", "1", "50"],
    )
    assert ranks == (["rank", "stored", "live", "live peak"], [["w 0", "50", "50", "50"]])
    assert blocks[1][1] == ("live at the end, by number of ranks", "1: 50")
    read = json.loads(json.dumps(statistics_json(statistics)))
    assert read["ranks"][0] | {"worker": "w", "rank": 0, "num_stored": 50, "num_live": 50} == read["ranks"][0]
    assert read["holders"] == {"1": 50}
    assert read["num_messages"] == 50


def test_nothing_recorded_is_told_too():
    statistics = told([])
    (overview, [row]), blocks = statistics_tables(statistics)
    assert dict(zip(overview, row, strict=True))["messages"] == "0"
    assert blocks[1][0][1] == "0 (0.0%)"
    assert ElementTree.fromstring(svg_document(*charts(statistics.spans, "empty"))).tag.endswith("svg")


def test_the_svg_is_well_formed_and_escapes_its_title():
    spans = [Span(n * 0.5, float(n), n) for n in range(10)]
    root = ElementTree.fromstring(svg_document(*charts(spans, "a <b> & c$\\frac$")))
    assert "a <b> & c$\\frac$" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    curves = [group for group in root.iter("{http://www.w3.org/2000/svg}g") if group.get("id", "").startswith("axes_")]
    assert len(curves) == 2

"""Playing a recording straight into an index."""

from __future__ import annotations

from index_invariants import check_invariants

from kvist.events import WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.snapshot import blocks_digest
from kvist.radix import RadixIndex
from kvist.replay import RecordedSource
from kvist.replay.indexing import IndexPlayer
from kvist.replay.script import Script


def indexed(make, records, tmp_path):
    path = make.write(tmp_path / "r", records)
    index = RadixIndex()
    player = IndexPlayer(index)
    for lines in Script(path).lines():
        player.apply(lines)
    report = player.report()
    check_invariants(index)
    return {rank.source: rank for rank in report.ranks}, report


def test_a_canonical_stream_ends_exact_and_its_heartbeat_agrees(make, tmp_path):
    messages = [make.batch(0, make.stored(1, 2, 3)), make.batch(1, make.removed(3))]
    messages.append(make.heartbeat(2, 2, blocks_digest([1, 2], 0)))
    ranks, report = indexed(make, make.records(*messages), tmp_path)
    rank = ranks[WorkerRank("w", 0)]
    assert (rank.num_blocks, rank.digest, rank.state) == (2, blocks_digest([1, 2], 0), SourceState.LIVE)
    assert (report.num_blocks, report.num_cleared, report.num_refused_events) == (2, 0, 0)


def test_an_engines_stream_is_hashed_and_of_the_worker_its_source_is_called(make, tmp_path):
    tokens = list(range(12))
    messages = [
        make.engine_batch(0, make.engine_stored(71, 72, tokens=tokens[:8]), rank=None),
        make.engine_batch(1, make.engine_stored(73, tokens=tokens[8:], parent=72), rank=None),
        make.engine_batch(2, make.engine_removed(72), rank=None),
    ]
    hashes = [int(block) for block in block_hashes(tokens, 4)]
    ranks, _ = indexed(make, make.records(*messages), tmp_path)
    rank = ranks[WorkerRank("pod-1", 0)]
    assert (rank.num_blocks, rank.digest) == (2, blocks_digest([hashes[0], hashes[2]], 0))
    assert rank.state is SourceState.LIVE


def test_workers_of_one_stream_and_streams_of_one_recording_stay_apart(make, tmp_path):
    other = RecordedSource("pod-2", "tcp://h:1")
    records = make.records(make.batch(0, make.stored(1), worker="a"), make.batch(0, make.stored(1, 2), worker="b"))
    records += make.records(make.engine_batch(0, make.engine_stored(5, tokens=[1, 2, 3, 4])), source=other)
    ranks, report = indexed(make, records, tmp_path)
    assert {source: rank.num_blocks for source, rank in ranks.items()} == {("a", 0): 1, ("b", 0): 2, ("pod-2", 0): 1}
    assert report.num_blocks == 3


def test_what_a_gap_costs_is_lost_and_said(make, tmp_path):
    records = make.records(make.batch(0, make.stored(1)), make.batch(2, make.stored(3)))
    ranks, report = indexed(make, records, tmp_path)
    rank = ranks[WorkerRank("w", 0)]
    assert (rank.num_blocks, rank.state) == (1, SourceState.PARTIAL)
    assert report.num_cleared == 2  # when it was lost, and asked about once more
    assert "0 snapshots, 2 times cleared" in report.to_text()


def test_each_stream_has_the_block_size_that_it_names(make, tmp_path):
    other = RecordedSource("pod-2", "tcp://h:1")
    records = make.records(make.engine_batch(0, make.engine_stored(5, tokens=range(8), block_size=8)))
    records += make.records(make.heartbeat(0, 0, 0), make.batch(0, make.stored(1)), source=other)
    _, report = indexed(make, records, tmp_path)
    assert {rank.source.worker: rank.block_size for rank in report.ranks} == {"pod-1": 8, "w": 4}
    assert report.failures == ()

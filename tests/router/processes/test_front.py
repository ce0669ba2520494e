"""What a front knows of an index that a keeper writes, and of the next keeper's."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvist.events import Tier, WorkerRank
from kvist.events.session import SourceState
from kvist.radix import RadixIndex, RadixReader
from kvist.radix.memory import index_bytes
from kvist.router.index import RankStatus
from kvist.router.processes.front import SharedIndex
from kvist.router.processes.keeper import FrontMetrics
from kvist.router.processes.messages import Message, Used

A, B = WorkerRank("http://a", 0), WorkerRank("http://b", 0)
HASHES = np.arange(1, 11, dtype=np.uint64)

NewIndex = Callable[[], tuple[RadixIndex, RadixReader]]


@pytest.fixture
def new_index() -> Iterator[NewIndex]:
    descriptors = []

    def make() -> tuple[RadixIndex, RadixReader]:
        descriptors.append(os.memfd_create("test"))
        os.ftruncate(descriptors[-1], index_bytes(0))
        index = RadixIndex(segment_bits=0, max_blocks=20, memory=mmap.mmap(descriptors[-1], 0))
        return index, RadixReader(mmap.mmap(descriptors[-1], 0))

    yield make
    for each in descriptors:
        os.close(each)


def status_of(index: RadixIndex, rank: WorkerRank, state: SourceState = SourceState.LIVE) -> RankStatus:
    return RankStatus(rank, state, clearing=index.clearing_of(rank), slot=index.slot_of(rank))


def test_the_next_keepers_numbers_are_not_taken_for_those_of_the_one_before(new_index: NewIndex) -> None:
    shared = SharedIndex(lambda _: None)
    for ranks in ((A, B), (B, A), (A, B)):  # in the order in which they get their numbers
        index, reader = new_index()
        for rank in ranks:
            index.store(rank, Tier.GPU, None, HASHES[: 5 if rank is A else 8])
        for rank in (B, A):
            shared.set_ranks(rank.worker, [status_of(index, rank)])
        shared.attach(reader)
        assert shared.match(HASHES) == {A: (5,) * 4, B: (8,) * 4}
        assert [shared.ranks(rank.worker)[0].num_blocks for rank in (A, B)] == [5, 8]
        shared.detach()
        assert shared.match(HASHES) == {}
        assert [status.target for status in shared.ranks(A.worker)] == [A]  # which it may still be given work by load


def test_ranks_that_may_have_lost_blocks_and_workers_that_are_gone_are_in_no_answer(new_index: NewIndex) -> None:
    shared, (index, reader) = SharedIndex(lambda _: None), new_index()
    shared.attach(reader)
    for rank in (A, B):
        index.store(rank, Tier.GPU, None, HASHES)
        shared.set_ranks(rank.worker, [status_of(index, rank)])
    assert shared.match(HASHES).keys() == {A, B}
    shared.set_ranks(A.worker, [status_of(index, A, SourceState.RESYNCING)])
    assert shared.match(HASHES).keys() == {B}
    shared.set_ranks(B.worker, [])
    assert shared.match(HASHES) == {}
    assert shared.ranks(B.worker) == []
    index.clear(*A)
    index.store(A, Tier.GPU, None, HASHES[:3])
    assert shared.match(HASHES) == {}  # until it is told of
    shared.set_ranks(A.worker, [status_of(index, A)])
    assert shared.match(HASHES) == {A: (3,) * 4}


def test_the_keeper_is_told_what_was_matched_once_it_may_have_to_evict(new_index: NewIndex) -> None:
    told: list[Message] = []
    shared, (index, reader) = SharedIndex(told.append), new_index()
    shared.attach(reader)
    index.store(A, Tier.GPU, None, HASHES[:4])
    shared.match(HASHES)
    assert told == []
    index.store(A, Tier.GPU, None, np.arange(1, 15, dtype=np.uint64))
    shared.match(HASHES)
    assert told == [Used(HASHES.tobytes())]


def test_a_removed_workers_series_go_also_where_the_front_that_told_them_is_busy() -> None:
    metrics = FrontMetrics()
    metrics.on_connect(0, pid=1)
    metrics.update(0, [("kvist_x", "", "counter", [("kvist_x_total", {"worker": each}, 1.0) for each in ("a", "b")])])
    metrics.forget("a")
    (told,) = [each for each in metrics.collect() if each.name == "kvist_x"]
    assert [sample.labels for sample in told.samples] == [{"worker": "b"}]

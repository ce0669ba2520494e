"""Recovery end to end: whatever was missed, the index is soon exact again, and the engine notices nothing."""

from __future__ import annotations

import asyncio
import threading
from itertools import count

import msgspec
import pytest

from kvist.events import WorkerRank
from kvist.events.codec import decode_snapshot_part, encode_snapshot_part, is_snapshot_part
from kvist.events.session import SessionLimits, SourceState
from kvist.events.snapshot import SnapshotAssembly
from kvist.events.transports import Endpoint, Message
from kvist.events.transports.memory import MemoryPublication
from kvist.indexer import Indexer
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.radix import RadixIndex

BLOCK_SIZE = 4
SHORT_MEMORY = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.05, replay_max_batches=3)
_names = count()


@pytest.fixture(params=["memory", "tcp"])
def url(request):
    return f"memory://recovery-{next(_names)}" if request.param == "memory" else "tcp://127.0.0.1:0"


@pytest.fixture
def memory_url():
    return f"memory://recovery-{next(_names)}"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr("kvist.events.snapshot.MAX_PART_BLOCKS", 8)
    monkeypatch.setattr("kvist.indexer.canonical.NUM_BLOCKS_A_SLICE", 3)


def publisher_at(transport, limits=SHORT_MEMORY, **options):
    return KvEventPublisher(transport, worker="w", block_size=BLOCK_SIZE, limits=limits, **options)


async def churned(publisher, truths, until, num_rounds: int = 30) -> None:
    """Have the publisher's history outgrow its memory, in batches."""
    for _ in range(num_rounds):
        before = {rank: each.num_batches for rank, each in publisher.statistics().ranks.items()}
        for truth in truths:
            truth.churn(4)
            truth.store(2)
        await until(lambda: all(publisher.statistics().ranks[r].num_batches > n for r, n in before.items()))  # noqa: B023


def sole(indexer):
    (statistics,) = indexer.statistics()
    return statistics


async def test_a_router_that_starts_late_or_again_is_exact_and_the_engine_notices_nothing(url, make_truth, until):
    with publisher_at(url, num_ranks=2) as publisher:
        truths = [make_truth(publisher, rank, seed=rank) for rank in range(2)]
        await churned(publisher, truths, until)
        for _ in range(2):
            index = RadixIndex(seed=1)
            async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
                indexer.add_source("w1", publisher.endpoint)
                for rank, truth in enumerate(truths):
                    await until(lambda: indexer.is_exact("w1", rank) and _digest(index, rank) == truth.digest())  # noqa: B023
                assert sole(indexer).num_snapshots == 2
                assert sole(indexer).num_cleared == sole(indexer).num_malformed == 0
                truths[0].churn(20)
                await until(lambda: indexer.is_exact("w1", 0) and _digest(index, 0) == truths[0].digest())  # noqa: B023
        statistics = publisher.statistics()
        assert statistics.num_lost_events == statistics.num_dropped_batches == 0


def _digest(index: RadixIndex, rank: int = 0) -> tuple[int, int]:
    held = index.digest(WorkerRank("w1", rank))
    return held.num_blocks, held.digest


async def test_routers_that_ask_within_a_while_share_one_snapshot(make_truth, until, memory_url):
    with publisher_at(memory_url) as publisher:
        truth = make_truth(publisher)
        await churned(publisher, [truth], until)
        indexes = [RadixIndex(seed=seed) for seed in range(3)]
        for index in indexes:
            async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
                indexer.add_source("w1", publisher.endpoint)
                await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())  # noqa: B023
        assert publisher.statistics().num_snapshots == 1


@pytest.mark.parametrize("num_kept", [3, 1000])
async def test_a_stall_costs_a_range_or_a_snapshot_once_the_range_is_gone(
    index, indexer, make_truth, until, until_true, memory_url, monkeypatch, num_kept
):
    monkeypatch.setattr("kvist.events.transports.received.QUEUE_CAPACITY", 3)
    limits = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.05, replay_max_batches=num_kept)
    with publisher_at(memory_url, limits) as publisher:
        truth = make_truth(publisher)
        truth.store()
        indexer.add_source("w1", memory_url)
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())
        for num_batches in range(1, 21):  # the loop stands still meanwhile
            truth.store()
            until_true(lambda: publisher.statistics().ranks[0].num_batches > num_batches)  # noqa: B023
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())
        assert sole(indexer).num_snapshots == (1 if num_kept == 3 else 0)
        assert sole(indexer).num_cleared == 0


async def test_a_diverged_index_is_replaced_by_a_snapshot(index, indexer, make_truth, until, memory_url):
    with publisher_at(memory_url) as publisher:
        truth = make_truth(publisher)
        indexer.add_source("w1", memory_url)
        await churned(publisher, [truth], until)
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())
        num_snapshots = sole(indexer).num_snapshots
        index.clear("w1", 0)  # a fault that no event tells of
        await until(lambda: sole(indexer).num_diverged == 1 and sole(indexer).num_snapshots > num_snapshots)
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())


class Meddling(MemoryPublication):
    """Does something to the first answers that have a snapshot."""

    def __init__(self, url: str, meddle, num_times: int = 1) -> None:
        super().__init__(Endpoint.parse(url))
        self._meddle = meddle
        self.num_left = num_times

    def replay(self, request):
        answer = super().replay(request)
        if answer is None or self.num_left == 0 or not any(is_snapshot_part(each.payload) for each in answer):
            return answer
        self.num_left -= 1
        return self._meddle(answer)


def with_payload(message: Message, payload: bytes) -> Message:
    return message._replace(payload=payload)


def altered(message: Message, **changes: object) -> Message:
    part = decode_snapshot_part(message.payload, "test")
    return with_payload(message, encode_snapshot_part(msgspec.structs.replace(part, **changes)))


def lie(answer: list[Message]) -> list[Message]:
    return [altered(each, digest=1) if is_snapshot_part(each.payload) else each for each in answer]


def repeat_a_block(answer: list[Message]) -> list[Message]:
    """Tell one block twice, with a digest that counts it twice: only the index can notice."""
    parts = [decode_snapshot_part(each.payload, "test") for each in answer if is_snapshot_part(each.payload)]
    first = parts[0]
    twice = msgspec.structs.replace(
        first,
        hashes=first.hashes + first.hashes[:8],
        depths=first.depths + first.depths[:4],
        tiers=first.tiers + first.tiers[:1],
    )
    assembly = SnapshotAssembly("test")
    assembly.add(msgspec.structs.replace(twice, part_idx=0, num_parts=1))
    num_blocks, digest = assembly._num_blocks, assembly._digest % 2**64
    changes = {"num_parts": 1, "part_idx": 0, "num_blocks": num_blocks, "digest": digest}
    return [with_payload(answer[0], encode_snapshot_part(msgspec.structs.replace(twice, **changes)))]


MEDDLING = {
    "cut": lambda answer: answer[:2],
    "a part is missing": lambda answer: answer[1:],
    "a part of another snapshot": lambda answer: [altered(answer[0], sequence=999), *answer[1:]],
    "a digest that lies": lie,
    "hostile bytes": lambda answer: [with_payload(answer[0], answer[0].payload[:40] + b"\xc1" * 9), *answer[1:]],
    "hashes cut": lambda answer: [altered(answer[0], hashes=b"1234567"), *answer[1:]],
}


@pytest.mark.parametrize("fault", MEDDLING)
async def test_a_snapshot_that_is_not_what_it_says_is_counted_skipped_and_asked_for_again(
    index, indexer, make_truth, until, memory_url, fault, caplog
):
    publication = Meddling(memory_url, MEDDLING[fault])
    with publisher_at(publication) as publisher:
        truth = make_truth(publisher)
        await churned(publisher, [truth], until)
        indexer.add_source("w1", memory_url)
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())
        assert publication.num_left == 0
        assert sole(indexer).num_malformed == 1
        assert caplog.text.count("malformed message") == 1


@pytest.mark.parametrize("meddle", [lambda answer: answer[::-1] + answer, lambda answer: [*answer[:3], *answer]])
async def test_parts_that_come_twice_or_in_another_order_do_no_harm(
    index, indexer, make_truth, until, memory_url, meddle
):
    with publisher_at(Meddling(memory_url, meddle)) as publisher:
        truth = make_truth(publisher)
        await churned(publisher, [truth], until)
        indexer.add_source("w1", memory_url)
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())
        assert sole(indexer).num_malformed == 0


async def test_a_snapshot_that_only_the_index_can_refute_is_taken_back(index, indexer, make_truth, until, memory_url):
    publication = Meddling(memory_url, repeat_a_block)
    with publisher_at(publication) as publisher:
        truth = make_truth(publisher)
        await churned(publisher, [truth], until)
        indexer.add_source("w1", memory_url)
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())
        assert publication.num_left == 0
        assert sole(indexer).num_diverged == 1


async def test_without_any_good_snapshot_a_rank_is_partial_and_heals_when_there_is_one(
    index, indexer, make_truth, until, memory_url, monkeypatch
):
    hasty = SessionLimits(retry_s=0.01, max_retry_s=0.1)
    monkeypatch.setattr("kvist.events.session.SessionLimits", lambda: hasty)
    publication = Meddling(memory_url, lie, num_times=10**9)
    with publisher_at(publication) as publisher:
        truth = make_truth(publisher)
        await churned(publisher, [truth], until)
        indexer.add_source("w1", memory_url)
        await until(lambda: indexer.states("w1") == {0: SourceState.PARTIAL})
        assert _digest(index)[0] <= truth.digest()[0]
        assert sole(indexer).num_cleared >= 1
        publication.num_left = 0
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())


async def test_a_publisher_killed_amid_a_snapshot_and_started_anew_leaves_nothing_of_itself(
    index, indexer, make_truth, until, memory_url
):
    is_asked, may_go_on = threading.Event(), threading.Event()

    def stall(answer: list[Message]) -> list[Message]:
        is_asked.set()
        may_go_on.wait(60)
        return answer[: len(answer) // 2]

    with publisher_at(Meddling(memory_url, stall)) as publisher:
        truth = make_truth(publisher)
        await churned(publisher, [truth], until)
        indexer.add_source("w1", memory_url)
        await until(is_asked.is_set)
        assert WorkerRank("w1", 0) in indexer.resyncing
    with publisher_at(memory_url) as publisher:
        truth = make_truth(publisher, seed=9)
        await churned(publisher, [truth], until)
        may_go_on.set()
        await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())


async def test_a_cancelled_router_amid_a_snapshot_leaves_the_publisher_to_others(make_truth, until, memory_url):
    with publisher_at(memory_url) as publisher:
        truth = make_truth(publisher)
        await churned(publisher, [truth], until)
        for num_turns in range(0, 60, 7):
            index = RadixIndex(seed=1)
            async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
                indexer.add_source("w1", memory_url)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                indexer.remove_source("w1")
            assert _digest(index) == (0, 0)
        index = RadixIndex(seed=1)
        async with Indexer(index, block_size=BLOCK_SIZE) as indexer:
            indexer.add_source("w1", memory_url)
            await until(lambda: indexer.is_exact("w1", 0) and _digest(index) == truth.digest())

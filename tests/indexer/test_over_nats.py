"""End to end over a real NATS server: whatever dies, the index ends up equal to the truth."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvist.events.session import SourceState
from kvist.indexer import Indexer
from kvist.publisher import KvEventPublisher, PublisherLimits
from kvist.radix import RadixIndex

BLOCK_SIZE = 4
QUICK = PublisherLimits(coalesce_s=0.001, heartbeat_s=0.05)


@pytest.fixture(autouse=True)
def reconnects_soon(monkeypatch):
    monkeypatch.setattr("kvist.events.transports.base.MAX_RECONNECT_S", 0.2)


@pytest.fixture(params=["", "?jetstream=KV"], ids=["core", "jetstream"])
def server_and_url(request, start_nats_server):
    server = start_nats_server(has_jetstream=bool(request.param))
    return server, f"nats://127.0.0.1:{server.port}/org%2Fmodel{request.param}"


def publisher_at(url: str, limits: PublisherLimits = QUICK) -> KvEventPublisher:
    return KvEventPublisher(url, worker="pod-1", block_size=BLOCK_SIZE, num_ranks=2, limits=limits)


async def test_the_index_equals_the_truth_through_kills_of_the_server(
    server_and_url, indexer, make_truth, digest_of, until
):
    server, url = server_and_url
    with publisher_at(url) as publisher:
        indexer.add_source("w1", publisher.endpoint)
        truths = [make_truth(publisher, rank, seed=rank) for rank in range(2)]

        def is_exact() -> bool:
            return all(
                digest_of("w1", rank) == truth.digest() and indexer.is_exact("w1", rank)
                for rank, truth in enumerate(truths)
            )

        for _ in range(3):
            for truth in truths:
                truth.churn(200)
            await until(is_exact)
            server.kill()
            for truth in truths:
                truth.churn(200)
            server.start()
            await until(is_exact)
        assert "org%2Fmodel/pod-1" in indexer.statistics()[0].url


async def test_a_restarted_publisher_and_a_restarted_index_are_exact_again(
    server_and_url, indexer, make_truth, digest_of, until
):
    _, url = server_and_url
    with publisher_at(url) as publisher:
        indexer.add_source("w1", publisher.endpoint)
        truth = make_truth(publisher)
        truth.churn(200)
        await until(lambda: digest_of("w1") == truth.digest())
    with publisher_at(url) as publisher:
        truth = make_truth(publisher, seed=1)
        truth.churn(200)
        await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 0))
        other = RadixIndex(seed=2)
        async with Indexer(other, block_size=BLOCK_SIZE) as restarted:
            restarted.add_source("w1", publisher.endpoint)
            await until(lambda: restarted.is_exact("w1", 0) and restarted.is_exact("w1", 1))
            ranks = [rank for rank in other.ranks() if rank.rank == 0]
            assert [(held.num_blocks, held.digest) for held in map(other.digest, ranks)] == [truth.digest()]


async def test_what_the_next_publisher_does_not_know_is_forgotten_though_no_connection_tells_of_it(
    server_and_url, index, make_truth, digest_of, until
):
    _, url = server_and_url
    ahead_s = 0.0
    async with Indexer(index, block_size=BLOCK_SIZE, clock=lambda: time.monotonic() + ahead_s) as indexer:
        with publisher_at(url) as publisher:
            indexer.add_source("w1", publisher.endpoint)
            truth = make_truth(publisher)
            truth.churn(200)
            await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 1))

        def is_after_a_while(*states: SourceState) -> bool:
            nonlocal ahead_s
            ahead_s += 1.0
            return [*indexer.states("w1").values()] == [*states]

        await until(lambda: is_after_a_while(SourceState.RESYNCING, SourceState.RESYNCING))
        assert digest_of("w1") == truth.digest()
        with KvEventPublisher(url, worker="pod-1", block_size=BLOCK_SIZE, num_ranks=0, limits=QUICK) as silent:
            await until(lambda: is_after_a_while(SourceState.PARTIAL, SourceState.PARTIAL))
            assert digest_of("w1") == (0, 0)
            truth = make_truth(silent)
            truth.churn(200)
            await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 0))
            assert indexer.states("w1")[1] is SourceState.PARTIAL


async def test_an_index_that_starts_beyond_the_replay_buffer_gets_a_snapshot_in_pages(
    start_nats_server, indexer, make_truth, digest_of, until
):
    server = start_nats_server("max_payload: 4096")  # smaller than a chunk of the snapshot
    limits = PublisherLimits(coalesce_s=0.001, heartbeat_s=0.05, replay_max_batches=2)
    with publisher_at(f"nats://127.0.0.1:{server.port}/m", limits) as publisher:
        truth = make_truth(publisher)
        for _ in range(20):
            truth.churn(50)
            await asyncio.sleep(0.005)  # several batches
        indexer.add_source("w1", publisher.endpoint)
        await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 0))
        assert indexer.statistics()[0].num_snapshots > 0


async def test_a_router_that_starts_after_the_publisher_died_reads_the_stream(
    start_nats_server, indexer, make_truth, digest_of, until
):
    server = start_nats_server(has_jetstream=True)
    url = f"nats://127.0.0.1:{server.port}/org%2Fmodel?jetstream=KV"
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        truth.churn(300)
        endpoint = publisher.endpoint
    indexer.add_source("w1", endpoint)
    await until(lambda: digest_of("w1") == truth.digest())


async def test_an_outage_longer_than_the_hand_over_costs_a_replay_not_a_loss(
    start_nats_server, indexer, make_truth, digest_of, until, monkeypatch
):
    monkeypatch.setattr("kvist.events.transports.broker_stream.CAPACITY", 4)
    server = start_nats_server()
    limits = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.05, outbox_capacity=8)
    with publisher_at(f"nats://127.0.0.1:{server.port}/m", limits) as publisher:
        indexer.add_source("w1", publisher.endpoint)
        truth = make_truth(publisher)
        truth.churn(10)
        await until(lambda: digest_of("w1") == truth.digest())
        server.kill()
        while publisher.statistics().num_dropped_batches < 20:
            truth.churn(1)
            await until(lambda: publisher.statistics().num_waiting_events == 0)  # else events are lost before any batch
        server.start()
        await until(lambda: digest_of("w1") == truth.digest() and indexer.is_exact("w1", 0))
        (statistics,) = indexer.statistics()
        assert statistics.num_replays > 0
        assert statistics.num_cleared == 0

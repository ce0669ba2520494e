"""Engines that know nothing of Kvist: vLLM's sockets, frames and bytes, without epoch and heartbeat."""

from __future__ import annotations

import pytest

from kvist.events import Tier
from kvist.events.hashing import block_hashes
from kvist.events.session import SourceState
from kvist.events.snapshot import block_digest
from kvist.publisher import KvEventPublisher, PublisherLimits

WORKER = "http://127.0.0.1:8100"
"""The router names workers by their URL, which is no topic."""


def tokens_of(number: int) -> list[int]:
    return [number * 4 + idx for idx in range(4)]


def digest_of_roots(*numbers: int) -> tuple[int, int]:
    """Return what an index holds that has exactly the one-block prompts of these numbers."""
    hashes = [int(block_hashes(tokens_of(number), 4)[0]) for number in numbers]
    return len(hashes), sum(block_digest(block_hash, Tier.GPU) for block_hash in hashes) % (1 << 64)


@pytest.fixture
def port(free_port):
    return free_port()


@pytest.fixture
def add_vllm(indexer, port):
    """Return a function that makes the indexer follow the port."""
    return lambda options="": indexer.add_source(WORKER, f"tcp://127.0.0.1:{port}{options}")


def sole(indexer):
    (statistics,) = indexer.statistics()
    return statistics


async def test_a_late_subscriber_gets_what_the_replay_socket_still_has(
    start_vllm, port, add_vllm, indexer, digest_of, until
):
    engine = start_vllm(port)
    for number in range(5):
        engine.store(number, tokens_of(number))
    engine.remove(3)
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(0, 1, 2, 4))
    await until(lambda: indexer.is_exact(WORKER, 0))
    engine.store(9, tokens_of(9))
    await until(lambda: digest_of(WORKER) == digest_of_roots(0, 1, 2, 4, 9))


@pytest.mark.parametrize("with_topics", [False, True])
async def test_a_gap_is_filled_from_old_and_new_replay_frames(
    start_vllm, port, add_vllm, indexer, digest_of, until, with_topics
):
    engine = start_vllm(port, with_topics=with_topics)
    engine.store(0, tokens_of(0))
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(0))
    engine.store(1, tokens_of(1), is_lost=True)
    engine.remove(0, is_lost=True)
    engine.store(2, tokens_of(2))
    await until(lambda: digest_of(WORKER) == digest_of_roots(1, 2) and indexer.is_exact(WORKER, 0))
    assert sole(indexer).num_gaps == 1


async def test_the_loss_of_the_last_event_heals_when_the_engine_is_idle(
    start_vllm, port, add_vllm, digest_of, until, monkeypatch
):
    monkeypatch.setattr("kvist.publisher.engine_feed.IDLE_S", 0.2)
    engine = start_vllm(port)
    engine.store(0, tokens_of(0))
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(0))
    engine.remove(0, is_lost=True)
    await until(lambda: digest_of(WORKER) == (0, 0))


async def test_an_engine_restarted_behind_our_back_leaves_no_phantom_blocks(
    start_vllm, port, add_vllm, indexer, digest_of, until
):
    first = start_vllm(port)
    for number in range(3):
        first.store(number, tokens_of(number))
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(0, 1, 2))
    first.kill()
    second = start_vllm(port)
    for number in range(10, 13):  # as many as before, so that the next number looks like the next
        second.store(number, tokens_of(number))
    await until(lambda: digest_of(WORKER) == digest_of_roots(10, 11, 12))
    second.store(13, tokens_of(13))
    await until(lambda: digest_of(WORKER) == digest_of_roots(10, 11, 12, 13))
    await until(lambda: indexer.is_exact(WORKER, 0))
    assert sole(indexer).num_restarts == 1


async def test_a_restarted_engine_that_has_said_nothing_yet_is_believed_empty(
    start_vllm, port, add_vllm, digest_of, until
):
    first = start_vllm(port)
    first.store(0, tokens_of(0))
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(0))
    first.kill()
    second = start_vllm(port)
    await until(lambda: digest_of(WORKER) == (0, 0))
    second.store(1, tokens_of(1))
    await until(lambda: digest_of(WORKER) == digest_of_roots(1))


async def test_an_engine_without_replay_is_partial_after_a_gap_and_learns_again(
    start_vllm, port, add_vllm, indexer, digest_of, until
):
    engine = start_vllm(port, num_kept=None)
    add_vllm("?replay_port=none")

    def has_joined():
        engine.store(99, tokens_of(99))
        return digest_of(WORKER) == digest_of_roots(99)

    await until(has_joined)
    engine.store(1, tokens_of(1), is_lost=True)
    engine.store(2, tokens_of(2))
    await until(lambda: digest_of(WORKER) == digest_of_roots(2))
    await until(lambda: indexer.states(WORKER) == {0: SourceState.PARTIAL})
    engine.publish({"type": "AllBlocksCleared"})
    engine.store(3, tokens_of(3))
    await until(lambda: digest_of(WORKER) == digest_of_roots(3))
    assert indexer.is_exact(WORKER, 0)


async def test_what_the_engine_has_forgotten_is_partial(start_vllm, port, add_vllm, indexer, digest_of, until):
    engine = start_vllm(port, num_kept=2)
    for number in range(5):
        engine.store(number, tokens_of(number))
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(3, 4))
    assert indexer.states(WORKER) == {0: SourceState.PARTIAL}
    assert sole(indexer).num_cleared == 1


async def test_ranks_of_one_stream_are_told_apart(start_vllm, port, add_vllm, digest_of, until):
    engine = start_vllm(port)
    engine.store(1, tokens_of(1), rank=0)
    engine.store(2, tokens_of(2), rank=3)
    add_vllm()
    await until(lambda: (digest_of(WORKER, 0), digest_of(WORKER, 3)) == (digest_of_roots(1), digest_of_roots(2)))


async def test_garbage_between_an_engines_batches_is_counted_and_skipped(
    start_vllm, port, add_vllm, indexer, digest_of, until, caplog
):
    engine = start_vllm(port)
    engine.store(0, tokens_of(0))
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(0))
    engine.publish({"type": "BlockStored", "block_hashes": "nonsense"})
    engine.publish("not an event")
    engine.store(1, tokens_of(1), rank=1 << 40)
    engine.store(2, tokens_of(2))
    await until(lambda: digest_of(WORKER) == digest_of_roots(0, 2))
    assert sole(indexer).num_malformed == 3
    assert caplog.text.count("malformed batch") == 1


async def test_blocks_of_another_size_are_refused_and_the_error_names_both(
    start_vllm, port, add_vllm, indexer, digest_of, until, caplog
):
    engine = start_vllm(port)
    engine.store(0, list(range(16)))
    add_vllm()
    await until(lambda: sole(indexer).num_refused_batches == 1)
    assert sole(indexer).failure == "block_size 16, expected 4"
    assert caplog.text.count("stream refused") == 1
    engine.store(1, tokens_of(1))  # a hybrid model has blocks of both sizes
    await until(lambda: digest_of(WORKER) == digest_of_roots(1))
    assert sole(indexer).failure is None


async def test_a_kvist_publisher_that_replaces_the_engine_is_recognised(
    start_vllm, port, add_vllm, indexer, digest_of, until, make_truth
):
    engine = start_vllm(port)
    engine.store(0, tokens_of(0))
    add_vllm()
    await until(lambda: digest_of(WORKER) == digest_of_roots(0))
    engine.kill()
    limits = PublisherLimits(heartbeat_s=0.05)
    with KvEventPublisher(f"tcp://127.0.0.1:{port}", worker="w", block_size=4, limits=limits) as publisher:
        truth = make_truth(publisher)
        truth.churn(20)
        await until(lambda: digest_of(WORKER) == truth.digest() and indexer.is_exact(WORKER, 0))

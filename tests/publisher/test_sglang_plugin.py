"""In SGLang's process: its factory learns of the publisher, and its batches become canonical ones."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvist.errors import InvalidValueError
from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import block_digest
from kvist.indexer import Indexer
from kvist.publisher.sglang_plugin import SglangPublisher, register
from kvist.radix import RadixIndex


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """An event as SGLang 0.5.23 declares it."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


def tokens_of(number: int) -> list[int]:
    return [number * 4 + idx for idx in range(4)]


def stored(number: int) -> BlockStored:
    return BlockStored([-number], None, tokens_of(number), 4, None, "GPU")


@pytest.fixture
def publisher(free_port):
    """The publisher of rank 1, configured as SGLang does it: with every field of its own configuration."""
    port = free_port()
    made = SglangPublisher(
        attn_dp_rank=1,
        endpoint=f"tcp://127.0.0.1:{port - 1}",
        bind=None,
        replay_endpoint=f"tcp://*:{port}",
        buffer_steps=100,
        hwm=100_000,
        max_queue_size=100_000,
        topic="pod-1",
    )
    made.url = f"tcp://127.0.0.1:{port}"
    yield made
    made.shutdown()


async def test_the_schedulers_batches_reach_an_index_as_its_ranks_blocks(publisher, until):
    index = RadixIndex()
    publisher.publish(KVEventBatch(1.0, [BlockRemoved([-9])]))  # before any block tells its size
    publisher.publish(KVEventBatch(2.0, [stored(1), stored(2)]))
    async with Indexer(index, block_size=4) as indexer:
        indexer.add_source("w", publisher.url)
        await until(lambda: indexer.is_exact("w", 1) and index.digest(WorkerRank("w", 1)).num_blocks == 2)
        publisher.publish(KVEventBatch(3.0, [BlockRemoved([-1], "GPU")]))
        left = block_digest(int(block_hashes(tokens_of(2), 4)[0]), Tier.GPU)
        await until(lambda: index.digest(WorkerRank("w", 1)).digest == left)
        assert list(indexer.states("w")) == [1]  # other ranks have publishers of their own


def test_nothing_that_the_scheduler_publishes_makes_it_fail(publisher, caplog):
    publisher.publish(KVEventBatch(1.0, [{"type": "BlockStored"}, 7, stored(1)]))
    publisher.publish(KVEventBatch("soon", []))
    assert publisher.num_malformed == 3
    assert caplog.text.count("malformed events skipped") == 1
    assert publisher.describe_local_source(4) is None
    publisher.shutdown()
    publisher.publish(KVEventBatch(1.0, [stored(2)]))


@pytest.mark.parametrize("endpoint", ["ipc:///run/kv", "tcp://*", "tcp://*:0", "tcp://:5557", "inproc://kv"])
def test_an_address_that_is_not_a_port_of_the_host_is_refused(endpoint):
    with pytest.raises(InvalidValueError, match="--kv-events-config endpoint"):
        SglangPublisher(attn_dp_rank=0, endpoint=endpoint)


def test_sglangs_factory_learns_of_the_publisher_once(monkeypatch):
    known: dict[str, object] = {}

    class EventPublisherFactory:
        @classmethod
        def register_publisher(cls, name: str, constructor: object) -> None:
            if name in known:
                raise KeyError(name)
            known[name] = constructor

    parts = ["sglang", "srt", "disaggregation", "kv_events"]
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    sys.modules["sglang.srt.disaggregation.kv_events"].EventPublisherFactory = EventPublisherFactory
    register()
    register()
    assert known == {"kvist": SglangPublisher}

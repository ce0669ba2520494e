"""The sidecar between a stand-in for vLLM and what it publishes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from kvist.errors import InvalidValueError
from kvist.events import Heartbeat, Tier
from kvist.events.codec import decode_batch
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import block_digest
from kvist.events.transports import Endpoint, open_publication, open_subscription
from kvist.events.transports.base import EVERYTHING, WHAT_FOLLOWS, WHO_IS_THERE
from kvist.publisher import PublisherLimits
from kvist.publisher.sidecar import Sidecar
from kvist.publisher.state import StateStore

QUICK = PublisherLimits(heartbeat_s=0.05)


def tokens_of(number: int) -> list[int]:
    return [number * 4 + idx for idx in range(4)]


def holding_of(*numbers: int) -> Heartbeat:
    """Return the heartbeat of a rank that holds exactly the one-block prompts of these numbers."""
    hashes = [int(block_hashes(tokens_of(number), 4)[0]) for number in numbers]
    return Heartbeat(len(hashes), sum(block_digest(block_hash, Tier.GPU) for block_hash in hashes) % (1 << 64))


class Observed:
    """What a subscriber of the sidecar saw last: heartbeats by rank."""

    def __init__(self) -> None:
        self.batches = []

    async def observe(self, url: str) -> None:
        async with open_subscription(Endpoint.parse(url)) as subscription:
            while True:
                self.batches += [decode_batch(m.payload, "test").batch for m in await subscription.receive()]

    def holding(self, rank: int = 0) -> Heartbeat | None:
        beats = [b.events[0] for b in self.batches if b.rank == rank and isinstance(b.events[0], Heartbeat)]
        return beats[-1] if beats else None


@pytest.fixture
def port(free_port):
    return free_port()


@asynccontextmanager
async def running(sidecar: Sidecar):
    """Run the sidecar and a subscriber of it; yield what the subscriber observes."""
    observed = Observed()
    with sidecar:
        tasks = [asyncio.create_task(sidecar.run()), asyncio.create_task(observed.observe(sidecar.endpoint))]
        try:
            yield observed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def sidecar_of(*ports: int, **options) -> Sidecar:
    endpoints = [Endpoint.parse(f"tcp://127.0.0.1:{port}") for port in ports]
    return Sidecar(endpoints, to="tcp://127.0.0.1:0", worker="w", limits=QUICK, **options)


async def test_an_engines_stream_becomes_canonical_batches_of_the_workers_name(start_vllm, port, until):
    engine = start_vllm(port)
    engine.store(1, tokens_of(1))
    sidecar = sidecar_of(port, block_size=4)
    async with running(sidecar) as observed:
        await until(lambda: observed.holding() == holding_of(1))
        engine.store(2, tokens_of(2))
        engine.remove(1)
        await until(lambda: observed.holding() == holding_of(2))
        assert {(batch.worker, batch.block_size) for batch in observed.batches} == {("w", 4)}
    assert sidecar.statistics().num_engine_batches == 3


async def test_the_block_size_is_learnt_from_the_first_stored_event(start_vllm, port, until):
    engine = start_vllm(port)
    engine.remove(404)
    sidecar = sidecar_of(port)
    async with running(sidecar) as observed:
        await until(lambda: sidecar.statistics().num_engine_batches == 1)
        assert observed.batches == []
        engine.store(1, tokens_of(1))
        await until(lambda: observed.holding() == holding_of(1))
        assert observed.batches[-1].block_size == 4


async def test_a_sidecar_whose_engine_is_silent_answers_that_it_has_nothing_and_its_publisher_once_there_is_one(
    start_vllm, port, until
):
    engine = start_vllm(port)
    async with (
        running(sidecar := sidecar_of(port)),
        open_subscription(Endpoint.parse(sidecar.endpoint)) as subscription,
    ):
        for question in (WHAT_FOLLOWS, EVERYTHING, WHO_IS_THERE):
            assert await subscription.replay(question, 60) == []
        engine.store(1, tokens_of(1))
        await until(lambda: sidecar.statistics().published.num_sent_messages > 1)  # the second is a heartbeat
        (message,) = await subscription.replay(WHO_IS_THERE, 60)
        assert decode_batch(message.payload, "test").batch.events == (holding_of(1),)


async def test_a_restarted_engine_is_published_as_cleared_and_then_anew(start_vllm, port, until):
    first = start_vllm(port)
    first.store(1, tokens_of(1))
    sidecar = sidecar_of(port, block_size=4)
    async with running(sidecar) as observed:
        await until(lambda: observed.holding() == holding_of(1))
        first.kill()
        second = start_vllm(port)
        second.store(2, tokens_of(2))
        await until(lambda: observed.holding() == holding_of(2))
    assert sidecar.statistics().num_restarts == 1


async def test_a_gap_in_the_engines_stream_is_filled_before_anything_behind_it(start_vllm, port, until):
    engine = start_vllm(port)
    engine.store(1, tokens_of(1))
    sidecar = sidecar_of(port, block_size=4)
    async with running(sidecar) as observed:
        await until(lambda: observed.holding() == holding_of(1))
        engine.remove(1, is_lost=True)
        engine.store(2, tokens_of(2))
        await until(lambda: observed.holding() == holding_of(2))
    assert (sidecar.statistics().num_gaps, sidecar.statistics().num_lost) == (1, 0)


async def test_a_gap_that_cannot_be_filled_clears_the_rank(start_vllm, port, until):
    engine = start_vllm(port, num_kept=2)
    engine.store(1, tokens_of(1))
    sidecar = sidecar_of(port, block_size=4)
    async with running(sidecar) as observed:
        await until(lambda: observed.holding() == holding_of(1))
        for number in (2, 3, 4):
            engine.store(number, tokens_of(number), is_lost=True)
        engine.store(5, tokens_of(5))
        await until(lambda: observed.holding() == msgspec.structs.replace(holding_of(4, 5), is_complete=False))
        engine.publish({"type": "AllBlocksCleared"})
        await until(lambda: observed.holding() == holding_of())
    assert sidecar.statistics().num_lost == 1


async def test_a_hundred_thousand_blocks_at_once_arrive_without_a_gap(start_vllm, port, until):
    engine = start_vllm(port, num_kept=3)
    sidecar = sidecar_of(port, block_size=4)
    async with running(sidecar):
        engine.store(0, tokens_of(0))
        await until(lambda: sidecar.statistics().num_engine_batches == 1)

        def step(first: int) -> dict[str, object]:
            tokens = [token for number in range(first, first + 8) for token in tokens_of(number)]
            return engine.stored(0, tokens) | {"block_hashes": list(range(first, first + 8)), "block_size": 4}

        await asyncio.to_thread(lambda: [engine.publish(step(1 + 8 * idx)) for idx in range(12_500)])
        await until(lambda: sidecar.statistics().num_engine_batches == 12_501)
    statistics = sidecar.statistics()
    assert (statistics.num_gaps, statistics.num_lost, statistics.published.num_lost_events) == (0, 0, 0)
    assert statistics.published.ranks[0].num_blocks == 100_001


async def test_each_data_parallel_rank_may_have_its_own_endpoint(start_vllm, free_port, until):
    ports = [free_port(), free_port()]
    engines = [start_vllm(port) for port in ports]
    async with running(sidecar_of(*ports, block_size=4)) as observed:
        for rank, engine in enumerate(engines):
            engine.store(rank + 1, tokens_of(rank + 1), rank=rank)
        await until(lambda: (observed.holding(0), observed.holding(1)) == (holding_of(1), holding_of(2)))
        engines[1].kill()
        start_vllm(ports[1])
        await until(lambda: (observed.holding(0), observed.holding(1)) == (holding_of(1), holding_of()))


async def test_sglangs_signed_hashes_and_positional_events_are_understood(start_vllm, port, until):
    engine = start_vllm(port)
    engine.publish(["BlockStored", [-5], None, tokens_of(1), 4, None, "GPU"])
    engine.publish(["BlockStored", [-6], None, tokens_of(2), 4, None, "GPU"])
    engine.publish(["BlockRemoved", [-5], "GPU"])
    endpoint = replace(Endpoint.parse(f"tcp://127.0.0.1:{port}"), engine="sglang")
    async with running(Sidecar([endpoint], to="tcp://127.0.0.1:0", worker="w", limits=QUICK)) as observed:
        await until(lambda: observed.holding() == holding_of(2))


@pytest.mark.parametrize("options", [{"worker": "a b"}, {"block_size": 0}])
def test_a_wrong_value_is_refused_before_the_port_is_taken(free_port, options):
    url = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(InvalidValueError):
        Sidecar([], **{"to": url, "worker": "w", **options})
    open_publication(url).close()


async def test_a_sidecar_whose_publishing_fails_ends_and_says_why(start_vllm, port, monkeypatch):
    monkeypatch.setattr("kvist.publisher.sidecar.FAILURE_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr("kvist.events.transports.zmq.ZmqPublication.send", _broken_send)
    start_vllm(port).store(1, tokens_of(1))
    sidecar = sidecar_of(port, block_size=4)
    async with asyncio.timeout(60):
        await sidecar.run()
    with pytest.raises(BrokenPipeError, match="no route"):
        sidecar.close()


async def test_a_sidecar_cancelled_while_it_saves_its_state_ends_once_that_is_saved(
    start_vllm, port, until, tmp_path, monkeypatch
):
    save, is_saving, may_save = StateStore.save, threading.Event(), threading.Event()

    def save_late(store, state):
        is_saving.set()
        assert may_save.wait(60)
        return save(store, state)

    monkeypatch.setattr("kvist.publisher.sidecar.SAVE_INTERVAL_S", 0.01)
    monkeypatch.setattr(StateStore, "save", save_late)
    start_vllm(port).store(1, tokens_of(1))
    with sidecar_of(port, block_size=4, state_dir=tmp_path) as sidecar:
        running = asyncio.create_task(sidecar.run())
        await until(is_saving.is_set)
        for _ in range(2):
            running.cancel()
            assert not (await asyncio.wait([running], timeout=0.02))[0]
        may_save.set()
        await asyncio.wait([running])
        assert running.cancelled()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["sidecar-w.state", "sidecar-w.state.lock"]


def _broken_send(self, message):  # noqa: ARG001 - as ZmqPublication.send
    raise BrokenPipeError("no route")


async def test_an_engine_endpoint_that_cannot_be_bound_is_an_error_that_names_it(start_vllm, port):
    start_vllm(port)
    endpoint = replace(Endpoint.parse(f"tcp://127.0.0.1:{port}"), is_bound=True)
    sidecar = Sidecar([endpoint], to="tcp://127.0.0.1:0", worker="w")
    with pytest.raises(InvalidValueError, match=str(port)):
        await sidecar.run()
    sidecar.close()

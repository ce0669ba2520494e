"""An index that outlives its process in a folder: what was loaded counts once its stream goes on, and is exact then."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sys
import threading
from asyncio.subprocess import PIPE
from itertools import count

import numpy as np
import pytest
from index_invariants import check_invariants

from kvist.events import Tier, WorkerRank
from kvist.events.hashing import block_hashes
from kvist.files import AtomicFile
from kvist.indexer.dumps import keeper as keeper_module
from kvist.publisher import KvEventPublisher, PublisherLimits

BLOCK_SIZE = 4
_names = count()


@pytest.fixture
def url():
    return f"memory://kept-{next(_names)}"


def publisher_at(url, num_kept=1000):
    limits = PublisherLimits(coalesce_s=0.0, heartbeat_s=0.05, replay_max_batches=num_kept)
    return KvEventPublisher(url, worker="w", block_size=BLOCK_SIZE, limits=limits)


def sole(kept):
    (statistics,) = kept.indexer.statistics()
    return statistics


async def stored_in_batches(publisher, truth, until, num_batches):
    """Store blocks in that many batches, none of them joined."""
    first = publisher.statistics().ranks[0].num_batches
    for number in range(num_batches):
        truth.store(2)
        await until(lambda: publisher.statistics().ranks[0].num_batches > first + number)  # noqa: B023


@pytest.mark.parametrize(("num_kept", "num_missed"), [(1000, 0), (1000, 20), (3, 20)])
async def test_a_restart_is_exact_whatever_the_publisher_still_keeps(
    start_kept, url, make_truth, until, num_kept, num_missed
):
    with publisher_at(url, num_kept) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url)) as kept:
            truth.churn(200)
            await until(lambda: kept.is_exact(truth))
        await stored_in_batches(publisher, truth, until, num_missed)
        async with start_kept(("w", url)) as kept:
            assert kept.index.digest(WorkerRank("w", 0)).num_blocks > 0
            assert WorkerRank("w", 0) in kept.indexer.resyncing  # nothing was heard yet
            assert not kept.keeper.statistics().is_proven
            await until(lambda: kept.is_exact(truth))
            await until(lambda: kept.keeper.statistics().is_proven)
            assert kept.keeper.statistics().fates["proven"] == 1
            source = sole(kept)
            assert source.num_cleared == source.num_restarts == 0
            assert source.num_snapshots == (num_kept < num_missed)
            assert source.num_recovered <= num_missed


async def test_what_was_loaded_is_dropped_when_the_publisher_is_another(start_kept, make_truth, until, free_port):
    url = f"tcp://127.0.0.1:{free_port()}"
    with publisher_at(url) as publisher:
        before = make_truth(publisher, seed=1)
        async with start_kept(("w", url)) as kept:
            before.store(50)
            await until(lambda: kept.is_exact(before))
    with publisher_at(url) as publisher:
        now = make_truth(publisher, seed=2)
        now.store(60)
        async with start_kept(("w", url)) as kept:
            await until(lambda: kept.is_exact(now))
            await until(lambda: kept.keeper.statistics().is_proven)
            assert kept.keeper.statistics().fates["cleared"] == 1


@pytest.mark.parametrize("seed", range(6))
async def test_state_and_stream_together_are_the_truth_wherever_the_process_died(
    start_kept, url, make_truth, until, seed
):
    rng = random.Random(seed)
    with publisher_at(url, rng.choice([2, 1000])) as publisher:
        truth = make_truth(publisher, seed=seed)
        for _ in range(4):
            async with start_kept(("w", url), is_killed=rng.random() < 0.7) as kept:
                for _ in range(rng.randrange(4)):
                    truth.churn(rng.randrange(60))
                    await asyncio.sleep(0)
                    if rng.random() < 0.6:
                        await kept.keeper.save()  # amid events, or an answer
                if rng.random() < 0.5:
                    await until(lambda: kept.is_exact(truth))
            truth.churn(rng.randrange(40))
        async with start_kept(("w", url)) as kept:
            await until(lambda: kept.is_exact(truth))
            check_invariants(kept.index)
            assert sole(kept).num_diverged == 0


def prompt(number, num_blocks=4):
    return [number * 1000 + idx for idx in range(num_blocks * BLOCK_SIZE)]


def overlap(kept, tokens):
    """Return how many leading blocks the worker holds, as far as they count."""
    if WorkerRank("w", 0) in kept.indexer.resyncing:
        return 0
    depths = kept.index.match(block_hashes(tokens, BLOCK_SIZE)).get(WorkerRank("w", 0))
    return 0 if depths is None else depths[0]


def store(engine, number, num_blocks=4):
    for idx in range(num_blocks):
        tokens = prompt(number)[idx * BLOCK_SIZE : (idx + 1) * BLOCK_SIZE]
        engine.store(number * 10 + idx, tokens, number * 10 + idx - 1 if idx else None)


@pytest.mark.parametrize(("num_missed", "fate"), [(0, "proven"), (2, "proven"), (4, "cleared")])
async def test_a_stock_engines_blocks_count_again_if_its_replay_reaches_back(
    start_kept, start_vllm, free_port, until, num_missed, fate
):
    port = free_port()
    engine, url = start_vllm(port, num_kept=12), f"tcp://127.0.0.1:{port}"
    async with start_kept(("w", url)) as kept:
        store(engine, 1)
        await until(lambda: overlap(kept, prompt(1)) == 4)
    for number in range(num_missed):
        store(engine, 2 + number)
    async with start_kept(("w", url)) as kept:
        assert overlap(kept, prompt(1)) == 0
        await until(lambda: kept.keeper.statistics().is_proven)
        assert kept.keeper.statistics().fates[fate] == 1
        assert overlap(kept, prompt(1)) == (4 if fate == "proven" else 0)
        await until(lambda: num_missed == 0 or overlap(kept, prompt(1 + num_missed)) == 4)
        assert kept.state() == ("live" if fate == "proven" else "partial")
        engine.remove(13)  # by the engine's own name
        await until(lambda: overlap(kept, prompt(1)) == (3 if fate == "proven" else 0))


@pytest.mark.parametrize("num_batches_since", [0, 4, 9])
async def test_an_engine_that_was_restarted_meanwhile_is_noticed_however_far_it_is(
    start_kept, start_vllm, free_port, until, num_batches_since
):
    port = free_port()
    engine, url = start_vllm(port), f"tcp://127.0.0.1:{port}"
    async with start_kept(("w", url)) as kept:
        store(engine, 1)
        await until(lambda: overlap(kept, prompt(1)) == 4)
    engine.kill()
    engine = start_vllm(port)
    for number in range(num_batches_since):
        engine.store(number, [number] * BLOCK_SIZE)
    async with start_kept(("w", url)) as kept:
        if num_batches_since:
            await until(lambda: overlap(kept, [0] * BLOCK_SIZE) == 1)
        await until(lambda: kept.keeper.statistics().fates["cleared"] == 1)
        assert overlap(kept, prompt(1)) == 0


async def test_an_engine_that_nobody_can_ask_has_to_begin_anew(start_kept, start_vllm, free_port, until):
    port = free_port()
    engine, url = start_vllm(port, num_kept=None), f"tcp://127.0.0.1:{port}?replay_port=none"
    async with start_kept(("w", url)) as kept:

        async def is_heard():
            store(engine, 1)
            return overlap(kept, prompt(1)) == 4

        while not await is_heard():  # noqa: ASYNC110 - the engine does not know who listens
            await asyncio.sleep(0.005)
    async with start_kept(("w", url)) as kept:
        await until(lambda: kept.keeper.statistics().fates["cleared"] == 1)
        assert overlap(kept, prompt(1)) == 0


async def test_streams_wait_for_their_worker_and_are_saved_meanwhile(start_kept, url, make_truth, until):
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url), ("other", "tcp://127.0.0.1:1")) as kept:
            truth.store(30)
            await until(lambda: kept.is_exact(truth))
        async with start_kept() as kept:
            assert kept.keeper.statistics().fates["waiting"] == 1  # of the other nothing was ever heard
            kept.indexer.add_source("new", "tcp://127.0.0.1:2")
            await kept.keeper.save()
            assert kept.keeper.statistics().num_saves == 1
        async with start_kept() as kept:
            assert kept.keeper.statistics().fates["waiting"] == 1
            kept.indexer.add_source("w", url)
            assert kept.keeper.statistics().fates["waiting"] == 0
            await until(lambda: kept.is_exact(truth))
            assert sole(kept).num_snapshots == sole(kept).num_recovered == 0


async def test_what_waits_in_vain_is_dropped(start_kept, url, make_truth, until, monkeypatch):
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url)) as kept:
            truth.store(30)
            await until(lambda: kept.is_exact(truth))
    monkeypatch.setattr(keeper_module, "MAX_WAIT_S", 0.0)
    async with start_kept() as kept:
        await until(lambda: kept.keeper.statistics().is_proven)
        assert kept.keeper.statistics().fates["dropped"] == 1
        assert kept.index.digest(WorkerRank("w", 0)).num_blocks == 0
        assert not kept.indexer.resyncing


@pytest.mark.parametrize("elsewhere", ["tcp://127.0.0.1:1", "tcp://127.0.0.1:1?replay_port=9"])
async def test_a_worker_that_streams_from_elsewhere_begins_anew(start_kept, url, make_truth, until, elsewhere):
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url)) as kept:
            truth.store(30)
            await until(lambda: kept.is_exact(truth))
    async with start_kept(("w", elsewhere)) as kept:
        assert kept.index.digest(WorkerRank("w", 0)).num_blocks == 0
        await until(lambda: kept.keeper.statistics().fates["dropped"] == 1)


async def test_a_state_of_other_blocks_is_not_gone_on_with(start_kept, url, make_truth, until):
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url)) as kept:
            truth.store(30)
            await until(lambda: kept.is_exact(truth))
        async with start_kept(("w", url), block_size=16) as kept:
            await until(lambda: any(each.failure for each in kept.indexer.statistics()))
            assert kept.index.ranks() == []
            assert [each.failure for each in kept.indexer.statistics()] == ["block_size 4, expected 16"]


async def saved(start_kept, url, make_truth, until, tmp_path):
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url)) as kept:
            truth.store(12)
            await until(lambda: kept.is_exact(truth))
    return tmp_path / "router.state"


def gone_wrong(state):
    yield b""
    yield b"nothing of ours" * 9
    yield state[:-1]
    yield state + b"\0"
    yield state.replace(b"\xb0kvist-index-dump\x05", b"\xb0kvist-index-dump\x63")
    for place in range(0, len(state), 41):
        yield state[:place]
        yield state[:place] + bytes([state[place] ^ 0x14]) + state[place + 1 :]


async def test_a_damaged_state_is_set_aside_and_nothing_of_it_used(
    start_kept, url, make_truth, until, tmp_path, caplog
):
    path = await saved(start_kept, url, make_truth, until, tmp_path)
    state = path.read_bytes()
    for wrong in gone_wrong(state):
        path.write_bytes(wrong)
        caplog.clear()
        async with start_kept() as kept:
            assert kept.index.ranks() == [], wrong
            assert kept.indexer.parked == []
        assert "state cannot be used, starting empty" in caplog.text
        assert (tmp_path / "router.state.damaged").read_bytes() == wrong
        assert not path.exists()
    path.write_bytes(state)
    async with start_kept() as kept:
        assert len(kept.indexer.parked) == 1


async def test_it_is_saved_now_and_then_if_something_changed(start_kept, url, make_truth, until):
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url), interval_s=0.01) as kept:
            truth.store(3)
            await until(lambda: kept.keeper.statistics().num_saves > 0)
            await until(lambda: kept.is_exact(truth))
            await kept.keeper.save()
            num_saves = kept.keeper.statistics().num_saves
            await kept.keeper.save()
            assert kept.keeper.statistics().num_saves == num_saves
            assert kept.keeper.statistics().size_bytes > 0
            truth.store(1)
            await until(lambda: kept.keeper.statistics().num_saves > num_saves)


async def test_a_failing_disk_is_counted_and_told_and_stops_nothing(
    start_kept, url, make_truth, until, tmp_path, monkeypatch, caplog
):
    path = await saved(start_kept, url, make_truth, until, tmp_path)
    before = path.read_bytes()
    with publisher_at(url) as publisher:
        truth = make_truth(publisher)
        async with start_kept(("w", url)) as kept:
            truth.store(40)
            await until(lambda: kept.is_exact(truth))

            def refuse(*_):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            for method in ("write", "commit"):
                with monkeypatch.context() as patch:
                    patch.setattr(AtomicFile, method, refuse)
                    await kept.keeper.save()
            statistics = kept.keeper.statistics()
            assert (statistics.num_saves, statistics.num_failures) == (0, 2)
            assert "No space left" in statistics.failure
            assert "state not saved: [Errno 28] No space left on device" in caplog.text
            assert path.read_bytes() == before
            assert sorted(each.name for each in tmp_path.iterdir()) == ["router.state"]
            truth.store(1)
            await until(lambda: kept.is_exact(truth))
        assert kept.keeper.statistics().num_saves == 1  # at the end
        assert kept.keeper.statistics().failure is None


async def test_a_save_that_ends_early_leaves_no_trace(start_kept, url, make_truth, until, tmp_path, monkeypatch):
    path = await saved(start_kept, url, make_truth, until, tmp_path)
    before = path.read_bytes()
    async with start_kept(is_killed=True) as kept:
        kept.keeper._saved = None
        with monkeypatch.context() as patch:
            patch.setattr("kvist.indexer.dumps.dumper._wait_for_answers", lambda _: asyncio.Event().wait())
            patch.setattr(keeper_module, "LAST_SAVE_TIMEOUT_S", 0.05)
            await kept.keeper.stop()
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["router.state"]


async def test_a_save_cancelled_while_it_writes_is_over_before_anything_else_is_saved(
    start_kept, url, make_truth, until, tmp_path, monkeypatch
):
    path = await saved(start_kept, url, make_truth, until, tmp_path)
    commit, is_committing, may_commit = AtomicFile.commit, threading.Event(), threading.Event()

    def commit_late(file):
        is_committing.set()
        assert may_commit.wait(60)
        commit(file)

    async with start_kept(is_killed=True) as kept:
        kept.keeper._saved = None
        with monkeypatch.context() as patch:
            patch.setattr(AtomicFile, "commit", commit_late)
            saving = asyncio.create_task(kept.keeper.save())
            await until(is_committing.is_set)
            saving.cancel()
            following = asyncio.create_task(kept.keeper.save())
            await asyncio.wait([saving, following], timeout=0.02)
            assert not saving.done()
            may_commit.set()
            await asyncio.wait([saving, following])
        assert saving.cancelled()
        assert (kept.keeper.statistics().num_saves, kept.keeper.statistics().num_failures) == (1, 0)
    assert sorted(each.name for each in path.parent.iterdir()) == ["router.state"]


async def test_a_save_lets_others_have_their_turn_and_waits_for_answers_that_are_taken(start_kept, url):
    async with start_kept(("w", url)) as kept:
        kept.index.store(WorkerRank("w", 0), Tier.GPU, None, np.arange(1, 100_001, dtype=np.uint64))
        (source,) = kept.indexer.sources
        source.is_applying_answer = True
        kept.keeper._saved = None
        saving, num_turns = asyncio.create_task(kept.keeper.save()), 0
        while not saving.done():
            num_turns += 1
            source.is_applying_answer = num_turns < 3
            await asyncio.sleep(0)
        assert kept.keeper.statistics().num_saves == 1
        assert num_turns > 100_000 / 4096


WRITER = """
import asyncio, sys, time
from pathlib import Path
import numpy as np
from kvist.events import Tier, WorkerRank
from kvist.indexer import Indexer
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.indexer.canonical import CanonicalProgress, RankProgress
from kvist.radix import RadixIndex
from kvist.router.index import FleetState

async def main():
    index = RadixIndex()
    async with Indexer(index, block_size=4) as indexer:
        fleet = FleetState(index, indexer)
        keeper = StateKeeper(Path(sys.argv[1]), "router", 3600, lambda: [fleet], time.monotonic)
        await keeper.load(fleet)
        index.store(WorkerRank("w", 0), Tier.GPU, None, np.arange(1, 50_001, dtype=np.uint64))
        indexer.park("w", "tcp://127.0.0.1:1", 0, CanonicalProgress((RankProgress(0, 7, 3, True),)), 4)
        while True:
            await keeper.save()
            keeper._saved = None
            print("saved", flush=True)

asyncio.run(main())
"""


async def test_a_process_killed_amid_a_save_leaves_a_whole_state(start_kept, tmp_path, until):
    rng = random.Random(5)
    for _ in range(3):
        (tmp_path / "router.state").unlink(missing_ok=True)
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, str(tmp_path), stdout=PIPE)
        assert writer.stdout is not None
        for _ in range(rng.randint(1, 4)):
            assert await writer.stdout.readline() == b"saved\n"
        await until((tmp_path / "router.state.new").exists)
        writer.kill()
        await writer.communicate()
        async with start_kept(is_killed=True) as kept:
            assert len(kept.indexer.parked) == 1
            assert kept.index.digest(WorkerRank("w", 0)).num_blocks == 50_000
        assert not (tmp_path / "router.state.damaged").exists()

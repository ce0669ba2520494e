"""Routers beside each other: each decides as if it were the only one, by what all of them have in flight."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.router.config import RouterConfig
from kvist.router.fleet.board import FrontField, LoadBoard, RankField
from kvist.router.fleet.load import LoadTracker
from kvist.router.fleet.replicas import SILENT_S, ReplicaRows, Summary, SummaryBuilder
from kvist.router.policy.decision import Prompt
from kvist.router.policy.settings import PriceSettings

RANKS = [WorkerRank(f"http://w{idx}", rank) for idx in range(3) for rank in range(2)]
BLOCK = 16


class Router:
    """A router's board, of one front or more, and what it tells and hears."""

    def __init__(self, num_fronts: int = 1, num_replicas: int = 3, ranks: list[WorkerRank] = RANKS) -> None:
        self.board = LoadBoard(num_fronts=num_fronts, num_replicas=num_replicas)
        self.fronts = [LoadTracker(self.board, front) for front in range(num_fronts)]
        for rank in ranks:
            self.fronts[0].register(rank)
        self.policies = [front.pricing(PriceSettings(), BLOCK) for front in self.fronts]
        self.builder = SummaryBuilder(self.board)
        self.rows = ReplicaRows(self.board, lambda url: any(rank.worker == url for rank in ranks))

    def view(self, now_s: float, hashes: np.ndarray) -> dict[WorkerRank, tuple[float, ...]]:
        """Return what this router thinks of each rank, whatever its column is."""
        ranks = [*self.board.columns]
        columns = np.array([self.board.columns[rank] for rank in ranks])
        prices = self.policies[0].weigh(now_s, 4000, hashes, np.zeros(len(ranks), int), columns)
        loads = [self.fronts[0].load(rank) for rank in ranks]
        return {
            rank: (
                load.running_requests,
                load.prefill_tokens,
                round(float(prices.cost_s[idx]), 6),
                int(prices.cached_tokens[idx]),
            )
            for idx, (rank, load) in enumerate(zip(ranks, loads, strict=True))
        }


class Client:
    """Sends requests by one front, and ends them; the same to a router that does all, as the oracle."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.running: list[list[Any]] = []

    def step(self, now_s: float, ours: tuple[Router, int], oracle: tuple[Router, int]) -> None:
        if self.running and self.rng.random() < 0.4:
            self.end(now_s, self.running.pop(self.rng.randrange(len(self.running))))
            return
        rank, num_tokens = self.rng.choice(RANKS), self.rng.choice([100, 1000, 5000])
        hashes = np.arange(num_tokens // BLOCK, dtype=np.uint64) + np.uint64(self.rng.choice([1, 10**6, 10**9]))
        begun = []
        for router, front in (ours, oracle):
            tracker, policy = router.fronts[front], router.policies[front]
            columns = np.array([tracker.column(each) for each in RANKS])
            prices = policy.weigh(now_s, num_tokens, hashes, np.zeros(len(RANKS), int), columns)
            # What is dispatched must not hang on views that are a tick old, nor speeds on when answers come.
            load = tracker.begin(rank, Prompt(num_tokens, BLOCK), 0)
            compute = prices.compute.copy()
            compute[:] = 200
            unit_s = prices.load._replace(unit_s=np.full(len(RANKS), 40e-6))
            prices = prices._replace(compute=compute, load=unit_s)
            begun.append((load, policy.dispatched(now_s, tracker.column(rank), prices, RANKS.index(rank)), router))
        self.running.append(begun)

    def end(self, now_s: float, begun: list[Any]) -> None:
        for load, dispatched, _ in begun:
            load.end_prefill()
            dispatched.answered(now_s)
            dispatched.add_tokens(7)
            load.add_tokens(7)
            dispatched.finish(now_s)
            load.finish(0.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_fronts", [1, 2])
def test_all_know_what_one_router_that_does_all_knows(seed: int, num_fronts: int) -> None:
    """Summaries are of changes alone, now and then of all, and some are lost; ranks have other columns everywhere."""
    rng = random.Random(seed)
    routers = [Router(num_fronts, ranks=rng.sample(RANKS, len(RANKS))) for _ in range(3)]
    oracle = Router(3 * num_fronts)
    clients = [Client(seed * 10 + idx) for idx in range(3 * num_fronts)]
    now_s = 1000.0
    last = np.arange(4000 // BLOCK, dtype=np.uint64) + np.uint64(1)
    for tick in range(120):
        for idx, client in enumerate(clients):
            router, front = divmod(idx, num_fronts)
            if rng.random() < 0.5:
                client.step(now_s, (routers[router], front), (oracle, idx))
        now_s += 0.02
        is_whole = tick % 20 == 0 or tick == 119
        for idx, router in enumerate(routers):
            data = msgspec.msgpack.encode(router.builder.build(now_s, is_whole=is_whole))
            for other, peer in enumerate(routers):
                if other != idx and (is_whole or rng.random() < 0.8):
                    assert peer.rows.apply(str(idx), msgspec.msgpack.decode(data, type=Summary), now_s)
    truth = oracle.view(now_s, last)
    assert any(running for running, *_ in truth.values())
    for router in routers:
        assert sum(router.board.ints[row + FrontField.RUNNING] for row in router.board.row_starts) == sum(
            running for running, *_ in truth.values()
        )
        for rank, (*counts, cost_s, cached) in router.view(now_s, last).items():
            *true_counts, true_cost_s, true_cached = truth[rank]
            assert (counts, cached) == (true_counts, true_cached)
            assert math.isclose(cost_s, true_cost_s, rel_tol=0.05, abs_tol=0.02)


def test_clocks_of_machines_may_differ() -> None:
    ours, theirs = Router(), Router()
    load = theirs.fronts[0].begin(RANKS[0], Prompt(1000, BLOCK), 0)
    hashes = np.arange(1, 63, dtype=np.uint64)
    columns = np.arange(len(RANKS))
    prices = theirs.policies[0].weigh(5e6, 1000, hashes, np.zeros(len(RANKS), int), columns)
    theirs.policies[0].dispatched(5e6, 0, prices, 0)
    ours.rows.apply("other", theirs.builder.build(5e6 + 1, is_whole=True), 51.0)
    assert ours.view(51.0, hashes)[RANKS[0]] == theirs.view(5e6 + 1, hashes)[RANKS[0]]
    load.finish(0.0)


def test_what_is_done_at_the_very_moment_of_a_summary_is_told() -> None:
    ours, theirs, hashes = Router(), Router(), np.arange(1, 63, dtype=np.uint64)
    theirs.fronts[0].begin(RANKS[0], Prompt(1000, BLOCK), 0)
    prices = theirs.policies[0].weigh(7.0, 1000, hashes, np.zeros(len(RANKS), int), np.arange(len(RANKS)))
    theirs.policies[0].dispatched(7.0, 0, prices, 0)
    ours.rows.apply("other", theirs.builder.build(7.0, is_whole=False), 51.0)
    for later_s in (0.0, 1.5):
        assert ours.view(51.0 + later_s, hashes) == theirs.view(7.0 + later_s, hashes)


def test_the_time_of_one_step_is_not_taken_for_that_of_each_routers_prompt_in_it() -> None:
    """A worker that takes 50 µs a unit computes prompts of two routers together, and one alone now and then."""
    routers, unit_s, now_s = [Router(), Router()], 5e-5, 1000.0
    hashes, columns = np.arange(1, 63, dtype=np.uint64), np.arange(len(RANKS))
    for number in range(300):
        asked = routers if number % 3 else routers[:1]
        begun = []
        for router in asked:
            prices = router.policies[0].weigh(now_s, 4000, hashes[:0], np.zeros(len(RANKS), int), columns)
            begun.append(router.policies[0].dispatched(now_s, 0, prices, 0))
        for router, other in (routers, routers[::-1]):
            other.rows.apply("other", router.builder.build(now_s + 0.01, is_whole=False), now_s + 0.01)
        now_s += sum(each.work for each in begun) * unit_s
        for each in begun:
            each.answered(now_s)
            each.finish(now_s)
        now_s += 0.1
    for router in routers:
        seconds, work = router.board.learnt_speeds()[RANKS[0]]
        assert seconds / work == pytest.approx(unit_s)


def test_who_is_silent_counts_no_more_and_gives_its_row_to_another() -> None:
    ours, theirs = Router(num_replicas=1), Router()
    theirs.fronts[0].begin(RANKS[0], Prompt(1000, BLOCK), 0)
    summary = theirs.builder.build(1.0, is_whole=True)
    assert ours.rows.apply("a", summary, 1.0)
    assert not ours.rows.apply("b", summary, 1.0)
    assert ours.fronts[0].running_requests(RANKS[0].worker) == 1
    assert ours.rows.forget_silent(1.0 + SILENT_S) == []
    assert ours.rows.forget_silent(1.1 + SILENT_S) == ["a"]
    assert ours.fronts[0].running_requests(RANKS[0].worker) == 0
    assert not ours.board.cell_ints[1].any()
    assert not ours.board.in_flight[1]["hash"].any()
    assert ours.rows.apply("b", summary, 4.0)


def test_what_is_said_of_others_workers_and_what_is_no_summary_changes_nothing() -> None:
    ours, theirs = Router(), Router(ranks=[WorkerRank("http://elsewhere", 0), RANKS[1]])
    theirs.fronts[0].begin(WorkerRank("http://elsewhere", 0), Prompt(1000, BLOCK), 0)
    theirs.fronts[0].begin(RANKS[1], Prompt(1000, BLOCK), 0)
    summary = theirs.builder.build(1.0, is_whole=True)
    ours.rows.apply("a", summary, 1.0)
    assert WorkerRank("http://elsewhere", 0) not in ours.board.columns
    assert ours.fronts[0].load(RANKS[1]).running_requests == 1
    with pytest.raises(ValueError, match="bytes of numbers for 2 ranks"):
        ours.rows.apply("a", msgspec.structs.replace(summary, numbers=summary.numbers[8:]), 1.0)
    assert ours.board.cell_ints[1, 1 + ours.board.columns[RANKS[1]], RankField.RUNNING] == 1


def test_routers_of_other_versions_share_their_load() -> None:
    """Fields of work are only appended: the one before has one less, and a later one may have more."""
    ours = Router()
    cells = [3.0, 70.0, 5.0, 4.0, -0.25]
    times = [-2.0, -1.5, -math.inf, -9.0]
    work = [1000.0, 640.0, 7.0, 0.5, 12000.0, 7.0, 900.0, 0.25, *times, 30.0, 0.125, 2.0]
    for appended in ([], [6.0], [6.0, 99.0, 98.0]):
        numbers = np.array([*work, *appended, *cells], "<f8").tobytes()
        summary = msgspec.msgpack.encode([True, 3, [RANKS[0]], numbers, [], False, [], []])
        assert ours.rows.apply("a", msgspec.msgpack.decode(summary, type=Summary), 100.0)
        column = ours.board.columns[RANKS[0]]
        row = ours.board.work[1][:, column].tolist()
        assert row == [*work[:8], 98.0, 98.5, 0.0, 91.0, *work[12:], *(appended or [0.0])[:1]]
        assert ours.board.cell_ints[1, 1 + column, : RankField.LAST_BYTE_AT].tolist() == [3, 70, 5, 4]
        assert ours.board.cell_floats[1, 1 + column, RankField.LAST_BYTE_AT] == 99.75
        assert ours.fronts[0].load(RANKS[0]).running_requests == 3
    with pytest.raises(ValueError, match="152 bytes of numbers for 1 ranks, expected a multiple of 8, at least 20"):
        ours.rows.apply("a", Summary(True, 3, [RANKS[0]], bytes(152), []), 100.0)


def test_a_summary_has_the_bytes_of_this_version() -> None:
    """Routers of other versions read them: fields are appended, never moved."""
    theirs = Router(ranks=RANKS[:1])
    column = theirs.board.columns[RANKS[0]]
    theirs.board.work[0][:, column] = np.arange(1.0, 17.0)
    theirs.board.cell_ints[0, 1 + column, : RankField.LAST_BYTE_AT] = 17, 18, 19, 20
    theirs.board.cell_floats[0, 1 + column, RankField.LAST_BYTE_AT] = 21.0
    numbers = [*range(1, 9), 8.0, 9.0, 10.0, 11.0, *range(13, 17), *range(17, 21), 20.0]
    expected = b"\x98\xc3\x00\x91\x92\xa9http://w0\x00\xc4\xa8" + struct.pack("<21d", *numbers) + b"\x90\xc2\x90\x90"
    assert msgspec.msgpack.encode(theirs.builder.build(1.0, is_whole=True)) == expected


async def test_routers_beside_each_other_count_what_the_others_have_in_flight(
    worker, router, http_bytes, start_nats_server
) -> None:
    """Over a real broker, which dies and comes back; one more comes, and goes."""
    go_on, broker = asyncio.Event(), start_nats_server()

    async def wait(_: Any, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(http_bytes.response(http_bytes.completion()))

    async def until_running(front: Any, number: int) -> None:
        async def is_so() -> bool:
            return (await front.workers())[one.url]["running_requests"] == number

        await front.until(is_so)

    async with worker(answer=wait) as one, AsyncExitStack() as stack:
        url = f"nats://127.0.0.1:{broker.port}/fleet/routers"
        settings = {"replicas": url, "block_size": 16, "silence_timeout_s": 60.0, "shutdown_timeout_s": 0.1}
        first, second = [await stack.enter_async_context(router(one.url, **settings)) for _ in range(2)]
        asked = [asyncio.create_task(front.complete([1] * 64)) for front in (first, first, second)]
        async with AsyncExitStack() as short:
            third = await short.enter_async_context(router(one.url, **settings))
            lost = asyncio.create_task(third.complete([2] * 64))
            for front in (first, second, third):
                await until_running(front, 4)
            assert (await third.client.get("/readiness")).json()["replicas"] == {
                "active": 2,
                "malformed": 0,
                "problem": None,
            }
            assert (await third.metrics())["kvist_router_replicas"] == 2
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
        await until_running(first, 3)
        broker.kill()  # what was heard counts until it is too old
        await until_running(first, 2)
        await until_running(second, 1)
        broker.start()
        for front in (first, second):
            await until_running(front, 3)
        go_on.set()
        assert [(await each).status_code for each in asked] == [200, 200, 200]
        for front in (first, second):
            await until_running(front, 0)


@pytest.mark.parametrize("url", ["http://host/a/b", "tcp://host:5557", "nats://host", "nats://host:4222/fleet"])
def test_where_they_meet_must_be_a_place_on_a_broker(url: str) -> None:
    with pytest.raises(InvalidValueError, match="replicas"):
        RouterConfig(replicas=url)

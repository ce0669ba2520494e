"""A worker that joins a busy fleet is let in by what it takes, and one that starts with the others at once is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvist.events import WorkerRank
from kvist.router.fleet.board import RankField
from kvist.router.fleet.worker import WARM_UP_REQUESTS, WARM_UP_STEPS


class Holding:
    """Answers each request once it is let."""

    def __init__(self, http_bytes: Any) -> None:
        self.http_bytes, self.gate, self.num_running, self.most_running = http_bytes, asyncio.Semaphore(0), 0, 0

    async def __call__(self, _: Any, writer: asyncio.StreamWriter) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await self.gate.acquire()
        self.num_running -= 1
        writer.write(self.http_bytes.response(self.http_bytes.completion()))

    def let(self, num_answers: int) -> None:
        for _ in range(num_answers):
            self.gate.release()


@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
async def test_a_burst_on_a_busy_fleet_does_not_flood_the_worker_that_joins_it(
    worker, router, http_bytes, until, policy
) -> None:
    busy, new = Holding(http_bytes), Holding(http_bytes)

    def ask(num: int) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(front.complete(f"{idx} hello")) for idx in range(num)]

    async def bound() -> int:
        return (await front.workers())[two.url]["max_requests"]

    async with worker(answer=busy) as one, worker(answer=new) as two, router(one.url, policy=policy) as front:
        asked = ask(20)
        await until(lambda: busy.num_running == 20)
        await front.client.post("/workers", json={"url": two.url})
        await front.until_state(two.url, "healthy")
        assert (await front.workers())[two.url]["warming"]
        assert await bound() == WARM_UP_REQUESTS
        asked += ask(35)
        await until(lambda: busy.num_running + new.num_running == 55)
        assert new.num_running == WARM_UP_REQUESTS
        new.let(WARM_UP_REQUESTS)
        await until(lambda: sum(each.done() for each in asked) == WARM_UP_REQUESTS)
        grown = 3 * WARM_UP_REQUESTS  # one more for each first byte, and for each end
        assert await bound() == grown
        asked += ask(35)
        await until(lambda: busy.num_running + new.num_running == 90 - WARM_UP_REQUESTS)
        assert new.most_running == grown
        new.let(1000)
        busy.let(1000)
        assert {(await each).status_code for each in asked} == {200}


async def test_a_worker_is_warm_after_enough_answers_and_has_no_bound_then(
    worker, router, http_bytes, until, monkeypatch
) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.REPORT_INTERVAL_S", 0.01)
    busy, new = Holding(http_bytes), Holding(http_bytes)
    new.let(10_000)
    async with worker(answer=busy) as one, worker(answer=new) as two, router(one.url, policy="least-loaded") as front:
        asked = asyncio.create_task(front.complete())
        await until(lambda: busy.num_running == 1)
        await front.client.post("/workers", json={"url": two.url})
        await front.until_state(two.url, "healthy")
        for _ in range(WARM_UP_STEPS // 2):  # each begins and ends
            assert (await front.complete()).headers["x-kvist-worker"] == two.url

        async def is_warm() -> bool:
            explained = (await front.workers())[two.url]
            return not explained["warming"] and explained["max_requests"] is None

        await front.until(is_warm)
        busy.let(1)
        assert (await asked).status_code == 200


async def test_a_worker_becomes_warm_also_after_a_front_that_had_counted_its_answers_has_died(
    worker, router, until, monkeypatch
) -> None:
    for name, value in (("REPORT_INTERVAL_S", 0.01), ("WARM_UP_STEPS", 4)):
        monkeypatch.setattr(f"kvist.router.fleet.membership.{name}", value)
    async with worker() as one, router(one.url) as front:
        for _ in range(5):
            assert (await front.complete()).status_code == 200
        capacity, load = front.service.fleet.get(one.url).capacity, front.service.keeper.load
        capacity.warms_from = load.num_steps(one.url)
        load.board.cell_ints[:, 1 + load.column(WorkerRank(one.url, 0)), RankField.ENDED : RankField.ANSWERED + 1] = 0
        await until(lambda: capacity.warms_from == 0)
        for _ in range(2):  # each begins and ends
            assert (await front.complete()).status_code == 200
        await until(lambda: capacity.warms_from is None)


async def test_a_fleet_that_starts_at_once_takes_a_burst_evenly(worker, router, http_bytes, until) -> None:
    held = [Holding(http_bytes), Holding(http_bytes)]
    async with (
        worker(answer=held[0]) as one,
        worker(answer=held[1]) as two,
        router(one.url, two.url, policy="least-loaded") as front,
    ):
        asked = [asyncio.create_task(front.complete()) for _ in range(80)]
        await until(lambda: sum(each.num_running for each in held) == 80)
        assert [each.num_running for each in held] == [40, 40]
        for each in held:
            each.let(80)
        assert {(await each).status_code for each in asked} == {200}

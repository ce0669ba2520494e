"""Workers come, are judged, misbehave, drain and go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvist.events import WorkerRank
from kvist.router.fleet.fleet import RANKS_MAX_AGE_S, Fleet
from kvist.router.fleet.worker import CircuitBreaker, HealthGauge, Worker
from kvist.router.index import RankStatus

EVENTS = {"endpoint": "tcp://127.0.0.1:40001?replay_port=40002"}


def kvist_engine(**fields: Any) -> dict[str, Any]:
    return {"engine": "kvist", "version": "0.1", "block_size": 16, "kv_events": EVENTS} | fields


async def test_a_worker_is_starting_until_it_answers(worker, router, free_port) -> None:
    late = worker(port=free_port())
    async with router(late.url, ready=False, health_failures=1000) as front:
        assert (await front.workers())[late.url]["state"] == "starting"
        assert (await front.client.get("/readiness")).status_code == 503
        async with late:
            await front.until_state(late.url, "healthy")
            assert (await front.client.get("/readiness")).status_code == 200


async def test_an_unhealthy_worker_gets_nothing_until_it_recovers(worker, router) -> None:
    async with worker() as sick, worker() as well, router(sick.url, well.url, policy="round-robin") as front:
        sick.health_status = 500
        await front.until_state(sick.url, "unhealthy")
        explained = (await front.workers())[sick.url]
        assert "GET /health answered 500" in explained["last_failure"]
        assert {(await front.complete()).headers["x-kvist-worker"] for _ in range(4)} == {well.url}
        sick.health_status = 200
        await front.until_state(sick.url, "healthy")
        assert {(await front.complete()).headers["x-kvist-worker"] for _ in range(4)} == {sick.url, well.url}


async def test_a_check_that_fails_is_repeated_soon(worker, router, monkeypatch) -> None:
    monkeypatch.setattr("kvist.router.fleet.membership.UNSURE_INTERVAL_S", 0.001)
    async with worker() as sick, router(sick.url, health_interval_s=1.0, health_failures=100) as front:
        sick.health_status = 500
        await front.until_state(sick.url, "unhealthy")


async def test_a_worker_that_answers_too_slowly_fails_its_check(worker, router) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker() as slow, router(slow.url, health_timeout_s=0.5, health_failures=1) as front:
        slow._reply = never
        await front.until_state(slow.url, "unhealthy")
        assert "within 0.5 s" in (await front.workers())[slow.url]["last_failure"]


async def test_announced_events_are_followed_and_a_new_endpoint_replaces_the_old(worker, router) -> None:
    async with worker(server_info=kvist_engine()) as one, router(one.url) as front:
        await front.until_sources(one.url, EVENTS["endpoint"])
        one.server_info = kvist_engine(kv_events={"endpoint": "tcp://127.0.0.1:50001"})
        await front.until_sources(one.url, "tcp://127.0.0.1:50001")
        one.server_info = kvist_engine(kv_events=None)
        await front.until_sources(one.url)


async def test_a_configured_event_source_wins_over_the_announced_one(worker, router) -> None:
    endpoints = ("tcp://127.0.0.1:50003", "tcp://127.0.0.1:50005")
    one = worker(server_info=kvist_engine())
    async with one, router(one.url, kv_event_sources={one.url: endpoints}, block_size=16) as front:
        await front.until_sources(one.url, *endpoints)


async def test_an_endpoint_elsewhere_is_not_dialled_and_the_worker_still_serves(worker, router) -> None:
    info = kvist_engine(kv_events={"endpoint": "tcp://169.254.169.254:80"})
    async with worker(server_info=info) as one, router(one.url) as front:
        await front.until_sources(one.url)
        assert "169.254.169.254" in (await front.workers())[one.url]["kv_events"]["error"]
        assert (await front.complete()).status_code == 200


async def test_block_sizes_do_not_matter_to_policies_that_look_at_no_cache(worker, router) -> None:
    one = worker(server_info=kvist_engine())
    async with one, router(one.url, policy="round-robin", block_size=64) as front:
        assert (await front.complete()).status_code == 200


async def test_a_worker_added_while_running_takes_requests(worker, router) -> None:
    async with worker(server_info=kvist_engine()) as one, router() as front:
        assert (await front.complete()).status_code == 503
        added = await front.client.post("/workers", json={"url": one.url + "/"})
        assert (added.status_code, added.json()) == (201, {"url": one.url, "state": "starting"})
        await front.until_state(one.url, "healthy")
        assert (await front.complete()).status_code == 200


async def test_a_removed_worker_ends_its_requests_takes_no_new_ones_and_is_forgotten(
    worker, router, http_bytes, until
) -> None:
    go_on = asyncio.Event()

    async def wait(_: Any, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(http_bytes.response(b"{}"))

    async with worker(answer=wait, server_info=kvist_engine()) as one, router(one.url) as front:
        running = asyncio.create_task(front.complete())
        await until(lambda: one.completions)
        removed = await front.client.delete("/workers", params={"url": one.url})
        assert (removed.status_code, removed.json()["state"]) == (202, "draining")
        assert (await front.complete()).status_code == 503
        assert (await front.client.post("/workers", json={"url": one.url})).status_code == 409
        assert not running.done()
        await front.until_sources(one.url, EVENTS["endpoint"])
        go_on.set()
        assert (await running).status_code == 200
        await front.until_state(one.url, "gone")
        assert one.url not in front.service.keeper.index._streams
        assert not [name for name in await front.metrics() if one.url in name]


async def test_a_drain_has_an_end(worker, router, until) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker(answer=never) as one, router(one.url, drain_timeout_s=0.05) as front:
        running = asyncio.create_task(front.complete())
        await until(lambda: one.completions)
        await front.client.delete("/workers", params={"url": one.url})
        await front.until_state(one.url, "gone")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_removing_twice_drains_once(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        first, second = await asyncio.gather(
            *(front.client.delete("/workers", params={"url": one.url}) for _ in range(2))
        )
        assert first.status_code == 202
        assert second.status_code in (202, 404)
        await front.until_state(one.url, "gone")


def test_the_lists_of_ranks_are_asked_for_anew_after_a_while_or_once_a_rank_was_cleared() -> None:
    asked: list[str] = []

    def ranks(url: str) -> list[RankStatus]:
        asked.append(url)
        return [RankStatus(WorkerRank(url, 0))]

    index, now_s = SimpleNamespace(num_clearings=0, ranks=ranks), 0.0
    fleet = Fleet(16, index, lambda: now_s)  # type: ignore[arg-type]
    workers: list[Any] = [SimpleNamespace(url=f"http://w{number}") for number in range(64)]

    def num_asked() -> int:
        asked.clear()
        for worker in workers:
            assert fleet.ranks(worker)[0].target.worker == worker.url
        assert len(set(asked)) == len(asked)
        return len(asked)

    assert (num_asked(), num_asked()) == (64, 0)
    nums = []
    for step in range(1, 101):
        now_s = step * RANKS_MAX_AGE_S / 10
        nums.append(num_asked())
    assert nums[:4] == [0, 0, 0, 0]
    assert sum(nums[4:10]) >= 64  # each of them, by the time that its list is too old
    assert max(nums[50:]) < 32  # not all of them at once
    index.num_clearings = 1
    assert (num_asked(), num_asked()) == (64, 0)


@pytest.mark.parametrize("index", [None, SimpleNamespace(block_sizes={})])
def test_workers_are_asked_once_what_they_serve(index: Any) -> None:
    asked = list[str]()

    class Asked(Worker):
        def serves(self, model: str | None) -> bool:
            asked.append(self.url)
            return super().serves(model)

    fleet = Fleet(16, index, lambda: 0.0)
    fleet.put(Asked("http://w", (), HealthGauge(is_healthy=True), CircuitBreaker()))
    for _ in range(2):
        assert [worker.url for worker in fleet.routable(None)] == ["http://w"]
        assert fleet.block_size_of("http://w", None) == 16
    assert asked == ["http://w"]

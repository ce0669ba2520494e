"""The policy `kv` in the router: it learns from answers as they come, and sees what is under way."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from kvist.events import WorkerRank
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService
from kvist.router.policy.settings import DEFAULT_ALPHA
from kvist.router.policy.work import CONTEXT, QUEUED

TOKENS = list(range(1000, 3000))
LONG = list(range(50_000))
"""Takes seconds by the first guess of a fleet's speed."""


def slow_by(seconds: float, http_bytes: Any, *, status: int = 200) -> Any:
    """Answer in two events, the first of them after so long."""

    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        head = http_bytes.event_stream_head.replace(b"200", b"%d" % status)
        await asyncio.sleep(seconds)
        writer.write(head + http_bytes.chunk(b"data: {}\n\n") * 2 + http_bytes.chunk(b""))

    return answer


async def seconds_of(front: Any, tokens: list[int]) -> dict[str, dict[str, float]]:
    return {each["worker"]: each["seconds"] for each in (await front.explain(tokens))["candidates"]}


async def test_a_worker_whose_first_tokens_come_late_is_priced_as_slow(worker, router, http_bytes) -> None:
    async with (
        worker(answer=slow_by(0.0, http_bytes)) as fast,
        worker(answer=slow_by(0.25, http_bytes)) as slow,
        router(fast.url, slow.url, block_size=16, expected_cache_tokens=0) as front,
    ):
        for start in range(24):
            await asyncio.gather(*(front.complete([start * 2 + at, *TOKENS], stream=True) for at in range(2)))
        seconds = await seconds_of(front, TOKENS)
        assert seconds[slow.url]["compute"] > 1.05 * seconds[fast.url]["compute"]


async def test_a_worker_whose_answers_take_longer_is_priced_as_slow_though_none_is_streamed(
    worker, router, http_bytes
) -> None:
    def whole_after(seconds: float) -> Any:
        async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(seconds)
            writer.write(http_bytes.response(http_bytes.completion()))

        return answer

    async with (
        worker(answer=whole_after(0.0)) as fast,
        worker(answer=whole_after(0.25)) as slow,
        router(fast.url, slow.url, block_size=16, expected_cache_tokens=0) as front,
    ):
        for start in range(24):
            await asyncio.gather(*(front.complete([start * 2 + at, *TOKENS]) for at in range(2)))
        seconds = await seconds_of(front, TOKENS)
        assert seconds[slow.url]["compute"] > 1.05 * seconds[fast.url]["compute"]


@pytest.mark.parametrize("status", [400, 500])
async def test_nothing_is_learnt_from_an_answer_that_computed_nothing(worker, router, http_bytes, status) -> None:
    async with (
        worker(answer=slow_by(0.2, http_bytes, status=status)) as one,
        router(one.url, block_size=16, breaker_failures=100) as front,
    ):
        before = await seconds_of(front, TOKENS)
        for start in range(3):
            assert (await front.complete([start, *TOKENS], stream=True)).status_code == status
        after = await seconds_of(front, TOKENS)
        assert after[one.url]["compute"] == before[one.url]["compute"]
        assert after[one.url]["wait"] == 0


async def test_a_prompt_that_is_being_computed_draws_the_same_prompt_to_it(worker, router, until) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker(answer=never) as a, worker(answer=never) as b, router(a.url, b.url, block_size=16) as front:
        first = asyncio.create_task(front.complete(LONG, stream=True))
        await until(lambda: len(a.completions) + len(b.completions) == 1)
        holder = a if a.completions else b
        candidates = {each["worker"]: each for each in (await front.explain(LONG))["candidates"]}
        running = candidates[holder.url]
        assert running["overlap_blocks"]["gpu"] == 0
        assert running["tokens_cached_or_in_flight"] > 0.8 * len(LONG)
        assert running["seconds"]["wait"] > 0
        second = asyncio.create_task(front.complete([*LONG, 7], stream=True))
        await until(lambda: len(holder.completions) == 2)
        work = front.service.keeper.load.board.work
        assert work[0, CONTEXT].sum() == 2 * len(LONG) + 1
        whole = len(LONG) * (1 + DEFAULT_ALPHA / 2 * len(LONG))
        left = running["seconds"]["compute"] / 40e-6
        assert work[0, QUEUED].sum() == pytest.approx(whole + left, rel=1e-3)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await until(lambda: not work[0, [QUEUED, CONTEXT]].any())
        candidates = {each["worker"]: each for each in (await front.explain(LONG))["candidates"]}
        assert candidates[holder.url]["tokens_cached_or_in_flight"] == 0  # nothing was computed


async def test_an_answer_that_is_not_streamed_is_waited_for_as_long_as_it_should_take(worker, router, until) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker(answer=never) as a, worker(answer=never) as b, router(a.url, b.url, block_size=16) as front:
        asked = asyncio.create_task(front.complete(LONG))
        await until(lambda: len(a.completions) + len(b.completions) == 1)
        busy, idle = (a, b) if a.completions else (b, a)
        seconds = await seconds_of(front, TOKENS)
        assert seconds[busy.url]["wait"] > seconds[idle.url]["wait"] == 0
        assert not front.service.keeper.load.board.work[0, QUEUED].any()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_names_of_models_that_clients_make_up_take_no_memory(worker, router) -> None:
    async with worker(models=None) as one, router(one.url, block_size=16) as front:
        for number in range(20):
            assert (await front.complete(TOKENS[:64], model=f"made up {number}")).status_code == 200
        assert len(front.service._forwarder.routing._pricing) == 1


@pytest.mark.parametrize("num_fronts", [1, 2])
async def test_learnt_speeds_are_on_disk_while_the_router_runs(
    worker, fronts_of, http_bytes, until, tmp_path, num_fronts: int
) -> None:
    path, kept = tmp_path / "router.speeds.json", {"state_dir": str(tmp_path), "state_interval_s": 0.01}
    async with AsyncExitStack() as exits:
        one = await exits.enter_async_context(worker(answer=slow_by(0.0, http_bytes)))
        config = RouterConfig(worker_urls=(one.url,), port=0, block_size=16, expected_cache_tokens=0, **kept)
        opened = RouterService(config) if num_fronts == 1 else fronts_of(config, num_fronts)
        fronts = await exits.enter_async_context(opened)
        for front in [fronts] if num_fronts == 1 else fronts:
            async with httpx.AsyncClient(base_url=front.url, timeout=60, trust_env=False) as client:
                body = {"model": "m", "prompt": TOKENS, "stream": True}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
        target, board = WorkerRank(one.url, 0), front.keeper.load.board
        expected = [
            {"worker": one.url, "rank": 0, **dict(zip(("seconds", "work"), board.learnt_speeds()[target], strict=True))}
        ]
        await until(lambda: path.exists() and json.loads(path.read_text()) == expected)


async def test_learnt_speeds_outlive_the_router_and_are_shown(worker, router, http_bytes, tmp_path, caplog) -> None:
    def routing() -> Any:
        return router(fast.url, slow.url, block_size=16, expected_cache_tokens=0, state_dir=str(tmp_path))

    async with worker(answer=slow_by(0.0, http_bytes)) as fast, worker(answer=slow_by(0.2, http_bytes)) as slow:
        async with routing() as front:
            assert {each["prompt_tokens_per_s"] for each in (await front.workers()).values()} == {None}
            for start in range(8):
                await asyncio.gather(*(front.complete([start * 2 + at, *TOKENS], stream=True) for at in range(2)))
            learnt, shown = await seconds_of(front, TOKENS), await front.workers()
            assert shown[slow.url]["prompt_tokens_per_s"] < len(TOKENS) / 0.2 * 1.1
            assert shown[fast.url]["prompt_tokens_per_s"] > shown[slow.url]["prompt_tokens_per_s"]
        async with routing() as front:
            again = await seconds_of(front, TOKENS)
            for each in (fast, slow):
                assert again[each.url]["compute"] == pytest.approx(learnt[each.url]["compute"])
        (tmp_path / "router.speeds.json").write_text('[{"worker": "w", "rank": 0, "seconds": -1, "work": 1}]')
        async with routing() as front:
            assert "Expected `float` > 0.0 - at `$[0].seconds`" in caplog.text
            assert (await front.complete(TOKENS, stream=True)).status_code == 200

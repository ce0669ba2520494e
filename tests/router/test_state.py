"""A router that starts again from its folder: warm as soon as its workers are known and heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvist.errors import InvalidValueError
from kvist.router.config import RouterConfig

TOKENS = list(range(1000, 1160))  # ten blocks


async def state_of(front: Any) -> dict[str, Any]:
    health: dict[str, Any] = (await front.client.get("/health")).json()["state"]
    assert (await front.client.get("/readiness")).json()["state"].keys() == health.keys()
    return health


async def until_streams(front: Any, **expected: int) -> None:
    """Wait until that many of the loaded streams are so."""

    async def is_so() -> bool:
        return expected.items() <= (await state_of(front))["streams"].items()

    await front.until(is_so)


async def test_overlaps_are_back_without_a_snapshot(worker, router, engine, tmp_path: Path) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url, state_dir=str(tmp_path)) as front:
                await front.until_overlap(one.url, TOKENS, 9)
            async with router(one.url, state_dir=str(tmp_path)) as front:
                await front.until_overlap(one.url, TOKENS, 9)
                await until_streams(front, loaded=1, proven=1)
                assert (await state_of(front))["is_proven"]
                assert cache.publisher.statistics().num_snapshots == 0
                assert (await front.metrics())['kvist_state_streams{fate="proven"}'] == 1


async def test_what_is_known_of_a_worker_waits_until_it_is_there(worker, router, engine, tmp_path: Path) -> None:
    async with worker() as one, worker() as two:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url, state_dir=str(tmp_path)) as front:
                await front.until_overlap(one.url, TOKENS, 9)
            async with router(two.url, block_size=16, state_dir=str(tmp_path)) as front:
                await until_streams(front, loaded=1, waiting=1)
                assert not (await state_of(front))["is_proven"]
                await front.client.post("/workers", json={"url": one.url})
                await until_streams(front, waiting=0, proven=1)
                await front.until_overlap(one.url, TOKENS, 9)


async def test_a_worker_whose_stream_is_elsewhere_now_begins_anew(worker, router, engine, tmp_path: Path) -> None:
    async with worker() as one:
        with engine("one") as cache, engine("one") as moved:
            one.server_info = cache.server_info
            cache.store(TOKENS)
            async with router(one.url, state_dir=str(tmp_path)) as front:
                await front.until_overlap(one.url, TOKENS, 9)
            one.server_info = moved.server_info
            moved.store(TOKENS[:48])
            async with router(one.url, state_dir=str(tmp_path)) as front:
                await front.until_overlap(one.url, TOKENS, 3)
                await until_streams(front, loaded=1, dropped=1)


async def test_a_folder_has_one_router(worker, router, tmp_path: Path) -> None:
    async with worker() as one, router(one.url, state_dir=str(tmp_path)):
        with pytest.raises(InvalidValueError, match=r"state_dir: .* a folder that no other process uses, as pid"):
            async with router(one.url, state_dir=str(tmp_path)):
                pass


def test_only_a_policy_with_an_index_has_a_state() -> None:
    with pytest.raises(InvalidValueError, match="expected none, as policy round-robin"):
        RouterConfig(policy="round-robin", state_dir="/var/lib/kvist")

"""What workers are expected to hold that no event tells: pure, then behind a router and real HTTP."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_invariants import check_invariants

from kvist.engine import bundled_model_path
from kvist.events import WorkerRank
from kvist.events.hashing import block_hashes
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService
from kvist.router.expected import ExpectedBlocks
from kvist.router.index import FleetIndex
from kvist.router.unreported import holder_of

TOKENS = list(range(1000, 1160))  # ten blocks
VLLM = 'vllm:cache_config_info{{engine="{}",block_size="16",num_gpu_blocks="{}",enable_prefix_caching="{}"}} 1.0\n'
SGLANG = 'sglang:max_total_num_tokens{{{}_rank="{}"}} {}\n'


@dataclass
class BruteForce:
    """Least recently used, as slowly as it can be said: each block by when it was used, and how deep in its chain."""

    capacity: int
    time_to_live_s: float
    used: dict[tuple[int, ...], tuple[int, float, int]] = field(default_factory=dict)
    num_uses: int = 0

    def use(self, chain: tuple[int, ...], now_s: float) -> None:
        self.num_uses += 1
        for depth in range(1, len(chain) + 1):
            self.used[chain[:depth]] = (self.num_uses, now_s, depth)
        self.forget(now_s)

    def forget(self, now_s: float) -> None:
        fresh = {block: use for block, use in self.used.items() if now_s - use[1] <= self.time_to_live_s}
        newest_first = sorted(fresh, key=lambda block: (-fresh[block][0], fresh[block][2]))
        self.used = {block: fresh[block] for block in newest_first[: self.capacity]}


_steps = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6).map(tuple), st.integers(0, 4), st.none() | st.integers(0, 12)),
    max_size=60,
)


@given(_steps, st.integers(0, 12), st.integers(1, 12))
def test_what_is_expected_is_what_a_brute_force_lru_holds_and_whole_chains_alone(
    steps: list[tuple[tuple[int, ...], int, int | None]], capacity: int, time_to_live_s: int
) -> None:
    blocks, oracle = ExpectedBlocks(capacity, time_to_live_s), BruteForce(capacity, time_to_live_s)
    names: dict[tuple[int, ...], int] = {}
    held: set[int] = set()
    now_s = 0.0
    for chain, passed_s, new_capacity in steps:
        now_s += passed_s
        if new_capacity is not None:
            blocks.capacity = oracle.capacity = new_capacity
        hashes = [names.setdefault(chain[: idx + 1], len(names)) for idx in range(len(chain))]
        oracle.use(chain, now_s)
        held.update(hashes)
        for start in reversed(range(0, len(hashes), 2)):
            blocks.use(hashes[start : start + 2], now_s)
        forgotten = list[int]()
        while part := blocks.forget(now_s, 3):
            assert len(part) <= 3
            forgotten += part
        assert len(set(forgotten)) == len(forgotten)
        held.difference_update(forgotten)
        assert held == {names[block] for block in oracle.used}
        assert len(blocks) == len(held) <= blocks.capacity
        assert all(block[:-1] in oracle.used for block in oracle.used if len(block) > 1)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def hashes(tokens: list[int], block_size: int = 16) -> Any:
    return np.array(block_hashes(tokens, block_size), np.uint64)


def overlap(index: FleetIndex, worker: str, tokens: list[int]) -> int:
    return index.match(hashes(tokens)).get(WorkerRank(worker, 0), (0,))[0]


async def test_a_prompt_is_forgotten_after_its_time_to_live_unless_it_was_used_again() -> None:
    clock = Clock()
    async with FleetIndex(RouterConfig(block_size=16, expected_time_to_live_s=60), clock) as index:
        index.unreported.set_room("w", 1000)
        index.record_computed(WorkerRank("w", 0), hashes(TOKENS[:64]))
        index.record_computed(WorkerRank("w", 0), hashes(TOKENS[80:]))
        clock.now_s += 59
        index.record_computed(WorkerRank("w", 0), hashes(TOKENS[:32]))
        clock.now_s += 2
        index.unreported.set_room("w", 1000)
        assert (overlap(index, "w", TOKENS), overlap(index, "w", TOKENS[80:])) == (2, 0)
        check_invariants(index.radix)


async def test_long_prompts_are_recorded_in_steps_one_prompt_after_the_other(monkeypatch, until) -> None:
    for module in ("index", "unreported"):
        monkeypatch.setattr(f"kvist.router.{module}.STEP_BLOCKS", 2)
    rank, first, second = WorkerRank("w", 0), hashes(TOKENS), hashes([7, *TOKENS])
    async with FleetIndex(RouterConfig(block_size=16), Clock()) as index:
        index.unreported.set_room("w", 11)
        for chain in (first, second, first[:1]):
            index.record_computed(rank, chain)
        assert not index.match(first)
        await until(lambda: [overlap(index, "w", tokens) for tokens in (TOKENS, [7, *TOKENS])] == [1, 10])
        index.record_computed(rank, hashes([8, *TOKENS, *TOKENS]))
        await until(lambda: overlap(index, "w", [8, *TOKENS, *TOKENS]) == 11)
        await until(lambda: [status.num_blocks for status in index.ranks("w")] == [11])
        gone = WorkerRank("gone", 0)
        index.unreported.set_room("gone", 11)
        index.record_computed(gone, first)
        await asyncio.sleep(0)
        assert overlap(index, "gone", TOKENS) == 2
        index.unreported.forget("gone")
        index.record_computed(rank, first)
        await until(lambda: overlap(index, "w", TOKENS) == 10)
        assert index.radix.slot_of(holder_of(gone)) is None
        check_invariants(index.radix)


async def test_all_workers_together_are_expected_to_hold_no_more_than_the_index_may() -> None:
    async with FleetIndex(RouterConfig(block_size=16, max_blocks=8), Clock()) as index:
        for _ in range(2):
            for worker in ("a", "b"):
                index.unreported.set_room(worker, 1 << 50)
        for worker in ("a", "b"):
            index.record_computed(WorkerRank(worker, 0), hashes(TOKENS))
        assert [overlap(index, worker, TOKENS) for worker in ("a", "b")] == [4, 4]


async def test_a_prompt_counts_once_the_first_byte_of_its_answer_is_there(worker, router, http_bytes) -> None:
    goes_on, ends = asyncio.Event(), asyncio.Event()

    async def slow(_: Any, writer: Any) -> None:
        await goes_on.wait()
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(b"data: {}\n\n"))
        await ends.wait()
        writer.write(http_bytes.chunk(b"data: [DONE]\n\n") + http_bytes.chunk(b""))

    async def is_sent() -> bool:
        return bool(one.completions)

    async with worker(answer=slow) as one, router(one.url, block_size=16) as front:
        answer = asyncio.create_task(front.complete(TOKENS, stream=True))
        await front.until(is_sent)
        assert (await front.explain(TOKENS))["overlap_tokens"] == 0
        goes_on.set()
        await front.until_overlap(one.url, [*TOKENS, 1], 10)  # and so of all full blocks, the last one too
        ends.set()
        assert (await answer).status_code == 200


async def test_the_next_turn_goes_where_the_conversation_is_and_brings_the_answers_blocks(worker, router) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, block_size=16) as front:
        first = (await front.complete(TOKENS[:64])).headers["x-kvist-worker"]
        other = b.url if first == a.url else a.url
        assert (await front.complete([5] * 64)).headers["x-kvist-worker"] == other
        for length, overlap_tokens in ((128, 64), (160, 128)):
            answer = await front.complete(TOKENS[:length])
            assert answer.headers["x-kvist-worker"] == first
            assert answer.headers["x-kvist-overlap-tokens"] == str(overlap_tokens)


async def test_what_is_expected_says_that_it_is_approximate(worker, router, engine, monkeypatch) -> None:
    for module in ("routing", "fleet.fleet"):
        monkeypatch.setattr(f"kvist.router.{module}.RANKS_MAX_AGE_S", -1.0)
    async with worker() as silent, worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(TOKENS[:32])
            async with router(silent.url, one.url) as front:
                await front.until_overlap(one.url, TOKENS, 2)
                await front.client.delete("/workers", params={"url": one.url})
                await front.until_state(one.url, "gone")

                async def is_expecting() -> bool:
                    return (await front.workers())[silent.url]["kv_events"]["ranks"] != []

                await front.until(is_expecting)
                await front.complete(TOKENS)
                await front.client.post("/workers", json={"url": one.url})
                await front.until_overlap(one.url, TOKENS, 2)
                ranks = {url: explained["kv_events"]["ranks"] for url, explained in (await front.workers()).items()}
                assert ranks[silent.url] == [{"rank": 0, "state": "approximate", "blocks": 10}]
                assert ranks[one.url] == [{"rank": 0, "state": "live", "blocks": 2}]
                candidates = {each["worker"]: each for each in (await front.explain(TOKENS))["candidates"]}
                assert (candidates[silent.url]["approximate"], candidates[one.url]["approximate"]) == (True, False)
                assert candidates[silent.url]["overlap_blocks"]["gpu"] == 9
                without_events = (await front.client.get("/readiness")).json()["event_sources"][
                    "workers_without_events"
                ]
                assert [(each["worker"], each["approximate"]) for each in without_events] == [(silent.url, True)]


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_a_prompt_that_was_refused_is_not_expected(worker, router, http_bytes, status: int) -> None:
    async def refuse(_: Any, writer: Any) -> None:
        writer.write(http_bytes.response(b"{}", status=status))

    async with worker(answer=refuse) as one, router(one.url, block_size=16) as front:
        assert (await front.complete(TOKENS)).status_code == status
        one.answer = None
        assert (await front.complete(TOKENS)).headers["x-kvist-overlap-tokens"] == "0"


@pytest.mark.parametrize(
    ("tells", "capacity"),
    [
        ({"metrics": VLLM.format(0, 4, True)}, 4),
        ({"metrics": VLLM.format(0, 4, True) + VLLM.format(1, 2, True)}, 6),
        ({"metrics": VLLM.format(0, 4, True).replace("num_gpu", 'kv_cache_size_tokens="48",num_gpu')}, 3),
        ({"metrics": VLLM.format(0, 4, False)}, 0),
        ({"metrics": VLLM.format(0, "None", True)}, 5),
        ({"metrics": SGLANG.format("tp", 0, 64) + SGLANG.format("tp", 1, 64)}, 4),
        ({"metrics": SGLANG.format("dp", 0, 64) + SGLANG.format("dp", 1, 32)}, 6),
        ({"metrics": SGLANG.format("tp", 0, "NaN")}, 5),
        ({"metrics": 'vllm:cache_config_info{block_size="16'}, 5),
        ({"metrics": "\N{SNOWMAN}" * (1 << 19)}, 5),
        ({"server_info": {"max_total_num_tokens": 64, "tp_size": 2}}, 4),
        ({"server_info": {"max_total_num_tokens": 64, "disable_radix_cache": True}}, 0),
        ({"server_info": {"engine": "kvist", "block_size": 16, "max_total_num_tokens": 64}}, 4),
        ({"server_info": {"max_total_num_tokens": "64"}}, 5),
        ({}, 5),
    ],
)
async def test_a_worker_is_expected_to_hold_as_much_as_it_says(worker, router, tells: Any, capacity: int) -> None:
    async with worker(**tells) as one, router(one.url, expected_cache_tokens=80) as front:
        await front.complete(TOKENS)
        (candidate,) = (await front.explain(TOKENS))["candidates"]
        assert (candidate["overlap_blocks"]["gpu"], candidate["approximate"]) == (capacity, capacity > 0)
        ranks = (await front.workers())[one.url]["kv_events"]["ranks"]
        assert [rank["blocks"] for rank in ranks] == ([capacity] if capacity else [])
        await front.complete([5] * 48)  # drives out the ends of what was there
        assert (await front.explain(TOKENS))["candidates"][0]["overlap_blocks"]["gpu"] == max(0, capacity - 3)


async def test_a_worker_that_restarts_is_expected_to_hold_nothing(worker, router) -> None:
    async with worker(metrics="process_start_time_seconds 1.5") as one, router(one.url, block_size=16) as front:
        await front.complete(TOKENS)
        await front.until_overlap(one.url, TOKENS, 9)
        one.metrics = "process_start_time_seconds 2.5"  # it was back before anybody looked
        await front.until_overlap(one.url, TOKENS, 0)
        await front.complete(TOKENS)
        await front.until_overlap(one.url, TOKENS, 9)
        one.metrics = None
        one.kill()
        await front.until_state(one.url, "unhealthy")
        await one.start()
        await front.until_state(one.url, "healthy")
        assert (await front.explain(TOKENS))["overlap_tokens"] == 0
        await front.complete(TOKENS)
        await front.until_overlap(one.url, TOKENS, 9)


async def test_a_worker_that_is_too_busy_to_be_checked_forgets_nothing(worker, router) -> None:
    async with worker() as one, router(one.url, block_size=16, health_timeout_s=0.25) as front:
        await front.complete(TOKENS)
        one.health_gate.clear()
        await front.until_state(one.url, "unhealthy")
        one.health_gate.set()
        await front.until_state(one.url, "healthy")
        assert (await front.explain(TOKENS))["overlap_tokens"] == 144


@pytest.mark.parametrize("block_size", [None, 16])
async def test_a_worker_that_is_removed_takes_along_what_it_was_expected_to_hold(worker, router, block_size) -> None:
    async with worker() as one, worker() as other, router(one.url, other.url, block_size=block_size) as front:
        url = (await front.complete(TOKENS)).headers["x-kvist-worker"]
        await front.client.delete("/workers", params={"url": url})
        await front.until_state(url, "gone")

        async def is_swept() -> bool:
            return (await front.metrics())["kvist_index_blocks"] == 0

        await front.until(is_swept)


@pytest.mark.parametrize("is_announced", [True, False])
async def test_the_first_event_of_a_worker_replaces_what_was_expected(worker, router, engine, is_announced) -> None:
    with engine("one") as cache:
        endpoint = cache.publisher.endpoint
    async with worker() as one:
        sources = {} if is_announced else {"kv_event_sources": {one.url: (endpoint,)}}
        async with router(one.url, block_size=16, **sources) as front:
            await front.complete(TOKENS)
            await front.until_overlap(one.url, TOKENS, 9)
            with engine("one", endpoint) as cache:
                cache.store(list(range(32)))
                if is_announced:
                    one.server_info = cache.server_info
                await front.until_overlap(one.url, list(range(48)), 2)
                assert (await front.explain(TOKENS))["overlap_tokens"] == 0
                explained = (await front.workers())[one.url]["kv_events"]
                assert explained["ranks"] == [{"rank": 0, "state": "live", "blocks": 2}]
                await front.complete(TOKENS)  # of which its stream tells nothing: it is not there
                assert (await front.explain(TOKENS))["candidates"][0]["overlap_blocks"]["gpu"] == 0


async def test_the_block_size_of_a_worker_without_events_does_not_matter(worker, router) -> None:
    async with worker(server_info={"engine": "kvist", "block_size": 32}) as one, router(one.url) as front:
        await front.complete(TOKENS)
        decision = await front.explain(TOKENS)
        assert (decision["overlap_tokens"], decision["block_size"]) == (144, 16)
    async with (
        worker(server_info={"engine": "kvist", "block_size": 32}) as one,
        router(one.url, block_size=64) as front,
    ):
        await front.complete(TOKENS)
        assert (await front.explain(TOKENS))["overlap_tokens"] == 128


async def test_no_block_size_is_needed_and_expectations_are_cut_as_others_tell(worker, router, engine) -> None:
    async with worker() as one, worker() as other, router(one.url, other.url) as front:
        await front.complete(TOKENS)
        await front.complete(TOKENS[1:])
        assert (await front.explain(TOKENS))["block_size"] == 16
        with engine("other", block_size=32) as cache:
            other.server_info = cache.server_info
            cache.store(TOKENS)
            await front.until_overlap(other.url, TOKENS, 4)
            assert (await front.explain(TOKENS))["block_size"] == 32
            other.health_status = 500
            await front.until_state(other.url, "unhealthy")
            await front.complete(TOKENS)
            decision = await front.explain(TOKENS)
            assert (decision["worker"], decision["overlap_tokens"]) == (one.url, 128)


async def test_a_router_that_starts_expects_nothing(worker, router, engine, tmp_path) -> None:
    async with worker() as silent, worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info
            cache.store(list(range(32)))
            for _ in range(2):
                async with router(silent.url, one.url, state_dir=str(tmp_path)) as front:
                    await front.until_overlap(one.url, list(range(48)), 2)
                    assert [each.worker for each in front.service.keeper.index.radix.ranks()] == [one.url]
                    for number in range(4):  # more than one worker gets
                        await front.complete([number] * 64)
                    (rank,) = (await front.workers())[silent.url]["kv_events"]["ranks"]
                    assert (rank["state"], rank["blocks"] > 0) == ("approximate", True)


async def test_nothing_is_expected_from_the_first_event_on_before_anybody_looks_at_the_worker(engine, until) -> None:
    async with FleetIndex(RouterConfig(block_size=16), time.monotonic) as index:
        index.unreported.set_room("w", 1000)
        index.record_computed(WorkerRank("w", 0), hashes(TOKENS))
        assert overlap(index, "w", TOKENS) == 10
        with engine("w") as cache:
            index.follow("w", [cache.publisher.endpoint])
            cache.store(list(range(32)))
            await until(lambda: overlap(index, "w", list(range(32))) == 2)
            assert overlap(index, "w", TOKENS) == 0
            assert [rank.display_state for rank in index.ranks("w")] == ["live"]
            index.unreported.set_room("w", 1000)
            assert [holder.worker for holder in index.radix.ranks()] == ["w"]


async def test_what_follows_an_image_is_expected_where_what_precedes_it_is_held(engine, until) -> None:
    async with FleetIndex(RouterConfig(block_size=16), time.monotonic) as index:
        rank, chat = WorkerRank("w", 0), hashes(TOKENS)

        def depth(num_exact: int | None) -> int:
            return index.match(chat, None, num_exact).get(rank, (0,))[0]

        with engine("w") as cache:
            index.follow("w", [cache.publisher.endpoint])
            cache.store(TOKENS[:32])
            await until(lambda: depth(2) == 2)
            index.record_computed(WorkerRank("w", 0), chat)
            assert depth(2) == 2, "nobody has looked at the worker yet"
            index.unreported.set_room("w", 8)
            index.record_computed(WorkerRank("w", 0), chat)
            assert [depth(number) for number in (0, 1, 2, 3, None)] == [8, 8, 8, 2, 2]
            assert overlap(index, "w", TOKENS) == 2, "of text alone"
            assert [status.num_blocks for status in index.ranks("w")] == [2]
            cache.publisher.cleared()
            await until(lambda: depth(None) == 0)
            assert [depth(number) for number in (0, 2)] == [0, 0]
            index.record_computed(WorkerRank("w", 0), chat)
            assert [depth(number) for number in (0, 2)] == [8, 0]
            index.unreported.forget("w")
            assert depth(0) == 0
            check_invariants(index.radix)


async def test_each_rank_is_expected_to_hold_what_follows_an_image_by_itself(engine, until) -> None:
    async with FleetIndex(RouterConfig(block_size=16), time.monotonic) as index:
        with engine("w", num_ranks=2) as cache:
            index.follow("w", [cache.publisher.endpoint])
            for rank in (0, 1):
                cache.store(TOKENS[:32], rank)
            await until(lambda: len(index.match(hashes(TOKENS))) == 2)
            index.unreported.set_room("w", 8)
            index.record_computed(WorkerRank("w", 1), hashes(TOKENS))
            found = index.match(hashes(TOKENS), None, 2)
            assert {target.rank: depths[0] for target, depths in found.items()} == {0: 2, 1: 4}, "half of the room each"


async def test_a_partial_rank_is_expected_to_hold_all_that_it_was_sent_until_it_is_cleared(
    start_vllm, free_port, until
) -> None:
    engine = start_vllm(free_port(), num_kept=None)
    engine.next_sequence = 7  # nobody can tell any more what it stored before
    async with FleetIndex(RouterConfig(block_size=16), time.monotonic) as index:
        rank, chat = WorkerRank("w", 0), hashes(TOKENS)

        def depth() -> int:
            return index.match(chat).get(rank, (0,))[0]

        index.follow("w", [f"{engine.url}?engine=sglang&replay_port=none"])
        index.unreported.set_room("w", 100)

        def is_partial() -> bool:
            if not index.has_reported("w"):
                engine.store(2, TOKENS[16:32], parent=1)  # until it is heard
            return [status.display_state for status in index.ranks("w")] == ["partial"]

        await until(is_partial)
        index.unreported.set_room("w", 100)
        assert depth() == 0
        index.record_computed(rank, chat)
        assert depth() == 10
        engine.store(11, TOKENS[100:116])
        engine.store(12, TOKENS[116:132], parent=11)
        other = hashes(TOKENS[100:132])
        await until(lambda: index.match(other).get(rank, (0,))[0] == 2)
        index.record_computed(rank, other)
        engine.remove(12)
        await until(lambda: index.match(other)[rank][0] == 1)  # as its events tell all of this prompt
        engine.publish({"type": "AllBlocksCleared"})
        await until(lambda: index.ranks("w")[0].display_state == "live")
        assert depth() == 0
        index.record_computed(rank, chat)
        assert depth() == 0, "of a live rank only its events tell"
        check_invariants(index.radix)


@pytest.mark.parametrize("reports_anew", [False, True])
async def test_what_was_sent_before_a_ranks_first_report_stays_if_the_rank_is_partial_and_cannot_be_asked(
    start_vllm, free_port, until, reports_anew: bool
) -> None:
    engine = start_vllm(free_port(), num_kept=None)
    engine.next_sequence = 7
    async with FleetIndex(RouterConfig(block_size=16), time.monotonic) as index:
        index.follow("w", [f"{engine.url}?engine=sglang&replay_port=none"])
        index.unreported.set_room("w", 100, reports_anew=reports_anew)
        index.record_computed(WorkerRank("w", 0), hashes(TOKENS))
        assert overlap(index, "w", TOKENS) == 10

        def has_reported() -> bool:
            engine.store(2, TOKENS[16:32], parent=1)  # until it is heard
            return index.has_reported("w")

        await until(has_reported)
        for _ in range(2):
            assert overlap(index, "w", TOKENS) == (0 if reports_anew else 10)
            index.unreported.set_room("w", 100, reports_anew=reports_anew)
        check_invariants(index.radix)


async def are_all(client: httpx.AsyncClient, services: list[RouterService], state: str) -> bool:
    """Return whether each worker has a rank in this state, as all processes of the router know it."""
    pages = [(await client.get(f"{service.url}/workers")).json()["workers"] for service in services]
    events = [each["kv_events"] for page in pages for each in page]
    return [rank["state"] for each in events for rank in each["ranks"]] == [state] * len(events)


@pytest.mark.parametrize("engine_name", ["sglang", "vllm"])
@pytest.mark.parametrize("num_fronts", [1, 2])
async def test_a_conversation_returns_to_a_worker_whose_stream_was_followed_too_late(
    worker, start_vllm, free_port, fronts_of, num_fronts: int, engine_name: str
) -> None:
    """Nobody reports what follows a system prompt that was stored before; vLLM can be asked for it."""
    async with AsyncExitStack() as exits:
        engines = [start_vllm(free_port(), num_kept=None) for _ in range(3)]
        models = [{"id": "m", "object": "model", "owned_by": engine_name}]
        workers = [await exits.enter_async_context(worker(models=models)) for _ in engines]
        sources = {
            one.url: (f"{engine.url}?engine={engine_name}&replay_port=none",)
            for one, engine in zip(workers, engines, strict=True)
        }
        config = RouterConfig(
            worker_urls=tuple(sources), kv_event_sources=sources, port=0, health_interval_s=0.05, debug_headers=True
        )
        if num_fronts == 1:
            services = [await exits.enter_async_context(RouterService(config))]
        else:
            services = await exits.enter_async_context(fronts_of(config, num_fronts))
        client = await exits.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        for engine in engines:
            engine.next_sequence = 7
        async with asyncio.timeout(60):
            while not await are_all(client, services, "partial"):
                for engine in engines:  # until it is heard
                    engine.store(2, TOKENS[16:32], parent=1)
                await asyncio.sleep(0.05)

        async def overlap_tokens(service: RouterService, prompt: list[int]) -> int:
            decision = await client.post(f"{service.url}/route", json={"model": "m", "token_ids": prompt})
            tokens: int = decision.json()["overlap_tokens"]
            return tokens

        for number in range(6):
            prompt, held, sent_to = [number, *TOKENS], 0, set()
            for turn in range(4):
                service = services[turn % num_fronts]
                async with asyncio.timeout(60):  # until this front has heard where the others sent it
                    while engine_name == "sglang" and await overlap_tokens(service, prompt) != held:
                        pass
                answer = await client.post(f"{service.url}/v1/completions", json={"model": "m", "prompt": prompt})
                assert answer.headers["x-kvist-overlap-tokens"] == str(held if engine_name == "sglang" else 0)
                sent_to.add(answer.headers["x-kvist-worker"])
                held = len(prompt) // 16 * 16
                prompt = [*prompt, *range(2000 + 100 * turn, 2040 + 100 * turn)]
            assert engine_name == "vllm" or len(sent_to) == 1


def chat_of(number: int, *turns: str) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": f"data:{number}"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    for turn in turns:
        messages += [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": turn}]
    return messages


async def test_a_chat_with_an_image_is_recorded_once_at_a_partial_rank_too(
    worker, start_vllm, free_port, monkeypatch
) -> None:
    """At the first byte, as any chat with an image: not also at the end, as what a partial rank has not reported."""
    engine, recorded, record_computed = start_vllm(free_port(), num_kept=None), list[int](), FleetIndex.record_computed

    def record(index: FleetIndex, target: WorkerRank, hashes: np.ndarray) -> None:
        recorded.append(len(hashes))
        record_computed(index, target, hashes)

    monkeypatch.setattr(FleetIndex, "record_computed", record)
    async with worker(models=[{"id": "m", "object": "model", "owned_by": "sglang"}]) as one:
        path, sources = str(bundled_model_path()), {one.url: (f"{engine.url}?engine=sglang&replay_port=none",)}
        config = RouterConfig(worker_urls=(one.url,), kv_event_sources=sources, port=0, model_path=path)
        async with RouterService(config) as service, httpx.AsyncClient(timeout=60, trust_env=False) as client:
            engine.next_sequence = 7
            async with asyncio.timeout(60):
                while not await are_all(client, [service], "partial"):
                    engine.store(2, TOKENS[16:32], parent=1)
                    await asyncio.sleep(0.05)
            body = {"model": "m", "messages": chat_of(1)}
            for number in range(1, 4):
                assert (await client.post(f"{service.url}/v1/chat/completions", json=body)).status_code == 200
                assert len(recorded) == number
            assert min(recorded) >= 512 // 16


@pytest.mark.parametrize("num_fronts", [1, 2])
async def test_a_chat_with_an_image_returns_to_the_worker_that_has_seen_it(
    worker, engine, fronts_of, num_fronts: int
) -> None:
    async with AsyncExitStack() as exits:
        caches = [exits.enter_context(engine(name)) for name in "abc"]
        workers = [await exits.enter_async_context(worker(server_info=each.server_info)) for each in caches]
        urls = tuple(each.url for each in workers)
        config = RouterConfig(
            worker_urls=urls, port=0, model_path=str(bundled_model_path()), health_interval_s=0.05, debug_headers=True
        )
        if num_fronts == 1:
            services = [await exits.enter_async_context(RouterService(config))]
        else:
            services = await exits.enter_async_context(fronts_of(config, num_fronts))
        for cache in caches:
            cache.store(list(range(32)))
        client = await exits.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        async with asyncio.timeout(60):  # what is expected of workers without events their first event replaces
            while not await are_all(client, services, "live"):
                pass

        async def holders(messages: list[dict[str, Any]], service: RouterService) -> set[str]:
            body = {"model": "m", "messages": messages}
            candidates = (await client.post(f"{service.url}/route", json=body)).json()["candidates"]
            return {each["worker"] for each in candidates if each["overlap_blocks"]["gpu"] >= 512 // 16}

        for number in range(6):
            sent_to = set()
            for service in services:
                async with asyncio.timeout(60):  # until each front has heard of the streams, and where it was sent
                    while not await holders(chat_of(number), service):
                        body = {"model": "m", "messages": chat_of(number)}
                        answer = await client.post(f"{service.url}/v1/chat/completions", json=body)
                        sent_to.add(answer.headers["x-kvist-worker"])
            for turn in range(1, 4):
                messages = chat_of(number, *["And this?"] * turn)
                found = await holders(messages, services[turn % num_fronts])
                assert found
                assert found <= sent_to

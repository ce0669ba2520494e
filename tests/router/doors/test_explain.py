"""`/readiness` says why no request can be taken, and which streams are not live; streams decide nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.events import Batch, Heartbeat
from kvist.events.codec import encode_batch
from kvist.events.session import SourceState
from kvist.events.transports import Endpoint, Message, open_publication
from kvist.indexer.statistics import SourceStatistics
from kvist.router.doors.explain import condition_of

TOKENS = list(range(1000, 1160))


def source(states: tuple[SourceState, ...] = (), **values: Any) -> SourceStatistics:
    return SourceStatistics("w", "tcp://w:1", dict(enumerate(states)), **values)


LIVE, PARTIAL, RESYNCING = SourceState.LIVE, SourceState.PARTIAL, SourceState.RESYNCING


@pytest.mark.parametrize(
    ("statistics", "condition"),
    [
        (source(), "no_events"),
        (source((LIVE, LIVE)), "live"),
        (source((LIVE, PARTIAL)), "partial"),
        (source((PARTIAL, RESYNCING, LIVE)), "resyncing"),
        (source((RESYNCING,), is_peer_gone=True), "gone"),
        (source((LIVE,), failure="the broker refused"), "failed"),
    ],
)
def test_a_stream_is_as_its_worst_rank(statistics, condition):
    found, reason = condition_of(statistics)
    assert found == condition
    assert (reason is None) == (condition == "live")
    assert condition != "failed" or reason == "the broker refused"


async def readiness(front: Any) -> tuple[int, dict[str, Any]]:
    answer = await front.client.get("/readiness")
    return answer.status_code, answer.json()


async def until_problem(front: Any, condition: str, text: str) -> dict[str, Any]:
    """Wait until one stream is in a condition for a reason; return what is told of it."""
    found: list[dict[str, Any]] = []

    async def is_told() -> bool:
        _, page = await readiness(front)
        found[:] = [
            each
            for each in page["event_sources"]["problems"]
            if each["condition"] == condition and text in each["reason"]
        ]
        return bool(found)

    await front.until(is_told)
    return found[0]


async def test_without_a_healthy_worker_the_reason_names_each(worker, router) -> None:
    async with worker(health_status=500) as one, router(one.url, ready=False) as front:
        await front.until_state(one.url, "unhealthy")
        status, page = await readiness(front)
        assert (status, page["ready"]) == (503, False)
        assert page["reason"].startswith(f"no worker is healthy; {one.url} is unhealthy: ")
        assert page["reason"].endswith("GET /health answered 500")


async def test_a_broker_that_is_down_is_told_and_requests_are_taken(worker, router, free_port, start_vllm) -> None:
    ports = free_port(), free_port()
    start_vllm(ports[1]).store(1, TOKENS[:16])
    async with worker() as one, worker() as two:
        sources = {one.url: (f"nats://127.0.0.1:{ports[0]}/m/w",), two.url: (f"tcp://127.0.0.1:{ports[1]}",)}
        async with router(one.url, two.url, block_size=16, kv_event_sources=sources) as front:
            problem = await until_problem(front, "failed", "127.0.0.1")
            assert (problem["worker"], problem["url"]) == (one.url, sources[one.url][0])
            await front.until_overlap(two.url, TOKENS, 1)
            status, page = await readiness(front)
            assert (status, page["reason"]) == (200, None)
            assert (page["event_sources"]["live"], page["event_sources"]["failed"]) == (1, 1)
            (shown,) = (await front.workers())[one.url]["kv_events"]["sources"]
            assert (shown["condition"], shown["reason"]) == ("failed", problem["reason"])
            assert (await front.complete()).status_code == 200


async def test_a_live_stream_that_tells_of_one_layer_group_has_upper_bounds(worker, router, free_port) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    publication = open_publication(url)
    heartbeat = Batch("w", 0, 1, 0, 16, 1.0, (Heartbeat(0, 0, is_upper_bound=True),))
    async with worker() as one, router(one.url, block_size=16, kv_event_sources={one.url: (url,)}) as front:

        async def has_upper_bounds() -> bool:
            publication.send(Message(b"kv/w/0", 0, encode_batch(heartbeat)))
            (_, page), shown = await readiness(front), (await front.workers())[one.url]["kv_events"]
            if page["event_sources"]["overlap_is_upper_bound"]:
                assert (page["event_sources"]["live"], page["event_sources"]["problems"]) == (1, [])
                assert [rank["state"] for rank in shown["ranks"]] == ["live"]
                assert "--groups all" in shown["sources"][0]["reason"]
            return bool(page["event_sources"]["overlap_is_upper_bound"])

        await front.until(has_upper_bounds)
    publication.close()


async def test_the_streams_of_an_sglang_with_windows_have_upper_bounds(worker, router, engine) -> None:
    sizes = {"memory_usage": {"token_capacity": 8192, "token_capacity_swa": 4096}}
    with engine("one") as cache:
        endpoint = Endpoint.parse(cache.publisher.endpoint)
        ports = [int(address.rpartition(":")[2]) for address in (endpoint.address, endpoint.replay_address)]
        names = ("endpoint_port_base", "replay_endpoint_port_base")
        published = {"publisher": "kvist", "endpoint_host": "*", "dp_size": 1} | dict(zip(names, ports, strict=True))
        told = {"disaggregation_mode": "null", "internal_states": [sizes], "kv_events": published}
        cache.store(TOKENS)
        async with worker(server_info=told) as one, router(one.url) as front:
            await front.until_overlap(one.url, TOKENS, 9)
            (_, page), shown = await readiness(front), (await front.workers())[one.url]["kv_events"]
            assert (page["event_sources"]["live"], page["event_sources"]["overlap_is_upper_bound"]) == (1, 1)
            (source,) = shown["sources"]
            assert (source["condition"], source["overlap_is_upper_bound"]) == ("live", True)
            assert "of which SGLang's events do not tell" in source["reason"]


async def test_a_stream_that_fails_before_any_block_size_is_known_is_told(worker, router, free_port) -> None:
    async with worker() as one:
        source = f"nats://kv:secret@127.0.0.1:{free_port()}/m/w"
        async with router(one.url, kv_event_sources={one.url: (source,)}) as front:
            problem = await until_problem(front, "failed", "127.0.0.1")
            assert (problem["worker"], problem["url"]) == (one.url, source.replace("kv:secret@", ""))
            (shown,) = (await front.workers())[one.url]["kv_events"]["sources"]
            assert (shown["condition"], shown["reason"]) == ("failed", problem["reason"])


async def test_a_worker_whose_events_contradict_its_block_size_is_refused_with_both(worker, router, engine) -> None:
    async with worker() as one:
        with engine("one") as cache:
            one.server_info = cache.server_info | {"block_size": 32}
            async with router(one.url) as front:
                cache.store(TOKENS)
                await until_problem(front, "failed", "block_size 16, expected 32")
                assert (await readiness(front))[0] == 200
                (shown,) = (await front.workers())[one.url]["kv_events"]["sources"]
                assert shown["failure"] == "block_size 16, expected 32"
                assert shown["refused_batches"] > 0


async def test_a_stock_engines_too(worker, router, free_port, start_vllm) -> None:
    port = free_port()
    vllm = start_vllm(port)
    vllm.store(1, TOKENS[:32])
    async with (
        worker() as one,
        router(one.url, block_size=16, kv_event_sources={one.url: (f"tcp://127.0.0.1:{port}",)}) as front,
    ):
        await until_problem(front, "failed", "block_size 32, expected 16")


async def test_a_worker_without_events_is_named(worker, router) -> None:
    async with worker() as one, router(one.url, block_size=16) as front:
        _, page = await readiness(front)
        (without_events,) = page["event_sources"]["workers_without_events"]
        assert without_events["worker"] == one.url
        assert "announces no KV events" in without_events["reason"]

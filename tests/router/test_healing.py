"""A vLLM worker whose events were lost is asked to report what it finds cached, and left alone once that is known."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.events import Batch, Heartbeat
from kvist.events.codec import encode_batch
from kvist.events.transports import Message, open_publication
from kvist.router import healing
from kvist.router.healing import ask_full_report

FULL = {"kv_cache_report_mode": "full"}
VLLM = [{"id": "m", "object": "model", "owned_by": "vllm"}]
PROMPT = list(range(33))


def block(number: int) -> list[int]:
    return [100 * number + idx for idx in range(16)]


@pytest.mark.parametrize(
    ("body", "asking"),
    [
        (b'{"prompt": "a"}', b'{"vllm_xargs":{"kv_cache_report_mode":"full"},"prompt": "a"}'),
        (b' {\n"a\\u00e9" : 1.0 }', b' {"vllm_xargs":{"kv_cache_report_mode":"full"},\n"a\\u00e9" : 1.0 }'),
        (b"{ }", b'{"vllm_xargs":{"kv_cache_report_mode":"full"} }'),
        (b'{"vllm_xargs" : {"x": 1}}', b'{"vllm_xargs" : {"kv_cache_report_mode":"full","x": 1}}'),
        (b'{"vllm_xargs": {}, "n": 1}', b'{"vllm_xargs": {"kv_cache_report_mode":"full"}, "n": 1}'),
        (b'{"p": "\\"vllm_xargs\\": {"}', b'{"vllm_xargs":{"kv_cache_report_mode":"full"},"p": "\\"vllm_xargs\\": {"}'),
    ],
)
def test_the_request_for_a_full_report_is_put_in_and_no_other_byte_changed(body, asking):
    assert ask_full_report(body) == asking


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not JSON",
        b"[1]",
        b'{"prompt": ',
        b'{"vllm_xargs": null}',
        b'{"vllm_xargs": [1]}',
        b'{"vllm_xargs": {"kv_cache_report_mode": "incremental"}}',
        b'{"metadata": {"vllm_xargs": {}}, "vllm_xargs": {}}',
        b'{"vllm\\u005fxargs": {"x": 1}}',
    ],
)
def test_a_body_that_is_no_object_or_has_its_own_way_stays_as_it_is(body):
    assert ask_full_report(body) is body


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), _JSON), st.none() | st.dictionaries(st.text(max_size=5), _JSON, max_size=2))
def test_any_object_is_the_same_but_for_the_argument(fields, arguments):
    sent: dict[str, Any] = fields if arguments is None else fields | {"vllm_xargs": arguments}
    received = json.loads(ask_full_report(json.dumps(sent, indent=1).encode()))
    assert received.pop("vllm_xargs") == (arguments or {}) | FULL
    assert received == {name: value for name, value in sent.items() if name != "vllm_xargs"}


@pytest.fixture
def engine(start_vllm, free_port):
    """An engine that keeps two messages for replay."""
    port = free_port()
    engine = start_vllm(port, num_kept=2)
    engine.url = f"tcp://127.0.0.1:{port}"
    engine.store(1, block(1))
    return engine


async def lose(engine, front, url: str) -> None:
    """Have the engine lose more than it keeps, and the router notice."""
    number = engine.next_sequence + 1
    for lost in range(3):
        engine.store(number + lost, block(number + lost), is_lost=True)
    engine.store(number + 3, block(number + 3))
    await front.until_overlap(url, [*block(number + 3), 0], 1)
    assert await state_of(front, url) == ["partial"]


async def state_of(front, url: str) -> list[str]:
    """Return the states of the worker's ranks, as the router knows them from now on."""
    return [rank["state"] for rank in (await front.workers())[url]["kv_events"]["ranks"]]


async def num_blocks(front, url: str) -> int:
    return sum(rank["blocks"] for rank in (await front.workers())[url]["kv_events"]["ranks"])


def asked(worker) -> list[bool]:
    """Return, for each request the worker got, whether it asked for a full report."""
    return [json.loads(received.body).get("vllm_xargs") == FULL for received in worker.completions]


async def test_requests_to_a_partial_rank_ask_until_nothing_new_is_hit(worker, router, engine, monkeypatch):
    monkeypatch.setattr(healing, "NUM_KNOWN_IN_A_ROW", 2)
    async with (
        worker(models=VLLM, cached_tokens=0) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await front.until_overlap(one.url, [*block(1), 0], 1)
        await front.complete(PROMPT)
        await lose(engine, front, one.url)
        one.cached_tokens = 16  # of which the index knows nothing
        await front.complete(PROMPT)
        one.cached_tokens = 0
        for _ in range(3):
            await front.complete(PROMPT)
        assert asked(one) == [False, True, True, True, False]
        metrics = await front.metrics()
        name = "kvist_router_full_reports_total"
        assert metrics[f'{name}{{report="lacking",worker="{one.url}"}}'] == 1
        assert metrics[f'{name}{{report="known",worker="{one.url}"}}'] == 2
        assert await state_of(front, one.url) == ["partial"]


async def test_a_rank_that_loses_again_is_asked_again(worker, router, engine, monkeypatch):
    monkeypatch.setattr(healing, "NUM_KNOWN_IN_A_ROW", 1)
    async with (
        worker(models=VLLM, cached_tokens=0) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await lose(engine, front, one.url)
        number = 50
        while await num_blocks(front, one.url) < 10:  # a connection that comes late costs what was stored before it
            engine.store(number, block(number))
            await front.until_overlap(one.url, [*block(number), 0], 1)
            number += 1
        await front.complete(PROMPT)
        await front.complete(PROMPT)
        await lose(engine, front, one.url)
        await front.complete(PROMPT)
        assert asked(one) == [True, False, True]


async def test_an_engine_that_does_not_tell_is_asked_a_bounded_number_of_times(worker, router, engine, monkeypatch):
    monkeypatch.setattr(healing, "MAX_ASKED", 2)
    async with (
        worker(models=VLLM) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await lose(engine, front, one.url)
        for _ in range(3):
            await front.complete(PROMPT)
        assert asked(one) == [True, True, False]
        assert (await front.metrics())[f'kvist_router_full_reports_total{{report="untold",worker="{one.url}"}}'] == 2


async def test_engines_that_are_not_vllm_get_the_clients_bytes(worker, router, engine):
    sglang = [{"id": "m", "object": "model", "owned_by": "sglang"}]
    async with (
        worker(models=sglang, cached_tokens=0) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await lose(engine, front, one.url)
        answer = await front.complete(PROMPT)
        assert one.completions[0].body == answer.request.content


async def test_other_endpoints_of_a_partial_worker_get_the_clients_bytes(worker, router, engine):
    async with (
        worker(models=VLLM) as one,
        router(one.url, kv_event_sources={one.url: (engine.url,)}, block_size=16) as front,
    ):
        await lose(engine, front, one.url)
        answer = await front.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert one.completions[0].body == answer.request.content


async def test_a_worker_whose_sidecar_lacks_blocks_is_asked_too(worker, router, free_port):
    url = f"tcp://127.0.0.1:{free_port()}"
    publication = open_publication(url)
    heartbeat = encode_batch(Batch("w", 0, 1, 0, 16, 1.0, (Heartbeat(0, 0, is_complete=False),)))
    async with (
        worker(models=VLLM) as one,
        router(one.url, kv_event_sources={one.url: (url,)}, block_size=16) as front,
    ):
        async with asyncio.timeout(60):
            while await state_of(front, one.url) != ["partial"]:
                publication.send(Message(b"kv/w/0", 0, heartbeat))
        await front.complete(PROMPT)
        assert asked(one) == [True]
    publication.close()

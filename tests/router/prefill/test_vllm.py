"""vLLM's workers: what each is told is what its connectors read, and what they would refuse is never sent."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from kvist.router.prefill.dialect import Side
from kvist.router.prefill.handover import DIALECTS, begins_with_failure
from kvist.router.prompts import ParsedRequest

LONG = list(range(1000, 1400))
MODELS = [{"id": "m", "object": "model", "owned_by": "vllm"}]
KVIST = {"engine": "kvist", "block_size": 16}
FREE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


class Engines:
    """Prefill workers that hold blocks by the request's id, and decode workers that read each once."""

    def __init__(self, http_bytes: Any) -> None:
        self.bytes = http_bytes
        self.held: set[str] = set()

    async def prefill(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body, name = json.loads(received.body), received.headers["x-request-id"]
        if body.get("stream") and body.get("kv_transfer_params"):
            writer.write(self.bytes.response(b'{"error": {"message": "no params in a stream"}}', status=400))
            return
        answer: dict[str, Any] = {"choices": [{"text": "a"}]}
        if body.get("kv_transfer_params") == {"do_remote_decode": True, "do_remote_prefill": False, **FREE}:
            assert (body["max_tokens"], body.get("max_completion_tokens", 1), body.get("n", 1)) == (1, 1, 1)
            assert not body.get("stream_options")  # refused where nothing is streamed
            self.held.add(name)
            params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": name}
            place = {"remote_engine_id": "p", "remote_block_ids": [[1, 2]], "remote_host": "h", "remote_port": 5600}
            answer["kv_transfer_params"] = params | place | {"tp_size": 1}
        writer.write(self.bytes.response(json.dumps(answer).encode()))

    async def decode(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        params = body.get("kv_transfer_params")
        if params is not None:
            name = params["remote_request_id"]
            if name != received.headers["x-request-id"] or params["remote_block_ids"] is None or body.get("n", 1) != 1:
                writer.write(self.bytes.response(b'{"error": {"message": "bad params"}}', status=400))
                return
        text = "computed" if params is None else "fetched" if name in self.held else "another prompt"  # nothing checks
        self.held -= {name} if params else set()
        writer.write(self.bytes.response(json.dumps({"choices": [{"text": text}]}).encode()))

    async def fail(self, received: Any, writer: asyncio.StreamWriter) -> None:
        """Cannot fetch the blocks, and in a stream has answered 200 by then."""
        if "kv_transfer_params" not in json.loads(received.body):
            await self.decode(received, writer)
            return
        first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
        opening = [first] if received.target.endswith("chat/completions") else []
        events = [f"data: {json.dumps(each, separators=(',', ':'))}\n\n".encode() for each in [*opening, error]]
        writer.write(self.bytes.event_stream_head)
        for event in [*events, b"data: [DONE]\n\n", b""]:
            writer.write(self.bytes.chunk(event))
            await writer.drain()


@pytest.fixture
def engines(http_bytes) -> Engines:
    return Engines(http_bytes)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "fetched"),
        ({"logprobs": 2, "stream": False, "min_tokens": 3}, "fetched"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "fetched"),
        ({"n": 3, "logprobs": 1}, "fetched"),
        ({"n": 2, "best_of": 2}, "computed"),
        ({"use_beam_search": True}, "computed"),
        ({"echo": True, "logprobs": 1}, "computed"),
        ({"prompt_logprobs": 0}, "computed"),
    ],
)
async def test_the_decode_worker_fetches_what_one_sequence_needs(
    worker, router, engines, fields: dict[str, Any], expected: str
) -> None:
    async with (
        worker(models=MODELS, answer=engines.prefill) as p,
        worker(models=MODELS, answer=engines.decode) as d,
        router(p.url, d.url, prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,)) as front,
    ):
        answer = await front.complete(LONG, **fields)
        is_apart, num_answers = expected == "fetched", fields.get("n", 1)
        assert [each["text"] for each in answer.json()["choices"]] == [expected] * (num_answers if is_apart else 1)
        assert len(p.completions) == is_apart * num_answers
        sent = json.loads(d.completions[0].body)
        sent.pop("kv_transfer_params", None)
        assert sent == json.loads(answer.request.content) | ({"n": 1} if is_apart and "n" in fields else {})
        assert not engines.held


async def test_each_side_is_told_which_of_its_ranks_it_is_for(worker, router, engines, engine) -> None:
    async with worker(models=MODELS, answer=engines.prefill) as p, worker(models=MODELS, answer=engines.decode) as d:
        with engine("p-ranks", num_ranks=2) as p_cache, engine("d-ranks", num_ranks=2) as d_cache:
            caches = {p.url: p_cache, d.url: d_cache}
            for cache in caches.values():
                for rank in (0, 1):
                    cache.store(list(range(rank, rank + 16)), rank)
            sources = {url: (cache.publisher.endpoint,) for url, cache in caches.items()}
            roles = {"prefill_worker_urls": (p.url,), "decode_worker_urls": (d.url,)}
            async with router(kv_event_sources=sources, max_local_prefill_tokens=0, **roles) as front:
                for url in caches:
                    await front.until_ranks(url, 2)
                for _ in range(4):
                    assert (await front.complete(LONG)).json()["choices"] == [{"text": "fetched"}]
        for each in (*p.completions, *d.completions):
            assert each.headers["x-data-parallel-rank"] in ("0", "1")


async def test_a_chat_that_limits_its_completion_is_asked_one_token_of(worker, router, engines) -> None:
    async with (
        worker(models=MODELS, answer=engines.prefill) as p,
        worker(models=MODELS, answer=engines.decode) as d,
        router(prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,), max_local_prefill_tokens=0) as front,
    ):
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 9}
        answer = await front.client.post("/v1/chat/completions", json=chat | {"top_logprobs": 1, "logprobs": True})
        assert answer.json()["choices"] == [{"text": "fetched"}]
        assert json.loads(p.completions[0].body)["max_completion_tokens"] == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_whose_blocks_could_not_be_fetched_is_made_anew(worker, router, engines, path: str) -> None:
    async with (
        worker(models=MODELS, answer=engines.prefill) as p,
        worker(models=MODELS, answer=engines.fail) as d,
        router(prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,), max_local_prefill_tokens=0) as front,
    ):
        prompt = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": LONG}
        answer = await front.client.post(path, json={"model": "m", "stream": True} | prompt)
        assert answer.json()["choices"] == [{"text": "computed"}]
        assert (await front.metrics())['kvist_router_disaggregation_fallbacks_total{reason="transfer_failed"}'] == 1


@pytest.mark.parametrize("failure", ["it ends", "503", "it is gone"])
async def test_only_one_decode_worker_is_sent_the_blocks_as_they_are_freed_then(
    worker, router, engines, failure: str
) -> None:
    async def fetch_and_fail(received: Any, writer: asyncio.StreamWriter) -> None:
        engines.held.discard(received.headers["x-request-id"])
        if failure == "503":
            writer.write(engines.bytes.response(b"{}", status=503))
        else:
            writer.transport.abort()

    async with (
        worker(models=MODELS, answer=engines.prefill) as p,
        worker(models=MODELS, answer=fetch_and_fail) as broken,
        worker(models=MODELS, answer=engines.decode) as d,
        router(prefill_worker_urls=(p.url,), decode_worker_urls=(broken.url, d.url), policy="round-robin") as front,
    ):
        if failure == "it is gone":
            broken.kill()
        answers = [(await front.complete(LONG)).json()["choices"][0]["text"] for _ in range(3)]
        num_failed = len(broken.completions)
        assert (num_failed == 0) is (failure == "it is gone")
        assert sorted(answers) == ["computed"] * num_failed + ["fetched"] * (len(answers) - num_failed)
        metrics = await front.metrics()
        name = 'kvist_router_disaggregation_fallbacks_total{reason="decode_failed"}'
        assert metrics.get(name, 0) == num_failed


async def test_cached_tokens_of_a_fetched_prompt_are_not_taken_for_the_decode_workers(worker, router, engines) -> None:
    async def decode(received: Any, writer: asyncio.StreamWriter) -> None:
        engines.held.discard(received.headers["x-request-id"])
        writer.write(engines.bytes.response(engines.bytes.completion(cached_tokens=384, prompt_tokens=400)))

    async with (
        worker(models=MODELS, answer=engines.prefill) as p,
        worker(models=MODELS, answer=decode) as d,
        router(prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,)) as front,
    ):
        for prompt, num_reported in ((LONG, 0), (LONG[:200], 384)):
            await front.complete(prompt)
            assert (await front.workers())[d.url]["hits"]["reported_tokens"] == num_reported
        assert len(p.completions) == 1


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
FAILED, REFUSED = (b'data: {"error":{"message":"x","code":%d}}\n\n' % code for code in (500, 400))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ROLE + FAILED, True),
        ((ROLE + FAILED).replace(b"\n", b"\r\n"), True),
        (FAILED, True),
        (REFUSED, False),
        (ROLE + REFUSED, False),
        (TOKEN + FAILED, False),
        (ROLE + TOKEN, False),
        (b"data: [DONE]\n\n", False),
        (b'{"error":{"code":500}}', False),
        (b"da", None),
        (ROLE, None),
        (FAILED[:-1], None),
        (b"data: " + bytes(65536), False),
    ],
)
def test_how_a_stream_begins_shows_whether_the_worker_failed(answer: bytes, expected: bool | None) -> None:
    assert begins_with_failure(answer) is expected


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"server_info": KVIST | {"role": "prefill"}}, {"models": MODELS}),
        (
            {"server_info": KVIST | {"role": "prefill", "kv_cache_dtype": "fp8_e4m3 scaled 1a"}},
            {"server_info": KVIST | {"role": "decode", "kv_cache_dtype": "fp8_e4m3"}},
        ),
        ({"models": MODELS}, {"server_info": {"disaggregation_mode": "decode"}}),
        ({"models": MODELS, "metrics": 'vllm:cache_config_info{block_size="16",cache_dtype="fp8"} 1.0\n'}, {}),
        ({"models": MODELS, "metrics": 'vllm:cache_config_info{block_size="32",cache_dtype="auto"} 1.0\n'}, {}),
        ({"models": [{"id": "base", "owned_by": "vllm"}, *MODELS]}, {"models": [{"id": "m", "owned_by": "sglang"}]}),
    ],
)
async def test_workers_that_do_not_understand_each_other_are_no_pair(
    worker, router, engines, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    metrics = 'vllm:cache_config_info{block_size="16",cache_dtype="bfloat16"} 1.0\n'
    async with (
        worker(answer=engines.prefill, **prefill) as p,
        worker(answer=engines.decode, **(decode or {"models": MODELS, "metrics": metrics})) as d,
        worker(models=MODELS, answer=engines.decode) as whole,
        router(whole.url, prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,), policy="round-robin") as front,
    ):
        for _ in range(3):
            assert (await front.complete(LONG)).json()["choices"] == [{"text": "computed"}]
        assert not p.completions
        assert (await front.metrics())['kvist_router_local_prefills_total{reason="no_decode_worker"}'] == 3


async def test_workers_that_do_not_say_their_engine_have_the_configured_dialect(worker, router, http_bytes) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b'{"error": {"message": "not like this"}}', status=422))

    for dialect, field in (("vllm", "kv_transfer_params"), ("tensorrt_llm", "disaggregated_params")):
        async with AsyncExitStack() as exits:
            p = await exits.enter_async_context(worker(answer=refuse))
            d = await exits.enter_async_context(worker())
            roles = {"prefill_worker_urls": (p.url,), "decode_worker_urls": (d.url,)}
            front = await exits.enter_async_context(router(prefill_dialect=dialect, **roles))
            assert (await front.complete(LONG)).status_code == 200
            assert field in json.loads(p.completions[0].body)
            assert (await front.metrics())['kvist_router_disaggregation_fallbacks_total{reason="prefill_refused"}'] == 1


def test_a_prompt_that_its_first_token_ends_hands_nothing_over() -> None:
    answer = json.dumps({"choices": [{"finish_reason": "stop"}], "kv_transfer_params": None}).encode()
    assert DIALECTS["vllm"].read_handoff(ParsedRequest("m", 2), answer) is None
    side = Side("http://a:1", 8998)
    assert DIALECTS["vllm"].begin(ParsedRequest("m", 2), side, side, Random(0))[1] is None

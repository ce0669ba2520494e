"""TensorRT-LLM's workers: contexts go on where their params say, from the tokens that they were computed from."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from typing import Any

import pytest

from kvist.router.prefill.trtllm import TrtllmDialect
from kvist.router.prompts import ParsedRequest

LONG = list(range(1000, 1400))
MODELS = [{"id": "m", "object": "model", "owned_by": "tensorrt_llm"}]
KNOWN = {"request_type", "disagg_request_id", "ctx_request_id", "first_gen_tokens", "encoded_opaque_state"} | {
    "ctx_dp_rank",
    "ctx_info_endpoint",
}


class Engines:
    """Context workers that hold a prompt by its number, and generation workers that begin with the first token."""

    def __init__(self, http_bytes: Any) -> None:
        self.bytes = http_bytes
        self.held: dict[int, tuple[list[int], int]] = {}
        self.finish_reason = "length"

    def _read(self, received: Any, writer: asyncio.StreamWriter) -> tuple[Any, Any]:
        """Return body and params, with None for the body of a request that the engine refuses."""
        body = json.loads(received.body)
        params = body.get("disaggregated_params") or {}
        is_bad = bool(params.keys() - KNOWN) or (body.get("stream_options") and not body.get("stream"))
        if is_bad or params.get("request_type", "context_only") not in ("context_only", "generation_only"):
            writer.write(self.bytes.response(b'{"message": "extra fields not permitted"}', status=400))
            return None, params
        return body, params

    async def context(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body, params = self._read(received, writer)
        if body is None:
            return
        number = params["disagg_request_id"]
        assert 2**42 <= number < 2**63
        assert body["stream"] is False
        tokens, rank = body.get("prompt", LONG), int(received.headers.get("x-data-parallel-rank", 0))
        self.held[number] = tokens, rank
        handed = {"request_type": "context_only", "first_gen_tokens": [7], "encoded_opaque_state": "AA==", **params}
        choice = {"text": "a", "finish_reason": self.finish_reason, "disaggregated_params": handed}
        place = {"ctx_request_id": number, "ctx_dp_rank": rank, "ctx_info_endpoint": "tcp://h:1"}
        answer = {"choices": [choice | {"disaggregated_params": handed | place}]}
        writer.write(self.bytes.response(json.dumps(answer | {"prompt_token_ids": tokens}).encode()))

    async def generation(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body, params = self._read(received, writer)
        if body is None:
            return
        text = "computed"
        if params:
            assert params["request_type"] == "generation_only"
            tokens = body["prompt_token_ids"] if "messages" in body else body["prompt"]
            assert self.held.pop(params["ctx_request_id"]) == (tokens, params["ctx_dp_rank"])
            text = "fetched"
        answer = {"choices": [{"text": text, "message": {"content": text}}]}
        writer.write(self.bytes.response(json.dumps(answer).encode()))


@pytest.fixture
def engines(http_bytes) -> Engines:
    return Engines(http_bytes)


async def test_contexts_are_computed_by_one_worker_and_gone_on_with_by_another(worker, router, engines) -> None:
    async with (
        worker(models=MODELS, answer=engines.context) as p,
        worker(models=MODELS, answer=engines.generation) as d,
        router(
            prefill_worker_urls=(p.url,),
            decode_worker_urls=(d.url,),
            max_local_prefill_tokens=0,
            prefill_dialect="vllm",
        ) as front,
    ):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for fields in ({}, options):
            assert (await front.complete(LONG, **fields)).json()["choices"][0]["text"] == "fetched"
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        answer = await front.client.post("/v1/chat/completions", json=chat)
        assert answer.json()["choices"][0]["message"]["content"] == "fetched"
        assert (await front.complete(LONG, logprobs=1)).json()["choices"][0]["text"] == "computed"
        for prompt, num_answers in ((LONG, 2), ([LONG[1:], LONG], 1)):
            choices = (await front.complete(prompt, n=num_answers)).json()["choices"]
            assert [(each["index"], each["text"]) for each in choices] == [(0, "fetched"), (1, "fetched")]
        assert (len(p.completions), engines.held) == (7, {})
        engines.finish_reason = "stop"  # the answer has ended: nobody fetches its context
        assert (await front.complete(LONG)).json()["choices"][0]["text"] == "computed"


async def test_a_context_is_fetched_from_the_rank_that_was_chosen_for_it(worker, router, engines, engine) -> None:
    async with (
        worker(models=MODELS, answer=engines.context) as p,
        worker(models=MODELS, answer=engines.generation) as d,
    ):
        with engine("p-ranks", num_ranks=2) as p_cache, engine("d-ranks", num_ranks=2) as d_cache:
            for cache, rank in product((p_cache, d_cache), (0, 1)):
                cache.store(list(range(rank, rank + 16)), rank)
            sources = {p.url: (p_cache.publisher.endpoint,), d.url: (d_cache.publisher.endpoint,)}
            roles = {"prefill_worker_urls": (p.url,), "decode_worker_urls": (d.url,)}
            async with router(kv_event_sources=sources, max_local_prefill_tokens=0, **roles) as front:
                for url in sources:
                    await front.until_ranks(url, 2)
                for _ in range(8):
                    assert (await front.complete(LONG)).json()["choices"][0]["text"] == "fetched"
        ranks = {each.headers["x-data-parallel-rank"] for each in p.completions}
        told = {str(json.loads(each.body)["disaggregated_params"]["ctx_dp_rank"]) for each in d.completions}
        assert ranks == told <= {"0", "1"}
        assert {each.headers["x-data-parallel-rank"] for each in d.completions} <= {"0", "1"}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"finish_reason": "length"}]}',
        b'{"choices": [{"finish_reason": "length", "disaggregated_params": null}]}',
        b'{"choices": [{"finish_reason": "stop", "disaggregated_params": {}}]}',
    ],
)
def test_an_answer_without_params_hands_nothing_over(answer: bytes) -> None:
    assert TrtllmDialect().read_handoff(ParsedRequest("m", 2), answer) is None

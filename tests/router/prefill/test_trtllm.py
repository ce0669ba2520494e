"""TensorRT-LLM's workers: contexts go on where their params say, from the tokens that they were computed from."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvist.router.prefill.trtllm import TrtllmDialect
from kvist.router.prompts import COMPLETION_PATH

LONG = list(range(1000, 1400))
MODELS = [{"id": "m", "object": "model", "owned_by": "tensorrt_llm"}]
KNOWN = {"request_type", "disagg_request_id", "ctx_request_id", "first_gen_tokens", "encoded_opaque_state"}


class Engines:
    """Context workers that hold a prompt by its number, and generation workers that begin with the first token."""

    def __init__(self, http_bytes: Any) -> None:
        self.bytes = http_bytes
        self.held: dict[int, list[int]] = {}
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
        tokens = self.held[number] = body.get("prompt", LONG)
        handed = {"request_type": "context_only", "first_gen_tokens": [7], "encoded_opaque_state": "AA==", **params}
        choice = {"text": "a", "finish_reason": self.finish_reason, "disaggregated_params": handed}
        answer = {"choices": [choice | {"disaggregated_params": handed | {"ctx_request_id": number}}]}
        writer.write(self.bytes.response(json.dumps(answer | {"prompt_token_ids": tokens}).encode()))

    async def generation(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body, params = self._read(received, writer)
        if body is None:
            return
        text = "computed"
        if params:
            assert params["request_type"] == "generation_only"
            tokens = body["prompt_token_ids"] if "messages" in body else body["prompt"]
            assert self.held.pop(params["ctx_request_id"]) == tokens
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
    assert TrtllmDialect().read_handoff(COMPLETION_PATH, answer) is None

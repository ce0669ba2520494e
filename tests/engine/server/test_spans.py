"""What a worker's traces and histograms tell of requests, and of prompts that it fetches; nothing is moved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest_asyncio

from kvist.engine import bundled_model_path
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.server.api import Api, ServedModel
from kvist.http import HttpServer
from kvist.openai.tokenization import ChatTokenizer
from kvist.tracing import open_tracing
from kvist.transfer.commands import Command, Fetch, FetchCompleted, FetchFailed, FetchReleased, Report

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "x-request-id": "mine"}
PROMPT = list(range(5, 45))
COME = {
    "do_remote_prefill": True,
    "remote_endpoints": ["tcp://127.0.0.1:9"],
    "remote_request_id": "there",
    "num_tokens": len(PROMPT),
}


@dataclass
class Transfers:
    """Transfers that only note what is wanted."""

    wanted: list[Fetch] = field(default_factory=list)

    def command(self, command: Command) -> None:
        if isinstance(command, Fetch):
            self.wanted.append(command)


@dataclass
class Served:
    client: httpx.AsyncClient
    engine: AsyncEngine
    transfers: Transfers
    collector: Any

    async def post(self, headers: dict[str, str] = PARENT, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
        return await self.client.post("/v1/completions", json=body, headers=headers)

    def report(self, report: Report) -> None:
        self.engine.submit(lambda: self.engine._core.on_report(report))

    async def metric(self, name: str) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvist_{name} "))


@pytest_asyncio.fixture
async def serve(trace_collector: Any) -> Any:
    @asynccontextmanager
    async def running() -> AsyncIterator[Served]:
        core = load_engine(
            EngineConfig(model_dir=bundled_model_path(), num_blocks=64, max_model_len=256, max_num_batched_tokens=128)
        ).core
        transfers = Transfers()
        core.handoffs.attach(transfers.command)
        tracing = open_tracing(trace_collector.url, "kvist-worker", "here:1")
        async with AsyncEngine(core, max_num_open=40) as engine:
            tokenizer = ChatTokenizer.load(bundled_model_path())
            model = ServedModel(
                names=("tiny",),
                path="/m",
                kv_cache_dtype="float32",
            )
            async with (
                HttpServer(Api(engine, tokenizer, model, tracing=tracing).handle) as server,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
            ):
                yield Served(client, engine, transfers, trace_collector)
        await asyncio.to_thread(tracing.close, 30)

    return running


def steps_below(spans: list[Any], parent: Any) -> list[Any]:
    """Return the parent's spans in order, each of which must lie within it."""
    below = sorted((each for each in spans if each.parent_id == parent.span_id), key=lambda each: each.start_ns)
    assert all(parent.start_ns <= each.start_ns <= each.end_ns <= parent.end_ns for each in below)
    return below


async def test_a_request_is_queued_prefilled_and_decoded_whole_or_as_a_stream(serve: Any, trace_collector: Any) -> None:
    async with serve() as served:
        for is_stream in (False, True):
            answer = await served.post(stream=is_stream)
            assert answer.status_code == 200
        for name in ("queue", "prefill", "time_to_first_token", "decode", "request"):
            assert await served.metric(f"engine_{name}_seconds_count") == 2
        assert await served.metric("engine_fetch_seconds_count") == 0
    roots = sorted(trace_collector.named("POST /v1/completions"), key=lambda each: each.start_ns)
    assert [each.attributes["gen_ai.request.stream"] for each in roots] == [False, True]
    for root, num_cached in zip(roots, (0, 32), strict=True):
        assert (root.trace_id, root.parent_id, root.kind, root.error) == (TRACE_ID, SPAN_ID, "SERVER", None)
        queue, prefill, decode = steps_below(trace_collector.spans, root)
        assert [each.name for each in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
        assert queue.end_ns == prefill.start_ns
        assert prefill.end_ns == decode.start_ns
        assert prefill.attributes == {"kvist.prompt_tokens": 40, "kvist.cached_tokens": num_cached}
        assert decode.attributes == {"gen_ai.usage.output_tokens": 4}
        assert (
            root.attributes.items()
            >= {
                "http.request.method": "POST",
                "url.path": "/v1/completions",
                "http.response.status_code": 200,
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": "tiny",
                "gen_ai.request.max_tokens": 4,
                "gen_ai.usage.input_tokens": 40,
                "gen_ai.usage.output_tokens": 4,
                "gen_ai.usage.cache_read.input_tokens": num_cached,
                "gen_ai.response.finish_reasons": ["length"],
                "kvist.request_id": "mine",
            }.items()
        )


async def test_each_choice_has_steps_of_its_own_and_refusals_have_none(
    serve: Any, trace_collector: Any, until: Any
) -> None:
    async with serve() as served:
        await served.post(n=2, prompt=[PROMPT, PROMPT[:20]], headers={})
        await until(lambda: trace_collector.named("POST /v1/completions"))
        (root,) = trace_collector.named("POST /v1/completions")
        assert (await served.post(max_tokens=-1)).status_code == 400
        assert (await served.post(headers={"traceparent": PARENT["traceparent"][:-1] + "0"})).status_code == 200
    below = steps_below(trace_collector.spans, root)
    prompts = {
        each.attributes["kvist.choice"]: each.attributes["kvist.prompt_tokens"]
        for each in below
        if each.name == "prefill"
    }
    assert prompts == {0: 40, 1: 40, 2: 20, 3: 20}
    assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["gen_ai.request.choice.count"]) == (60, 2)
    (refused,) = [each for each in trace_collector.named("POST /v1/completions") if each.span_id != root.span_id]
    assert (refused.attributes["http.response.status_code"], refused.error) == (400, None)
    assert not steps_below(trace_collector.spans, refused)


async def test_a_fetch_is_a_step_and_one_that_fails_has_its_reason(
    serve: Any, trace_collector: Any, until: Any
) -> None:
    async with serve() as served:
        for reason in (None, "gone"):
            asking = asyncio.create_task(served.post(kv_transfer_params=COME))
            await until(lambda: served.transfers.wanted)
            request_id = served.transfers.wanted.pop().request_id
            if reason is None:
                served.report(FetchCompleted(request_id, 7))
            else:
                served.report(FetchFailed(request_id, reason))
                served.report(FetchReleased(request_id))
            assert (await asking).status_code == 200
        assert await served.metric("engine_fetch_seconds_count") == 1
    came, computed = sorted(trace_collector.named("POST /v1/completions"), key=lambda each: each.start_ns)
    assert came.attributes["kvist.handoff"] == "decode"
    steps = {root.span_id: steps_below(trace_collector.spans, root) for root in (came, computed)}
    assert [each.name for each in steps[came.span_id]] == ["queue", "fetch", "decode"]
    assert [each.name for each in steps[computed.span_id]] == ["queue", "fetch", "prefill", "decode"]
    assert (steps[came.span_id][1].error, steps[computed.span_id][1].error) == (None, "gone")


async def test_a_client_that_leaves_ends_its_request_early(serve: Any, trace_collector: Any, until: Any) -> None:
    async with serve() as served:
        asking = asyncio.create_task(served.post(headers={}, kv_transfer_params=COME))
        await until(lambda: served.transfers.wanted)
        asking.cancel()
        await until(lambda: trace_collector.named("POST /v1/completions"))
    (root,) = trace_collector.named("POST /v1/completions")
    assert root.error == "ended early"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]

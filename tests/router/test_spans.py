"""What a trace tells of a request's way through the router, and what workers are told of the trace."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest

from kvist.errors import InvalidValueError
from kvist.router.config import RouterConfig

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
LONG = list(range(1000, 1400))


def info(role: str) -> dict[str, Any]:
    transfer = {"endpoints": ["tcp://127.0.0.1:9"], "agent": "shared_memory"}
    return {"engine": "kvist", "block_size": 16, "kv_events": None, "role": role, "kv_transfer": transfer}


@pytest.fixture
def answers(http_bytes) -> dict[str, Any]:
    """What a worker may do with a request."""

    async def prefill(_: Any, writer: asyncio.StreamWriter) -> None:
        params = {"do_remote_prefill": True, "remote_request_id": "held"}
        said = b"data: %b\n\n" % json.dumps({"choices": [], "kv_transfer_params": params}).encode()
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(said) + http_bytes.chunk(b""))

    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(http_bytes.completion(cached_tokens=16, prompt_tokens=400)))

    async def fail(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"{}", status=503))

    async def fail_transfer(received: Any, writer: asyncio.StreamWriter) -> None:
        if b"kv_transfer_params" in received.body:
            writer.write(http_bytes.response(b"{}", status=500))
        else:
            await answer(received, writer)

    async def drop(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    return {"prefill": prefill, "answer": answer, "fail": fail, "fail transfer": fail_transfer, "drop": drop}


async def post(front: Any, **headers: str) -> httpx.Response:
    body = {"model": "m", "prompt": LONG, "max_tokens": 9}
    return await front.client.post("/v1/completions", json=body, headers=PARENT | headers)


async def spans_of(collector: Any, until: Any, num_requests: int = 1) -> list[Any]:
    """Return the spans in order of their start, once that many requests have ended."""
    await until(lambda: len(collector.named("POST /v1/completions")) == num_requests)
    return sorted(collector.spans, key=lambda span: span.start_ns)


def summary(spans: list[Any]) -> list[tuple[str, str | None]]:
    return [(span.name, span.error) for span in spans]


async def test_the_trace_of_a_request_names_each_choice_and_goes_on_in_both_workers(
    worker, router, answers, until, trace_collector
) -> None:
    async with (
        worker(server_info=info("prefill"), answer=answers["prefill"]) as p,
        worker(server_info=info("decode"), answer=answers["answer"]) as d,
        router(p.url, d.url, otlp_traces_endpoint=trace_collector.url, block_size=16) as front,
    ):
        front.hold(p.url, LONG[:64])
        assert (await post(front, **{"x-request-id": "mine"})).status_code == 200
        root, *steps = await spans_of(trace_collector, until)
        assert summary(steps) == [(name, None) for name in ("read", "match", "choose", "prefill", "choose", "decode")]
        assert {(span.trace_id, span.service) for span in (root, *steps)} == {(TRACE_ID, "kvist-router")}
        assert (root.parent_id, {span.parent_id for span in steps}) == (SPAN_ID, {root.span_id})
        assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in steps)
        done = [step for step in steps if step.name != "prefill"]  # which goes on while what it computed is fetched
        assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(done))
        told = root.attributes
        assert told.pop("gen_ai.response.time_to_first_chunk") > 0
        assert told == {
            "http.request.method": "POST",
            "url.path": "/v1/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "m",
            "gen_ai.usage.input_tokens": 400,
            "gen_ai.usage.output_tokens": 1,
            "gen_ai.usage.cache_read.input_tokens": 16,
            "kvist.request_id": "mine",
            "kvist.prompt_tokens": 400,
        }
        _, _, choice, prefill, _, decode = steps
        chosen = {"kvist.worker": d.url, "kvist.prefill_worker": p.url, "kvist.prefill_overlap_tokens": 64}
        assert choice.attributes.items() >= (chosen | {"kvist.policy": "kv", "kvist.overlap_tokens": 0}).items()
        for call, asked in ((prefill, p), (decode, d)):
            assert (call.kind, call.attributes["server.port"]) == ("CLIENT", asked.port)
            received = asked.completions[0].headers
            assert received["traceparent"] == f"00-{TRACE_ID}-{call.span_id}-01"
            assert received["tracestate"] == "vendor=1"


@pytest.mark.parametrize(
    ("prefill", "decode", "steps"),
    [
        (
            "fail",
            "answer",
            [("prefill", "answered 503"), ("retry", None), ("choose", None), ("fallback", None), ("generate", None)],
        ),
        (
            "drop",
            "answer",
            [("prefill", ...), ("retry", None), ("choose", None), ("fallback", None), ("generate", None)],
        ),
        (
            "answer",
            "answer",
            [("prefill", None), ("fallback", None), ("choose", None), ("generate", None)],
        ),
        (
            "prefill",
            "fail transfer",
            [
                ("prefill", None),
                ("choose", None),
                ("decode", "answered 500"),
                ("fallback", None),
                ("retry", None),
                ("choose", None),
                ("generate", None),
            ],
        ),
    ],
)
async def test_each_retry_and_fallback_is_a_span_with_its_reason(
    worker, router, answers, until, trace_collector, prefill: str, decode: str, steps: list[tuple[str, Any]]
) -> None:
    async with (
        worker(server_info=info("prefill"), answer=answers[prefill]) as p,
        worker(server_info=info("decode"), answer=answers[decode]) as d,
        router(p.url, d.url, otlp_traces_endpoint=trace_collector.url) as front,
    ):
        assert (await post(front)).status_code == 200
        spans = (await spans_of(trace_collector, until))[4:]
        assert [name for name, _ in summary(spans)] == [name for name, _ in steps]
        for span, (_, error) in zip(spans, steps, strict=True):
            assert (error is ... and span.error) or span.error == error
        reasons = {span.name: span.attributes["kvist.reason"] for span in spans if "kvist.reason" in span.attributes}
        expected = {"answer": "prefill_refused", "prefill": "transfer_failed"}.get(prefill, "prefill_failed")
        assert reasons["fallback"] == expected
        if prefill == "fail":
            assert reasons["retry"] == "answered 503"
            assert next(s for s in spans if s.name == "retry").attributes["kvist.worker"] == p.url


async def test_requests_that_stay_local_or_fail_say_why(worker, router, answers, until, trace_collector) -> None:
    async with (
        worker(server_info=info("prefill"), answer=answers["prefill"]) as p,
        worker(server_info=info("decode"), answer=answers["answer"]) as d,
        router(p.url, d.url, otlp_traces_endpoint=trace_collector.url) as front,
    ):
        body = {"model": "m", "prompt": LONG[:9]}
        assert (await front.client.post("/v1/completions", json=body)).status_code == 200
        spans = await spans_of(trace_collector, until)
        assert [span.name for span in spans][1:] == ["read", "match", "choose", "generate"]
        assert next(s for s in spans if s.name == "choose").attributes["kvist.local"] == "short"
        assert spans[0].parent_id == ""
        trace_collector.spans.clear()
        assert (await front.client.post("/v1/completions", json={"model": "none", "prompt": LONG})).status_code == 404
        spans = await spans_of(trace_collector, until)
        assert spans[0].attributes["http.response.status_code"] == 404
        assert "expected one of the models served" in spans[0].error
        assert [(span.name, bool(span.error)) for span in spans][-1] == ("choose", True)
        trace_collector.spans.clear()
        assert (await front.client.post("/v1/embeddings", json={"model": "m"})).status_code == 200
        await until(lambda: trace_collector.named("POST"))


async def test_a_client_that_leaves_ends_its_trace(worker, router, until, trace_collector) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker(answer=never) as one, router(one.url, otlp_traces_endpoint=trace_collector.url) as front:
        asking = asyncio.create_task(post(front))
        await until(lambda: one.completions)
        asking.cancel()
        spans = await spans_of(trace_collector, until)
        assert spans[-1].name == "generate"
        assert [span.attributes["error.type"] for span in (spans[0], spans[-1])] == ["ClientDisconnectedError"] * 2


async def test_without_tracing_a_clients_trace_is_passed_on_as_it_is(worker, router, answers) -> None:
    async with (
        worker(server_info=info("prefill"), answer=answers["prefill"]) as p,
        worker(server_info=info("decode"), answer=answers["answer"]) as d,
        router(p.url, d.url) as front,
    ):
        await post(front)
        for asked in (p, d):
            assert asked.completions[0].headers.items() >= PARENT.items()


async def test_a_collector_that_is_away_costs_requests_nothing(worker, router, answers, free_port) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with worker(answer=answers["answer"]) as one, router(one.url, otlp_traces_endpoint=url) as front:
        for _ in range(3):
            assert (await post(front)).status_code == 200


def test_the_collectors_url_is_checked() -> None:
    with pytest.raises(InvalidValueError, match="otlp_traces_endpoint"):
        RouterConfig(otlp_traces_endpoint="127.0.0.1:4318")

"""Prefill and decode workers as processes of this machine, asked as a router would ask them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvist.cli import main
from kvist.cli._rank_transfers import RankTransfers
from kvist.cli.serve import ServeConfig
from kvist.engine import bundled_model_path
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService

MODEL = bundled_model_path()
PARENT_ID = "b7ad6b7169203331"


@pytest.fixture
def serve_tiny(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a context manager that is a running worker of the bundled model, with these flags."""
    return partial(serve, MODEL)


def make_prompt(count: int, seed: int) -> list[int]:
    return [3 + (seed * 37 + i * i) % 200 for i in range(count)]


NIXL = ("--kv-transfer-agent", "nixl")
BOUNCE = ("--kv-transfer-bounce-mib", "32")


@pytest.mark.parametrize("flags", [(), BOUNCE, NIXL, (*NIXL, *BOUNCE)], ids=lambda flags: " ".join(flags) or "plain")
async def test_one_worker_computes_prompts_and_another_goes_on(
    flags: tuple[str, ...], serve_tiny: Callable[..., Any]
) -> None:
    if "nixl" in flags:
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    async with serve_tiny("--role", "prefill", *flags) as source, serve_tiny("--role", "decode", *flags) as target:
        info = (await source.client.get("/server_info")).json()
        assert info["role"] == "prefill"
        assert info["kv_transfer"]["agent"] == ("nixl" if "nixl" in flags else "shared_memory")

        async def both(prompt: list[int]) -> str:
            params = await source.prefill(prompt)
            assert params["do_remote_prefill"] is True
            assert params["remote_endpoints"] == info["kv_transfer"]["endpoints"]
            return await target.text({"prompt": prompt, "max_tokens": 20, "kv_transfer_params": params})

        prompts = [make_prompt(20 + 15 * (i % 7), i // 2) for i in range(14)]
        texts = await asyncio.gather(*map(both, prompts))
        assert await target.metric("engine_prompts_fetched") == 14
        assert await target.metric("engine_fallbacks") == 0
        assert await source.metric("transfer_sent_bytes") == await target.metric("transfer_received_bytes") > 0
        assert await source.metric("transfer_sent_descriptors") > 0
        for prompt, text in zip(prompts, texts, strict=True):
            assert text == await source.text({"prompt": prompt, "max_tokens": 20})
        await source.is_idle()
        await target.is_idle()


def path_of(span: Any, spans: dict[str, Any]) -> str:
    """Return the span and what it is part of, and check that it is so in time."""
    parent = spans.get(span.parent_id)
    name = f"{span.service.removeprefix('kvist-')}:{span.name.removeprefix('POST /v1/')}"
    if parent is None:
        assert span.parent_id == PARENT_ID
        return name
    assert span.start_ns >= parent.start_ns
    assert span.end_ns <= parent.end_ns
    return f"{path_of(parent, spans)} > {name}"


def read_stream(answer: str) -> dict[int, Any]:
    """Return the text and the end of each choice of a stream, and its usage as that of None."""
    assert answer.count("[DONE]") == answer.endswith("data: [DONE]\n\n") == 1
    events = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    read: dict[int | None, Any] = {None: events[-1]["usage"]}
    for choice in (choice for each in events for choice in each["choices"]):
        text, _ = read.get(choice["index"], ("", None))
        read[choice["index"]] = (
            text + (choice.get("text") or choice.get("delta", {}).get("content") or ""),
            choice["finish_reason"],
        )
    return read


async def test_several_answers_are_those_that_one_worker_gives(serve_tiny: Callable[..., Any]) -> None:
    batch = [make_prompt(90, 1), make_prompt(70, 2)]
    chat = {"messages": [{"role": "user", "content": "Tell me about rivers. " * 12}]}
    cases = [("chat/completions", chat | {"n": 3})]
    cases += [("completions", {"prompt": batch} | each) for each in ({}, {"n": 2})]
    async with serve_tiny("--role", "prefill") as source, serve_tiny("--role", "decode") as target:
        urls = tuple(str(each.client.base_url) for each in (source, target))
        config = RouterConfig(worker_urls=urls, port=0, max_local_prefill_tokens=0)
        async with RouterService(config) as router, httpx.AsyncClient(base_url=router.url, timeout=60) as client:

            async def ask(path: str, body: dict[str, Any]) -> list[httpx.Response]:
                return [await who.post(f"/v1/{path}", json=body) for who in (client, target.client)]

            for (path, fields), sampled in product(cases, ({"temperature": 0}, {"temperature": 1, "seed": 7})):
                body = {"max_tokens": 9} | fields | sampled
                apart, alone = [each.json() for each in await ask(path, body)]
                assert apart["choices"] == alone["choices"]
                for each in (apart, alone):
                    del each["usage"]["prompt_tokens_details"]  # the first of each prompt was not cached before
                assert apart["usage"] == alone["usage"]
                options = {"stream": True, "stream_options": {"include_usage": True}}
                apart, alone = [read_stream(each.text) for each in await ask(path, body | options)]
                assert apart == alone
        assert await source.metric("engine_prompts_sent") == await target.metric("engine_prompts_fetched") == 36
        num_computed = await source.metric("engine_admitted_tokens") - await source.metric("engine_cached_tokens")
        assert num_computed == 278 + 11 * (6 + 10 + 6), "each prompt once, and the end that fills no block"


async def test_a_stream_goes_on_from_the_first_token_and_its_trace_tells_of_router_and_both_workers(
    trace_collector: Any, until: Any, serve_tiny: Callable[..., Any]
) -> None:
    tracing = ("--otlp-traces-endpoint", trace_collector.url)
    options = {"environment": {"OTEL_BSP_SCHEDULE_DELAY": "20"}}
    async with (
        serve_tiny("--role", "prefill", *tracing, **options) as source,
        serve_tiny("--role", "decode", *tracing, **options) as target,
    ):
        urls = [str(each.client.base_url) for each in (source, target)]
        config = RouterConfig(
            worker_urls=(*urls,), port=0, otlp_traces_endpoint=trace_collector.url, policy="round-robin"
        )
        async with RouterService(config) as router, httpx.AsyncClient(base_url=router.url, timeout=60) as client:

            async def ask(who: httpx.AsyncClient, trace_id: str, num_spans: int) -> tuple[str, list[Any]]:
                """Return the text of a stream, and the spans that it has left."""
                body = {"prompt": make_prompt(300, 3), "max_tokens": 9, "temperature": 0, "stream": True}
                traced = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
                answer = await who.post("/v1/completions", json=body, headers=traced)
                await until(lambda: sum(each.trace_id == trace_id for each in trace_collector.spans) >= num_spans)
                texts = re.findall(r'"text":"(.*?)","finish', answer.text)
                return "".join(texts), [each for each in trace_collector.spans if each.trace_id == trace_id]

            text, spans = await ask(client, "1" * 32, 14)
            alone, _ = await ask(source.client, "2" * 32, 4)
            assert text == alone != ""
            of_router, in_p = "router:completions", "router:completions > router:prefill > prefill:completions"
            in_d = f"{of_router} > router:decode > decode:completions"
            paths = sorted(path_of(span, {each.span_id: each for each in spans}) for span in spans)
            assert paths == sorted(
                [of_router, in_p, in_d]
                + [f"{of_router} > router:{name}" for name in ("read", "match", "prefill", "decode")]
                + [f"{of_router} > router:choose"] * 2
                + [f"{in_p} > prefill:{name}" for name in ("queue", "prefill")]
                + [f"{in_d} > decode:{name}" for name in ("queue", "fetch", "decode")]
            )

            await source.kill()
            text, spans = await ask(client, "3" * 32, 13)
            assert text == alone
            assert {"prefill", "retry", "fallback", "generate"} <= {each.name for each in spans}
            (fallback,) = (each for each in spans if each.name == "fallback")
            assert fallback.attributes["kvist.reason"] == "prefill_failed"


async def test_whichever_worker_is_killed_the_other_keeps_nothing_and_goes_on(serve_tiny: Callable[..., Any]) -> None:
    flags = ("--kv-transfer-timeout", "3")
    async with serve_tiny(*flags) as survivor:
        prompt = make_prompt(60, 1)
        expected = await survivor.text({"prompt": prompt, "max_tokens": 20})
        async with serve_tiny(*flags) as source:
            params = await source.prefill(prompt)
            other = await source.prefill(make_prompt(80, 2))
            assert await survivor.text({"prompt": prompt, "max_tokens": 20, "kv_transfer_params": params}) == expected
            await source.kill()  # with a prompt held that nobody can fetch any more
            text = await survivor.text({"prompt": make_prompt(80, 2), "max_tokens": 20, "kv_transfer_params": other})
            assert text == await survivor.text({"prompt": make_prompt(80, 2), "max_tokens": 20})
            assert await survivor.metric("engine_fallbacks") == 1
        await survivor.is_idle()
        async with serve_tiny(*flags) as target:
            params = await survivor.prefill(prompt)
            assert await target.text({"prompt": prompt, "max_tokens": 20, "kv_transfer_params": params}) == expected
            await survivor.prefill(make_prompt(70, 5))
            await target.kill()  # before it asks
        await survivor.is_idle()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGCONT])
async def test_a_sender_that_stops_while_it_is_asked_costs_the_receiver_no_blocks(
    ending: signal.Signals, serve_tiny: Callable[..., Any]
) -> None:
    prompt = make_prompt(60, 1)
    async with (
        serve_tiny("--kv-transfer-timeout", "3") as target,
        serve_tiny("--kv-transfer-timeout", "3") as source,
    ):
        body = {"prompt": prompt, "max_tokens": 20}
        greeting = make_prompt(30, 9)
        await target.post({"prompt": greeting, "kv_transfer_params": await source.prefill(greeting)})
        params = await source.prefill(prompt)
        await source.stop()
        answering = asyncio.create_task(target.text(body | {"kv_transfer_params": params}))
        await target.reaches("engine_requests_receiving", 1)
        assert await target.metric("engine_kv_blocks_used") > 0
        if ending is signal.SIGKILL:
            await source.kill()  # which is noticed, long before the time is up or not
            text = await answering
        else:
            text = await answering  # computed there, while the reserved blocks stay out of use
            assert await target.metric("transfer_quarantined_bytes") > 0
            source.resume()
            await source.is_idle()
        await target.is_idle()
        assert text == await target.text(body)
        assert await target.metric("engine_fallbacks") == 1


async def test_a_receiver_killed_while_it_is_written_to_costs_the_sender_no_blocks(
    serve_tiny: Callable[..., Any],
) -> None:
    prompt = make_prompt(60, 1)
    async with serve_tiny("--kv-transfer-timeout", "3") as source, serve_tiny() as target:
        body = {"prompt": prompt, "max_tokens": 200}
        params = await source.prefill(prompt)
        await target.stop()
        asking = asyncio.create_task(target.post(body | {"kv_transfer_params": params}))
        other = await source.prefill(make_prompt(80, 2))
        target.resume()
        await source.reaches("engine_prompts_sent", 1)
        asking_too = asyncio.create_task(
            target.post({"prompt": make_prompt(80, 2), "max_tokens": 200, "kv_transfer_params": other})
        )
        await target.kill()
        for task in (asking, asking_too):
            with pytest.raises(httpx.HTTPError):
                await task
        await source.is_idle()


async def test_a_failed_fetch_is_an_error_with_its_reason_where_no_fallback_is_allowed(
    serve_tiny: Callable[..., Any],
) -> None:
    async with serve_tiny("--no-kv-transfer-fallback") as target, serve_tiny() as source:
        prompt = make_prompt(40, 1)
        params = await source.prefill(prompt)
        params["remote_request_id"] = "nobody's"
        answer = await target.post({"prompt": prompt, "max_tokens": 5, "kv_transfer_params": params})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "kv transfer failed: unknown_request"
        for body, field in (
            ({"kv_transfer_params": {"do_remote_prefill": True}}, "missing required field `remote_endpoints`"),
            ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "got both"),
            ({"kv_transfer_params": {}}, "got neither"),
            ({"kv_transfer_params": {"do_remote_decode": True}, "n": 2}, "n=2"),
            ({"kv_transfer_params": params | {"num_tokens": 41}}, "num_tokens: got 41"),
        ):
            refused = await target.post({"prompt": prompt, "max_tokens": 5} | body)
            assert refused.status_code == 400, refused.text
            assert field in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--role", "prefill"], "role: got 'prefill', expected both, or --kv-transfer to be given as well"),
        (["--kv-transfer-agent", "nixl"], "kv_transfer_agent: got 'nixl', expected shared_memory, or --kv-transfer"),
        (["--kv-transfer-bounce-mib", "64"], "kv_transfer_bounce_mib: got 64, expected 0, or --kv-transfer"),
        (["--kv-transfer-timeout", "5"], "kv_transfer_timeout: got 5.0, expected 30.0, or --kv-transfer"),
        (["--no-kv-transfer-fallback"], "kv_transfer_fallback: got False, expected True, or --kv-transfer"),
        (["--kv-transfer", "tcp://127.0.0.1:65536"], "a port of at most 65535"),
        (["--kv-transfer", "tcp://0.0.0.0:0"], "other workers can reach"),
        (["--kv-transfer", "ipc://x"], "other workers can reach"),
        (["--kv-transfer", "tcp://127.0.0.1:0", "--kv-transfer-bounce-mib", "-1"], "kv_transfer_bounce_mib"),
        (["--kv-transfer", "tcp://127.0.0.1:0", "--kv-transfer-timeout", "nan"], "kv_transfer_timeout"),
        (["--kv-transfer", "tcp://127.0.0.1:0", "--kv-transfer-timeout", "inf"], "kv_transfer_timeout: got 'inf'"),
        (["--kv-transfer", "tcp://127.0.0.1:http"], "kv_transfer"),
        (["--kv-transfer", "tcp://127.0.0.1:0", "--num-blocks", "100000000"], "expected no more than fit into memory"),
        (["--kv-transfer", "tcp://nobody.invalid:0"], "a host with an IPv4 address"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(MODEL), "--port", "0", *flags]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("setting", "num_threads"), [("3", 3), ("none", None)])
def test_the_environment_says_how_many_threads_nixl_has(
    setting: str, num_threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setenv("KVIST_NIXL_THREADS", setting)
    monkeypatch.setattr("kvist.transfer.agents.nixl.NixlAgent", lambda _, **options: made.append(options))
    endpoint = "tcp://127.0.0.1:0"
    config = ServeConfig(
        model_dir=Path("tiny"), kv_transfer=endpoint, kv_transfer_agent="nixl", kv_transfer_timeout=9.0
    )
    RankTransfers(config, endpoint, "worker", 0)
    assert made == [{"write_timeout_s": 9.0, "num_threads": num_threads}]

"""A prefix that a busy worker holds is fetched by another, as a router has them do it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvist.engine import bundled_model_path
from kvist.router import attempts
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService

MODEL = bundled_model_path()
FLAGS = ("--kv-events", "tcp://127.0.0.1:0", "--kv-transfer-tokens-per-s", "1e6", "--kv-transfer-timeout", "5")


def make_prompt(count: int, seed: int) -> list[int]:
    return [3 + (seed * 37 + i * i) % 400 for i in range(count)]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"kvist_router_{name}"))


async def test_what_a_busy_worker_holds_is_fetched_by_another_whose_answer_is_as_if_it_had_computed_all(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PULL_TIMEOUT_S", 60.0)
    async with serve(MODEL, *FLAGS) as holder, serve(MODEL, *FLAGS) as other, serve(MODEL) as alone:
        holder_url, other_url = (str(each.client.base_url) for each in (holder, other))
        settings = {"max_worker_requests": 1, "silence_timeout_s": 60.0, "debug_headers": True}
        config = RouterConfig(worker_urls=(holder_url, other_url), port=0, **settings)
        async with RouterService(config) as router, httpx.AsyncClient(base_url=router.url, timeout=120) as client:

            async def explain(prompt: list[int], worker: str, num_blocks: int) -> dict[str, Any]:
                """Return where a prompt goes, once the router knows that this worker holds so much of it."""
                async with asyncio.timeout(120):
                    while True:
                        told = (await client.post("/route", json={"prompt": prompt})).json()
                        held = {each["worker"]: each["overlap_blocks"]["gpu"] for each in told.get("candidates", ())}
                        if held.get(worker) == num_blocks:
                            return told
                        await asyncio.sleep(0.02)

            async def ask(prompt: list[int]) -> tuple[str | None, int]:
                """Check an answer; return where it was fetched from, and how many tokens were cached."""
                body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body)
                assert answer.headers["x-kvist-worker"] == other_url
                assert answer.json()["choices"][0]["text"] == await alone.text(body)
                cached_tokens = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return answer.headers.get("x-kvist-prefill-worker"), cached_tokens

            first, second = make_prompt(1200, 1), make_prompt(1200, 2)
            for prompt in (second, first):
                await holder.text({"prompt": prompt, "max_tokens": 1})
                await explain([*prompt, 5], holder_url, 75)
            body = {"prompt": first, "max_tokens": 6500, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as busy:
                assert busy.headers["x-kvist-worker"] == holder_url
                told = await explain([*first[:240], *second], other_url, 0)
                assert "pull" not in told  # it is too short to be worth it
                assert await ask([*first[:240], *second]) == (None, 0)
                told = await explain([*first, 6, 7], other_url, 15)
                assert told["pull"] == {"worker": holder_url, "tokens": 960}
                (candidate,) = told["candidates"]
                terms = candidate["seconds"]
                assert terms["fetch"] > 0
                assert terms["compute"] < terms["fetch"]
                assert sum(terms.values()) == pytest.approx(2 * terms["cost"])
                assert await ask([*first, 6, 7]) == (holder_url, 1200)
                assert await metric(client, 'pulls_total{outcome="pulled"}') == 1
                assert await metric(client, "pulled_tokens_total") == 960
                await explain([*first, 8, 9], other_url, 75)
                assert await ask([*first, 8, 9]) == (None, 1200)

                monkeypatch.setattr(attempts, "PULL_TIMEOUT_S", 0.1)
                await holder.stop()
                assert await ask([*second, 6, 7]) == (None, 0)
                assert await metric(client, 'pulls_total{outcome="prefill_failed"}') == 1
                holder.resume()
            await holder.is_idle()
            await other.is_idle()
            assert await other.metric("engine_prompts_fetched") == 1
            assert await other.metric("engine_fallbacks") == 0

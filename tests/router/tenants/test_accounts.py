"""What tenants have used: by engines' word, told to themselves and to administrators, and added up over processes."""

from __future__ import annotations

from typing import Any

import httpx

from kvist.router.config import RouterConfig
from kvist.simulate.trace import read_lines


async def usage(front: Any, key: str) -> Any:
    answer = await front.client.get("/usage", headers={"authorization": f"Bearer {key}"})
    return answer.json()["usage"] if answer.status_code == 200 else answer.status_code


def row(tenant: str, requests: int, prompt: int, cached: int, output: int) -> dict[str, Any]:
    counts = {
        "requests": requests,
        "limited": 0,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
    }
    return {"tenant": tenant, "model": "m", **counts}


async def test_each_sees_its_own_and_administrators_all(worker, router, tenants, bearing, http_bytes, tmp_path) -> None:
    options = {"tenants": tenants("a", "b"), "api_key": "own", "admin_key": "admin", "ready": False}
    async with (
        worker(cached_tokens=60) as one,
        router(one.url, record_requests=str(tmp_path / "recorded"), **options) as front,
    ):
        for key in ("a", "a", "b", "own"):
            body = {"model": "m", "prompt": [1] * 50}
            answer = await front.client.post("/v1/completions", json=body, headers=bearing(key))
            assert answer.status_code == 200

        async def silent(_: Any, writer: Any) -> None:
            chunks = b"".join(http_bytes.chunk(b'data: {"choices": []}\n\n') for _ in range(3))
            writer.write(http_bytes.event_stream_head + chunks + http_bytes.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        one.answer, one.cached_tokens = silent, None  # it says nothing: three blocks are expected to be cached
        stream = {"model": "m", "prompt": [1] * 50, "stream": True}
        await front.client.post("/v1/completions", json=stream, headers=bearing("b"))
        refused = await front.client.post("/v1/completions", json={"model": "x"}, headers=bearing("b"))
        assert refused.status_code == 404
        a, b, own = row("a", 2, 200, 120, 2), row("b", 2, 150, 60 + 48, 5), row("default", 1, 100, 60, 1)
        assert await usage(front, "a") == [a]
        assert await usage(front, "b") == [b]
        assert await usage(front, "admin") == [a, b, own]
        assert await usage(front, "own") == 401
        assert await usage(front, "nobody") == 401
        assert (await front.client.post("/usage", headers=bearing("admin"))).status_code == 405
        page = (await front.client.get("/metrics", headers=bearing("admin"))).text
        assert 'kvist_router_tenant_cached_tokens_total{model="m",tenant="a"} 120.0' in page
        report = (await front.client.get("/regret", headers=bearing("admin"))).json()
        assert [(each["tenant"], each["requests"]) for each in report["by_tenant"]] == [
            ("a", 2),
            ("b", 2),
            ("default", 1),
        ]
        assert sum(each["requests"] for each in report["by_worker"]) == 5
    told = [line.tenant for _, line in read_lines(tmp_path / "recorded")]
    assert told.count("a") == 2


async def test_processes_add_up(worker, fronts_of, tenants, bearing) -> None:
    async with worker(cached_tokens=60) as one, httpx.AsyncClient(timeout=60, trust_env=False) as client:
        config = RouterConfig(worker_urls=(one.url,), port=0, tenants=tenants("a"), admin_key="admin")
        async with fronts_of(config, 2) as fronts:
            for front in fronts:
                body, url = {"model": "m", "prompt": [1] * 50}, f"{front.url}/v1/completions"
                assert (await client.post(url, json=body, headers=bearing("a"))).status_code == 200
            for key in ("a", "admin"):
                answer = await client.get(f"{fronts[0].url}/usage", headers=bearing(key))
                assert answer.json() == {"usage": [row("a", 2, 200, 120, 2)]}

"""The router's own endpoints: who may use them, and what they say."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvist.events.transports.received import BUDGET
from kvist.http import Request
from kvist.router.config import RouterConfig
from kvist.router.doors.keeper import question_of


@pytest.mark.parametrize(
    ("path", "passes"), [("/readiness", False), ("/metrics", False), ("/usage?x", False), ("/workers", True)]
)
def test_no_body_that_anybody_may_send_goes_to_the_process_that_follows_the_fleet(path: str, passes: bool) -> None:
    question = question_of(Request("POST", path, [(b"a", b"b")], b"body", None), RouterConfig(), is_draining=False)
    assert (question.target, question.headers) == (path, [(b"a", b"b")])
    assert question.body == (b"body" if passes else b"")


async def test_clients_need_their_key_and_it_stays_with_the_router(worker, router) -> None:
    async with worker() as one, router(one.url, api_key="client-key") as front:
        refused = await front.complete()
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await front.client.get("/v1/models")).status_code == 401
        front.client.headers["authorization"] = "Bearer client-key"
        assert (await front.complete()).status_code == 200
        assert "authorization" not in one.completions[0].headers


async def test_without_a_client_key_the_workers_key_passes_through(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        front.client.headers["authorization"] = "Bearer workers-own"
        await front.complete()
        assert one.completions[0].headers["authorization"] == "Bearer workers-own"


async def test_workers_are_sent_their_own_keys_by_whatever_goes_to_them(worker, router) -> None:
    async with worker() as one, worker() as other:
        keys = {"worker_api_key": "all", "worker_api_keys": {other.url: "its-own"}}
        async with router(one.url, other.url, policy="round-robin", **keys) as front:
            for _ in range(4):
                headers = {"authorization": "Bearer clients"}
                await front.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            for url in (one.url, other.url):
                await front.client.post("/flush_cache", headers={"x-kvist-worker": url})
        for each, key in ((one, "all"), (other, "its-own")):
            assert {"/health", "/server_info", "/v1/models", "/v1/completions", "/flush_cache"} <= {
                received.target for received in each.received
            }
            assert {received.headers["authorization"] for received in each.received} == {f"Bearer {key}"}


async def test_the_admin_key_stays_with_the_router(worker, router) -> None:
    async with worker() as one, router(one.url, admin_key="admin", ready=False) as front:
        front.client.headers["authorization"] = "Bearer admin"
        await front.complete()
        await front.client.post("/flush_cache", headers={"x-kvist-worker": one.url})
        assert len(one.completions) == 2
        assert all("authorization" not in received.headers for received in one.received)


@pytest.mark.parametrize(
    ("settings", "sent", "is_told"),
    [
        ({}, {}, True),
        ({}, {"x-forwarded-for": "203.0.113.9"}, False),
        ({}, {"host": "router.example"}, False),
        ({"debug_headers": True}, {"host": "router.example"}, True),
        ({"api_key": "client", "admin_key": "admin"}, {"authorization": "Bearer client"}, False),
        ({"api_key": "client", "admin_key": "admin"}, {"authorization": "Bearer admin"}, True),
    ],
)
async def test_only_administrators_hear_who_answered(worker, router, settings, sent, is_told: bool) -> None:
    async with worker() as one, router(one.url, ready=False, **settings) as front:
        answer = await front.client.post("/v1/completions", json={"prompt": "x"}, headers=sent)
        assert answer.status_code == 200
        assert [name for name in answer.headers if name.startswith("x-kvist-")] == [
            *(["x-kvist-worker", "x-kvist-overlap-tokens"] if is_told else [])
        ]
        assert "x-request-id" in answer.headers


@pytest.mark.parametrize(("method", "path"), [("GET", "/workers"), ("GET", "/get_loads"), ("POST", "/route")])
async def test_administration_needs_its_own_key(worker, router, method: str, path: str) -> None:
    async with worker() as one, router(one.url, api_key="client", admin_key="admin", ready=False) as front:

        async def ask(**headers: str) -> int:
            body = b'{"token_ids": [1]}' if method == "POST" else None
            return (await front.client.request(method, path, content=body, headers=headers)).status_code

        assert await ask() == 401
        assert await ask(authorization="Bearer client") == 401
        assert await ask(authorization="Bearer admin") in (200, 503)


async def test_without_an_admin_key_a_foreign_page_or_proxy_may_not_administer(router) -> None:
    async with router() as front:
        for headers in ({"host": "attacker.example"}, {"x-forwarded-for": "203.0.113.9"}):
            assert (await front.client.get("/workers", headers=headers)).status_code == 403
        form = await front.client.post(
            "/workers", content=b'{"url": "http://w:1"}', headers={"content-type": "text/plain"}
        )
        assert form.status_code == 415


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"{}", 400),
        (b'{"url": 3}', 400),
        (b'{"url": "w:1"}', 400),
        (b'{"url": "http://w:1", "weight": 2}', 400),
        (b'{"url": "http://w:1/?x=1"}', 400),
        (b'{"url": "http://w:1", "kv_event_sources": ["http://w:2"]}', 400),
        (b'{"url": "http://w:1", "kv_event_sources": ["tcp://[::1:2"]}', 400),
    ],
)
async def test_a_worker_that_makes_no_sense_is_refused(router, body: bytes, status: int) -> None:
    async with router() as front:
        answer = await front.client.post("/workers", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert await front.workers() == {}


async def test_removing_an_unknown_worker_is_a_404(router) -> None:
    async with router() as front:
        answer = await front.client.delete("/workers", params={"url": "http://nobody:1"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "url")


async def test_health_needs_no_worker_and_readiness_does(worker, router) -> None:
    async with router() as front:
        health = (await front.client.get("/health")).json()
        assert health["status"] == "ok"
        assert health["cold_start_s"] >= 0
        answer = await front.client.get("/readiness")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert answer.json()["reason"] == "there are no workers"
    async with worker() as one, router(one.url) as front:
        answer = await front.client.get("/readiness")
        counts = {"starting": 0, "healthy": 1, "unhealthy": 0, "draining": 0}
        page = answer.json()
        assert (page["ready"], page["reason"], page["workers"]) == (True, None, counts)


@pytest.mark.parametrize("keys", [{"api_key": "client"}, {"auth_url": "http://127.0.0.1:9"}])
async def test_where_clients_need_keys_only_administrators_learn_what_is_served(worker, router, keys) -> None:
    async with worker() as one, router(one.url, admin_key="admin", ready=False, **keys) as front:
        for headers in ({}, *({"authorization": f"Bearer {key}"} for key in ("client", "wrong"))):
            answer = await front.client.get("/readiness", headers=headers)
            assert (answer.status_code, answer.json()) == (200, {"ready": True})
        assert "m" in (await front.client.get("/readiness", headers={"authorization": "Bearer admin"})).json()["models"]


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("POST", "/health", 405, "GET"),
        ("POST", "/metrics", 405, "GET"),
        ("POST", "/ui", 405, "GET, HEAD"),
        ("GET", "/route", 405, "POST"),
        ("PUT", "/workers", 405, "GET, POST, DELETE"),
        ("GET", "/nope", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
    ],
)
async def test_wrong_methods_and_paths_are_refused_in_openais_shape(
    router, method: str, path: str, status: int, allowed: str | None
) -> None:
    async with router() as front:
        answer = await front.client.request(method, path)
        assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_explaining_a_wrong_body_or_model_is_an_error(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        assert (await front.client.post("/route", content=b"{")).status_code == 400
        assert (await front.client.post("/route", json={"prompt": "x", "model": "?"})).status_code == 404


async def test_workers_and_loads_show_what_is_known(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        explained = (await front.workers())[one.url]
        assert (explained["state"], explained["circuit"], explained["models"]) == ("healthy", "closed", ["m"])
        assert explained["kv_events"]["sources"] == []
        assert explained["kv_events"]["ranks"] == [{"rank": 0, "state": "approximate", "blocks": 0}]
        assert "announces no KV events" in explained["kv_events"]["error"]
        loads = (await front.client.get("/get_loads")).json()["loads"]
        assert [(load["rank"], load["running_requests"]) for load in loads] == [(0, 0)]


async def test_metrics_count_requests_tokens_and_the_error_of_the_prediction(worker, router) -> None:
    async with worker(cached_tokens=48) as one, router(one.url, block_size=16) as front:
        front.hold(one.url, list(range(32)))
        answer = await front.complete(list(range(64)))
        assert answer.status_code == 200
        samples = await front.metrics()

        def sample(name: str, **labels: Any) -> float:
            text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
            return samples[f"{name}{{{text}}}"]

        assert sample("kvist_router_requests_total", worker=one.url, status=200, policy="kv") == 1
        assert sample("kvist_router_prompt_tokens_total", worker=one.url, model="m") == 64
        assert sample("kvist_router_overlap_tokens_total", worker=one.url, model="m") == 32
        assert sample("kvist_router_output_tokens_total", worker=one.url, model="m") == 1
        assert sample("kvist_router_request_seconds_count", model="m") == 1
        assert 'kvist_router_inter_token_seconds_count{model="m"}' not in samples  # no stream has ended
        assert sample("kvist_router_overlap_error_tokens_sum", worker=one.url, sign="under") == 16
        assert sample("kvist_router_time_to_first_byte_seconds_count", worker=one.url, model="m") == 1
        assert sample("kvist_router_running_requests", worker=one.url) == 0
        assert sample("kvist_router_worker_state", worker=one.url, state="healthy") == 1
        assert sample("kvist_router_worker_state", worker=one.url, state="draining") == 0
        assert sample("kvist_router_circuit_state", worker=one.url, state="closed") == 1
        assert samples["kvist_router_event_answers_refused_total"] == BUDGET.num_refused  # counted for the process
        assert sample("kvist_router_ranks", worker=one.url, state="approximate") == 1
        assert sample("kvist_router_worker_blocks", worker=one.url) == 4
        assert samples["kvist_index_blocks"] == 4
        assert samples["kvist_router_connections"] == 1
        assert samples["kvist_router_loop_late_seconds_total"] >= 0
        assert samples["process_cpu_seconds_total"] > 0
        assert samples["process_resident_memory_bytes"] > 2**20
        refused = await front.complete(model="?")
        assert refused.status_code == 404
        assert (await front.metrics())['kvist_router_refusals_total{status="404"}'] == 1


async def test_a_stream_that_reports_its_usage_is_compared_too(worker, router, http_bytes) -> None:
    async def stream(_: Any, writer: Any) -> None:
        last = b"data: " + http_bytes.completion(cached_tokens=0) + b"\n\n"
        pieces = [b'data: {"choices": []}\n\n', last[:20], last[20:], b"data: [DONE]\n\n", b""]
        writer.write(http_bytes.event_stream_head + b"".join(map(http_bytes.chunk, pieces)))

    async with worker(answer=stream) as one, router(one.url, block_size=16) as front:
        front.hold(one.url, list(range(16)))
        await front.complete(list(range(64)), stream=True)
        samples = await front.metrics()
        assert samples[f'kvist_router_overlap_error_tokens_sum{{sign="over",worker="{one.url}"}}'] == 16


async def test_tokens_and_the_times_between_them_are_measured_by_model(worker, router, http_bytes) -> None:
    async def stream(received: Any, writer: Any) -> None:
        last = b"data: " + http_bytes.completion(cached_tokens=0).replace(
            b'"completion_tokens": 1', b'"completion_tokens": 9'
        )
        pieces = [b'data: {"choices": []}\n\n'] * 3 + ([last + b"\n\n"] if b"usage" in received.body else []) + [b""]
        writer.write(http_bytes.event_stream_head + b"".join(map(http_bytes.chunk, pieces)))

    models = [{"id": "m", "object": "model"}, {"id": "n", "object": "model"}]
    async with (
        worker(answer=stream, models=models) as one,
        worker(answer=stream, models=None) as untold,
        router(one.url, untold.url, policy="round-robin") as front,
    ):
        for model, options in (("m", {"include_usage": True}), ("n", None), ("x", None), ("y", None)):
            for _ in range(2):
                await front.complete("x", model=model, stream=True, stream_options=options)
        samples = await front.metrics()
        tokens = {name: value for name, value in samples.items() if name.startswith("kvist_router_output_tokens_total")}
        assert sum(value for name, value in tokens.items() if 'model="m"' in name) == 18
        assert sum(value for name, value in tokens.items() if 'model="n"' in name) == 6
        assert [value for name, value in tokens.items() if 'model="other"' in name] == [12]
        for model, number in (("m", 2), ("n", 2), ("other", 4)):
            for name in ("request", "inter_token"):
                assert samples[f'kvist_router_{name}_seconds_count{{model="{model}"}}'] == number
        total_s, between_s = [
            samples[f'kvist_router_{name}_seconds_sum{{model="m"}}'] for name in ("request", "inter_token")
        ]
        assert 0 <= between_s * 8 < total_s
        await front.client.delete("/workers", params={"url": untold.url})

        async def is_forgotten() -> bool:
            return not any(untold.url in name for name in await front.metrics())

        await front.until(is_forgotten)


async def test_the_openai_client_talks_to_the_router(worker, router) -> None:
    from openai import AsyncOpenAI, NotFoundError

    async with worker() as one, router(one.url) as front:
        http_client = httpx.AsyncClient(trust_env=False, timeout=60)
        async with AsyncOpenAI(base_url=front.service.url + "/v1", api_key="x", http_client=http_client) as client:
            answer = await client.completions.create(model="m", prompt="hello")
            assert answer.choices[0].text == "hi"
            assert [model.id async for model in client.models.list()] == ["m"]
            with pytest.raises(NotFoundError, match="expected one of the models served: m"):
                await client.completions.create(model="other", prompt="hello")

"""One request through the router: bytes unchanged, failures survived, load given back."""

from __future__ import annotations

import asyncio
import gc
import json
from random import Random
from typing import Any

import httpx
import pytest

from kvist.router.forward import Forwarding
from kvist.router.policy.work import CONTEXT, QUEUED, RECENT


def events(*texts: str) -> list[bytes]:
    return [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode() for text in texts]


def total_load(router: Any) -> int:
    load, fleet = router.service._forwarder.load, router.service.fleet
    return sum(load.running_requests(worker.url) for worker in fleet.workers)


async def test_an_answer_comes_back_unchanged_with_the_workers_name(worker, router, http_bytes) -> None:
    async with worker() as one, router(one.url) as front:
        answer = await front.complete("hello", temperature=0.5, unknown_field=[1, {"x": None}])
        assert answer.status_code == 200
        assert answer.content == http_bytes.completion()
        assert answer.headers["x-kvist-worker"] == one.url
        assert answer.headers["x-kvist-overlap-tokens"] == "0"
        assert total_load(front) == 0
        assert one.completions[0].body == answer.request.content


async def test_the_request_reaches_the_worker_byte_for_byte_with_its_query(worker, router) -> None:
    body = b'{"prompt" : "a\\u00e9",\n "model":"m" }'
    async with worker() as one, router(one.url) as front:
        await front.client.post("/v1/completions?trace=1", content=body, headers={"x-tenant": "blue"})
        seen = one.completions[0]
        assert (seen.target, seen.body, seen.headers["x-tenant"]) == ("/v1/completions?trace=1", body, "blue")
        assert seen.headers["x-forwarded-for"] == "127.0.0.1"


async def test_a_long_answer_keeps_no_copy_of_what_was_asked(worker, router, http_bytes, until) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(events("a")[0]))
        begun.set()
        await may_end.wait()
        writer.write(http_bytes.chunk(b""))

    async with worker() as one, router(one.url) as front:
        one.answer = answer
        asked = asyncio.create_task(front.complete("x" * 5000, stream=True))
        await begun.wait()
        ours = front.service._forwarder
        (forwarding,) = [each for each in gc.get_objects() if type(each) is Forwarding and each.router is ours]
        await until(lambda: forwarding.attempt is not None and forwarding.attempt.first_byte_s is not None)
        assert (forwarding.request.body, forwarding.body, forwarding.attempt.exchange.message) == (b"", b"", b"")
        may_end.set()
        assert (await asked).status_code == 200


async def test_request_ids_are_passed_on_or_made_and_returned(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        answer = await front.client.post(
            "/v1/completions", json={"prompt": "a", "model": "m"}, headers={"x-request-id": "abc"}
        )
        assert answer.headers["x-request-id"] == one.completions[0].headers["x-request-id"] == "abc"
        made = await front.complete()
        assert made.headers["x-request-id"] == one.completions[1].headers["x-request-id"]
        assert len(made.headers["x-request-id"]) == 32


async def test_a_worker_cannot_speak_in_the_routers_name(worker, router, http_bytes) -> None:
    async def boast(_: Any, writer: asyncio.StreamWriter) -> None:
        extra = "x-kvist-worker: http://a\r\nX-Kvist-Prefill-Worker: b\r\nx-request-id: c\r\nx-engine: kept\r\n"
        writer.write(http_bytes.response(b"{}", extra=extra))

    async with worker(answer=boast) as one, router(one.url) as front:
        headers = (await front.complete()).headers
        assert headers.get_list("x-kvist-worker") == [one.url]
        assert "x-kvist-prefill-worker" not in headers
        assert len(headers.get_list("x-request-id")) == 1
        assert headers["x-engine"] == "kept"


async def test_a_stream_starts_with_the_workers_first_byte_and_is_not_altered(worker, router, http_bytes) -> None:
    go_on = asyncio.Event()
    first, *rest = events("a", "b", "c")

    async def stream(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(first))
        await go_on.wait()
        writer.write(b"".join(map(http_bytes.chunk, [*rest, b"data: [DONE]\n\n", b""])))

    async with worker(answer=stream) as one, router(one.url) as front:
        request = {"model": "m", "prompt": "hello", "stream": True}
        async with front.client.stream("POST", "/v1/completions", json=request) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == first
            assert total_load(front) == 1
            go_on.set()
            assert b"".join([piece async for piece in pieces]) == b"".join(rest) + b"data: [DONE]\n\n"
        assert total_load(front) == 0


async def test_a_worker_that_is_removed_takes_its_series_along_also_where_it_answers_yet(
    worker, router, http_bytes
) -> None:
    go_on = asyncio.Event()

    async def stream(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(events("a")[0]))
        await go_on.wait()
        writer.write(b"".join(map(http_bytes.chunk, [*events("b"), b"data: [DONE]\n\n", b""])))

    async with worker(answer=stream) as one, worker() as two, router(one.url, drain_timeout_s=0.01) as front:
        request = {"model": "m", "prompt": "hello", "stream": True}
        async with front.client.stream("POST", "/v1/completions", json=request) as answer:
            assert any(one.url in name for name in await front.metrics())
            await front.client.post("/workers", json={"url": two.url})
            await front.client.delete("/workers", params={"url": one.url})
            await front.until_state(one.url, "gone")
            go_on.set()
            assert b"[DONE]" in await answer.aread()
        metrics = await front.metrics()
        assert [name for name in metrics if one.url in name] == []
        assert metrics['kvist_router_request_seconds_count{model="m"}'] == 1
        await front.until_state(two.url, "healthy")
        assert (await front.complete()).status_code == 200
        assert (await front.metrics())[f'kvist_router_output_tokens_total{{model="m",worker="{two.url}"}}'] == 1


async def test_a_client_that_leaves_takes_the_workers_request_along(worker, router, http_bytes, until) -> None:
    async def stream_forever(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(events("a")[0]))
        while True:
            writer.write(http_bytes.chunk(events("b")[0]))
            await writer.drain()
            await asyncio.sleep(0.005)

    async with worker(answer=stream_forever) as one, router(one.url) as front:
        async with front.client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "x"}) as answer:
            await anext(answer.aiter_raw())
        await until(lambda: one.num_disconnects == 1 and total_load(front) == 0)
        sample = f'kvist_router_requests_total{{policy="kv",status="499",worker="{one.url}"}}'
        assert (await front.metrics())[sample] == 1
        assert (await front.workers())[one.url]["circuit"] == "closed"


async def test_a_client_that_leaves_before_the_first_byte_gives_its_load_back(worker, router, until) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker(answer=never) as one, router(one.url) as front:
        with pytest.raises(httpx.ReadTimeout):
            await front.client.post(
                "/v1/completions", json={"model": "m", "prompt": "x"}, timeout=httpx.Timeout(60, read=0.2)
            )
        await until(lambda: total_load(front) == 0)


@pytest.mark.parametrize("status", [502, 503])
async def test_a_worker_that_cannot_take_it_now_is_passed_over(worker, router, http_bytes, status: int) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"busy", status=status))

    async with (
        worker(answer=refuse) as busy,
        worker() as idle,
        router(busy.url, idle.url, policy="round-robin") as front,
    ):
        answers = [await front.complete() for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-kvist-worker"] for answer in answers} == {idle.url}
        assert (await front.metrics())[f'kvist_router_retries_total{{worker="{busy.url}"}}'] == len(busy.completions)
        assert busy.completions


async def test_the_last_workers_refusal_is_passed_on(worker, router, http_bytes) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b'{"error": "full"}', status=503))

    async with worker(answer=refuse) as one, worker(answer=refuse) as two, router(one.url, two.url) as front:
        answer = await front.complete()
        assert (answer.status_code, answer.content) == (503, b'{"error": "full"}')
        assert len(one.completions) == len(two.completions) == 1


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_other_answers_are_the_requests_own_and_passed_on(worker, router, http_bytes, status: int) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"no", status=status))

    async with worker(answer=refuse) as one, worker(answer=refuse) as two, router(one.url, two.url) as front:
        answer = await front.complete()
        assert (answer.status_code, answer.content) == (status, b"no")
        assert len(one.completions) + len(two.completions) == 1


async def test_a_worker_that_is_gone_is_replaced_by_another(worker, router) -> None:
    async with (
        worker() as gone,
        worker() as other,
        router(gone.url, other.url, policy="round-robin", health_interval_s=60.0) as front,
    ):
        gone.kill()
        answers = [await front.complete() for _ in range(4)]
        assert {answer.headers["x-kvist-worker"] for answer in answers} == {other.url}
        assert total_load(front) == 0


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"])
async def test_a_worker_that_dies_before_its_first_byte_is_replaced(worker, router, head: bytes) -> None:
    async def die(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await writer.drain()
        writer.close()
        raise ConnectionResetError

    async with (
        worker(answer=die) as dying,
        worker() as other,
        router(dying.url, other.url, policy="round-robin") as front,
    ):
        answers = [await front.complete() for _ in range(3)]
        assert {answer.headers["x-kvist-worker"] for answer in answers} == {other.url}
        assert dying.completions


async def test_attempts_are_bounded(worker, router) -> None:
    async def die(*_: Any) -> None:
        raise ConnectionResetError

    async with (
        worker(answer=die) as a,
        worker(answer=die) as b,
        worker(answer=die) as c,
        router(a.url, b.url, c.url, max_attempts=2) as front,
    ):
        answer = await front.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_failed")
        assert sum(len(each.completions) for each in (a, b, c)) == 2


async def test_a_worker_killed_between_events_ends_the_stream_with_an_error_event(worker, router, http_bytes) -> None:
    async with worker() as dying, worker() as other:

        async def stream_and_die(_: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(http_bytes.event_stream_head + http_bytes.chunk(events("a")[0]))
            await writer.drain()
            await asyncio.sleep(0.02)
            dying.kill()
            raise ConnectionResetError

        dying.answer = stream_and_die
        async with router(dying.url, other.url, policy="round-robin", health_interval_s=60.0) as front:
            answers = [await front.complete(stream=True) for _ in range(3)]
            by_worker = {answer.headers["x-kvist-worker"]: answer for answer in answers}
            first, error, end = by_worker[dying.url].content.split(b"\n\n")
            assert first + b"\n\n" == events("a")[0]
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "worker_failed"
            assert end == b""
            assert [
                bool(each.extensions.get("broken_off")) for each in (by_worker[dying.url], by_worker[other.url])
            ] == [
                True,
                False,
            ]
            assert by_worker[other.url].status_code == 200
            assert total_load(front) == 0


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n", b"data: {"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n", b'{"choices'),
    ],
)
async def test_an_answer_cut_in_the_middle_is_seen_as_cut(worker, router, http_bytes, head: bytes, part: bytes) -> None:
    async def cut(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(head + (http_bytes.chunk(part) if b"chunked" in head else part))
        await writer.drain()
        raise ConnectionResetError

    async with worker(answer=cut) as one, router(one.url) as front:
        with pytest.raises(httpx.RemoteProtocolError):
            await front.complete()
        assert total_load(front) == 0


async def test_whatever_happens_to_workers_and_clients_nothing_stays_counted(worker, router, http_bytes, until) -> None:
    chance = Random(5)

    async def unreliable(_: Any, writer: asyncio.StreamWriter) -> None:
        luck = chance.random()
        if luck < 0.2:
            writer.write(http_bytes.response(b"busy", status=503))
        elif luck < 0.3:
            raise ConnectionResetError
        elif luck < 0.6:
            writer.write(http_bytes.event_stream_head)
            for text in "abcd":
                writer.write(http_bytes.chunk(events(text)[0]))
                await writer.drain()
                await asyncio.sleep(0.002)
            if luck < 0.4:
                raise ConnectionResetError
            writer.write(http_bytes.chunk(b""))
        else:
            await asyncio.sleep(luck / 50)
            writer.write(http_bytes.response(http_bytes.completion()))

    async def ask(front: Any) -> int | None:
        try:
            async with asyncio.timeout(chance.choice([0.005, 0.02, 5])):
                return (await front.complete(list(range(100)), stream=chance.random() < 0.5)).status_code
        except (TimeoutError, httpx.RemoteProtocolError):
            return None

    a, b, c = (worker(answer=unreliable) for _ in range(3))
    async with a, b, c, router(a.url, b.url, c.url, breaker_failures=1000) as front:
        statuses = await asyncio.gather(*(ask(front) for _ in range(120)))
        assert 200 in statuses
        assert set(statuses) <= {200, 502, 503, None}
        await until(lambda: total_load(front) == 0)
        loads = (await front.client.get("/get_loads")).json()["loads"]
        assert all(load["prefill_tokens"] == 0 for load in loads)
        work = front.service.keeper.load.board.work
        assert work[:, RECENT].any()
        assert not work[:, [QUEUED, CONTEXT]].any()
        assert {each["circuit"] for each in (await front.workers()).values()} == {"closed"}


async def test_an_open_circuit_takes_no_requests_and_one_trial_closes_it(worker, router, http_bytes) -> None:
    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"", status=500))

    settings = {"breaker_failures": 2, "breaker_cooldown_s": 3600.0}
    async with worker(answer=refuse) as one, router(one.url, **settings) as front:
        assert [(await front.complete()).status_code for _ in range(2)] == [500, 500]
        assert (await front.workers())[one.url]["circuit"] == "open"
        refused = await front.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_worker")
        one.answer, front.service.fleet.get(one.url).breaker.retry_at_s = None, 0.0  # as if that had passed
        assert (await front.complete()).status_code == 200
        assert (await front.workers())[one.url]["circuit"] == "closed"


async def test_a_trial_that_was_judged_gives_no_later_one_up(worker, router, http_bytes, until) -> None:
    gate, settings = asyncio.Event(), {"breaker_failures": 1, "breaker_cooldown_s": 0.001}

    async def refuse(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"no", status=500))

    async def linger(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.response(b"no", status=500)[:-1])
        await gate.wait()
        writer.write(b"o")

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with worker(answer=refuse) as one, router(one.url, **settings) as front:
        fleet, circuit = front.service.fleet, front.service.fleet.get(one.url).breaker
        assert (await front.complete()).status_code == 500
        one.answer = linger
        await until(lambda: fleet.routable("m"))
        asked = [asyncio.create_task(front.complete())]
        await until(lambda: circuit.failures_in_a_row == 2 and fleet.routable("m"))
        one.answer = never
        asked.append(asyncio.create_task(front.complete()))
        await until(lambda: len(one.completions) == 3)
        gate.set()
        assert (await asked[0]).status_code == 500
        assert circuit.state == "half-open"
        asked[1].cancel()
        await until(lambda: circuit.state == "open")


async def test_no_worker_at_all_is_a_503_in_openais_shape(router) -> None:
    async with router() as front:
        answer = await front.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert "x-request-id" in answer.headers


async def test_an_unknown_model_is_a_404_that_names_those_served(worker, router) -> None:
    async with worker() as one, router(one.url) as front:
        answer = await front.complete(model="gpt-9")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "'gpt-9'" in answer.json()["error"]["message"]
        assert not one.completions


async def test_a_known_model_without_a_healthy_worker_is_a_503(worker, router) -> None:
    async with worker() as one, router(one.url, health_failures=1) as front:
        one.health_status = 500
        await front.until_state(one.url, "unhealthy")
        assert (await front.complete()).status_code == 503


async def test_models_are_routed_to_the_workers_that_have_them(worker, router) -> None:
    async with worker(models=[{"id": "a"}]) as a, worker(models=[{"id": "b"}]) as b, router(a.url, b.url) as front:
        for model, url in [("a", a.url), ("b", b.url)] * 2:
            assert (await front.complete(model=model)).headers["x-kvist-worker"] == url
        assert [model["id"] for model in (await front.client.get("/v1/models")).json()["data"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b"{", None),
        ("/v1/chat/completions", b'{"model": 7, "messages": [{"role": "user"}]}', "model"),
        ("/v1/chat/completions", b"\xff\xfe", None),
    ],
)
async def test_a_body_no_worker_would_take_is_a_400_that_names_the_field(worker, router, path, body, param) -> None:
    async with worker() as one, router(one.url) as front:
        answer = await front.client.post(path, content=body)
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"] or "").startswith(param or "")
        assert not one.completions


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b""),
        ("/v1/completions", b'{"model": "m"}'),
        ("/v1/completions", b'{"model": "m", "prompt": [1, "a"]}'),
        ("/v1/completions", b'{"model": "m", "prompt": [-1]}'),
        ("/v1/chat/completions", b'{"model": "m", "messages": []}'),
        ("/v1/chat/completions", b'{"model": "m", "messages": "hi", "stream": 1}'),
    ],
)
async def test_fields_of_another_form_are_left_to_the_worker(worker, router, path, body) -> None:
    async with worker() as one, router(one.url) as front:
        assert (await front.client.post(path, content=body)).status_code == 200
        assert [received.body for received in one.completions] == [body]


async def test_an_anthropic_client_is_told_by_a_named_event_that_its_stream_broke_off(
    worker, router, http_bytes
) -> None:
    begun = b'event: ping\ndata: {"type": "ping"}\n\n'

    async def hang(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(begun))
        await asyncio.Event().wait()

    async with worker(answer=hang) as one, router(one.url, idle_timeout_s=0.05) as front:
        answer = await front.client.post("/v1/messages", json={"model": "m", "messages": [], "stream": True})
        name, data = answer.content.removeprefix(begun).split(b"\n", 1)
        assert (name, json.loads(data.removeprefix(b"data: "))["type"]) == (b"event: error", "error")


async def test_a_body_over_the_limit_is_a_413(worker, router) -> None:
    async with worker() as one, router(one.url, max_body_bytes=1000) as front:
        assert (await front.complete("x" * 2000)).status_code == 413


async def test_other_endpoints_are_passed_through_by_load(worker, router) -> None:
    paths = ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/audio/speech", "/v1/images/generations", "/tokenize"]
    async with worker() as one, router(one.url) as front:
        for path in paths:
            answer = await front.client.post(path, json={"model": "m", "input": "x"})
            assert answer.status_code == 200
            assert one.completions[-1].target == path
            assert (await front.client.post(path, json={"model": "?", "input": "x"})).status_code == 404
        assert len(one.completions) == len(paths)


async def test_sglangs_own_endpoint_is_routed_by_prefix(worker, router, http_bytes) -> None:
    tokens = list(range(64))
    meta = {"prompt_tokens": 64, "completion_tokens": 1, "cached_tokens": 48}
    event = b"data: " + json.dumps({"text": "x" * 5000, "meta_info": meta}).encode() + b"\n\n"

    async def answer(_: Any, writer: Any) -> None:
        writer.write(http_bytes.event_stream_head + http_bytes.chunk(event + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with worker(answer=answer) as a, worker(answer=answer) as b, router(a.url, b.url, block_size=16) as front:
        front.hold(b.url, tokens)
        for _ in range(3):
            answered = await front.client.post("/generate", json={"input_ids": tokens, "stream": True})
            assert (answered.headers["x-kvist-worker"], answered.content[:6]) == (b.url, b"data: ")
        exact = f'kvist_router_overlap_error_tokens_count{{sign="exact",worker="{b.url}"}}'
        assert (await front.metrics())[exact] == 3


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits"])
async def test_a_form_goes_to_a_worker_that_has_its_model(worker, router, path: str) -> None:
    models = [[{"id": "speech", "object": "model"}], [{"id": "chat", "object": "model"}]]
    async with worker(models=models[0]) as a, worker(models=models[1]) as b, router(a.url, b.url) as front:
        for _ in range(3):
            answer = await front.client.post(path, data={"model": "speech"}, files={"file": b"RIFF"})
            assert (answer.status_code, answer.headers["x-kvist-worker"]) == (200, a.url)
        answer = await front.client.post(path, data={"model": "x"}, files={"file": b"RIFF"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    "unknown",
    [
        b'{"detail":"Not Found"}',
        b'{"error": {"message": "Not Found", "type": "NotFoundError", "param": null, "code": 404}}',
        b'{"object":"error","message":"Not Found","type":"404","param":null,"code":404}',
    ],
)
async def test_an_endpoint_is_asked_of_a_worker_that_has_it(worker, router, http_bytes, unknown: bytes) -> None:
    async def lack(_: Any, writer: Any) -> None:
        writer.write(http_bytes.response(unknown, status=404))

    asked = {"model": "m", "query": "x", "documents": ["y"]}
    async with worker(answer=lack) as a, worker() as b, router(a.url, b.url) as front:
        for _ in range(4):
            answer = await front.client.post("/v1/rerank", json=asked)
            assert (answer.status_code, answer.headers["x-kvist-worker"]) == (200, b.url)
        b.answer = lack
        answer = await front.client.post("/v1/rerank", json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"][:12]) == (404, "endpoint_not_found", "/v1/rerank: ")
        assert total_load(front) == 0


async def test_an_adapter_is_asked_of_a_worker_that_still_has_it(worker, router, http_bytes) -> None:
    said = b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model","code":404}}'

    async def unloaded(_: Any, writer: Any) -> None:
        writer.write(http_bytes.response(said, status=404))

    async with worker(answer=unloaded) as a, worker() as b, router(a.url, b.url) as front:
        for _ in range(4):
            answer = await front.complete()
            assert (answer.status_code, answer.headers["x-kvist-worker"]) == (200, b.url)
        assert len(a.completions) > 0
        b.answer = unloaded
        answer = await front.complete()
        assert (answer.status_code, answer.content, total_load(front)) == (404, said, 0)


async def test_a_worker_that_knows_no_such_thing_is_believed(worker, router, http_bytes) -> None:
    said = b'{"error": {"message": "Response with id r_1 not found", "type": "invalid_request_error"}}'

    async def lack(_: Any, writer: Any) -> None:
        writer.write(http_bytes.response(said, status=404))

    async with worker(answer=lack) as a, worker(answer=lack) as b, router(a.url, b.url) as front:
        answer = await front.client.get("/v1/responses/r_1")
        assert (answer.status_code, answer.content, len(a.received + b.received) > 1) == (404, said, True)
        assert len([each for each in a.received + b.received if each.target == "/v1/responses/r_1"]) == 1


async def test_round_robin_takes_turns(worker, router) -> None:
    async with worker() as a, worker() as b, router(a.url, b.url, policy="round-robin") as front:
        taken = [(await front.complete()).headers["x-kvist-worker"] for _ in range(4)]
        assert taken in ([a.url, b.url] * 2, [b.url, a.url] * 2)


async def test_paced_clients_spread_over_the_fleet(worker, router) -> None:
    """Nothing is ever in flight when a request comes, and still no worker gets everything."""
    async with worker() as a, worker() as b, worker() as c, router(a.url, b.url, c.url) as front:
        for number in range(12):
            await front.complete([number] * 64)
        assert [len(each.completions) for each in (a, b, c)] == [4, 4, 4]


async def test_readings_are_counted_by_api_and_outcome(worker, router) -> None:
    async with worker() as one, router(one.url, policy="round-robin") as front:
        await front.complete([1, 2, 3])
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
            await front.client.post(path, json={"model": "m", "messages": [{"role": "user", "content": "x"}]})
        counted = {name: value for name, value in (await front.metrics()).items() if "readings_total" in name}
        series = 'kvist_router_readings_total{{api="{}",obstacle="{}",outcome="{}"}}'
        obstacles = dict.fromkeys(("chat", "messages", "responses"), "no_tokenizer") | {"other": "other_endpoint"}
        expected = {series.format(api, obstacle, "load only"): 1 for api, obstacle in obstacles.items()}
        assert counted == expected | {series.format("completions", "", "tokens"): 1}

"""The endpoint picker: asked by a client that is strict about the protocol, and by a real Envoy."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import envoy
import grpc
import httpx
import pytest
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as services
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvist.router import RouterConfig
from kvist.router.doors.picker import DESTINATION, Picker, endpoint_of

TOKENS = list(range(100, 180))
BODY = json.dumps({"model": "m", "prompt": TOKENS}).encode()
STREAMED, BUFFERED = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED


def headers(*more: tuple[str, str], path: str = "/v1/completions", mode: Any = STREAMED, subset: Any = None) -> Any:
    told = [(":method", "POST"), (":path", path), ("content-type", "application/json"), *more]
    request = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(
            headers={"headers": [HeaderValue(key=name, raw_value=value.encode()) for name, value in told]}
        ),
        protocol_config=pb.ProtocolConfiguration(request_body_mode=mode),
    )
    if subset is not None:
        hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": subset})
    return request


def pieces(body: bytes, size: int = 20) -> list[Any]:
    starts = range(0, len(body), size)
    return [
        pb.ProcessingRequest(
            request_body=pb.HttpBody(body=body[start : start + size], end_of_stream=start + size >= len(body))
        )
        for start in starts
    ]


def answer_headers(status: int) -> Any:
    told = [HeaderValue(key=":status", raw_value=str(status).encode())]
    return pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers={"headers": told}))


@asynccontextmanager
async def picking(*urls: str, **values: Any) -> AsyncIterator[tuple[Picker, grpc.aio.Channel]]:
    config = RouterConfig(worker_urls=urls, port=0, health_interval_s=0.05, **values)
    async with Picker(config) as picker, grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
        yield picker, channel


async def ask(channel: grpc.aio.Channel, *requests: Any) -> list[Any]:
    """Send these requests of one stream, and return all that is answered."""
    async with asyncio.timeout(60):
        return [answer async for answer in services.ExternalProcessorStub(channel).Process(iter(requests))]


def set_by(response: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in response.header_mutation.set_headers}


async def test_a_streamed_request_is_sent_where_its_prefix_is_and_counts_there(worker, engine, until) -> None:
    async with worker() as one, worker() as other:
        with engine("one") as cache:
            one.server_info = cache.server_info
            async with picking(one.url, other.url) as (picker, channel):
                cache.store(TOKENS)
                known = picker._router.known
                await until(lambda: [rank.num_blocks for rank in known.index.ranks(one.url)] == [5])
                call = services.ExternalProcessorStub(channel).Process()
                for request in (headers(), *pieces(BODY)):
                    await call.write(request)
                first = await call.read()
                told = set_by(first.request_headers.response)
                endpoints = [endpoint_of(one.url), endpoint_of(other.url)]
                assert told == {DESTINATION: ",".join(endpoints), "content-length": str(len(BODY))}
                assert dict(first.dynamic_metadata["envoy.lb"]) == {DESTINATION: ",".join(endpoints)}
                assert first.request_headers.response.clear_route_cache
                body = (await call.read()).request_body.response.body_mutation.streamed_response
                assert (body.body, body.end_of_stream) == (BODY, True)
                assert known.load.running_requests(one.url) == 1
                assert known.load.prefill_tokens(one.url) == 16
                await call.write(answer_headers(200))
                assert (await call.read()).WhichOneof("response") == "response_headers"
                assert known.load.prefill_tokens(one.url) == 0
                await call.done_writing()
                assert await call.read() == grpc.aio.EOF
                await until(lambda: known.load.running_requests(one.url) == 0)


async def test_a_buffered_request_gets_its_answer_with_the_body_which_is_as_the_worker_gets_it(worker) -> None:
    async with worker() as one, picking(one.url, aliases={"gpt": {"m": 1}}, worker_api_key="k") as (_, channel):
        asked = json.dumps({"model": "gpt", "prompt": TOKENS}).encode()
        first, second = await ask(channel, headers(mode=BUFFERED), *pieces(asked, 10**6))
        assert first.WhichOneof("response") == "request_headers"
        assert set_by(first.request_headers.response) == {}
        told, changed = set_by(second.request_body.response), second.request_body.response.body_mutation.body
        length = {"content-length": str(len(changed))}
        assert told == {DESTINATION: endpoint_of(one.url), "authorization": "Bearer k"} | length
        assert json.loads(changed)["model"] == "m"


async def test_a_gateway_says_among_whom_and_what_cannot_be_is_answered_at_once(worker) -> None:
    async with worker() as one, worker() as other, picking(one.url, other.url) as (_, channel):
        for subset in (endpoint_of(other.url), [endpoint_of(other.url)], f" {endpoint_of(other.url)} , 10.0.0.1:80"):
            answers = await ask(channel, headers(subset=subset), *pieces(BODY))
            assert set_by(answers[0].request_headers.response)[DESTINATION] == endpoint_of(other.url)
        for requests, status, code in (
            ([headers(subset="10.0.0.1:80"), *pieces(BODY)], 503, "no_healthy_worker"),
            ([headers(), *pieces(BODY.replace(b'"m"', b'"n"'))], 404, "model_not_found"),
            ([headers(), *pieces(b"{")], 400, None),
        ):
            (refusal,) = await ask(channel, *requests)
            assert refusal.immediate_response.status.code == status
            assert json.loads(refusal.immediate_response.body)["error"]["code"] == code


async def test_a_request_that_is_given_up_counts_no_more(worker, until) -> None:
    async with worker() as one, picking(one.url) as (picker, channel):
        call = services.ExternalProcessorStub(channel).Process()
        for request in (headers(), *pieces(BODY)):
            await call.write(request)
        await call.read()
        assert picker._router.known.load.running_requests(one.url) == 1
        call.cancel()
        await until(lambda: picker._router.known.load.running_requests(one.url) == 0)


async def test_health_follows_the_workers(worker) -> None:
    statuses = health_pb2.HealthCheckResponse
    async with worker() as one, picking(one.url) as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)

        async def until_status(wanted: int) -> None:
            async with asyncio.timeout(60):
                while (await stub.Check(health_pb2.HealthCheckRequest())).status != wanted:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        await until_status(statuses.SERVING)
        one.health_status = 500
        await until_status(statuses.NOT_SERVING)


def envoy_config(port: int, picker: int, workers: list[str], mode: str, trailers: str) -> dict[str, Any]:
    """Return a gateway that has these workers and asks the picker, as gateways of the Gateway API set Envoy up."""
    types, filters = "type.googleapis.com/envoy.", "extensions.filters."
    mode_of = {"request_header_mode": "SEND", "request_body_mode": mode, "request_trailer_mode": trailers}

    def cluster(name: str, ports: list[int], **more: Any) -> dict[str, Any]:
        at = [{"socket_address": {"address": "127.0.0.1", "port_value": each}} for each in ports]
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": each}} for each in at]}]
        assignment = {"cluster_name": name, "endpoints": endpoints}
        return {"name": name, "type": "STATIC", "load_assignment": assignment, **more}

    http2 = {
        "@type": f"{types}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    override = {
        "name": "override",
        "typed_config": {
            "@type": f"{types}extensions.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [{"header": DESTINATION}],
            "fallback_policy": {
                "policies": [
                    {
                        "typed_extension_config": {
                            "name": "random",
                            "typed_config": {"@type": f"{types}extensions.load_balancing_policies.random.v3.Random"},
                        }
                    }
                ]
            },
        },
    }
    manager = {
        "@type": f"{types}{filters}network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "picker",
                "typed_config": {
                    "@type": f"{types}{filters}http.ext_proc.v3.ExternalProcessor",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
                    "processing_mode": {**mode_of, "response_header_mode": "SEND", "response_body_mode": "NONE"},
                    "message_timeout": "60s",
                },
            },
            {"name": "router", "typed_config": {"@type": f"{types}{filters}http.router.v3.Router"}},
        ],
    }
    listener = {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    pool = cluster(
        "pool",
        [int(url.rpartition(":")[2]) for url in workers],
        load_balancing_policy={"policies": [{"typed_extension_config": override}]},
    )
    asked = cluster(
        "picker",
        [picker],
        typed_extension_protocol_options={"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
    )
    return {"static_resources": {"listeners": [listener], "clusters": [pool, asked]}}


@pytest.mark.parametrize(("mode", "trailers"), [("FULL_DUPLEX_STREAMED", "SEND"), ("BUFFERED", "SKIP")])
async def test_envoy_sends_requests_where_the_picker_says(
    worker, engine, until, free_port: Callable[[], int], tmp_path: Path, mode: str, trailers: str
) -> None:
    binary = Path(envoy.__path__[0]) / "_bin" / "envoy"
    async with worker() as one, worker() as other:
        with engine("one") as cache:
            one.server_info = cache.server_info
            async with picking(one.url, other.url, aliases={"gpt": {"m": 1}}) as (picker, _):
                cache.store(TOKENS)
                known, port = picker._router.known, free_port()
                await until(lambda: [rank.num_blocks for rank in known.index.ranks(one.url)] == [5])
                config = envoy_config(port, picker.port, [one.url, other.url], mode, trailers)
                (tmp_path / "envoy.json").write_text(json.dumps(config))
                command = [binary, "-c", tmp_path / "envoy.json", "--concurrency", "1", "-l", "warning"]
                log = (tmp_path / "log").open("wb")
                process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                    [*command, "--use-dynamic-base-id"], stdout=log, stderr=log
                )
                try:
                    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

                        async def is_up() -> bool:
                            try:
                                return (await client.post("/v1/completions", content=BODY)).status_code == 200
                            except httpx.TransportError:
                                return False

                        async with asyncio.timeout(60):
                            while not await is_up():
                                assert process.poll() is None, (tmp_path / "log").read_text()
                                await asyncio.sleep(0.1)
                        num_before = len(one.completions)
                        for _ in range(3):
                            answer = await client.post("/v1/completions", json={"model": "gpt", "prompt": TOKENS})
                            assert answer.json()["choices"][0]["text"] == "hi"
                        assert len(one.completions) == num_before + 3
                        assert json.loads(one.completions[-1].body) == {"model": "m", "prompt": TOKENS}
                        refused = await client.post("/v1/completions", json={"model": "no", "prompt": TOKENS})
                        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
                        await until(lambda: known.load.running_requests(one.url) == 0)
                finally:
                    process.kill()
                    process.wait()
                    log.close()

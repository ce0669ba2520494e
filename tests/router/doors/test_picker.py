"""The endpoint picker: asked by a client that is strict about the protocol, and by a real Envoy."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from cluster import Cluster, pod, serving, write_kubeconfig
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as services
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvist.cli.up import envoy_config, find_envoy
from kvist.errors import InvalidValueError
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


def answer_headers(status: int, *, served_by: str | None = None, **more: str) -> Any:
    told = [(":status", str(status)), *((name.replace("_", "-"), value) for name, value in more.items())]
    told = [HeaderValue(key=name, raw_value=value.encode()) for name, value in told]
    answer = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers={"headers": told}))
    if served_by is not None:
        answer.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": served_by})
    return answer


@asynccontextmanager
async def picking(
    *urls: str, credentials: grpc.ChannelCredentials | None = None, **values: Any
) -> AsyncIterator[tuple[Picker, grpc.aio.Channel]]:
    config = RouterConfig(worker_urls=urls, port=0, health_interval_s=0.05, **values)
    async with Picker(config) as picker, AsyncExitStack() as exits:
        address = f"127.0.0.1:{picker.port}"
        if credentials is None:
            yield picker, await exits.enter_async_context(grpc.aio.insecure_channel(address))
        else:
            yield picker, await exits.enter_async_context(grpc.aio.secure_channel(address, credentials))


async def test_operators_find_the_fleet_at_a_port_of_their_own(worker, until) -> None:
    async with worker() as one:
        config = RouterConfig(worker_urls=(one.url,), port=0, health_interval_s=0.05, admin_key="key")
        async with Picker(config, metrics_port=0) as picker, httpx.AsyncClient(timeout=60) as client:
            at, key = f"http://127.0.0.1:{picker.metrics_port}", {"authorization": "Bearer key"}
            await until(lambda: any(each.state == "healthy" for each in picker._router.view.fleet.workers))
            lines = (await client.get(f"{at}/metrics")).text.splitlines()
            assert f'kvist_router_worker_state{{state="healthy",worker="{one.url}"}} 1.0' in lines
            assert (await client.get(f"{at}/readiness")).status_code == 200
            assert (await client.get(f"{at}/workers")).status_code == 401
            assert one.url in (await client.get(f"{at}/workers", headers=key)).text
            assert (await client.get(f"{at}/nothing", headers=key)).status_code == 404
            assert (await client.post(f"{at}/metrics", headers=key)).status_code == 405


async def test_while_it_drains_it_is_not_ready_and_answers_gateways_that_have_not_noticed(worker, until) -> None:
    async with worker() as one, httpx.AsyncClient(timeout=60) as client:
        picker = Picker(RouterConfig(worker_urls=(one.url,), port=0, drain_delay_s=3600), metrics_port=0)
        await picker.__aenter__()
        readiness = f"http://127.0.0.1:{picker.metrics_port}/readiness"
        closing = asyncio.create_task(picker.__aexit__(None, None, None))
        await until(lambda: picker._is_draining)
        answer = await client.get(readiness)
        assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
            answers = await ask(channel, headers(), *pieces(BODY))
            assert set_by(answers[0].request_headers.response)[DESTINATION] == endpoint_of(one.url)
        closing.cancel()
        await asyncio.wait([closing])
        with pytest.raises(httpx.ConnectError):
            await client.get(readiness)


async def test_settings_are_read_again_at_sighup(worker, tmp_path: Path) -> None:
    async with worker() as one, worker() as other:
        settings = tmp_path / "router.toml"
        settings.write_text(f'worker_urls = ["{one.url}"]\nworker_api_key = "a"')
        command = [sys.executable, "-m", "kvist", "epp", "--port", "0", "--config", str(settings)]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            address = (await process.stdout.readline()).decode().split("//")[1].strip()
            settings.write_text(f'worker_urls = ["{other.url}"]\nworker_api_key = "b"')
            process.send_signal(signal.SIGHUP)
            while b"settings reloaded changed=worker_urls,worker_api_key" not in await process.stderr.readline():
                assert process.returncode is None
            async with grpc.aio.insecure_channel(address) as channel:
                refused = b""
                while not refused or b"no worker can take requests" in refused:  # its first health check is under way
                    (first, *_) = await ask(channel, headers(), *pieces(BODY))
                    refused = first.immediate_response.body or b"none"
                told = set_by(first.request_headers.response)
            assert (told[DESTINATION], told["authorization"]) == (endpoint_of(other.url), "Bearer b")
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == 0
        finally:
            if process.returncode is None:
                process.kill()


async def test_a_port_that_another_picker_has_is_refused_and_not_shared() -> None:
    async with picking() as (picker, _):
        config = RouterConfig(port=picker.port)
        with pytest.raises(InvalidValueError, match=f"^host and port: got '127.0.0.1:{picker.port}'"):
            async with Picker(config):
                pass
    for name, value in {"processes": 2, "access_log": "log"}.items():
        with pytest.raises(InvalidValueError, match=f"{name}: got {value!r}, expected .*: only kvist route has it"):
            Picker(RouterConfig(**{name: value}))


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
                known = picker._router.view
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
                regret = known._regret.report(time.monotonic(), 60.0)["total"]
                assert (regret["requests"], regret["held_tokens"], regret["routed_tokens"]) == (1, 64, 64)


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
            ([headers(subset=[]), *pieces(BODY)], 503, "no_healthy_worker"),
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
        assert picker._router.view.load.running_requests(one.url) == 1
        call.cancel()
        await until(lambda: picker._router.view.load.running_requests(one.url) == 0)


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
        for service, status in (
            ("liveness", statuses.SERVING),
            ("readiness", statuses.NOT_SERVING),
            ("envoy.service.ext_proc.v3.ExternalProcessor", statuses.NOT_SERVING),
        ):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == status
        asked = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await asked.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {each.name for each in (await asked.read()).list_services_response.service}
        assert listed > {service, "grpc.health.v1.Health"}


async def test_a_body_may_be_as_long_as_is_said_and_no_longer(worker) -> None:
    longest = json.dumps({"model": "m", "prompt": "x" * 10**6}).encode()
    async with worker() as one, picking(one.url, max_body_bytes=len(longest)) as (picker, channel):
        for mode, size in ((STREAMED, 10**5), (BUFFERED, len(longest) + 1)):
            answers = await ask(channel, headers(mode=mode), *pieces(longest, size))
            assert [answer.WhichOneof("response") for answer in answers[-1:]] == ["request_body"]
            (*_, refusal) = await ask(channel, headers(mode=mode), *pieces(longest + b" ", size))
            assert refusal.immediate_response.status.code == 413
            assert b"at most %d bytes" % len(longest) in refusal.immediate_response.body
        assert picker._router.view.load.running_requests(one.url) == 0
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):  # one message that nobody would hold
            await ask(channel, headers(mode=BUFFERED), *pieces(longest * 3, 10**8))


async def test_a_gateway_may_have_to_show_a_certificate(worker, tmp_path: Path) -> None:
    authority = trustme.CA()
    root, ours, gateways = authority.cert_pem.bytes(), authority.issue_cert("127.0.0.1"), authority.issue_cert("envoy")
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    ours.cert_chain_pems[0].write_to_path(str(tmp_path / "chain.pem"))
    ours.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    files = {"tls_certificate": "chain.pem", "tls_key": "key.pem", "client_ca": "authority.pem"}
    files = {name: str(tmp_path / file) for name, file in files.items()}
    pair = gateways.private_key_pem.bytes(), gateways.cert_chain_pems[0].bytes()
    async with worker() as one:
        async with picking(one.url, credentials=grpc.ssl_channel_credentials(root, *pair), **files) as (
            _,
            channel,
        ):
            answers = await ask(channel, headers(), *pieces(BODY))
            assert set_by(answers[0].request_headers.response)[DESTINATION] == endpoint_of(one.url)
        for credentials in (grpc.ssl_channel_credentials(root), grpc.ssl_channel_credentials(None, *pair), None):
            async with picking(one.url, credentials=credentials, **files) as (_, channel):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await ask(channel, headers(), *pieces(BODY))
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("header", ["x-gateway-inference-objective", "x-llm-d-inference-objective"])
async def test_where_no_worker_has_room_what_may_be_dropped_is_and_all_else_goes_to_the_best(
    worker, until, monkeypatch, tmp_path: Path, header: str
) -> None:
    spaces = "namespaces/inference"
    pods = Cluster(f"/api/v1/{spaces}/pods", "Pod")
    pools = Cluster(f"/apis/inference.networking.k8s.io/v1/{spaces}/inferencepools", "InferencePool")
    objectives = Cluster(f"/apis/llm-d.ai/v1alpha2/{spaces}/inferenceobjectives", "InferenceObjective")
    objectives.put("batch", spec={"priority": -1, "poolRef": {"name": "vllm"}})
    objectives.put("chat", spec={"priority": 1, "poolRef": {"name": "vllm"}})
    pods.put("one", **pod("127.0.0.1", labels={"app": "vllm"}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("no_proxy", "*")

    async with worker() as one, worker() as other, serving(pods, pools, objectives):
        write_kubeconfig(tmp_path / "kubeconfig", pods)
        ports = [{"number": each.port} for each in (one, other)]
        pools.put("vllm", spec={"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": ports})
        source = "kubernetes://inference?pool=vllm"
        async with picking(discover=(source,), max_worker_requests=1) as (picker, channel):
            fleet = picker._router.view.fleet
            await until(lambda: len(fleet.routable("m")) == 2)
            await until(lambda: any("watch" in query for query in objectives.asked))
            batch, chat = (header, "batch"), (header, "chat")
            calls = []
            for _ in range(2):  # which fill both
                calls.append(services.ExternalProcessorStub(channel).Process())
                for request in (headers(batch), *pieces(BODY)):
                    await calls[-1].write(request)
                answer = await calls[-1].read()
                assert answer.WhichOneof("response") == "request_headers"
            chosen = {worker.url: picker._router.view.load.running_requests(worker.url) for worker in fleet.workers}
            assert chosen == {one.url: 1, other.url: 1}
            (refusal,) = await ask(channel, headers(batch), *pieces(BODY))
            assert refusal.immediate_response.status.code == 429
            assert json.loads(refusal.immediate_response.body)["error"]["code"] == "shed"
            told = {each.header.key for each in refusal.immediate_response.headers.set_headers}
            assert told == {"content-type", "retry-after"}
            for told in ((), (chat,), ((header, "nobody's"),)):
                answers = await ask(channel, headers(*told), *pieces(BODY))
                assert answers[0].WhichOneof("response") == "request_headers"
            calls[0].cancel()
            await until(lambda: sum(picker._router.view.load.running_requests(each.url) for each in fleet.workers) == 1)
            answers = await ask(channel, headers(batch), *pieces(BODY))
            assert answers[0].WhichOneof("response") == "request_headers"
            free = set_by(answers[0].request_headers.response)[DESTINATION].partition(",")[0]
            (refusal,) = await ask(channel, headers(batch, subset=[_other_of(free, one, other)]), *pieces(BODY))
            assert refusal.immediate_response.status.code == 429


def _other_of(endpoint: str, *workers: Any) -> str:
    return next(endpoint_of(each.url) for each in workers if endpoint_of(each.url) != endpoint)


async def test_a_worker_that_is_too_busy_or_does_not_answer_is_given_less(worker) -> None:
    async with worker() as one, worker() as other, picking(one.url, other.url, breaker_failures=1) as (picker, channel):
        fleet, both = picker._router.view.fleet, {endpoint_of(one.url), endpoint_of(other.url)}

        async def tell(**answer: str) -> str:
            """Send a request of which this comes, and return who should have taken it."""
            call = services.ExternalProcessorStub(channel).Process()
            for request in (headers(), *pieces(BODY)):
                await call.write(request)
            told = set_by((await call.read()).request_headers.response)[DESTINATION].split(",")
            await call.read()
            status = int(answer.pop("status"))
            if "served_by" in answer:
                answer["served_by"] = told[1]
            await call.write(answer_headers(status, **answer))
            await call.read()
            await call.done_writing()
            assert await call.read() == grpc.aio.EOF
            return told[0]

        busy = await tell(status="429", retry_after="30")
        assert {await tell(status="200") for _ in range(5)} == both - {busy}
        (slow,) = (each for each in fleet.workers if endpoint_of(each.url) == busy)
        slow.capacity.paused_until_s = 0.0
        unreachable = await tell(status="200", served_by="the next one")
        assert {await tell(status="200") for _ in range(5)} == both - {unreachable}


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_envoy_sends_requests_where_the_picker_says(
    worker, engine, until, free_port: Callable[[], int], tmp_path: Path, mode: Any
) -> None:
    async with worker() as one, worker() as other:
        with engine("one") as cache:
            one.server_info = cache.server_info
            async with picking(one.url, other.url, aliases={"gpt": {"m": 1}}) as (picker, _):
                cache.store(TOKENS)
                known, port = picker._router.view, free_port()
                await until(lambda: [rank.num_blocks for rank in known.index.ranks(one.url)] == [5])
                asked = f"http://127.0.0.1:{picker.port}"
                config = envoy_config("127.0.0.1", port, asked, [one.url, other.url])
                if mode == "BUFFERED":
                    config = config.replace("FULL_DUPLEX_STREAMED", mode)
                    config = config.replace("request_trailer_mode: SEND", "request_trailer_mode: SKIP")
                (tmp_path / "envoy.yaml").write_text(config)
                command = [find_envoy(), "-c", tmp_path / "envoy.yaml", "--concurrency", "1", "-l", "warning"]
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
                            assert answer.headers["x-kvist-worker"] == one.url
                        assert len(one.completions) == num_before + 3
                        assert json.loads(one.completions[-1].body) == {"model": "m", "prompt": TOKENS}
                        refused = await client.post("/v1/completions", json={"model": "no", "prompt": TOKENS})
                        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
                        await until(lambda: known.load.running_requests(one.url) == 0)
                finally:
                    process.kill()
                    process.wait()
                    log.close()

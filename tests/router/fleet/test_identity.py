"""What workers say of themselves, and how far they are believed."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.http import UpstreamError, UpstreamPool
from kvist.router.fleet.identity import MAX_ANSWER_BYTES, Identity, event_endpoint, probe

KVIST = {"engine": "kvist", "version": "0.1", "block_size": 16, "kv_events": {"endpoint": "tcp://127.0.0.1:5557"}}


async def identity(url: str) -> Identity:
    async with UpstreamPool() as pool:
        return await probe(pool, url, [])


async def test_a_bundled_engine_tells_its_block_size_and_events(worker) -> None:
    async with worker(server_info=KVIST) as one:
        found = await identity(one.url)
    assert (found.engine, found.version, found.block_size) == ("kvist", "0.1", 16)
    assert found.event_endpoints == ("tcp://127.0.0.1:5557",)
    assert [model.id for model in found.models or ()] == ["m"]


async def test_a_bundled_engine_tells_its_role_and_where_its_blocks_are_asked_for(worker) -> None:
    transfer = {"endpoints": ["tcp://a:1"], "tokens_per_s": 1234.5}
    told = KVIST | {"role": "prefill", "kv_transfer": transfer, "kv_cache_dtype": "fp8_e4m3"}
    async with worker(server_info=told) as one:
        found = await identity(one.url)
        transfer["tokens_per_s"] = 1231.25
        assert await identity(one.url) == found  # the least changes of a speed tell nothing
    assert (found.role, found.transfer_endpoints, found.tokens_per_s) == ("prefill", ("tcp://a:1",), 1200.0)
    assert found.cache_block == (16, "fp8_e4m3")
    async with worker(server_info=KVIST | {"kv_transfer": None}) as one:
        found = await identity(one.url)
    assert (found.role, found.transfer_endpoints) == ("both", ())


async def test_a_bundled_engine_without_events_announces_none(worker) -> None:
    async with worker(server_info=KVIST | {"kv_events": None}) as one:
        assert (await identity(one.url)).event_endpoints == ()


VLLM = [{"id": "m", "owned_by": "vllm"}]
EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5701",
    "replay_endpoint": "tcp://*:5801",
    "buffer_steps": 10000,
    "topic": "",
}
CACHE = 'vllm:cache_config_info{block_size="128",cache_dtype="auto",kv_cache_size_tokens="524288"} 1.0\n'


async def test_vllm_tells_its_version_its_cache_and_the_streams_of_its_ranks(worker) -> None:
    sources = {"1": EVENTS | {"endpoint": "tcp://*:5702", "replay_endpoint": None}, "0": EVENTS}
    async with worker(models=VLLM, version={"version": "0.32.0"}, event_sources=sources, metrics=CACHE) as one:
        found = await identity(one.url)
    assert (found.engine, found.version, found.cache_size_tokens) == ("vllm", "0.32.0", 524288)
    assert found.cache_block == (128, "auto")
    assert found.event_endpoints == ("tcp://*:5701?replay_port=5801", "tcp://*:5702?replay_port=none")


async def test_vllm_is_asked_what_no_process_changes_once_a_process(worker) -> None:
    started = "process_start_time_seconds {}\n"
    async with (
        worker(models=VLLM, version={"version": "0.32.0"}, metrics=started.format(1.5)) as one,
        UpstreamPool() as pool,
    ):
        first = await probe(pool, one.url, [])
        one.models, one.version, num_asked = (
            [*VLLM, {"id": "lora", "parent": "m"}],
            {"version": "0.33.0"},
            len(one.received),
        )
        second = await probe(pool, one.url, [], first)
        assert [each.target for each in one.received[num_asked:]] == ["/health", "/v1/models", "/metrics"]
        one.metrics = started.format(2.5)
        third = await probe(pool, one.url, [], second)
    assert [model.id for model in second.models or ()] == ["m", "lora"]
    assert [each.version for each in (first, second, third)] == ["0.32.0", "0.32.0", "0.33.0"]


@pytest.mark.parametrize(
    "sources", [None, {}, {"0": EVENTS | {"publisher": "null"}}, {"sources": [EVENTS]}, {"0": {"endpoint": 5557}}]
)
async def test_a_vllm_that_names_no_streams_announces_none(worker, sources: Any) -> None:
    async with worker(models=VLLM, event_sources=sources) as one:
        found = await identity(one.url)
    assert (found.engine, found.version, found.event_endpoints) == ("vllm", None, ())


SGLANG = {"disaggregation_mode": "null", "version": "0.5.23", "page_size": 32, "kv_cache_dtype": "auto"}
PUBLISHED = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "",
    "block_size": 32,
    "dp_size": 2,
    "replay_endpoint_port_base": 5657,
}


@pytest.mark.parametrize(
    ("published", "endpoints"),
    [
        ({}, ("tcp://*:5557?replay_port=5657&engine=sglang", "tcp://*:5558?replay_port=5658&engine=sglang")),
        ({"publisher": "kvist", "dp_size": 1}, ("tcp://*:5557?replay_port=5657",)),
        ({"replay_endpoint_port_base": None, "dp_size": 1}, ("tcp://*:5557?replay_port=none&engine=sglang",)),
        ({"publisher": "theirs"}, ()),
        ({"dp_size": 0}, ()),
        ({"endpoint_port_base": "5557"}, ()),
    ],
)
async def test_sglang_tells_the_streams_of_its_ranks(worker, published: dict[str, Any], endpoints) -> None:
    async with worker(server_info=SGLANG | {"kv_events": PUBLISHED | published}) as one:
        found = await identity(one.url)
    assert (found.engine, found.version, found.cache_block) == ("sglang", "0.5.23", (32, "auto"))
    assert found.event_endpoints == endpoints


@pytest.mark.parametrize("more", [{}, {"kv_events": None}])
async def test_an_sglang_without_a_publisher_announces_none(worker, more: dict[str, Any]) -> None:
    async with worker(server_info=SGLANG | more) as one:
        assert (await identity(one.url)).event_endpoints == ()


@pytest.mark.parametrize(
    ("more", "has_upper_bounds"),
    [
        ({"internal_states": [{"memory_usage": {"token_capacity": 8192, "token_capacity_swa": 4096}}]}, True),
        ({"internal_states": [{"memory_usage": {"token_capacity": 8192, "token_capacity_swa": None}}]}, False),
        ({"internal_states": [{"memory_usage": {"token_capacity": 8192}}]}, False),
        ({"internal_states": [{}], "uses_mamba_radix_cache": False}, False),
        ({"uses_mamba_radix_cache": True}, True),
    ],
)
async def test_an_sglang_with_windows_or_states_has_upper_bounds(
    worker, more: dict[str, Any], has_upper_bounds
) -> None:
    async with worker(server_info=SGLANG | more) as one:
        assert (await identity(one.url)).has_upper_bounds is has_upper_bounds


@pytest.mark.parametrize(
    ("server_info", "uses_priority"),
    [
        (SGLANG | {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, True),
        (SGLANG | {"enable_priority_scheduling": True, "schedule_low_priority_values_first": False}, False),
        (SGLANG | {"enable_priority_scheduling": False, "schedule_low_priority_values_first": True}, False),
        (SGLANG, False),
        (KVIST, False),
        (None, None),
    ],
)
async def test_a_worker_schedules_by_priority_as_it_says(worker, server_info: Any, uses_priority) -> None:
    async with worker(server_info=server_info) as one:
        assert (await identity(one.url)).uses_priority is uses_priority


@pytest.mark.parametrize("server_info", [None, {"model_path": "x", "block_size": "16", "version": 3}, [1, 2]])
async def test_of_other_engines_only_the_models_are_read(worker, server_info: Any) -> None:
    models = [{"id": "base", "max_model_len": 9}, {"id": "lora", "parent": "base"}]
    async with worker(server_info=server_info, models=models) as one:
        found = await identity(one.url)
    assert (found.engine, found.block_size) == (None, None)
    assert [(model.id, model.parent) for model in found.models or ()] == [("base", None), ("lora", "base")]
    assert [model.entry for model in found.models or ()] == models


async def test_a_worker_without_a_model_list_is_taken_to_serve_any(worker) -> None:
    async with worker(models=None) as one:
        assert (await identity(one.url)).models is None


async def test_a_worker_that_says_it_is_unhealthy_is(worker) -> None:
    async with worker(health_status=503) as one:
        with pytest.raises(UpstreamError, match="GET /health answered 503"):
            await identity(one.url)


@pytest.mark.parametrize(
    "broken",
    [
        {"server_info": KVIST | {"block_size": "sixteen"}},
        {"server_info": KVIST | {"kv_events": {}}},
        {"models": "none"},
        {"models": [{"name": "m"}]},
        {"models": [{"id": "m" * MAX_ANSWER_BYTES}]},
    ],
)
async def test_an_answer_that_is_not_what_it_should_be_is_refused(worker, broken: dict[str, Any]) -> None:
    async with worker(**broken) as one:
        with pytest.raises(MalformedMessageError, match=one.url):
            await identity(one.url)


@pytest.mark.parametrize(
    ("url", "announced", "dialled"),
    [
        ("http://127.0.0.1:8000", "tcp://127.0.0.1:5557?replay_port=5558", "tcp://127.0.0.1:5557?replay_port=5558"),
        ("http://localhost:8000", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("http://gpu7:8000", "tcp://GPU7:5557", "tcp://GPU7:5557"),
        ("http://gpu7:8000", "tcp://*:5557", "tcp://gpu7:5557"),
        ("http://10.0.0.7:8000", "tcp://0.0.0.0:5557?replay_port=1", "tcp://10.0.0.7:5557?replay_port=1"),
        ("http://[fd00::7]:8000", "tcp://[::]:5557", "tcp://[fd00::7]:5557"),
        ("http://10.0.0.7:8000", "tcp://10.1.2.3:5557", "tcp://10.1.2.3:5557"),
        ("http://10.0.0.7:8000", "nats://10.1.2.3,10.0.0.7/m/w", "nats://10.1.2.3,10.0.0.7/m/w"),
        ("http://localhost:8000", "mqtts://127.0.0.1/m/w", "mqtts://127.0.0.1/m/w"),
    ],
)
def test_an_endpoint_on_the_workers_host_or_an_allowed_network_is_dialled(url, announced, dialled) -> None:
    assert event_endpoint(url, announced, ["10.1.0.0/16"]) == dialled


@pytest.mark.parametrize(
    "announced",
    [
        "tcp://10.9.0.1:5557",
        "tcp://metadata.internal:80",
        "tcp://127.0.0.1:5557",
        "ipc:///tmp/socket",
        "tcp://10.0.0.7",
        "tcp://10.0.0.7:port",
        "tcp://[::1:5557",
        "nats://10.1.2.3,10.9.0.1/m/w",
        "nats://broker/m/w",
        "nats://user:password@10.1.2.3/m/w",
        "nats://10.1.2.3/m/w?creds=/etc/passwd",
        "nats://10.1.2.3/m/w?jetstream=S&deliver=all",
        "",
    ],
)
def test_any_other_endpoint_is_refused(announced: str) -> None:
    with pytest.raises(InvalidValueError, match=r"kv_events\.endpoint"):
        event_endpoint("http://10.0.0.7:8000", announced, ["10.1.0.0/16"])

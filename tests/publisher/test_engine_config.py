"""An engine's own configuration tells where each of its ranks is, or why nobody can follow it."""

from __future__ import annotations

import json

import pytest

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint
from kvist.publisher.engine_config import engine_endpoints


def vllm(**fields: object) -> str:
    return json.dumps({"enable_kv_cache_events": True, "publisher": "zmq"} | fields)


def sglang(**fields: object) -> str:
    return json.dumps({"publisher": "zmq"} | fields)


def test_the_defaults_are_the_engines() -> None:
    assert engine_endpoints('{"enable_kv_cache_events": true}') == [Endpoint("tcp://127.0.0.1:5557", None, "vllm")]
    assert engine_endpoints(sglang()) == [Endpoint("tcp://127.0.0.1:5557", None, "sglang")]


def test_each_rank_has_its_own_pair_of_ports() -> None:
    config = vllm(endpoint="tcp://*:6000", replay_endpoint="tcp://*:7000")
    assert engine_endpoints(config, num_ranks=2, first_rank=3) == [
        Endpoint("tcp://127.0.0.1:6003", "tcp://127.0.0.1:7003", "vllm"),
        Endpoint("tcp://127.0.0.1:6004", "tcp://127.0.0.1:7004", "vllm"),
    ]


@pytest.mark.parametrize(
    ("config", "address", "is_bound"),
    [
        (vllm(endpoint="tcp://*:1"), "tcp://127.0.0.1:1", False),
        (vllm(endpoint="tcp://[::]:1"), "tcp://[::1]:1", False),
        (vllm(endpoint="tcp://[fd00::7]:1"), "tcp://[fd00::7]:1", False),
        (vllm(endpoint="ipc:///run/kv"), "ipc:///run/kv", False),
        (vllm(endpoint="tcp://0.0.0.0:1"), "tcp://127.0.0.1:1", True),
        (vllm(endpoint="tcp://localhost:1"), "tcp://127.0.0.1:1", True),
        (vllm(endpoint="tcp://10.0.0.9:1"), "tcp://10.0.0.9:1", True),
        (sglang(endpoint="tcp://0.0.0.0:1"), "tcp://127.0.0.1:1", False),
        (sglang(endpoint="tcp://127.0.0.1:1", bind=True), "tcp://127.0.0.1:1", False),
        (sglang(endpoint="tcp://*:1", bind=False), "tcp://127.0.0.1:1", True),
    ],
)
def test_what_the_engine_binds_is_connected_to_and_what_it_connects_to_is_bound(config, address, is_bound) -> None:
    (endpoint,) = engine_endpoints(config)
    assert (endpoint.address, endpoint.is_bound) == (address, is_bound)


def test_an_ipc_stream_may_have_its_replay_anywhere() -> None:
    (endpoint,) = engine_endpoints(vllm(endpoint="ipc:///run/kv", replay_endpoint="ipc:///run/again"))
    assert endpoint.replay_address == "ipc:///run/again"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "the JSON object that the engine was given"),
        ("[1]", "the JSON object that the engine was given"),
        ('{"enable_kv_cache_events": "on"}', "enable_kv_cache_events"),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', "events to be on"),
        (vllm(publisher="null"), "not 'null', for vllm"),
        ("{}", "not 'null', for sglang"),
        (sglang(publisher="kvist"), "not 'kvist', for sglang"),
        (vllm(endpoint="inproc://cache"), "endpoint: got 'inproc://cache'"),
        (vllm(endpoint="tcp://*:0"), "a port that can be known"),
        (vllm(endpoint="tcp://*:many"), "tcp://host:port"),
        (vllm(replay_endpoint="tcp://*"), "replay_endpoint: got 'tcp://*'"),
    ],
)
def test_what_nobody_could_follow_is_refused_with_the_reason(config, message) -> None:
    with pytest.raises(InvalidValueError) as refused:
        engine_endpoints(config)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("config", "num_ranks", "message"),
    [
        (vllm(endpoint="tcp://*:65535"), 2, "rank 1's below 65536"),
        (vllm(endpoint="ipc:///run/kv"), 2, "tcp:// where there are several"),
        (vllm(), 0, "data-parallel ranks: got '0 from 0'"),
        (vllm(), 5000, "data-parallel ranks"),
    ],
)
def test_ranks_that_cannot_all_have_their_ports_are_refused(config, num_ranks, message) -> None:
    with pytest.raises(InvalidValueError, match=message):
        engine_endpoints(config, num_ranks=num_ranks)


def test_events_that_are_off_for_vllm_may_be_on_for_sglang() -> None:
    assert engine_endpoints(sglang(), engine="sglang")
    with pytest.raises(InvalidValueError, match="events to be on"):
        engine_endpoints(sglang(), engine="vllm")

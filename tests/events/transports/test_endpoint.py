from __future__ import annotations

import pytest

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("tcp://h:5557", Endpoint("tcp://h:5557", "tcp://h:5558")),
        ("tcp://h:5557?replay_port=6000", Endpoint("tcp://h:5557", "tcp://h:6000")),
        ("tcp://h:5557?replay_port=none", Endpoint("tcp://h:5557", None)),
        ("tcp://h:0", Endpoint("tcp://h:0", "tcp://h:0")),
        ("tcp://[::1]:5557", Endpoint("tcp://[::1]:5557", "tcp://[::1]:5558")),
        ("tcp://*:5557?engine=sglang&bind=1", Endpoint("tcp://*:5557", "tcp://*:5558", "sglang", True)),
        ("tcp://h:1?engine=SGLang", Endpoint("tcp://h:1", "tcp://h:2", "sglang")),
        ("ipc:///run/k", Endpoint("ipc:///run/k", "ipc:///run/k.replay")),
        ("memory://m", Endpoint("memory://m", "memory://m")),
    ],
)
def test_a_url_names_the_stream_the_replay_and_who_speaks(url, endpoint):
    assert Endpoint.parse(url) == endpoint


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", "tcp://host:port"),
        ("tcp://h", "tcp://host:port"),
        ("http://h:1", "tcp://host:port"),
        ("tcp://h:1/path", "tcp://host:port"),
        ("memory://", "tcp://host:port"),
        ("tcp://h:x", "port from 0 to 65535"),
        ("tcp://h:65536", "port from 0 to 65535"),
        ("tcp://h:65535", "replay_port"),
        ("tcp://h:1?replay_port=-1", "replay_port to be none or a port"),
        ("tcp://h:1?replay_port=65536", "replay_port from 0 to 65535"),
        ("tcp://h:1?replay=2", "not replay"),
        ("tcp://h:1?engine=gpt", "vllm, sglang"),
        ("tcp://h:1?bind=yes", "bind to be 0 or 1"),
        ("ipc:///run/k?replay_port=1", "no replay_port with ipc"),
    ],
)
def test_a_wrong_url_is_an_error_that_says_what_is_expected(url, expected):
    with pytest.raises(InvalidValueError, match=expected) as error:
        Endpoint.parse(url)
    assert error.value.value == url


@pytest.mark.parametrize("url", ["tcp://h:5557?replay_port=6000", "tcp://h:1?replay_port=none", "ipc:///k"])
def test_the_url_of_an_endpoint_parses_to_it(url):
    assert Endpoint.parse(Endpoint.parse(url).url) == Endpoint.parse(url)

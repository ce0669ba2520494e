"""A configuration is right or refused with the field, the value and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from kvist.errors import InvalidValueError
from kvist.router.config import PolicyName, RouterConfig
from kvist.router.policy.baselines import BASELINES
from kvist.router.policy.settings import PriceSettings
from kvist.settings import option_help, parse_values, read_toml

WORKER = "http://127.0.0.1:8001"


def test_defaults_bind_loopback_and_route_by_prefix() -> None:
    config = RouterConfig()
    assert (config.host, config.port, config.policy) == ("127.0.0.1", 30000, "kv")


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"port": 99999}, "port", "int <= 65535"),
        ({"port": "30000"}, "port", "int, got str"),
        ({"polciy": 1}, "polciy", "such as policy"),
        ({"zzz": 1}, "zzz", "a known key"),
        ({"policy": "prefix"}, "policy", "one of kv, least-loaded, power-of-two, round-robin, random"),
        ({"models": {"m": {"pth": "/m"}}}, "models", "expected known keys alone, not pth"),
        ({"processes": "all"}, "processes", "one of auto, a number"),
        ({"block_size": 0}, "block_size", "int >= 1"),
        ({"cors_origins": ["https://a.example/"]}, "cors_origins", "scheme://host[:port]"),
        ({"cors_origins": ["null"]}, "cors_origins", "scheme://host[:port]"),
        ({"queue_timeout_s": float("nan")}, "queue_timeout_s", "float > 0"),
        ({"worker_urls": WORKER}, "worker_urls", "array, got str"),
        ({"worker_urls": [WORKER + "/"]}, "worker_urls", "http(s)://host[:port][/prefix]"),
        ({"worker_urls": ["tcp://w:1"]}, "worker_urls", "http(s)://host[:port][/prefix]"),
        ({"worker_urls": ["http://user@w:1"]}, "worker_urls", "http(s)://host[:port][/prefix]"),
        ({"worker_urls": ["http://w:99999"]}, "worker_urls", "http(s)://host[:port][/prefix]"),
        ({"worker_urls": ["http://w..svc:80"]}, "worker_urls", "http(s)://host[:port][/prefix]"),
        ({"worker_urls": [WORKER, WORKER]}, "worker_urls", "each worker once"),
        ({"kv_event_sources": {WORKER: ["tcp://h:1"]}, "block_size": 16}, "kv_event_sources", "one of worker_urls"),
        (
            {"worker_urls": [WORKER], "block_size": 16, "kv_event_sources": {WORKER: ["tcp://[::1:5557"]}},
            "kv_event_sources",
            "the URL of an event stream",
        ),
        (
            {"worker_urls": [WORKER], "kv_event_sources": {WORKER: ["nats://user:password@h/model"]}},
            "kv_event_sources",
            "got 'nats://***@h/model', expected the URL of an event stream (endpoint: got 'nats://h:4222/model'",
        ),
        ({"allowed_event_networks": ["10.0.0.0/33"]}, "allowed_event_networks", "a network as CIDR"),
        ({"tier_credits": [1.0, -0.5, 0, 0]}, "tier_credits", "float >= 0.0"),
        ({"tier_credits": []}, "tier_credits", "array of length >= 4"),
        ({"admin_key": ""}, "admin_key", "str of length >= 1"),
        ({"tls_certificate": "cert.pem"}, "tls_key", "certificate and key go together"),
        ({"max_attempts": 0}, "max_attempts", "int >= 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(InvalidValueError) as refusal:
        RouterConfig(**parse_values(RouterConfig, values))
    assert refusal.value.field == field
    assert expected in str(refusal.value)


def test_values_given_in_code_are_checked_too() -> None:
    with pytest.raises(InvalidValueError, match="drain_timeout_s"):
        RouterConfig(drain_timeout_s=0)


def test_numbers_given_as_text_are_read_only_where_asked() -> None:
    given = {"port": "0", "queue_timeout_s": "0.5", "block_size": "16", "tier_credits": ["1", "0.5", "0", "0"]}
    assert parse_values(RouterConfig, given, strict=False) == {
        "port": 0,
        "queue_timeout_s": 0.5,
        "block_size": 16,
        "tier_credits": (1.0, 0.5, 0.0, 0.0),
    }


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_each_policy_name_makes_the_policy_of_that_name(name: Any) -> None:
    assert RouterConfig(policy=name).make_policy() == (PriceSettings() if name == "kv" else name)
    assert name in ("kv", *BASELINES)


@pytest.mark.parametrize("name", ["least-loaded", "Least-Loaded", "LEAST-LOADED"])
def test_a_policys_name_may_be_in_any_case(name: Any) -> None:
    assert (
        RouterConfig(policy=name)
        == RouterConfig(**parse_values(RouterConfig, {"policy": name}))
        == RouterConfig(policy="least-loaded")
    )


def test_the_kv_policy_gets_what_tiers_are_worth() -> None:
    values = parse_values(RouterConfig, {"tier_credits": [1.0, 0.5, 0.25, 0]})
    assert RouterConfig(**values).make_policy() == PriceSettings(tier_credits=(1.0, 0.5, 0.25, 0.0))


def test_every_key_is_documented() -> None:
    assert set(option_help(RouterConfig)) == set(RouterConfig.__dataclass_fields__)


def test_a_toml_file_has_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(
        f'port = 0\nblock_size = 16\nworker_urls = ["{WORKER}"]\n[kv_event_sources]\n"{WORKER}" = ["tcp://h:5557"]\n'
    )
    config = RouterConfig(**parse_values(RouterConfig, read_toml(path)))
    assert config.kv_event_sources == {WORKER: ("tcp://h:5557",)}


def test_a_broken_or_missing_toml_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    with pytest.raises(InvalidValueError, match="a readable file"):
        read_toml(path)
    path.write_text("port = = 1")
    with pytest.raises(InvalidValueError, match=r"router\.toml.*valid TOML"):
        read_toml(path)

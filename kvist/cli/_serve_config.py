"""What `kvist serve` can be told: of its engine, of what is served where, and of transfers between workers."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from msgspec import Meta

from kvist.engine.config import EngineConfig
from kvist.errors import InvalidValueError

_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")
_MAX_PORT = 65_535
_OF_TRANSFERS = ("role", "kv_transfer_agent", "kv_transfer_bounce_mib", "kv_transfer_timeout", "kv_transfer_fallback")
"""What says something with `kv_transfer` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """The settings of one bundled worker."""

    served_model_name: Annotated[
        tuple[str, ...], Meta(description="names of the model, the first of which is in answers; if none, its path")
    ] = ()
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port, 0 for a free one")] = 8100
    kv_events: Annotated[
        str, Meta(description="where to publish cache events, 'none' for nowhere; port 0 is a free one")
    ] = "tcp://127.0.0.1:0"
    groups: Annotated[
        Literal["largest", "all"],
        Meta(description="'all' also publishes what window groups beside the largest hold, as kvist publish does"),
    ] = "largest"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(description="where to send traces, http://host:port[/v1/traces] (OTLP over HTTP; the extra tracing)"),
    ] = None
    kv_transfer: Annotated[
        str | None,
        Meta(description="tcp://host:port where other workers fetch prompts' KV, an address they can reach"),
    ] = None
    role: Annotated[
        Literal["both", "prefill", "decode"],
        Meta(description="what routers use this worker for, beside --kv-transfer"),
    ] = "both"
    kv_transfer_agent: Annotated[
        Literal["shared_memory", "nixl"],
        Meta(description="what moves the bytes: shared_memory within a host, nixl between hosts"),
    ] = "shared_memory"
    kv_transfer_bounce_mib: Annotated[
        int,
        Meta(
            ge=0,
            description="MiB of each of two regions through which thousands of small pieces go as one write; 0: off",
        ),
    ] = 0
    kv_transfer_timeout: Annotated[
        float,
        Meta(gt=0, le=86_400, description="seconds until a transfer has failed; prompts are held twice as long"),
    ] = 30.0
    kv_transfer_fallback: Annotated[bool, Meta(description="compute here a prompt that cannot be fetched")] = True

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if self.kv_transfer is not None:
            _check_endpoint(self.kv_transfer)
            if self.kv_transfer_agent == "shared_memory" and self.device != "cpu":
                expected = f"nixl: the KV memory is on {self.device}"
                raise InvalidValueError("kv_transfer_agent", "shared_memory", expected)
            return
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _OF_TRANSFERS and value != each.default:
                raise InvalidValueError(each.name, value, f"{each.default}, or --kv-transfer to be given as well")

    @property
    def names(self) -> tuple[str, ...]:
        """Return what requests may call the model."""
        return self.served_model_name or (str(self.model_dir),)


def _check_endpoint(endpoint: str) -> None:
    """Raise InvalidValueError for an address that cannot be bound, or that no other worker could reach."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_tcp = endpoint.startswith("tcp://") and re.fullmatch(r"[0-9]{1,5}", port) is not None
    if not is_tcp or not host or host in _WILDCARDS:
        raise InvalidValueError("kv_transfer", endpoint, "tcp://host:port that other workers can reach")
    if int(port) > _MAX_PORT:  # getaddrinfo takes it for another one
        raise InvalidValueError("kv_transfer", endpoint, f"a port of at most {_MAX_PORT}")
    try:
        socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InvalidValueError("kv_transfer", endpoint, f"a host with an IPv4 address ({error})") from None

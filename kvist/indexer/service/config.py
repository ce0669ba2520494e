"""The index service's one configuration: frozen, checked where it is built, the same keys in TOML, argv and code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, redacted
from kvist.events.types import MAX_RANKS
from kvist.indexer.statistics import DEFAULT_NUM_RANKS
from kvist.networks import check_networks
from kvist.settings import Secret, check_fields

MAX_INSTANCE_ID = (1 << 64) - 1


class Worker(NamedTuple):
    """One stream of one instance, as `--workers` names it."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Everything the index service can be told. Raises InvalidValueError that names the field."""

    workers: Annotated[
        tuple[str, ...], Meta(description="streams to follow from the start, as id[:rank]=endpoint, joined by commas")
    ] = ()
    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None, Meta(description="tokens per KV block of those workers")
    ] = None
    model_name: Annotated[str, Meta(min_length=1, description="model that those workers serve")] = "default"
    replay: Annotated[
        bool, Meta(description="ask each stream's replay port for what came before, and for what was lost since")
    ] = True
    max_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="distinct blocks that a model's index keeps; without it, what fits half of memory"),
    ] = None
    data_parallel_size: Annotated[
        int, Meta(ge=1, le=MAX_RANKS, description="ranks that a stream may name beside its own; others are skipped")
    ] = DEFAULT_NUM_RANKS
    full_reports: Annotated[
        bool,
        Meta(description="others have vLLM report its cached blocks anew, as copies seem to be: those are not counted"),
    ] = False
    peers: Annotated[
        tuple[str, ...],
        Meta(description="index services to start from, as http://host:port joined by commas; the first that answers"),
    ] = ()
    state_dir: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="folder to keep the indexes in, for the next start; of one process alone"),
    ] = None
    state_interval_s: Annotated[float, Meta(gt=0, description="time between saves, of what has changed")] = 60.0
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8090
    api_key: Annotated[Secret | None, Meta(description="bearer key to query and to list workers")] = field(
        default=None, repr=False
    )
    admin_key: Annotated[
        Secret | None,
        Meta(description="bearer key to register, unregister and dump; without it only loopback clients may"),
    ] = field(default=None, repr=False)
    allow_endpoints: Annotated[
        tuple[str, ...],
        Meta(description="networks (CIDR) where registered endpoints must be; without any, wherever they are"),
    ] = ()
    max_body_bytes: Annotated[int, Meta(ge=1, description="largest request body")] = 32 * 1024 * 1024
    max_connections: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="clients' connections at a time; without it, half of the descriptors there may be"),
    ] = None
    max_connections_per_peer: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="those of one address, which may be a load balancer; without it, as many as of all"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_networks("allow_endpoints", self.allow_endpoints)
        for peer in self.peers:
            _check_peer(peer)
        streams = [(worker.instance_id, worker.dp_rank) for worker in self.parsed_workers()]
        if len(set(streams)) != len(streams):
            raise InvalidValueError("workers", list(map(redacted, self.workers)), "each id and rank once")
        if streams and self.block_size is None:
            raise InvalidValueError("block_size", None, "the workers' tokens per block")

    def parsed_workers(self) -> list[Worker]:
        return [_parse_worker(text) for text in self.workers]


def _parse_worker(text: str) -> Worker:
    name, _, endpoint = text.partition("=")
    instance_id, has_rank, dp_rank = name.partition(":")
    if not _is_number(instance_id, MAX_INSTANCE_ID) or (has_rank and not _is_number(dp_rank, MAX_RANKS - 1)):
        raise InvalidValueError("workers", redacted(text), "id[:rank]=endpoint, id and rank in digits")
    try:
        Endpoint.parse(endpoint)
    except InvalidValueError as error:
        raise InvalidValueError("workers", redacted(text), f"id[:rank]=endpoint ({error})") from None
    return Worker(int(instance_id), int(dp_rank or 0), endpoint)


def _is_number(text: str, largest: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= largest


def _check_peer(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_origin = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_origin = False
    if not is_origin or parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise InvalidValueError("peers", url, "http://host[:port]")

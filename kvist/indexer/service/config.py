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
from kvist.settings import Count, Port, Seconds, Secret, Text, check_fields

MAX_INSTANCE_ID = (1 << 64) - 1


class Worker(NamedTuple):
    """One stream of one instance, as `--workers` names it."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Everything the index service can be told. Raises InvalidValueError that names the field."""

    workers: tuple[str, ...] = ()
    """streams to follow from the start, as id[:rank]=endpoint, separated by commas"""
    block_size: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """tokens per KV block of those workers"""
    model_name: Text = "default"
    """model of those workers"""
    replay: bool = True
    """ask each stream's replay port for what came before the start, and for lost messages"""
    max_blocks: Count | None = None
    """most distinct blocks in a model's index; by default what fits half of memory"""
    data_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = DEFAULT_NUM_RANKS
    """most data-parallel ranks of a stream, 1 to 4096; events of others are skipped"""
    full_reports: bool = False
    """set it if another router or tool makes vLLM report all its cached blocks; such ranks count as partly known"""
    peers: tuple[str, ...] = ()
    """index services to copy the index from at start, as http://host:port, separated by commas; the first that
    answers"""
    state_dir: Text | None = None
    """folder that keeps the indexes for the next start; only one process may use it"""
    state_interval_s: Seconds = 60.0
    """seconds between saves of the state"""
    host: Text = "127.0.0.1"
    """address to listen on"""
    port: Port = 8090
    """port to listen on; 0: any free one"""
    api_key: Secret | None = field(default=None, repr=False)
    """bearer key for queries and the list of workers"""
    admin_key: Secret | None = field(default=None, repr=False)
    """bearer key to register, unregister and dump; without it, only loopback clients may"""
    allow_endpoints: tuple[str, ...] = ()
    """networks (CIDR) that registered endpoints must be in; by default anywhere"""
    max_body_bytes: Count = 32 * 1024 * 1024
    """largest request body in bytes"""
    max_connections: Count | None = None
    """most client connections; by default half the limit of open files"""
    max_connections_per_peer: Count | None = None
    """most connections from one address, which may be a load balancer; by default --max-connections"""

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

"""Asks a worker about itself: whether it is up, which models it serves, where it streams its KV events.

Kvist's engine answers `GET /server_info` with `"engine": "kvist"`, SGLang with its role, its event streams and all of
its settings. vLLM is known by its model list; its version and its event streams have endpoints of their own
(`/version`, `/kv_event_sources`). Of any engine the model list is read, and the size of its cache in /metrics (vLLM,
SGLang).
An announced event endpoint is a claim: it is dialled only if `event_endpoint` allows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvist.errors import InvalidValueError, MalformedMessageError
from kvist.events.transports import Endpoint
from kvist.events.transports.broker import BrokerUrl, is_broker_url
from kvist.events.types import MAX_RANKS
from kvist.http import Headers, UpstreamError, UpstreamPool
from kvist.networks import is_in_networks
from kvist.router.policy.decision import Role

MAX_ANSWER_BYTES = 1024 * 1024
_VLLM_CACHE, _SGLANG_CACHE = "vllm:cache_config_info", "sglang:max_total_num_tokens"
_START = "process_start_time_seconds"
_MAX_TOKENS = 1 << 53
_Form = TypeVar("_Form")
_WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "::"})


class ServedModel(msgspec.Struct, frozen=True):
    """An entry of a worker's model list; a LoRA adapter names its base model as `parent`. `entry` is all it said."""

    id: str
    entry: dict[str, Any]
    parent: str | None = None


class Identity(msgspec.Struct, frozen=True):
    """What a worker says of itself, None where it does not. Without a model list it is taken to serve any model.

    `cache_size_tokens` is the size of its prefix cache, 0 if it has none; `started_s` the Unix time of its start.
    `cache_block` is the number of tokens in a block of its cache, and their data type, scales included;
    `bootstrap_port` is where decode workers of SGLang find a prefill worker. `first_rank` is the
    lowest of its ranks: vLLM numbers those of all nodes that serve a model together.
    """

    engine: str | None = None
    version: str | None = None
    block_size: int | None = None
    event_endpoints: tuple[str, ...] = ()
    data_parallel_size: int | None = None
    first_rank: int = 0
    role: Role = Role.BOTH
    transfer_endpoints: tuple[str, ...] = ()
    models: tuple[ServedModel, ...] | None = None
    cache_size_tokens: int | None = None
    started_s: float | None = None
    cache_block: tuple[int | None, str | None] = (None, None)
    bootstrap_port: int | None = None
    model_paths: tuple[str, ...] = ()
    """Where its tokeniser and its model are: directories, or names on the Hugging Face Hub."""
    tokens_per_s: float | None = None
    """How fast it fetches the part of a prompt that another worker holds; None if it neither fetches nor gives any."""
    has_upper_bounds: bool = False
    """Whether a hit also needs what its events do not tell of: SGLang's sliding windows, and states (Mamba)."""
    uses_priority: bool | None = None
    """Whether it schedules by the `priority` of requests, lower first."""

    def has_restarted(self, earlier: Identity) -> bool:
        """Return whether the worker's process is a new one, by the start times then and now, if both are known."""
        return None not in (self.started_s, earlier.started_s) and self.started_s != earlier.started_s


_UNKNOWN = Identity()


class _Place(msgspec.Struct, frozen=True):
    endpoint: str


class _Transfers(msgspec.Struct, frozen=True):
    endpoints: tuple[str, ...] = ()
    tokens_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class _ServerInfo(msgspec.Struct, frozen=True):
    engine: str
    version: str | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_events: _Place | None = None
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    role: Role = Role.BOTH
    kv_transfer: _Transfers | None = None


class _VllmEvents(msgspec.Struct, frozen=True):
    publisher: str | None = None
    endpoint: str = ""
    replay_endpoint: str | None = None

    @property
    def url(self) -> str:
        replay_port = "none" if self.replay_endpoint is None else self.replay_endpoint.rpartition(":")[2]
        return f"{self.endpoint}?replay_port={replay_port}"


class _SglangEvents(msgspec.Struct, frozen=True):
    """What a scheduler publishes: each rank at the ports that follow those of rank 0."""

    publisher: str
    endpoint_host: str
    endpoint_port_base: int
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    replay_endpoint_port_base: int | None = None

    def urls(self) -> tuple[str, ...]:
        """Return the ranks' streams: SGLang's own or, from its publisher `kvist`, canonical ones; none of any other."""
        dialect = {"zmq": "&engine=sglang", "kvist": ""}.get(self.publisher)
        if dialect is None:
            return ()
        base = self.replay_endpoint_port_base
        return tuple(
            f"tcp://{self.endpoint_host}:{self.endpoint_port_base + rank}"
            f"?replay_port={'none' if base is None else base + rank}{dialect}"
            for rank in range(self.dp_size)
        )


class _SglangMemory(msgspec.Struct, frozen=True):
    token_capacity_swa: int | None = None


class _SglangState(msgspec.Struct, frozen=True):
    memory_usage: _SglangMemory


class _ModelList(msgspec.Struct, frozen=True):
    data: list[dict[str, Any]]


async def probe(pool: UpstreamPool, url: str, authorization: Headers, earlier: Identity = _UNKNOWN) -> Identity:
    """Check a worker's health and return its identity.

    Of vLLM that is still the process of an `earlier` identity, only its models and metrics are asked anew. Raises
    UpstreamError if it is unreachable or says that it is not healthy, MalformedMessageError for an answer of the wrong
    form. The caller bounds the time.
    """
    status, _ = await fetch(pool, url, "/health", authorization)
    if not 200 <= status < 300:
        raise UpstreamError(url, f"GET /health answered {status}")
    models, measured = await _models(pool, url, authorization), await _metrics(pool, url, authorization)
    identity = earlier
    if earlier.engine != "vllm" or earlier.started_s is None or earlier.started_s != measured.get("started_s"):
        identity = await _server_info(pool, url, authorization)
        if identity.engine is None and any(model.entry.get("owned_by") == "vllm" for model in models or ()):
            identity = await _as_vllm(identity, pool, url, authorization)
    return msgspec.structs.replace(identity, models=models, **measured)


def event_endpoint(url: str, announced: str, allowed_networks: Sequence[str]) -> str:
    """Return the endpoint to dial for the one that a worker announces; a wildcard host means the worker's own.

    Raises InvalidValueError unless it is on the worker's own host or its address is in an allowed network.
    """
    own_host = _plain_host(urlsplit(url).hostname or "")
    if is_broker_url(announced):
        return _broker_endpoint(own_host, announced, allowed_networks)
    try:
        parts = urlsplit(announced)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.scheme != "tcp" or Endpoint.parse(announced).is_bound:
        raise InvalidValueError("kv_events.endpoint", announced, "tcp://host:port, to connect to")
    if host in _WILDCARD_HOSTS:
        netloc = f"[{own_host}]:{port}" if ":" in own_host else f"{own_host}:{port}"
        return parts._replace(netloc=netloc).geturl()
    if _plain_host(host) == own_host or is_in_networks(_plain_host(host), allowed_networks):
        return announced
    raise InvalidValueError("kv_events.endpoint", announced, f"the worker's own host {own_host} or an allowed network")


def _broker_endpoint(own_host: str, announced: str, allowed_networks: Sequence[str]) -> str:
    """Return the broker's URL, which must have allowed hosts only, and name no login or file of the router's own."""
    broker = BrokerUrl.parse(announced).with_worker(None)
    if broker.has_secrets or "deliver" in broker.options:
        raise InvalidValueError("kv_events.endpoint", broker.public, "a URL without a login, files and deliver")
    for host in broker.hosts:
        if _plain_host(host.name) != own_host and not is_in_networks(_plain_host(host.name), allowed_networks):
            expected = f"brokers on the worker's own host {own_host} or, as addresses, in an allowed network"
            raise InvalidValueError("kv_events.endpoint", broker.public, expected)
    return announced


async def _server_info(pool: UpstreamPool, url: str, authorization: Headers) -> Identity:
    answer = await _json_object(pool, url, "/server_info", authorization)
    paths = [answer.get(name) for name in ("tokenizer_path", "model_path")]
    model_paths = tuple(path for path in paths if isinstance(path, str) and path)
    known = Identity(cache_size_tokens=_cache_size_tokens(answer), model_paths=model_paths)
    try:
        if "disaggregation_mode" in answer:
            return _sglang_identity(answer, known)
        if answer.get("engine") != "kvist":
            return known
        info = msgspec.convert(answer, _ServerInfo)
    except msgspec.ValidationError as error:
        raise MalformedMessageError(f"{url}/server_info", str(error)) from None
    transfers = info.kv_transfer or _Transfers()
    return msgspec.structs.replace(
        known,
        engine=info.engine,
        version=info.version,
        block_size=info.block_size,
        event_endpoints=(info.kv_events.endpoint,) if info.kv_events else (),
        data_parallel_size=info.data_parallel_size,
        role=info.role,
        uses_priority=False,
        transfer_endpoints=transfers.endpoints,
        cache_block=(info.block_size, info.kv_cache_dtype),
        # Rounded, as the measured speed changes all the time.
        tokens_per_s=transfers.tokens_per_s and float(f"{transfers.tokens_per_s:.1e}"),
    )


def _sglang_identity(server_info: Mapping[str, Any], known: Identity) -> Identity:
    mode = server_info["disaggregation_mode"]
    published = _read_as(_SglangEvents, server_info.get("kv_events"))
    states = _read_as(list[_SglangState], server_info.get("internal_states")) or []
    has_windows = any(state.memory_usage.token_capacity_swa is not None for state in states)
    lowest_first = ("enable_priority_scheduling", "schedule_low_priority_values_first")
    fields = {
        "engine": "sglang",
        "version": server_info.get("version"),
        "event_endpoints": () if published is None else published.urls(),
        "has_upper_bounds": has_windows or server_info.get("uses_mamba_radix_cache") is True,
        "role": mode if mode in ("prefill", "decode") else Role.BOTH,
        "cache_block": [server_info.get("page_size"), server_info.get("kv_cache_dtype")],
        "bootstrap_port": server_info.get("disaggregation_bootstrap_port"),
        "uses_priority": all(server_info.get(name) is True for name in lowest_first),
    }
    return msgspec.convert(msgspec.structs.asdict(known) | fields, Identity)


def _read_as(form: type[_Form], value: object) -> _Form | None:
    """Return a part of an answer, None if there is none or it has another form: another version's."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError:
        return None


async def _as_vllm(identity: Identity, pool: UpstreamPool, url: str, authorization: Headers) -> Identity:
    """Return the identity with vLLM's version and, from 0.32 on, the streams of its ranks."""
    version = (await _json_object(pool, url, "/version", authorization)).get("version")
    sources = await _json_object(pool, url, "/kv_event_sources", authorization)
    try:
        by_rank = msgspec.convert(sources, dict[int, _VllmEvents], strict=False)
    except msgspec.ValidationError:
        by_rank = {}  # some other vLLM's
    return msgspec.structs.replace(
        identity,
        engine="vllm",
        version=version if isinstance(version, str) else None,
        event_endpoints=tuple(by_rank[rank].url for rank in sorted(by_rank) if by_rank[rank].publisher == "zmq"),
        first_rank=min(by_rank, default=0),
    )


async def _json_object(pool: UpstreamPool, url: str, target: str, authorization: Headers) -> dict[str, Any]:
    """Return the object that the worker answers with, an empty one for any other answer: it is another engine's."""
    status, body = await fetch(pool, url, target, authorization)
    try:
        answer = msgspec.json.decode(body) if status == 200 else None
    except msgspec.DecodeError:
        answer = None
    return answer if isinstance(answer, dict) else {}


def _cache_size_tokens(server_info: dict[str, Any]) -> int | None:
    if server_info.get("disable_radix_cache") is True:  # SGLang's
        return 0
    num_tokens = server_info.get("max_total_num_tokens")
    return num_tokens if type(num_tokens) is int and 0 <= num_tokens < _MAX_TOKENS else None


async def _metrics(pool: UpstreamPool, url: str, authorization: Headers) -> dict[str, Any]:
    """Return what /metrics say of the identity; of a page that cannot be read, nothing."""
    try:
        status, body = await fetch(pool, url, "/metrics", authorization)
        names = (_VLLM_CACHE, _SGLANG_CACHE, _START)
        lines = [line for line in body.decode().splitlines() if line.startswith(names)] if status == 200 else []
        families = text_string_to_metric_families("\n".join(lines))
        samples = [sample for family in families for sample in family.samples]
    except (MalformedMessageError, ValueError):
        return {}
    found: dict[str, Any] = {"started_s": next((each.value for each in samples if each.name == _START), None)}
    caches = [sample for sample in samples if sample.name in (_VLLM_CACHE, _SGLANG_CACHE)]
    # Each data-parallel rank has a cache of its own, which each of its tensor-parallel ranks reports.
    by_rank = {each.labels.get("engine", each.labels.get("dp_rank")): _num_tokens(each) for each in caches}
    if sizes := [size for size in by_rank.values() if size is not None]:
        found["cache_size_tokens"] = sum(sizes)
    for labels in (cache.labels for cache in caches if cache.name == _VLLM_CACHE):
        found["cache_block"] = _number(labels.get("block_size", "")), labels.get("cache_dtype")
    return found


def _num_tokens(cache: Sample) -> int | None:
    """Return the size of a cache in tokens, None if its metric does not say it (yet)."""
    if cache.name == _SGLANG_CACHE:
        return int(cache.value) if 0 <= cache.value < _MAX_TOKENS else None
    if cache.labels.get("enable_prefix_caching") == "False":
        return 0
    size, num_blocks, block_size = (
        _number(cache.labels.get(name, "")) for name in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")
    )
    return num_blocks * block_size if size is None and num_blocks is not None and block_size is not None else size


def _number(label: str) -> int | None:
    return int(label) if label.isdecimal() and len(label) < 16 else None


async def _models(pool: UpstreamPool, url: str, authorization: Headers) -> tuple[ServedModel, ...] | None:
    status, body = await fetch(pool, url, "/v1/models", authorization)
    if status != 200:
        return None
    try:
        entries = msgspec.json.decode(body, type=_ModelList).data
        return tuple(msgspec.convert({**entry, "entry": entry}, ServedModel) for entry in entries)
    except msgspec.DecodeError as error:
        raise MalformedMessageError(f"{url}/v1/models", str(error)) from None


async def fetch(
    pool: UpstreamPool, url: str, target: str, authorization: Headers, body: bytes = b""
) -> tuple[int, bytes]:
    """Return status and body of a worker's answer to a GET, or to a POST of JSON; raises as `probe` does."""
    headers = [(b"accept", b"application/json"), *authorization]
    if body:
        headers.append((b"content-type", b"application/json"))
    async with pool.exchange(url, "POST" if body else "GET", target, headers, body) as response:
        return response.status, await response.read(MAX_ANSWER_BYTES)


def _plain_host(host: str) -> str:
    return "127.0.0.1" if host in ("localhost", "::1") else host.lower()

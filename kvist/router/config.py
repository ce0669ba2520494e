"""The router's one configuration: frozen, checked where it is built, the same keys in TOML, argv and code."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import asdict

from kvist.errors import InvalidValueError
from kvist.events import Tier
from kvist.events.transports.broker import is_broker_url
from kvist.events.types import MAX_RANKS
from kvist.http import Headers, UpstreamLimits
from kvist.indexer.statistics import DEFAULT_NUM_RANKS
from kvist.networks import check_networks
from kvist.router.expected import DEFAULT_TIME_TO_LIVE_S
from kvist.router.policy.decision import Role
from kvist.router.policy.settings import (
    DEFAULT_ALPHA,
    DEFAULT_MAX_LOCAL_PREFILL_TOKENS,
    DEFAULT_TIER_CREDITS,
    PriceSettings,
)
from kvist.router.sources import SourceUrl, check_event_source, check_worker_url
from kvist.settings import Count, Port, Seconds, Secret, Text, check_fields
from kvist.tracing import check_traces_endpoint

_logger = logging.getLogger(__name__)

DialectName: TypeAlias = Literal["kvist", "vllm", "sglang", "tensorrt_llm"]
PolicyName: TypeAlias = Literal["kv", "least-loaded", "power-of-two", "round-robin", "random"]

DEFAULT_EXPECTED_CACHE_TOKENS = 400_000
"""The room that an 8B model leaves for KV on a GPU of 80 GB. If workers are expected to cache twice to eight times what
they can, simulated ones find up to 7 points more of their prompts cached than with events, and up to 13 points less of
conversations that outgrow the cache; with a half up to 13 less, with a quarter up to 28
(benchmarks/bench_expected.py, 2026-11-22)."""

SALTING_ENGINES = frozenset({"kvist", "vllm", "sglang"})
"""Engines whose chats, completions and responses take a `cache_salt`, as read in vLLM 0.33 and SGLang 0.5.23;
Anthropic messages take one in vLLM alone."""

_UPSTREAM = UpstreamLimits()

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\\?#@\sA-Z]+")

RELOADED = frozenset(
    {
        *("worker_urls", "prefill_worker_urls", "decode_worker_urls", "discover"),
        *("kv_event_sources", "allowed_event_networks"),
        *("expected_cache_tokens", "health_interval_s", "health_timeout_s", "silence_timeout_s", "drain_timeout_s"),
        *("api_key", "admin_key", "worker_api_key", "worker_api_keys"),
        *("cors_origins", "debug_headers"),
        *("policy", "max_local_prefill_tokens", "prefill_dialect", "max_attempts", "tier_credits", "models", "aliases"),
        *("request_timeout_s", "queue_timeout_s", "workers_use_priority", "drain_delay_s"),
    }
)
"""Fields that may change while the router runs; the others need a restart."""


TierCredits: TypeAlias = Annotated[
    tuple[Annotated[float, Meta(ge=0, le=1)], ...], Meta(min_length=len(Tier), max_length=len(Tier))
]


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one model and its adapters, which override those of all models."""

    path: str | None = None
    policy: PolicyName | None = None
    tier_credits: TierCredits | None = None
    max_local_prefill_tokens: Annotated[int, Meta(ge=0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything the router can be told. Raises InvalidValueError that names the field."""

    worker_urls: tuple[str, ...] = ()
    """workers to route to, as http://host:port"""
    prefill_worker_urls: tuple[str, ...] = ()
    """prefill workers, if they do not announce the role themselves"""
    decode_worker_urls: tuple[str, ...] = ()
    """decode workers, if they do not announce the role themselves"""
    prefill_dialect: DialectName = "vllm"
    """engine of prefill and decode workers, if neither they nor their model lists say it"""
    max_local_prefill_tokens: Annotated[int, Meta(ge=0)] = DEFAULT_MAX_LOCAL_PREFILL_TOKENS
    """a prompt with at most this many uncached tokens is computed by the decode worker itself"""
    discover: tuple[str, ...] = field(default=(), repr=False)
    """URLs of files, DNS names, Kubernetes or NATS where more workers are found (docs/fleet.md)"""
    kv_event_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """endpoint of a worker's KV events, instead of what it announces; one for each stream"""
    allowed_event_networks: tuple[str, ...] = ()
    """networks (CIDR) that announced event endpoints may be in, besides the worker's own host"""
    full_reports: bool = False
    """set it if another router or tool makes vLLM report all its cached blocks; such ranks count as partly known"""
    data_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = DEFAULT_NUM_RANKS
    """most data-parallel ranks of a worker, 1 to 4096, unless the worker announces fewer"""
    policy: PolicyName = "kv"
    """how a worker is chosen; only kv looks at prefixes"""
    block_size: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """tokens per KV block of workers that do not announce it; by default each event stream says it"""
    max_blocks: Count | None = None
    """kv: most distinct blocks in the index; by default what fits half of memory"""
    expected_cache_tokens: Annotated[int, Meta(ge=0)] = DEFAULT_EXPECTED_CACHE_TOKENS
    """kv: cache size in tokens of workers that do not report it, for what their KV events do not tell; 0: no cache"""
    expected_time_to_live_s: Seconds = DEFAULT_TIME_TO_LIVE_S
    """kv: seconds that a worker is assumed to keep a prompt after its last use, if its KV events do not tell"""
    model_path: str | None = None
    """directory of the tokeniser and chat template of every model without --model; by default the path that workers
    report, if it exists on this machine"""
    models: dict[str, ModelSettings] = field(default_factory=dict)
    """directory of one model's tokeniser and chat template; [models.NAME] of a file also sets its policy and others"""
    aliases: dict[str, dict[str, Annotated[float, Meta(gt=0)]]] = field(default_factory=dict)
    """another name for a model; several with shares split its conversations over models"""
    state_dir: Text | None = None
    """kv: folder that keeps the index for the next start; only one process may use it"""
    state_interval_s: Seconds = 60.0
    """seconds between saves of the state"""
    host: Text = "127.0.0.1"
    """address to listen on"""
    port: Port = 30000
    """port to listen on; 0: any free one"""
    processes: Count | Literal["auto"] = 1
    """processes that take requests; with more than 1, another one follows the fleet. auto: the number of cores less
    one"""
    replicas: Text | None = None
    """broker topic over which routers share their load: nats://host:port/FLEET/routers, or mqtt://"""
    tls_certificate: str | None = None
    """PEM file of the certificate, then its chain, to serve HTTPS"""
    tls_key: str | None = None
    """PEM file of that certificate's private key"""
    client_ca: str | None = None
    """PEM file of the CA of client certificates; clients without one are refused"""
    worker_ca: str | None = None
    """PEM file of the CA of workers' HTTPS certificates; by default the system's CAs"""
    worker_certificate: str | None = None
    """PEM file of the client certificate, then its chain, to show to workers"""
    worker_key: str | None = None
    """PEM file of that certificate's private key"""
    api_key: Secret | None = field(default=None, repr=False)
    """bearer key that clients must send"""
    tenants: Text | None = None
    """file of tenants: the SHA-256 of their keys, and their limits (docs/tenants.md)"""
    auth_url: str | None = None
    """URL of an authoriser that is asked about keys no tenant file has (docs/tenants.md)"""
    auth_ttl_s: Seconds = 30.0
    """seconds for which an authoriser's answer is cached"""
    auth_timeout_s: Seconds = 3.0
    """seconds the authoriser may take to answer"""
    isolation: Literal["none", "tenant"] = "none"
    """tenant: no tenant outside its group can find out what another has cached"""
    isolation_secret: Secret | None = field(default=None, repr=False)
    """secret that cache salts are derived from; the same for all routers of a fleet"""
    admin_key: Secret | None = field(default=None, repr=False)
    """bearer key of administrators; without it, only loopback clients may administer"""
    worker_api_key: Secret | None = field(default=None, repr=False)
    """bearer key sent to workers; a file sets those of single workers, by URL, in [worker_api_keys]"""
    worker_api_keys: dict[str, Secret] = field(default_factory=dict, repr=False)
    """bearer keys of single workers, by URL"""
    cors_origins: tuple[str, ...] = ()
    """origins of web pages that may call the API, as scheme://host[:port]; *: any"""
    debug_headers: bool = False
    """show all clients, not only administrators, which worker answered and what it had cached"""
    show_prompts: bool = False
    """show administrators the start and end of prompts on the live page (/ui)"""
    max_body_bytes: Count = 32 * 1024 * 1024
    """largest request body in bytes"""
    max_connections: Count | None = None
    """most client connections; by default half the limit of open files"""
    max_connections_per_peer: Count | None = None
    """most connections from one address, which may be a load balancer; by default --max-connections"""
    access_log: Text | None = None
    """file for one line of JSON per request; -: stdout"""
    access_log_sample: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """share of successful requests to log, above 0 to 1; failed ones are always logged"""
    record_requests: Text | None = None
    """folder for recordings of requests: times, lengths and block hashes, no text (docs/recording.md)"""
    record_max_bytes: Annotated[int, Meta(ge=2**26)] = 2**30
    """most bytes of all recordings in that folder; the oldest are deleted"""
    otlp_traces_endpoint: str | None = None
    """OTLP endpoint for traces, http://host:port[/v1/traces]; needs the extra tracing"""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """workers that a request is sent to until one answers, 1 to 100"""

    tier_credits: TierCredits = DEFAULT_TIER_CREDITS
    """kv: share of a block's computation that a hit saves, 0 to 1, on GPU, host, disk and external storage"""

    health_interval_s: Seconds = 10.0
    """seconds between health checks of a worker"""
    health_timeout_s: Seconds = 5.0
    """seconds a health check may take"""
    health_failures: Count = 3
    """failed checks in a row that make a worker unhealthy"""
    breaker_failures: Count = 5
    """failed requests in a row that open a worker's circuit"""
    breaker_cooldown_s: Seconds = 10.0
    """seconds before an open circuit lets a trial request through"""
    silence_timeout_s: Seconds = 3.0
    """seconds without a byte from a busy worker, not even from its /metrics, after which its requests are moved"""
    max_worker_requests: Count | None = None
    """most requests in flight to a worker; by default learnt: what it runs at once and a small reserve"""
    max_worker_prefill_tokens: Count | None = None
    """uncached prompt tokens in flight at which a worker gets no more requests; by default what it computes in 8 s"""
    max_fleet_requests: Count | None = None
    """most requests in flight to all workers; by default the sum of their own limits"""
    max_fleet_prefill_tokens: Count | None = None
    """uncached prompt tokens in flight to all workers at which none gets more requests; by default no limit"""
    max_queued: Annotated[int, Meta(ge=0)] = 16384
    """most requests that wait for a free worker, per model; 0: none waits"""
    queue_timeout_s: Seconds = 60.0
    """seconds a request may wait; its header x-kvist-queue-timeout may set less"""
    workers_use_priority: bool = False
    """forward a request's priority also to workers that do not say whether they schedule by it: vLLM"""
    connect_timeout_s: Seconds = _UPSTREAM.connect_timeout_s
    """seconds to connect to a worker"""
    first_byte_timeout_s: Seconds = _UPSTREAM.first_byte_timeout_s
    """seconds until the first byte of a worker's answer"""
    idle_timeout_s: Seconds = _UPSTREAM.idle_timeout_s
    """seconds between two pieces of a worker's answer"""
    request_timeout_s: Seconds | None = None
    """seconds for a whole request with all its attempts; by default no limit"""
    drain_timeout_s: Seconds = 300.0
    """seconds for which a removed worker's requests may still run"""
    drain_delay_s: Annotated[float, Meta(ge=0)] = 0.0
    """at SIGTERM, seconds for which /readiness fails before connections are refused"""
    shutdown_timeout_s: Seconds = 180.0
    """at SIGTERM, seconds for which running requests may go on after that"""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_workers()
        self._check_rest()

    def _check_workers(self) -> None:
        for name in ("worker_urls", "prefill_worker_urls", "decode_worker_urls"):
            for url in getattr(self, name):
                check_worker_url(name, url)
        for url in self.discover:
            SourceUrl.parse(url)
        for url in self.worker_api_keys:
            check_worker_url("worker_api_keys", url)
        for url, endpoints in self.kv_event_sources.items():
            if url not in self.every_worker_url:
                raise InvalidValueError("kv_event_sources", url, f"one of worker_urls {list(self.every_worker_url)}")
            for endpoint in endpoints:
                check_event_source(endpoint)
        for urls in (self.worker_urls, (*self.prefill_worker_urls, *self.decode_worker_urls)):
            if len(set(urls)) != len(urls):
                raise InvalidValueError("worker_urls", list(urls), "each worker once, and once among those of a role")

    def _check_rest(self) -> None:
        check_networks("allowed_event_networks", self.allowed_event_networks)
        for names in (("tls_certificate", "tls_key"), ("worker_certificate", "worker_key")):
            missing = [name for name in names if getattr(self, name) is None]
            if len(missing) == 1:
                raise InvalidValueError(missing[0], None, "a PEM file, as certificate and key go together")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidValueError("cors_origins", origin, "* or scheme://host[:port] in small letters")
        if self.auth_url is not None:
            check_worker_url("auth_url", self.auth_url)
        if self.replicas is not None:
            if not is_broker_url(self.replicas):
                form = "nats://host:port/FLEET/routers or mqtt://host:port/FLEET/routers"
                raise InvalidValueError("replicas", self.replicas, form)
            check_event_source(self.replicas, "replicas")
        if self.isolation == "tenant" and self.isolation_secret is None:
            raise InvalidValueError("isolation_secret", None, "a secret, as isolation is by tenant")
        if self.isolation == "tenant" and not self.has_tenants:
            raise InvalidValueError("isolation", "tenant", "none without tenants or auth_url, which tell clients apart")
        if self.client_ca is not None and self.tls_certificate is None:
            raise InvalidValueError("client_ca", self.client_ca, "none without tls_certificate")
        if self.otlp_traces_endpoint is not None:
            check_traces_endpoint(self.otlp_traces_endpoint)
        if self.state_dir is not None and self.policy != "kv":
            raise InvalidValueError("state_dir", self.state_dir, f"none, as policy {self.policy} keeps no index")
        for name, model in self.models.items():
            if model.policy == "kv" != self.policy:
                raise InvalidValueError(f"models.{name}.policy", "kv", "another, unless the fleet's policy is kv")
        for name, shares in self.aliases.items():
            if not shares or shares.keys() & self.aliases.keys():
                raise InvalidValueError(f"aliases.{name}", shares, "models, which are no aliases")

    def changed_to(self, other: RouterConfig) -> RouterConfig:
        """Return this configuration with the reloadable fields of another; log what changes, and what needs a restart.

        Raises InvalidValueError.
        """
        changed = [each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)]
        fixed = [name for name in changed if name not in RELOADED]
        if "policy" in changed and "kv" in (self.policy, other.policy):  # that needs an index, or has one too many
            fixed.append("policy")
        changed = [name for name in changed if name not in fixed]
        renewed = replace(self, **{name: getattr(other, name) for name in changed})
        _logger.info("settings reloaded changed=%s", ",".join(changed) or "nothing")
        if fixed:
            _logger.warning("settings changed that need a restart fields=%s", ",".join(fixed))
        return renewed

    @property
    def every_worker_url(self) -> tuple[str, ...]:
        """Return the workers of all roles, each once: one with a role may also be among `worker_urls`."""
        return tuple(dict.fromkeys((*self.worker_urls, *self.prefill_worker_urls, *self.decode_worker_urls)))

    @property
    def has_tenants(self) -> bool:
        return self.tenants is not None or self.auth_url is not None

    @property
    def asks_for_keys(self) -> bool:
        return self.api_key is not None or self.has_tenants

    @property
    def engines(self) -> frozenset[str] | None:
        """Return the engines that may be given requests, None for any: with isolation, those that salt their caches."""
        return SALTING_ENGINES if self.isolation == "tenant" else None

    def authorization(self, url: str) -> Headers:
        """Return the authorization header that a worker is sent, if it has a key."""
        key = self.worker_api_keys.get(url, self.worker_api_key)
        return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    def url_at(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_certificate is None else 'https'}://{host}:{port}"

    def role_of(self, url: str) -> Role | None:
        """Return the role configured for a worker, None where the worker's own counts."""
        if url in self.prefill_worker_urls:
            return Role.PREFILL
        return Role.DECODE if url in self.decode_worker_urls else None

    def of(self, model: str | None) -> RouterConfig:
        own = self.models.get(model or "")
        values = {} if own is None else {name: value for name, value in asdict(own).items() if value is not None}
        path = values.pop("path", self.model_path)
        return replace(self, **values, model_path=path, models={}, aliases={}, state_dir=None) if own else self

    def make_policy(self, alpha: float = DEFAULT_ALPHA) -> PriceSettings | PolicyName:
        """Return the settings of the `kv` policy, with a model's `alpha`, or the name of the other policy chosen."""
        return PriceSettings(alpha, self.tier_credits) if self.policy == "kv" else self.policy

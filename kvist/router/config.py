"""The router's one configuration: frozen, checked where it is built, the same keys in TOML, argv and code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import asdict

from kvist.errors import InvalidValueError
from kvist.events import Tier
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
    """workers that compute prompts for others, where they do not say so"""
    decode_worker_urls: tuple[str, ...] = ()
    """workers that go on with what prefill workers computed, likewise"""
    prefill_dialect: DialectName = "vllm"
    """the engine of such workers, where neither they nor their model lists say it"""
    max_local_prefill_tokens: Annotated[int, Meta(ge=0)] = DEFAULT_MAX_LOCAL_PREFILL_TOKENS
    """prompts with no more tokens to compute are not handed to a prefill worker"""
    discover: tuple[str, ...] = field(default=(), repr=False)
    """where more workers are found: URLs of files, DNS, Kubernetes or NATS (docs/fleet.md)"""
    kv_event_sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """where a worker streams its KV events, once a stream; wins over what the worker announces"""
    allowed_event_networks: tuple[str, ...] = ()
    """networks (CIDR) where announced event endpoints may be, beside the worker's own host"""
    full_reports: bool = False
    """others have vLLM report its cached blocks anew: told from copies by what a hit needs, and known in part"""
    data_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = DEFAULT_NUM_RANKS
    """ranks that a worker's streams may name, unless it announces fewer"""
    policy: PolicyName = "kv"
    """how a worker is chosen"""
    block_size: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """tokens per KV block of workers that do not say; without it, what each one's stream names"""
    max_blocks: Count | None = None
    """kv: distinct blocks that are kept; without it, what fits half of memory"""
    expected_cache_tokens: Annotated[int, Meta(ge=0)] = DEFAULT_EXPECTED_CACHE_TOKENS
    """kv: prompt tokens a worker without KV events is expected to cache, where it does not tell; 0 expects nothing"""
    expected_time_to_live_s: Seconds = DEFAULT_TIME_TO_LIVE_S
    """kv: how long after its last use such a worker is expected to hold a prompt"""
    model_path: str | None = None
    """directory of tokenizer and chat template, of all models that are not named by themselves; without it, where
    workers say that theirs is, if that is on this machine"""
    models: dict[str, ModelSettings] = field(default_factory=dict)
    """where single models' tokenizer and template are; in [models.NAME] of a file also policy, …"""
    aliases: dict[str, dict[str, Annotated[float, Meta(gt=0)]]] = field(default_factory=dict)
    """other names of models; of several of one name each gets its share of the conversations"""
    state_dir: Text | None = None
    """kv: folder to keep what is known of the caches in, for the next start; of one process alone"""
    state_interval_s: Seconds = 60.0
    """time between saves, of what has changed"""
    host: Text = "127.0.0.1"
    """address to listen on"""
    port: Port = 30000
    """port to listen on; 0 takes a free one"""
    processes: Count | Literal["auto"] = 1
    """processes that take requests, beside one that follows the fleet if they are several; auto: as many as there are
    cores but one"""
    replicas: Text | None = None
    """where routers beside this one are met, which are told what it has in flight and tell it:
    nats://host:port/FLEET/routers, or mqtt://"""
    tls_certificate: str | None = None
    """PEM file to serve HTTPS with, the certificate first, then its chain"""
    tls_key: str | None = None
    """PEM file of the certificate's private key"""
    client_ca: str | None = None
    """PEM file of who signs clients' certificates: those without one are refused"""
    worker_ca: str | None = None
    """PEM file of who signs certificates of workers with https; else the system says"""
    worker_certificate: str | None = None
    """PEM file of the certificate that such workers are shown, then its chain"""
    worker_key: str | None = None
    """PEM file of that certificate's private key"""
    api_key: Secret | None = field(default=None, repr=False)
    """bearer key that clients must send"""
    tenants: Text | None = None
    """file of tenants: their keys, as SHA-256, and what each may do (docs/tenants.md)"""
    auth_url: str | None = None
    """URL of an authoriser, which is asked whose a key is that no file has (docs/tenants.md)"""
    auth_ttl_s: Seconds = 30.0
    """how long the authoriser's word on a key counts"""
    auth_timeout_s: Seconds = 3.0
    """time that the authoriser may take to answer"""
    isolation: Literal["none", "tenant"] = "none"
    """tenant: no tenant can tell what others have cached, but those of its group"""
    isolation_secret: Secret | None = field(default=None, repr=False)
    """what salts of caches are made from, the same in each router of a fleet"""
    admin_key: Secret | None = field(default=None, repr=False)
    """bearer key for administration; without it only loopback clients may administer"""
    worker_api_key: Secret | None = field(default=None, repr=False)
    """bearer key that workers are sent; of single workers, by URL, in [worker_api_keys] of a file"""
    worker_api_keys: dict[str, Secret] = field(default_factory=dict, repr=False)
    """keys of single workers, by URL"""
    cors_origins: tuple[str, ...] = ()
    """origins whose pages may use what clients may, as scheme://host[:port], or * for any"""
    debug_headers: bool = False
    """tell every client, not administrators alone, which worker answered and what it held"""
    show_prompts: bool = False
    """show administrators the beginnings and ends of prompts on the live page (/ui)"""
    max_body_bytes: Count = 32 * 1024 * 1024
    """largest request body"""
    max_connections: Count | None = None
    """clients' connections at a time; without it, half of the descriptors there may be"""
    max_connections_per_peer: Count | None = None
    """those of one address, which may be a load balancer; without it, as many as of all"""
    access_log: Text | None = None
    """file that has a line of JSON for each request, or - for stdout"""
    access_log_sample: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """share of the requests it has; those that failed are all there"""
    record_requests: Text | None = None
    """folder to record requests in: their times, sizes and shared prefixes, and nothing of texts"""
    record_max_bytes: Annotated[int, Meta(ge=2**26)] = 2**30
    """what all recordings in that folder may take; the oldest parts are deleted"""
    otlp_traces_endpoint: str | None = None
    """where to send traces, http://host:port[/v1/traces] (OTLP over HTTP; the extra tracing)"""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """workers tried for one request while none has answered"""

    tier_credits: TierCredits = DEFAULT_TIER_CREDITS
    """kv: share of its computation that a block spares on GPU, host, disk, external storage"""

    health_interval_s: Seconds = 10.0
    """time between health checks of a worker"""
    health_timeout_s: Seconds = 5.0
    """time a health check may take"""
    health_failures: Count = 3
    """failed checks in a row that make a worker unhealthy"""
    health_successes: Count = 2
    """passed checks in a row that make it healthy again"""
    breaker_failures: Count = 5
    """failed requests in a row that open a circuit"""
    breaker_cooldown_s: Seconds = 10.0
    """time an open circuit waits for its next try"""
    silence_timeout_s: Seconds = 3.0
    """time after which a worker that has requests and sends no byte is given up"""
    max_worker_requests: Count | None = None
    """requests a worker is given at a time; without it, what it says to run and a small reserve"""
    max_worker_prefill_tokens: Count | None = None
    """uncached prompt tokens in flight at which a worker is given no more; without it, no bound"""
    max_fleet_requests: Count | None = None
    """requests all workers are given at a time; without it, what each of them takes"""
    max_queued: Annotated[int, Meta(ge=0)] = 16384
    """requests that may wait for a worker with room, a model"""
    queue_timeout_s: Seconds = 60.0
    """time a request may wait; its header x-kvist-queue-timeout may say less"""
    workers_use_priority: bool = False
    """workers schedule by a request's priority: it is left in the body"""
    connect_timeout_s: Seconds = _UPSTREAM.connect_timeout_s
    """time that a connection to a worker may take to open"""
    first_byte_timeout_s: Seconds = _UPSTREAM.first_byte_timeout_s
    """time from a request to a worker to the first byte of its answer"""
    idle_timeout_s: Seconds = _UPSTREAM.idle_timeout_s
    """time between two pieces of a worker's answer"""
    request_timeout_s: Seconds | None = None
    """time for a whole request, all attempts and its answer included; without it, no bound"""
    drain_timeout_s: Seconds = 300.0
    """time a removed worker's requests may go on"""
    drain_delay_s: Annotated[float, Meta(ge=0)] = 0.0
    """at SIGTERM, time for which /readiness fails before connections are refused"""
    shutdown_timeout_s: Seconds = 180.0
    """at SIGTERM, time that running requests may then go on before they are ended"""

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
            check_event_source(self.replicas, "replicas")
        if self.isolation == "tenant" and self.isolation_secret is None:
            raise InvalidValueError("isolation_secret", None, "a secret, as isolation is by tenant")
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

    def changed_to(self, other: RouterConfig) -> tuple[RouterConfig, list[str], list[str]]:
        """Return this configuration with the reloadable fields of another, which changed, and which could not."""
        changed = [each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)]
        fixed = [name for name in changed if name not in RELOADED]
        if "policy" in changed and "kv" in (self.policy, other.policy):  # that needs an index, or has one too many
            fixed.append("policy")
        changed = [name for name in changed if name not in fixed]
        return replace(self, **{name: getattr(other, name) for name in changed}), changed, fixed

    @property
    def every_worker_url(self) -> tuple[str, ...]:
        """Return the workers of all roles, each once: one with a role may also be among `worker_urls`."""
        return tuple(dict.fromkeys((*self.worker_urls, *self.prefill_worker_urls, *self.decode_worker_urls)))

    @property
    def has_tenants(self) -> bool:
        """Return whether tenants are configured."""
        return self.tenants is not None or self.auth_url is not None

    @property
    def asks_for_keys(self) -> bool:
        """Return whether clients need a key."""
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
        """Return the URL of a router that listens on this port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_certificate is None else 'https'}://{host}:{port}"

    def role_of(self, url: str) -> Role | None:
        """Return the role configured for a worker, None where the worker's own counts."""
        if url in self.prefill_worker_urls:
            return Role.PREFILL
        return Role.DECODE if url in self.decode_worker_urls else None

    def of(self, model: str | None) -> RouterConfig:
        """Return the configuration of one model."""
        own = self.models.get(model or "")
        values = {} if own is None else {name: value for name, value in asdict(own).items() if value is not None}
        path = values.pop("path", self.model_path)
        return replace(self, **values, model_path=path, models={}, aliases={}, state_dir=None) if own else self

    def make_policy(self, alpha: float = DEFAULT_ALPHA) -> PriceSettings | PolicyName:
        """Return the settings of the `kv` policy, with a model's `alpha`, or the name of the other policy chosen."""
        return PriceSettings(alpha, self.tier_credits) if self.policy == "kv" else self.policy

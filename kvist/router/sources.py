"""URLs of sources that workers are discovered from, and the workers that they name.

    file:///PATH.toml, file:///PATH.json       a list of workers, checked each second
    dns://NAME:PORT                            the addresses of a name
    dns+srv://_SERVICE._tcp.NAME               the targets and ports of a service
    kubernetes://NAMESPACE/SERVICE             the endpoints of a service
    kubernetes://NAMESPACE?selector=LABELS     the pods with these labels
    kubernetes://NAMESPACE?pool=NAME           the pods of an InferencePool, at each of its ports
    nats://HOST:PORT/SUBJECT                   those that announce themselves

For names and pods, `?scheme=`, `?role=` and `?kv_event_source=` describe the workers; {host} is replaced by each one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct
from msgspec.structs import force_setattr

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, redacted
from kvist.events.transports.broker import BrokerUrl, is_broker_url
from kvist.http.pool import parse_base_url
from kvist.router.policy.decision import Role

ROLES = frozenset(role.value for role in Role)

_OF_WORKERS = ("scheme", "role", "kv_event_source")
_FORMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "file": ("file:///PATH.toml or file:///PATH.json", ()),
    "dns": ("dns://NAME:PORT", (*_OF_WORKERS, "nameserver")),
    "dns+srv": ("dns+srv://_SERVICE._tcp.NAME", (*_OF_WORKERS, "nameserver")),
    "kubernetes": (
        "kubernetes://NAMESPACE/SERVICE[?port=…], kubernetes://NAMESPACE?selector=…&port=… or …?pool=NAME",
        (*_OF_WORKERS, "selector", "port", "pool"),
    ),
}
"""The form of the URLs of each scheme, and the options that they may have."""


class WantedWorker(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker as a source or an administrator describes it. Raises InvalidValueError."""

    url: str
    kv_event_sources: tuple[str, ...] = ()
    role: Role | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "url", self.url.rstrip("/"))
        check_worker_url("url", self.url)
        for endpoint in self.kv_event_sources:
            check_event_source(endpoint)


@dataclass(frozen=True, slots=True)
class SourceUrl:
    """A parsed URL of a source; `name` is the URL without parts that may be secret."""

    scheme: str
    host: str
    port: int | None
    path: str
    options: Mapping[str, str]
    name: str
    nameserver: tuple[str, int] | None = None
    broker: BrokerUrl | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> SourceUrl:
        """Parse a URL; raises InvalidValueError, which shows no secret, for one of none of these forms."""
        if url.startswith("nats") and is_broker_url(url):
            try:
                broker = BrokerUrl.parse(url, "SUBJECT")
            except InvalidValueError as error:
                raise InvalidValueError("discover", error.value, error.expected) from None
            return cls("nats", "", None, broker.model, {}, broker.public, broker=broker)
        scheme, shown = url.partition("://")[0], redacted(url.partition("?")[0])
        if scheme not in _FORMS:
            forms = ", ".join(form for form, _ in _FORMS.values())
            raise InvalidValueError("discover", shown, f"one of {forms}, nats://HOST:PORT/SUBJECT")
        form, names = _FORMS[scheme]
        try:
            parts = urlsplit(url)
            port, options = parts.port, dict(parse_qsl(parts.query, keep_blank_values=True))
            asked = urlsplit(f"//{options['nameserver']}") if "nameserver" in options else None
            nameserver = None if asked is None else (str(ip_address(asked.hostname or "")), asked.port or 53)
        except ValueError:
            raise InvalidValueError("discover", shown, form) from None
        path, host = unquote(parts.path), parts.hostname or ""
        is_right = {
            "file": not host and Path(path).suffix in (".toml", ".json"),
            "dns": bool(host) and port is not None and not path,
            "dns+srv": host.startswith("_") and port is None and not path,
            "kubernetes": bool(host)
            and port is None
            and [bool(path.strip("/")), "selector" in options, "pool" in options].count(True) == 1,
        }[scheme]
        if not is_right or parts.username is not None or parts.fragment:
            raise InvalidValueError("discover", shown, form)
        for name, value in options.items():
            if name not in names or not value:
                given = f"{name}={value}" if name in names else name
                allowed = f"only the options {', '.join(names)}" if names else "no options"
                raise InvalidValueError("discover", shown, f"{allowed}, not {given}")
        for name, choices in (("scheme", ("http", "https")), ("role", sorted(ROLES))):
            if options.get(name, choices[0]) not in choices:
                raise InvalidValueError("discover", shown, f"{name} to be {' or '.join(choices)}, not {options[name]}")
        if "kv_event_source" in options:
            check_event_source(options["kv_event_source"].replace("{host}", "host"), "discover, kv_event_source")
        if "selector" in options and "port" not in options:
            raise InvalidValueError("discover", shown, "port=NAME_OR_NUMBER beside selector")
        if "pool" in options and "port" in options:
            raise InvalidValueError("discover", shown, "no port beside pool, which has its own")
        query = "&".join(f"{name}={value}" for name, value in options.items() if name != "kv_event_source")
        return cls(scheme, host, port, path, options, f"{shown}?{query}" if query else shown, nameserver)

    def worker(self, host: str, port: int, role: str | None = None) -> WantedWorker:
        """Return the worker at this address; an unknown role counts as none."""
        host = f"[{host}]" if ":" in host else host
        role = role if role in ROLES else self.options.get("role")
        stream = self.options.get("kv_event_source")
        return WantedWorker(
            f"{self.options.get('scheme', 'http')}://{host}:{port}",
            () if stream is None else (stream.replace("{host}", host),),
            None if role is None else Role(role),
        )


def check_worker_url(name: str, url: str) -> None:
    """Raise InvalidValueError unless the URL is that of a worker: no trailing slash, no user, no query."""
    parse_base_url(url, name)
    if url.endswith("/"):
        raise InvalidValueError(name, url, "http(s)://host[:port][/prefix] without a slash at its end")


def check_event_source(endpoint: str, name: str = "kv_event_sources") -> None:
    """Raise InvalidValueError unless the endpoint is the URL of an event stream."""
    try:
        Endpoint.parse(endpoint)
    except ValueError as error:
        raise InvalidValueError(name, redacted(endpoint), f"the URL of an event stream ({error})") from None

"""Streams on a broker: the URL that names one, and how its parts are written as subjects and topics.

docs/transports.md specifies both. A slash in a name is %2F: nats://broker/meta-llama%2FLlama-3.1-8B.
"""

from __future__ import annotations

import re
import ssl
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, unquote_to_bytes, urlencode

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message
from kvist.events.transports.received import MalformedCounter

STREAM, ASK, ANSWER = "kvist", "kvist-ask", "kvist-answer"
"""The first token of a subject or topic: of live events, which alone JetStream keeps, of questions, and of answers."""

_TLS_OPTIONS = ("tls_ca", "tls_cert", "tls_key")
PRIVATE_OPTIONS = (*_TLS_OPTIONS, "creds", "nkey")
"""Paths of files that prove who we are, and that mean nothing on another host."""
_VALUES = {
    "replay_port": (r"none|\d+", "none or a port"),
    "engine": (r"(?i:vllm|sglang)", "one of vllm, sglang"),
    "bind": (r"[01]", "0 or 1"),
    "eagle": (r"drop", "drop"),
    "jetstream": (r"[\w-]{1,64}", "a name of letters, digits, _ and -"),
    "max_age_s": (r"[1-9]\d{0,8}", "a positive number of seconds"),
    "max_bytes": (r"[1-9]\d{0,17}", "a positive number of bytes"),
    "deliver": (r"all", "all"),
}
"""The pattern of each option's value, and its description for errors; other options need only have a value."""
_HEADER = struct.Struct(">QQ")
_RANK = re.compile(rb"0|[1-9][0-9]{0,8}")


_NATS_OPTIONS = ("creds", "nkey", "jetstream", "max_age_s", "max_bytes", "deliver")
_DEFAULT_PORTS = {"nats": 4222, "nats+tls": 4222, "mqtt": 1883, "mqtts": 8883}


def is_broker_url(url: str) -> bool:
    return url.partition("://")[0] in _DEFAULT_PORTS


def redacted(text: str) -> str:
    """Return a text that may contain a broker's URL, without user and password."""
    return re.sub(r"(?<=://).*@", "***@", text, flags=re.DOTALL)


def public_url(url: str) -> str:
    """Return a valid URL of any stream for display: a broker's without login and files, others unchanged."""
    return BrokerUrl.parse(url).public if is_broker_url(url) else url


class Host(NamedTuple):
    """Where a broker listens; an IPv6 address has no brackets."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """A parsed broker URL. No text made from it contains user, password, or the files that prove who we are."""

    scheme: str
    hosts: tuple[Host, ...]
    model: str
    worker: str | None
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str, form: str = "MODEL[/WORKER]") -> BrokerUrl:
        """Parse and check a URL with a path of this form; raises InvalidValueError, which shows no secret."""
        scheme, _, rest = url.partition("://")
        if scheme not in _DEFAULT_PORTS:
            raise _invalid(url, f"one of the schemes {', '.join(_DEFAULT_PORTS)}")
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        userinfo, _, hosts = authority.rpartition("@")
        user, has_password, password = userinfo.partition(":")
        segments = path.split("/")
        if len(segments) > 1 + form.count("/") or not all(segments):
            raise _invalid(url, f"{scheme}://host:port/{form}, a slash within a name written as %2F")
        return cls(
            scheme,
            tuple(_hosts(url, hosts, _DEFAULT_PORTS[scheme])),
            unquote(segments[0]),
            unquote(segments[1]) if len(segments) > 1 else None,
            unquote(user) if user else None,
            unquote(password) if has_password else None,
            _options(url, scheme, query),
        )

    @property
    def is_mqtt(self) -> bool:
        return self.scheme.startswith("mqtt")

    @property
    def has_tls(self) -> bool:
        """Return whether the connection must be encrypted, and the broker's certificate checked."""
        return self.scheme in ("nats+tls", "mqtts")

    @property
    def public(self) -> str:
        """Return the URL without secrets and paths of files."""
        path = "/".join(quote(name, safe="") for name in (self.model, self.worker) if name is not None)
        shown = {name: value for name, value in self.options.items() if name not in PRIVATE_OPTIONS}
        query = f"?{urlencode(shown, safe='', quote_via=quote)}" if shown else ""
        return f"{self.scheme}://{','.join(map(str, self.hosts))}/{path}{query}"

    @property
    def has_secrets(self) -> bool:
        """Return whether the URL has a login or files, which `public` leaves out."""
        return self.user is not None or self.names_files

    @property
    def names_files(self) -> bool:
        """Return whether the URL names files of the host that opens it."""
        return any(name in PRIVATE_OPTIONS for name in self.options)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context with the URL's files, or None; raises InvalidValueError for unusable files."""
        if not self.has_tls:
            return None
        certificate = self.options.get("tls_cert")
        try:
            context = ssl.create_default_context(cafile=self.options.get("tls_ca"))
            if certificate is not None:
                context.load_cert_chain(certificate, self.options["tls_key"])
        except OSError as error:
            expected = f"tls_ca, tls_cert and tls_key to name PEM files ({error})"
            raise InvalidValueError("endpoint", self.public, expected) from None
        return context

    def with_worker(self, worker: str | None) -> BrokerUrl:
        """Return the URL with this worker; raises InvalidValueError if there is none, or the URL names another.

        Another is refused because a `MODEL` with a plain slash is parsed as a model and a worker.
        """
        if worker is not None and self.worker not in (None, worker):
            raise _invalid(self.public, f"{worker} as WORKER, or none; a slash within MODEL is written as %2F")
        if worker is None and self.worker is None:
            raise _invalid(self.public, f"{self.scheme}://host:port/MODEL/WORKER")
        return self if worker is None else replace(self, worker=worker)

    def name(self, kind: str, *tokens: str) -> str:
        """Return this worker's subject or topic, from `kind` to the last of these tokens."""
        assert self.worker is not None, "with_worker() comes first"
        return ("/" if self.is_mqtt else ".").join((kind, escape(self.model), escape(self.worker), *tokens))

    def token_of(self, topic: bytes) -> str:
        """Return the last token of a message's subject: the rank, or the whole topic if that is no rank's."""
        rank = topic.removeprefix(self._rank_topic)
        if rank != topic and _RANK.fullmatch(rank):
            return rank.decode()
        return f"-{escape(topic)}"

    def topic_of(self, token: str) -> bytes:
        """Return the topic that `token_of` made the token of."""
        return unquote_to_bytes(token[1:]) if token.startswith("-") else self._rank_topic + token.encode()

    @property
    def _rank_topic(self) -> bytes:
        return f"kv/{self.worker}/".encode()


def escape(name: str | bytes) -> str:
    """Return the name as one token of a subject or topic: all but letters, digits, `_`, `-`, `~` as %XX."""
    return quote(name, safe="").replace(".", "%2E")


def pack(publication_id: int, message: Message) -> bytes:
    """Encode a message for a broker; the publication's number is random, so that subscribers notice a restart."""
    return _HEADER.pack(publication_id, message.sequence) + message.payload


def unpack(topic: bytes, data: bytes, malformed: MalformedCounter) -> tuple[int, Message] | None:
    """Decode what `pack` returned into the publication's number and the message; count anything else, return None."""
    if len(data) < _HEADER.size:
        malformed.count_message([len(topic), len(data)])
        return None
    publication_id, sequence = _HEADER.unpack_from(data)
    return publication_id, Message(topic, sequence, data[_HEADER.size :])


def read_options(url: str, query: str, allowed: Iterable[str]) -> dict[str, str]:
    """Return the options of a URL, each checked by itself; raises InvalidValueError."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in allowed:
            shown = name.rpartition("@")[2]  # before it is the end of a password with a question mark
            raise _invalid(url, f"only the options {', '.join(allowed)}, not {shown}")
        pattern, expected = _VALUES.get(name, (r"(?s).+", "given"))
        if re.fullmatch(pattern, value, re.ASCII) is None:
            raise _invalid(url, f"{name} to be {expected}")
    return options


def _options(url: str, scheme: str, query: str) -> dict[str, str]:
    is_mqtt, has_tls = scheme in ("mqtt", "mqtts"), scheme in ("nats+tls", "mqtts")
    allowed = (*(() if is_mqtt else _NATS_OPTIONS), *(_TLS_OPTIONS if has_tls else ()), "engine")
    options = read_options(url, query, allowed)
    if not options.keys().isdisjoint(("max_age_s", "max_bytes", "deliver")) and "jetstream" not in options:
        raise _invalid(url, "jetstream=STREAM beside max_age_s, max_bytes and deliver")
    if ("tls_cert" in options) != ("tls_key" in options):
        raise _invalid(url, "tls_cert and tls_key together")
    return options


def _hosts(url: str, text: str, default_port: int) -> Iterable[Host]:
    for part in text.split(","):
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@\s]+)(?::(\d{1,5}))?", part, re.ASCII)
        port = default_port if match is None or match[2] is None else int(match[2])
        if match is None or not 1 <= port <= 65535:
            raise _invalid(url, "host:port, or several joined by commas")
        yield Host(match[1].strip("[]"), port)


def _invalid(url: str, expected: str) -> InvalidValueError:
    return InvalidValueError("endpoint", redacted(url), expected)

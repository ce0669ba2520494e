"""Traces requests through router and workers, as spans of one trace that are exported over OTLP/HTTP.

Code calls a `Span` for each step; where nothing is traced that is `NO_SPAN`, whose methods do nothing. `open_tracing`
switches tracing on. Only `otlp` imports OpenTelemetry, and it is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeAlias
from urllib.parse import urlsplit

from kvist.errors import InvalidValueError, MissingExtraError

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

__all__ = ["NO_SPAN", "Attributes", "Headers", "Span", "check_traces_endpoint", "open_tracing"]

Attributes: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""Attributes of a span; those that are None are left out."""

Headers: TypeAlias = list[tuple[bytes, bytes]]

_P = ParamSpec("_P")


class Span:
    """A step of a request that is not traced: its methods do nothing. Subclasses trace.

    A span begins when it is created, and ends by `end` or with its `with` block, whose exception becomes its error.
    Spans nest. All times are those of `time.monotonic`.
    """

    __slots__ = ()

    is_recorded = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """End the span; with an error, it has failed."""

    def step(self, name: str) -> Span:
        """Begin a nested step in this process."""
        return self

    def call(self, name: str) -> Span:
        """Begin a nested call to another process, to which `headers` passes the trace on."""
        return self

    def mark(self, name: str, attributes: Attributes) -> None:
        """Record a nested step that takes no time."""

    def record(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes, error: str | None = None
    ) -> None:
        """Record a nested step that has ended."""

    def set(self, describe: Callable[_P, Attributes], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Add the attributes that `describe` returns; it is not called where nothing is traced."""

    def fail(self, error: str) -> None:
        """Mark the span as failed, for this reason."""

    def stop(self) -> None:
        """Set the span's end to now, though its `with` block continues."""

    def headers(self, headers: Headers) -> Headers:
        """Return a request's headers with this trace in them, so that its receiver continues the trace."""
        return headers


NO_SPAN = Span()


def check_traces_endpoint(endpoint: str) -> str:
    """Return a collector's URL for traces, with `/v1/traces` if it has no path. Raises InvalidValueError."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise InvalidValueError("otlp_traces_endpoint", endpoint, "http(s)://host:port[/v1/traces] (OTLP over HTTP)")
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def open_tracing(endpoint: str, service_name: str, instance_id: str) -> Tracing:
    """Return a tracer that exports as OpenTelemetry's environment variables say; raises MissingExtraError."""
    try:
        from kvist.tracing.otlp import Tracing
    except ModuleNotFoundError as error:
        raise MissingExtraError("tracing", str(error.name)) from None
    return Tracing(endpoint, service_name, instance_id)

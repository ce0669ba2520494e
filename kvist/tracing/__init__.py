"""What becomes of one request, as spans of a trace that router and workers share; exported over OTLP/HTTP.

`Span` is how a request's way is told, and `NO_SPAN` what stands for it where nothing is traced: every call does
nothing. `open_tracing` switches it on. `otlp` alone imports OpenTelemetry, and is imported only then.
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
"""What a span says beside its name and times; None is left out."""

Headers: TypeAlias = list[tuple[bytes, bytes]]

_P = ParamSpec("_P")


class Span:
    """A step that is not traced: whatever is called does nothing. Subclasses trace.

    It has begun when it is made, and ends with its `with` block, whose error is its own, or by `end`. Steps of a step
    nest in it. All times are those of `time.monotonic`.
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
        """End the step, which came to nothing if there is an error."""

    def step(self, name: str) -> Span:
        return self

    def call(self, name: str) -> Span:
        """Begin a step that somebody else is asked to do: `headers` tells them."""
        return self

    def mark(self, name: str, attributes: Attributes) -> None:
        """Tell of something that takes no time."""

    def record(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes, error: str | None = None
    ) -> Span:
        """Tell of a step that has ended; return it, for steps of its own. This one may have ended long ago."""
        return self

    def set(self, describe: Callable[_P, Attributes], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Add what `describe` returns; it is not called where nothing is traced."""

    def fail(self, error: str) -> None:
        """Say why the step came to nothing."""

    def stop(self) -> None:
        """Let the step have ended now, though its block goes on."""

    def headers(self, headers: Headers) -> Headers:
        """Return the headers of a request, such that whoever gets it goes on with this trace."""
        return headers


NO_SPAN = Span()


def check_traces_endpoint(endpoint: str) -> str:
    """Return a collector's URL for traces; one without a path gets `/v1/traces`. Raises InvalidValueError."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise InvalidValueError("otlp_traces_endpoint", endpoint, "http(s)://host:port[/v1/traces] (OTLP over HTTP)")
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def open_tracing(endpoint: str, service_name: str, instance_id: str) -> Tracing:
    """Return what makes and exports spans, as OpenTelemetry's environment says; raises MissingExtraError."""
    try:
        from kvist.tracing.otlp import Tracing
    except ModuleNotFoundError as error:
        raise MissingExtraError("tracing", str(error.name)) from None
    return Tracing(endpoint, service_name, instance_id)

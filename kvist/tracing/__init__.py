"""What becomes of one request, as spans of a trace that router and workers share; exported over OTLP/HTTP.

`Span` is how a request's way is told, and `NO_SPAN` what stands for it where nothing is traced: every call does
nothing. `open_tracing` switches it on. `otlp` alone imports OpenTelemetry, and is imported only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.errors import MissingExtraError
from kvist.tracing.span import NO_SPAN, Attributes, Headers, Span, check_traces_endpoint

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

__all__ = ["NO_SPAN", "Attributes", "Headers", "Span", "check_traces_endpoint", "open_tracing"]


def open_tracing(endpoint: str, service_name: str, instance_id: str) -> Tracing:
    """Return what makes and exports the spans of this service; close it in the end.

    The endpoint is that of a collector, as `check_traces_endpoint` wants it. Everything else is told by OpenTelemetry's
    environment variables, which also win over the names given here. Raises MissingExtraError.
    """
    try:
        from kvist.tracing.otlp import Tracing
    except ModuleNotFoundError as error:
        raise MissingExtraError("tracing", str(error.name)) from None
    return Tracing(endpoint, service_name, instance_id)

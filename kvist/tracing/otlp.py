"""Spans for OpenTelemetry: made from recorded times, sampled as the client's trace is, exported by a thread.

The SDK samples, batches and exports, as its environment variables say (`OTEL_*`: sampler, limits of the queue, headers,
certificates, resource). Spans are built here, once they have ended: the SDK's own live spans cost ten times as much (31
and 3 µs each, on a 2-core x86-64 VM, 2026-11-21), which a router would pay some six times a request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NoOpTracer, SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist import __version__
from kvist.tracing import NO_SPAN, Attributes, Headers, Span, check_traces_endpoint

logger = logging.getLogger(__name__)

_TRACE_HEADERS = (b"traceparent", b"tracestate")
_NS_PER_S = 1_000_000_000


class Tracing(Collector):
    """Begins the traces of requests and exports their spans. One thread makes spans; another, the SDK's, exports them.

    The queue is bounded and drops the oldest; a collector that cannot be reached costs requests nothing. As a
    Prometheus collector it says how many spans were made, exported and lost.
    """

    def __init__(self, endpoint: str, service_name: str, instance_id: str) -> None:
        names = {"service.name": service_name, "service.instance.id": instance_id, "service.version": __version__}
        resource = Resource.create(names).merge(OTELResourceDetector().detect())  # whose names win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._is_disabled = isinstance(self._provider.get_tracer("kvist"), NoOpTracer)
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = _WatchedExporter(check_traces_endpoint(endpoint))
        self._processor = BatchSpanProcessor(self._exporter)
        self._scope = InstrumentationScope("kvist", __version__)
        self._closing: threading.Thread | None = None
        self._num_made = 0

    def request(self, name: str, headers: Headers, attributes: Attributes) -> Span:
        """Begin a request's trace here, or go on with its client's; a trace that is not sampled is passed on alone."""
        if self._is_disabled:
            return NO_SPAN
        carrier: dict[str, list[str]] = {}
        for header, value in headers:
            if header in _TRACE_HEADERS:
                carrier.setdefault(header.decode(), []).append(value.decode("latin-1"))
        parent_context = self._propagator.extract(carrier) if carrier else Context()
        parent = get_current_span(parent_context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._provider.id_generator.generate_trace_id()
        said = _without_none(attributes)
        sampling = self._provider.sampler.should_sample(parent_context, trace_id, name, SpanKind.SERVER, said)
        is_sampled = sampling.decision is Decision.RECORD_AND_SAMPLE
        flags = (parent.trace_flags & ~TraceFlags.SAMPLED) | (TraceFlags.SAMPLED if is_sampled else 0)
        span_id = self._provider.id_generator.generate_span_id()
        context = SpanContext(trace_id, span_id, False, TraceFlags(flags), sampling.trace_state)
        if not is_sampled:
            return _PassedOn(context)
        said = dict(sampling.attributes or {})
        offset_ns = time.time_ns() - time.monotonic_ns()
        return _Recorded(self, name, context, parent if parent.is_valid else None, offset_ns, SpanKind.SERVER, said)

    def close(self, timeout_s: float) -> None:
        """Export what is left, for so long; what is not exported then is lost. Idempotent."""

        def close() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            self._exporter.complaints.close()

        if self._closing is None:
            self._closing = threading.Thread(target=close, name="kvist-traces", daemon=True)
            self._closing.start()
        self._closing.join(timeout_s)
        self._exporter.shutdown()

    def collect(self) -> Iterator[Metric]:
        """Yield the counts; what was made and neither exported nor lost waits, or found the queue full."""
        for name, text, value in (
            ("made", "Spans of requests that were sampled.", self._num_made),
            ("exported", "Spans that the collector took.", self._exporter.num_exported),
            ("lost", "Spans that it did not take.", self._exporter.num_lost),
        ):
            yield CounterMetricFamily(f"kvist_trace_spans_{name}", text, value)

    def child_of(self, parent: SpanContext) -> SpanContext:
        """Return the context of a new span of the same trace."""
        span_id = self._provider.id_generator.generate_span_id()
        return SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)

    def ended(self, span: _Recorded, end_ns: int, error: str | None) -> None:
        """Queue a span for export."""
        self._num_made += 1
        made = ReadableSpan(
            span.name,
            context=span.context,
            parent=span.parent,
            resource=self._provider.resource,
            attributes=span.attributes,
            kind=span.kind,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=span.start_ns,
            end_time=max(end_ns, span.start_ns),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(made)


class _PassedOn(Span):
    """A step of a trace that is not sampled: others are told so, and nothing else is done."""

    __slots__ = ("context",)

    def __init__(self, context: SpanContext) -> None:
        self.context = context

    def headers(self, headers: Headers) -> Headers:
        context = self.context
        kept = [field for field in headers if field[0] not in _TRACE_HEADERS]
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        kept.append((b"traceparent", parent.encode()))
        if context.trace_state:
            kept.append((b"tracestate", context.trace_state.to_header().encode("latin-1")))
        return kept


class _Recorded(_PassedOn):
    """A step that is traced; its wall-clock times are monotonic ones, all of a request by one offset."""

    __slots__ = ("_end_ns", "_error", "_offset_ns", "_tracing", "attributes", "kind", "name", "parent", "start_ns")

    is_recorded = True

    def __init__(
        self,
        tracing: Tracing,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        offset_ns: int,
        kind: SpanKind,
        attributes: dict[str, Any],
        began_s: float | None = None,
    ) -> None:
        super().__init__(context)
        self._tracing = tracing
        self._offset_ns = offset_ns
        self._error: str | None = None
        self._end_ns: int | None = None
        self.name = name
        self.parent = parent
        self.kind = kind
        self.attributes = attributes
        self.start_ns = self._wall_ns(began_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.attributes.setdefault("error.type", kind.__name__)
            self.fail(str(error) or kind.__name__)
        self._tracing.ended(self, self._wall_ns(None) if self._end_ns is None else self._end_ns, self._error)

    def step(self, name: str) -> Span:
        return self._child(name, SpanKind.INTERNAL, {})

    def call(self, name: str) -> Span:
        return self._child(name, SpanKind.CLIENT, {})

    def mark(self, name: str, attributes: Attributes) -> None:
        child = self._child(name, SpanKind.INTERNAL, _without_none(attributes))
        self._tracing.ended(child, child.start_ns, None)

    def record(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes, error: str | None = None
    ) -> Span:
        child = self._child(name, SpanKind.INTERNAL, _without_none(attributes), began_s)
        self._tracing.ended(child, self._wall_ns(ended_s), error)
        return child

    def set(self, describe: Any, *args: Any, **kwargs: Any) -> None:
        self.attributes.update(_without_none(describe(*args, **kwargs)))

    def fail(self, error: str) -> None:
        self._error = error

    def stop(self) -> None:
        self._end_ns = self._wall_ns(None)

    def _child(self, name: str, kind: SpanKind, attributes: dict[str, Any], began_s: float | None = None) -> _Recorded:
        context = self._tracing.child_of(self.context)
        return _Recorded(self._tracing, name, context, self.context, self._offset_ns, kind, attributes, began_s)

    def _wall_ns(self, at_s: float | None) -> int:
        return (time.monotonic_ns() if at_s is None else int(at_s * _NS_PER_S)) + self._offset_ns


class _WatchedExporter(SpanExporter):
    """Counts what is exported and what is lost, and says once when either begins, where the SDK would each time."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._inner = OTLPSpanExporter(endpoint=endpoint)
        self.complaints = _Complaints()
        self._is_failing = False
        self._is_shut_down = False
        self.num_exported = 0
        self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        is_ok = result is SpanExportResult.SUCCESS
        if is_ok:
            self.num_exported += len(spans)
        else:
            self.num_lost += len(spans)
        reason = self.complaints.take()
        if not is_ok and not self._is_failing:
            logger.warning("traces are not taken and will be lost url=%s reason=%s", self._endpoint, reason)
        elif is_ok and self._is_failing:
            logger.info("traces are taken again url=%s num_lost=%d", self._endpoint, self.num_lost)
        self._is_failing = not is_ok
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]


class _Complaints(logging.Filter):
    """Keeps from the log what the SDK would repeat with every batch, and the exporter's first words as a reason.

    Keeps from it too what OpenTelemetry says of headers that cannot be read: any client could fill the log with that.
    """

    _EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    _LOGGERS = (
        _EXPORTER,
        "opentelemetry.sdk._shared_internal",
        "opentelemetry.sdk.trace.export",  # instead of the one above, of old
        "opentelemetry.trace.propagation.tracecontext",
        "opentelemetry.trace.span",  # of a trace state
    )

    def __init__(self) -> None:
        super().__init__()
        self._first: str | None = None
        for name in self._LOGGERS:
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if self._first is None and record.name == self._EXPORTER:
            self._first = record.getMessage()
        return False

    def take(self) -> str | None:
        """Return the first complaint since the last call."""
        first, self._first = self._first, None
        return first

    def close(self) -> None:
        """Let the loggers speak again."""
        for name in self._LOGGERS:
            logging.getLogger(name).removeFilter(self)


def _without_none(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}

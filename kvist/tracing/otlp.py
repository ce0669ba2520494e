"""Spans made and exported by the OpenTelemetry SDK: sampled as the client's trace is, exported by a separate thread.

The SDK samples, batches and exports as its environment variables say (`OTEL_*`: sampler, limits of the queue, headers,
certificates, resource). A span costs 20 µs; a trace that is not sampled costs one span per request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import opentelemetry.trace as trace  # `from opentelemetry`, which other packages bring, would find it without `trace`
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist import __version__
from kvist.tracing import NO_SPAN, Attributes, Headers, Span, check_traces_endpoint

logger = logging.getLogger(__name__)

_TRACE_HEADERS = (b"traceparent", b"tracestate")
_NS_PER_S = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing(Collector):
    """Begins the traces of requests and exports their spans. One thread makes spans; another, the SDK's, exports them.

    The queue is bounded and drops the oldest; a collector that cannot be reached does not slow requests. As a
    Prometheus collector it counts the spans made, exported and lost.
    """

    def __init__(self, endpoint: str, service_name: str, instance_id: str) -> None:
        names = {"service.name": service_name, "service.instance.id": instance_id, "service.version": __version__}
        resource = Resource.create(names).merge(OTELResourceDetector().detect())  # whose names win
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracer = provider.get_tracer("kvist", __version__)
        self._exporter = _WatchedExporter(check_traces_endpoint(endpoint))
        self._processor = _CountingProcessor(self._exporter)
        provider.add_span_processor(self._processor)
        self._closing: threading.Thread | None = None

    def request(self, name: str, headers: Headers, attributes: Attributes) -> Span:
        """Begin a request's trace, or continue its client's; one that is not sampled is only passed on."""
        if isinstance(self._tracer, trace.NoOpTracer):
            return NO_SPAN
        carrier: dict[str, list[str]] = {}
        for header, value in headers:
            if header in _TRACE_HEADERS:
                carrier.setdefault(header.decode(), []).append(value.decode("latin-1"))
        parent = _PROPAGATOR.extract(carrier) if carrier else Context()
        offset_ns = time.time_ns() - time.monotonic_ns()
        began_ns = time.monotonic_ns() + offset_ns
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, _without_none(attributes), start_time=began_ns)
        return _Recorded(self._tracer, span, offset_ns) if span.is_recording() else _PassedOn(span)

    def close(self, timeout_s: float) -> None:
        """Export the spans that are left; those not exported within the timeout are lost. Idempotent."""

        def close() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            self._exporter.remove_filters()

        if self._closing is None:
            self._closing = threading.Thread(target=close, name="kvist-traces", daemon=True)
            self._closing.start()
        self._closing.join(timeout_s)
        self._exporter.shutdown()

    def collect(self) -> Iterator[Metric]:
        """Yield the counts; spans made but neither exported nor lost are in the queue, or were dropped from it."""
        for name, text, value in (
            ("made", "Spans of requests that were sampled.", self._processor.num_made),
            ("exported", "Spans that the collector took.", self._exporter.num_exported),
            ("lost", "Spans that could not be exported.", self._exporter.num_lost),
        ):
            yield CounterMetricFamily(f"kvist_trace_spans_{name}", text, value)


class _PassedOn(Span):
    """A span of a trace that is not sampled: it only passes the trace on to other processes."""

    __slots__ = ("_context",)

    def __init__(self, span: trace.Span) -> None:
        self._context = trace.set_span_in_context(span, Context())

    def headers(self, headers: Headers) -> Headers:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        kept = [field for field in headers if field[0] not in _TRACE_HEADERS]
        return [*kept, *((name.encode(), value.encode("latin-1")) for name, value in carrier.items())]


class _Recorded(_PassedOn):
    """A span that is traced; wall-clock times are monotonic times plus one offset per request."""

    __slots__ = ("_end_ns", "_offset_ns", "_span", "_tracer")

    is_recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset_ns: int) -> None:
        super().__init__(span)
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns
        self._end_ns: int | None = None

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self.fail(str(error) or type(error).__name__)
        self._span.end(self._wall_ns() if self._end_ns is None else self._end_ns)

    def step(self, name: str) -> Span:
        return self._child(name, SpanKind.INTERNAL, {}, self._wall_ns())

    def call(self, name: str) -> Span:
        return self._child(name, SpanKind.CLIENT, {}, self._wall_ns())

    def mark(self, name: str, attributes: Attributes) -> None:
        now_ns = self._wall_ns()
        self._child(name, SpanKind.INTERNAL, attributes, now_ns)._span.end(now_ns)

    def record(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes, error: str | None = None
    ) -> None:
        child = self._child(name, SpanKind.INTERNAL, attributes, self._wall_ns(began_s))
        if error is not None:
            child.fail(error)
        child._span.end(self._wall_ns(max(began_s, ended_s)))

    def set(self, describe: Any, *args: Any, **kwargs: Any) -> None:
        self._span.set_attributes(_without_none(describe(*args, **kwargs)))

    def fail(self, error: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, error))

    def stop(self) -> None:
        self._end_ns = self._wall_ns()

    def _child(self, name: str, kind: SpanKind, attributes: Attributes, began_ns: int) -> _Recorded:
        span = self._tracer.start_span(name, self._context, kind, _without_none(attributes), start_time=began_ns)
        return _Recorded(self._tracer, span, self._offset_ns)

    def _wall_ns(self, at_s: float | None = None) -> int:
        return (time.monotonic_ns() if at_s is None else int(at_s * _NS_PER_S)) + self._offset_ns


class _CountingProcessor(BatchSpanProcessor):
    """Counts all spans that were made, also those for which the queue has no room."""

    num_made = 0

    def on_end(self, span: ReadableSpan) -> None:
        self.num_made += 1
        super().on_end(span)


class _WatchedExporter(SpanExporter, logging.Filter):
    """Counts exported and lost spans, and logs only when exports begin to fail or succeed; the SDK logs each failure.

    As a filter it mutes the SDK's messages about failures, of which it keeps the first as the reason, and
    OpenTelemetry's about malformed headers, with which any client could fill the log.
    """

    _EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    _SILENCED = (
        _EXPORTER,
        "opentelemetry.sdk._shared_internal",
        "opentelemetry.sdk.trace.export",  # what older versions have instead of the one above
        "opentelemetry.trace.propagation.tracecontext",
        "opentelemetry.trace.span",  # malformed trace states
    )

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._inner = OTLPSpanExporter(endpoint=endpoint)
        self._is_failing = self._is_shut_down = False
        self._reason: str | None = None
        self.num_exported = self.num_lost = 0
        for name in self._SILENCED:
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if self._reason is None and record.name == self._EXPORTER:
            self._reason = record.getMessage()
        return False

    def remove_filters(self) -> None:
        for name in self._SILENCED:
            logging.getLogger(name).removeFilter(self)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        is_ok = result is SpanExportResult.SUCCESS
        self.num_exported += len(spans) if is_ok else 0
        self.num_lost += 0 if is_ok else len(spans)
        if not is_ok and not self._is_failing:
            logger.warning("traces cannot be exported and are dropped url=%s reason=%s", self._endpoint, self._reason)
        elif is_ok and self._is_failing:
            logger.info("traces are exported again url=%s num_lost=%d", self._endpoint, self.num_lost)
        self._is_failing, self._reason = not is_ok, None
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]


def _without_none(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}

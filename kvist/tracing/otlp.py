"""Spans made and exported by the OpenTelemetry SDK: sampled as the client's trace is, exported by a separate thread.

The SDK samples, batches and exports as its environment variables say (`OTEL_*`: sampler, limits of the queue, headers,
certificates, resource). A span costs 20 µs; a trace that is not sampled costs one span per request.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import opentelemetry.trace as trace  # `from opentelemetry`, which other packages bring, would find it without `trace`
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvist import __version__
from kvist.tracing import NO_SPAN, Attributes, Headers, Span, check_traces_endpoint

_TRACE_HEADERS = (b"traceparent", b"tracestate")
_NS_PER_S = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()


class _OnceAMinute(logging.Filter):
    """Passes one message a minute."""

    next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        is_due = record.created >= self.next_s
        if is_due:
            self.next_s = record.created + 60.0
        return is_due


export_log = _OnceAMinute()
"""The SDK logs each try to reach the collector, and that the queue is full."""
for _name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal"):
    logging.getLogger(_name).addFilter(export_log)
for _name in ("opentelemetry.trace.propagation.tracecontext", "opentelemetry.trace.span"):
    logging.getLogger(_name).addFilter(lambda _: False)  # a client could fill the log with malformed headers


class Tracing:
    """Begins the traces of requests and exports their spans. One thread makes spans; another, the SDK's, exports them.

    The queue is bounded and drops the oldest; a collector that cannot be reached does not slow requests.
    """

    def __init__(self, endpoint: str, service_name: str, instance_id: str) -> None:
        names = {"service.name": service_name, "service.instance.id": instance_id, "service.version": __version__}
        resource = Resource.create(names).merge(OTELResourceDetector().detect())  # whose names win
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracer = provider.get_tracer("kvist", __version__)
        self._exporter = OTLPSpanExporter(endpoint=check_traces_endpoint(endpoint))
        self._processor = BatchSpanProcessor(self._exporter)
        provider.add_span_processor(self._processor)

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
        """Export the spans that are left; those not exported within the timeout are lost."""
        closing = threading.Thread(target=self._processor.shutdown, name="kvist-traces", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


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


def _without_none(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}

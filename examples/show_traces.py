"""Receive traces over OTLP/HTTP and print each as a tree: when a step began, and how many milliseconds it took.

    python examples/show_traces.py
    kvist up --disaggregated --otlp-traces-endpoint http://127.0.0.1:4318

A trace is printed once nothing has been added to it for a while: each process exports its spans every five seconds,
or as often as OTEL_BSP_SCHEDULE_DELAY says. To keep traces, use Jaeger, Tempo or another collector that accepts OTLP.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SHOWN = re.compile(r"kvist[.](.*worker|.*_tokens|local|reason)|gen_ai[.]usage|http[.]response")
traces: dict[bytes, list[tuple[str, Any]]] = defaultdict(list)  # of each trace, services and spans
changed_s: dict[bytes, float] = {}


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for process in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in process.resource.attributes}
            for span in (span for scope in process.scope_spans for span in scope.spans):
                traces[span.trace_id].append((names["service.name"], span))
                changed_s[span.trace_id] = time.monotonic()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def print_tree(spans: list[tuple[str, Any]]) -> None:
    """Print each span below its parent; at the top those whose parent is not here, but the client's."""
    known = {span.span_id for _, span in spans}
    children: dict[bytes, list[tuple[str, Any]]] = defaultdict(list)
    for service, span in sorted(spans, key=lambda each: each[1].start_time_unix_nano):
        children[span.parent_span_id if span.parent_span_id in known else b""].append((service, span))
    began_ns = min(span.start_time_unix_nano for _, span in spans)

    def print_below(parent_id: bytes, parent_service: str | None, indent: str) -> None:
        for service, span in children[parent_id]:
            start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
            name = span.name if service == parent_service else f"{span.name} [{service}]"
            took = f"{(start_ns - began_ns) / 1e6:9.2f} {(end_ns - start_ns) / 1e6:9.2f}"
            print(f"{took}  {indent + name:30} {facts_of(span)}".rstrip(), flush=True)
            print_below(span.span_id, service, indent + "  ")

    print(f"\n    at ms   took ms  trace {spans[0][1].trace_id.hex()}")
    print_below(b"", None, "")


def facts_of(span: Any) -> str:
    facts = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    shown = [f"{name.partition('.')[2]}={value}" for name, value in facts.items() if SHOWN.match(name)]
    return " ".join([*shown, *([f"error: {span.status.message}"] if span.status.message else [])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--quiet-s", type=float, default=6.0, help="when nothing more is expected of a trace")
    args = parser.parse_args()
    with HTTPServer(("127.0.0.1", args.port), Receiver) as server:
        server.timeout = 0.1
        while True:
            server.handle_request()
            for trace_id in [name for name, at_s in changed_s.items() if time.monotonic() - at_s > args.quiet_s]:
                del changed_s[trace_id]
                print_tree(traces.pop(trace_id))

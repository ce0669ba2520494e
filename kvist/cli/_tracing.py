"""How commands that serve trace requests: their flag, and what exports a worker's spans."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvist.tracing import open_tracing

if TYPE_CHECKING:
    from kvist.tracing.otlp import Tracing

_SERVICES = {"both": "kvist-worker", "prefill": "kvist-prefill", "decode": "kvist-decode"}


def add_tracing_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where to send traces, http://host:port[/v1/traces] (OTLP over HTTP; the extra tracing)",
    )


def open_worker_tracing(args: argparse.Namespace, worker: str) -> Tracing | None:
    """Return what exports this worker's spans, None without the flag; raises InvalidValueError or MissingExtraError."""
    if args.otlp_traces_endpoint is None:
        return None
    return open_tracing(args.otlp_traces_endpoint, _SERVICES[args.role], worker)

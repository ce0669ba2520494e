"""`kvist epp`: the endpoint picker of the Gateway API, by the settings of `kvist route`."""

from __future__ import annotations

import argparse
import asyncio

from kvist.cli import route
from kvist.cli._terminal import serve
from kvist.errors import InvalidValueError
from kvist.files import file_stamp

HELP = "run an endpoint picker for the Gateway API inference extension (Envoy ext_proc)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    route.add_arguments(parser)
    text = "HTTP port for /metrics, /readiness and the other administrative endpoints of `kvist route` (default: none)"
    parser.add_argument("--metrics-port", type=int, help=text)


def run(args: argparse.Namespace) -> int:
    from kvist.router.doors.picker import Picker

    if args.metrics_port is not None and not 0 <= args.metrics_port <= 65535:
        raise InvalidValueError("--metrics-port", args.metrics_port, "0 to 65535")
    stamp, config = file_stamp(args.config), route.make_config(args)
    picker = Picker(config, args.metrics_port)
    service = route.reloading(picker, args, stamp)
    return asyncio.run(serve(service, lambda _: f"kvist epp: listening on {config.url_at(picker.port)}"))

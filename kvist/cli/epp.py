"""`kvist epp`: the endpoint picker of the Gateway API, by the settings of `kvist route`."""

from __future__ import annotations

import argparse
import asyncio

from kvist.cli._terminal import serve
from kvist.cli.route import add_arguments, make_config

__all__ = ["HELP", "add_arguments", "run"]

HELP = "pick endpoints for a gateway of Kubernetes' Gateway API (Envoy's ext_proc)"


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from kvist.router.doors.picker import Picker

    config = make_config(args)
    return asyncio.run(serve(Picker(config), lambda picker: f"kvist epp: listening on {config.url_at(picker.port)}"))

"""`kvist index`: the index as a service, from flags or a TOML file with the same keys."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from functools import partial

from kvist.cli._settings import add_settings, read_config
from kvist.cli._terminal import serve
from kvist.indexer.service.config import IndexConfig

HELP = "index a fleet's KV events and answer which workers hold a prefix"

# A comma may also separate the hosts of a broker's URL.
_SEPARATORS = {"workers": r",(?=[^,=]*=\s*[a-z+]+://|\s*$)", "peers": ",", "allow_endpoints": ","}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, IndexConfig, {name: {"action": "append", "metavar": "VALUE"} for name in _SEPARATORS})


def run(args: argparse.Namespace) -> int:
    config, started_s = make_config(args), time.monotonic()
    from kvist.indexer.service.service import IndexService

    def ready_line(service: IndexService) -> str:
        start_s = time.monotonic() - started_s
        return f"kvist index: listening on {service.url} streams={len(config.workers)} start_s={start_s:.2f}"

    return asyncio.run(serve(IndexService(config, started_s), ready_line))


def make_config(args: argparse.Namespace) -> IndexConfig:
    return read_config(args, IndexConfig, {name: partial(_split, pattern) for name, pattern in _SEPARATORS.items()})


def _split(pattern: str, texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in re.split(pattern, text) if part.strip()]

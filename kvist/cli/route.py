"""`kvist route`: the router, from flags or a TOML file with the same keys."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol

import msgspec

from kvist.cli._settings import SEVERAL, add_settings, read_config
from kvist.cli._terminal import serve
from kvist.contexts import BackgroundTasks
from kvist.errors import InvalidValueError, KvistError
from kvist.events.transports import redacted
from kvist.files import Stamp, file_stamp
from kvist.router.config import RouterConfig

logger = logging.getLogger(__name__)

HELP = "route OpenAI requests to the worker that holds their prefix"

_POLL_INTERVAL_S = 1.0
"""How often the file is checked for changes."""

_EVENT_SOURCES = "kv_event_sources"
_GROUPS = {
    "worker_urls": "workers",
    "max_local_prefill_tokens": "routing",
    "kv_event_sources": "workers",
    "policy": "routing",
    "block_size": "what workers hold",
    "host": "listening",
    "tls_certificate": "security",
    "max_body_bytes": "listening",
    "access_log": "logs and traces",
    "max_attempts": "routing",
    "health_interval_s": "health of workers",
    "max_worker_requests": "admission",
    "connect_timeout_s": "timeouts",
}
"""Titles of the help, from these keys on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = {"flag": "--kv-event-source", "metavar": "URL=ENDPOINT", **SEVERAL}
    model = {"flag": "--model", "metavar": "NAME=DIRECTORY", **SEVERAL}
    alias = {"flag": "--alias", "metavar": "NAME=MODEL[@SHARE]", **SEVERAL}
    add_settings(parser, RouterConfig, {_EVENT_SOURCES: sources, "models": model, "aliases": alias}, _GROUPS)
    parser.add_argument("--part", help=argparse.SUPPRESS)  # from a supervisor to the processes it starts


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; read the settings again at SIGHUP and when their file changes."""
    stamp, started_s = file_stamp(args.config), time.monotonic()
    config = make_config(args)
    if args.part is not None:
        return _run_part(args, config, stamp, started_s)
    from kvist.router.fleet.replicas import num_replicas
    from kvist.router.processes.supervisor import Supervisor, num_fronts

    if (number := num_fronts(config.processes)) > 1:
        supervisor = Supervisor(
            [sys.executable, "-P", "-m", "kvist", *sys.argv[1:]], config.host, config.port, number, num_replicas(config)
        )
        url = config.url_at(supervisor.port)
        return supervisor.run(lambda: print(f"{_ready_line(config, url)} processes={number}", flush=True))
    from kvist.router.doors.service import RouterService

    service = RouterService(config, started_s)
    return asyncio.run(serve(reloading(service, args, stamp), lambda _: _ready_line(config, service.url)))


def _ready_line(config: RouterConfig, url: str) -> str:
    discover = f" discover={len(config.discover)}" if config.discover else ""
    return f"kvist route: listening on {url} policy={config.policy} workers={len(config.every_worker_url)}{discover}"


def _run_part(args: argparse.Namespace, config: RouterConfig, stamp: Stamp, started_s: float) -> int:
    from kvist.router.processes.front import end_with_supervisor, make_part
    from kvist.router.processes.supervisor import Part, installed_code
    from kvist.router.recording import Beginning

    part = msgspec.json.decode(args.part, type=Part)
    if part.code != (code := installed_code()):  # neither memory nor messages are shared with other code
        raise KvistError(f"kvist {code} is installed, but the router was started by {part.code}: restart the router")
    recording = msgspec.json.decode(sys.stdin.buffer.readline(), type=Beginning)  # not of argv, which others see

    async def run() -> int:
        end_with_supervisor(part)
        return await serve(reloading(make_part(config, part, started_s, recording), args, stamp), lambda _: "")

    return asyncio.run(run())


class _Reloadable(AbstractAsyncContextManager[Any], Protocol):
    def reload(self, config: RouterConfig) -> None: ...


@asynccontextmanager
async def reloading(service: _Reloadable, args: argparse.Namespace, stamp: Stamp) -> AsyncIterator[None]:
    """Run a service that reloads its settings at SIGHUP, and when its file is not the one that had this stamp."""
    requested = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, requested.set)
    async with service, BackgroundTasks() as tasks:
        tasks.create_task(_watch_settings(service, args, stamp, requested), name="kvist-settings")
        yield


async def _watch_settings(
    service: _Reloadable, args: argparse.Namespace, stamp: Stamp, requested: asyncio.Event
) -> None:
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(None if args.config is None else _POLL_INTERVAL_S):
                await requested.wait()
        last, stamp = stamp, file_stamp(args.config)
        if requested.is_set() or stamp != last:
            requested.clear()
            try:
                service.reload(make_config(args))
            except InvalidValueError as error:
                logger.error("settings not reloaded reason=%s", error)


def make_config(args: argparse.Namespace) -> RouterConfig:
    """Return the configuration of the file overridden by the flags; raises InvalidValueError."""
    parsers = {_EVENT_SOURCES: _parse_event_sources, "models": _parse_models, "aliases": _parse_aliases}
    return read_config(args, RouterConfig, parsers)


def _parse_event_sources(texts: list[str]) -> dict[str, list[str]]:
    sources: dict[str, list[str]] = {}
    for url, endpoint in _parse_pairs("kv-event-source", "URL=ENDPOINT", texts):
        sources.setdefault(url, []).append(endpoint)
    return sources


def _parse_models(texts: list[str]) -> dict[str, dict[str, str]]:
    return {name: {"path": path} for name, path in _parse_pairs("model", "NAME=DIRECTORY", texts)}


def _parse_aliases(texts: list[str]) -> dict[str, dict[str, str]]:
    aliases: dict[str, dict[str, str]] = {}
    for name, text in _parse_pairs("alias", "NAME=MODEL[@SHARE]", texts):
        model, _, share = text.rpartition("@") if "@" in text else (text, "", "1")
        aliases.setdefault(name, {})[model] = share
    return aliases


def _parse_pairs(flag: str, expected: str, texts: list[str]) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in texts]
    for text, (name, found, value) in zip(texts, pairs, strict=True):
        if not (name and found and value):
            raise InvalidValueError(flag, redacted(text), expected)
    return [(name, value) for name, _, value in pairs]

"""`kvist route`: the router, from flags or a TOML file with the same keys."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from typing import Any

from kvist.errors import InvalidValueError
from kvist.router.config import POLICY_NAMES, RouterConfig, option_help, parse_values, read_toml

HELP = "route OpenAI requests to the worker that holds their prefix"

# Keys that take several values, and how the command line spells them.
_LISTS = ("worker_urls", "allowed_event_networks", "tier_credits")
_EVENT_SOURCES = "kv_event_sources"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each key of the configuration."""
    parser.add_argument("--config", type=Path, help="TOML file with the same keys (underscores for dashes); flags win")
    for name, text in option_help().items():
        flag = "--" + name.replace("_", "-")
        default = getattr(RouterConfig(), name)
        options: dict[str, Any] = {"help": f"{text} (default: {_shown(default)})", "default": argparse.SUPPRESS}
        if name == _EVENT_SOURCES:
            parser.add_argument("--kv-event-source", dest=name, action="append", metavar="URL=ENDPOINT", **options)
        elif name in _LISTS:
            parser.add_argument(flag, nargs="+", metavar="VALUE", **options)
        elif name == "policy":
            parser.add_argument(flag, type=str.lower, choices=POLICY_NAMES, **options)
        else:
            parser.add_argument(flag, metavar="VALUE", **options)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    return asyncio.run(_serve(make_config(args)))


def make_config(args: argparse.Namespace) -> RouterConfig:
    """Return the configuration of the file overridden by the flags; raises InvalidValueError."""
    from_file = read_toml(args.config) if args.config is not None else {}
    given = {name: value for name, value in vars(args).items() if name in option_help()}
    if _EVENT_SOURCES in given:
        given[_EVENT_SOURCES] = _event_sources(given[_EVENT_SOURCES])
    # A file has types, so its values are checked as they are; flags are text.
    return RouterConfig(**parse_values(from_file) | parse_values(given, strict=False))


async def _serve(config: RouterConfig) -> int:
    from kvist.router.service import RouterService

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with RouterService(config) as service:
        num_workers = len(config.worker_urls)
        print(f"kvist route: listening on {service.url} policy={config.policy} workers={num_workers}", flush=True)
        await stopped.wait()
    return 0


def _event_sources(texts: list[str]) -> dict[str, list[str]]:
    sources: dict[str, list[str]] = {}
    for text in texts:
        url, found, endpoint = text.partition("=")
        if not found:
            raise InvalidValueError("kv-event-source", text, "URL=ENDPOINT")
        sources.setdefault(url, []).append(endpoint)
    return sources


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return "none" if default in (None, {}) else str(default)

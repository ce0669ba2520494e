"""`kvist publish`: beside an engine, turn its event stream into a canonical one."""

from __future__ import annotations

import argparse
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.events.transports import Endpoint
    from kvist.events.windows import KnownWindow
    from kvist.publisher.sidecar import Sidecar

HELP = "publish an engine's KV events as canonical batches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "--engine", type=str.lower, choices=("vllm", "sglang"), required=True, help="whose stream it is"
    )
    parser.add_argument(
        "--endpoint",
        action="append",
        metavar="URL",
        help="the engine's event endpoint (default tcp://127.0.0.1:5557); again for each data-parallel rank",
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="URL",
        help="the engine's replay endpoint, with a single --endpoint (default: the port after the endpoint's)",
    )
    parser.add_argument("--bind", action="store_true", help="bind the endpoint, for an engine that connects to it")
    parser.add_argument(
        "--to",
        default="tcp://127.0.0.1:5567",
        metavar="URL",
        help="where to publish (default %(default)s; port 0 takes a free one)",
    )
    parser.add_argument(
        "--worker",
        default=socket.gethostname(),
        metavar="NAME",
        help="the worker's name in the batches (default: host)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help="the engine's block size (default: learnt from its first event)",
    )
    parser.add_argument(
        "--window",
        metavar="TOKENS|full",
        help="the attention window to publish, for an engine whose events do not tell (default: the largest seen)",
    )


def run(args: argparse.Namespace) -> int:
    """Publish until SIGINT or SIGTERM; return 0."""
    import asyncio

    from kvist.publisher.sidecar import Sidecar

    with Sidecar(
        _engine_endpoints(args),
        to=args.to,
        worker=args.worker,
        block_size=args.block_size,
        window=_window(args.window),
    ) as sidecar:
        asyncio.run(_run_until_signalled(sidecar, args))
    statistics = sidecar.statistics()
    published = statistics.published
    print(
        f"kvist publish: {statistics.num_engine_batches} engine batches in, {statistics.num_restarts} restarts, "
        f"{statistics.num_gaps} gaps, {statistics.num_recovered} recovered, {statistics.num_lost} times lost, "
        f"{statistics.num_malformed} malformed; {published.num_sent_messages} messages out, "
        f"{published.num_sent_bytes} bytes, {published.num_lost_events} events lost",
        flush=True,
    )
    return 0


async def _run_until_signalled(sidecar: Sidecar, args: argparse.Namespace) -> None:
    """Run the sidecar until it fails or a signal asks it to end."""
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    task = loop.create_task(sidecar.run(), name="kvist-publish")
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    block_size = "learnt from the first event" if args.block_size is None else args.block_size
    print(f"kvist publish: ready at {sidecar.endpoint} worker={args.worker} block_size={block_size}", flush=True)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise


def _engine_endpoints(args: argparse.Namespace) -> list[Endpoint]:
    from dataclasses import replace

    from kvist.errors import InvalidValueError
    from kvist.events.transports import Endpoint

    urls = args.endpoint or ["tcp://127.0.0.1:5557"]
    endpoints = [replace(Endpoint.parse(url), engine=args.engine, is_bound=args.bind) for url in urls]
    if args.replay_endpoint is None:
        return endpoints
    if len(endpoints) > 1:
        raise InvalidValueError("--replay-endpoint", args.replay_endpoint, "a single --endpoint beside it")
    return [replace(endpoints[0], replay_address=Endpoint.parse(args.replay_endpoint).address)]


def _window(text: str | None) -> KnownWindow | None:
    from kvist.errors import InvalidValueError
    from kvist.events.windows import FULL

    if text is None:
        return None
    if text == "full":
        return FULL
    if not text.isdecimal() or int(text) == 0:
        raise InvalidValueError("--window", text, "a positive number of tokens, or full")
    return int(text)

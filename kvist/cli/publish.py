"""`kvist publish`: beside an engine, turn its event stream into a canonical one.

Where the engine's streams are follows from `--kv-events-config`, else from `--endpoint`, else from the command line of
the engine that runs in the same PID namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.cli._terminal import run_until_signalled
from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint

if TYPE_CHECKING:
    from kvist.publisher.engine_config import EngineProcess

_logger = logging.getLogger(__name__)

HELP = "publish an engine's KV events as a canonical stream"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "the engine's own --kv-events-config; event and replay endpoints of all ranks follow from it"
    add("--kv-events-config", metavar="JSON", help=text)
    text = "with --kv-events-config: data-parallel ranks of the engine on this host (default %(default)s)"
    add("--data-parallel-size", type=int, default=1, metavar="N", help=text)
    text = "with --kv-events-config: the first rank on this host (default %(default)s)"
    add("--data-parallel-start-rank", type=int, default=0, metavar="RANK", help=text)
    text = "the engine (default: found from its configuration or process)"
    add("--engine", type=str.lower, choices=("vllm", "sglang"), help=text)
    text = (
        "the engine's event endpoint, instead of its configuration; repeat it for each data-parallel rank "
        "(?replay_port=N if that is not the next port, ?bind=1 if the engine connects)"
    )
    add("--endpoint", action="append", metavar="URL", help=text)
    text = "endpoint to publish at; port 0: any free one (default %(default)s)"
    add("--to", default="tcp://127.0.0.1:5567", metavar="URL", help=text)
    host = socket.gethostname()
    add("--worker", default=host, metavar="NAME", help="the worker's name in the stream (default: the host's name)")
    text = "the engine's block size in tokens (default: as in its first event)"
    add("--block-size", type=int, metavar="TOKENS", help=text)
    text = (
        "layer groups to publish: the one with the largest window, or all, so that overlaps of hybrid models are "
        "exact, not upper bounds (default: %(default)s)"
    )
    add("--groups", choices=("largest", "all"), default="largest", help=text)
    text = "name of a LoRA adapter, if the engine sends only its number; may be repeated"
    add("--lora-name", action="append", default=[], metavar="ID=NAME", help=text)
    text = "set it if something makes vLLM report all its cached blocks; its ranks count as partly known"
    add("--full-reports", action="store_true", help=text)
    text = "folder that keeps the state, so that a restart of this command loses nothing (default: none)"
    add("--state-dir", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    from kvist.publisher.sidecar import Sidecar

    with Sidecar(
        _engine_endpoints(args),
        to=args.to,
        worker=args.worker,
        block_size=args.block_size,
        lora_names=_lora_names(args.lora_name),
        state_dir=args.state_dir,
        has_full_reports=args.full_reports,
        has_all_groups=args.groups == "all",
    ) as sidecar:
        block_size = sidecar.block_size or "from the first event"
        ready_line = f"kvist publish: ready at {sidecar.endpoint} worker={args.worker} block_size={block_size}"
        asyncio.run(run_until_signalled(sidecar.run(), ready_line))
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


def _engine_endpoints(args: argparse.Namespace) -> list[Endpoint]:
    from kvist.publisher.engine_config import engine_endpoints

    if args.kv_events_config is not None:
        if args.endpoint is not None:
            raise InvalidValueError("--kv-events-config", args.kv_events_config, "no --endpoint beside it")
        ranks = {"num_ranks": args.data_parallel_size, "first_rank": args.data_parallel_start_rank}
        endpoints = engine_endpoints(args.kv_events_config, engine=args.engine, **ranks)
    elif (args.data_parallel_size, args.data_parallel_start_rank) != (1, 0):
        raise InvalidValueError("--kv-events-config", None, "what the engine was given, beside its data-parallel ranks")
    elif args.endpoint is None and (running := _running_engine(args.engine)) is not None:
        ranks = {"num_ranks": running.num_ranks, "first_rank": running.first_rank}
        endpoints = engine_endpoints(running.config_json, engine=running.engine, **ranks)
    elif args.engine is not None:
        urls = args.endpoint or ["tcp://127.0.0.1:5557"]
        if len(set(urls)) != len(urls):
            raise InvalidValueError("--endpoint", urls, "each once")
        return [replace(Endpoint.parse(url), engine=args.engine) for url in urls]
    elif args.endpoint is not None:
        raise InvalidValueError("--engine", None, "vllm or sglang, beside --endpoint")
    else:
        expected = "what the engine was given, or --engine: no vllm or sglang with this flag is seen to run here"
        raise InvalidValueError("--kv-events-config", None, expected)
    for endpoint in endpoints:
        does = "binding" if endpoint.is_bound else "connecting to"
        replay = endpoint.replay_address or "none: what is missed cannot be asked for again"
        _logger.info("%s %s engine=%s replay=%s", does, endpoint.address, endpoint.engine, replay)
    return endpoints


def _running_engine(engine: str | None) -> EngineProcess | None:
    """Return the engine that runs here with KV events in its command line, None if there is none."""
    from kvist.publisher.engine_config import find_engines

    found = [each for each in find_engines() if engine in (None, each.engine)]
    if len(found) > 1:
        listed = "; ".join(f"pid {each.pid}: {each.engine} {each.config_json}" for each in found)
        expected = f"the one to follow, as several engines run here ({listed})"
        raise InvalidValueError("--kv-events-config", None, expected)
    for each in found:
        _logger.info("found an engine pid=%d engine=%s kv_events_config=%s", each.pid, each.engine, each.config_json)
    return found[0] if found else None


def _lora_names(texts: list[str]) -> dict[int, str]:
    names: dict[int, str] = {}
    for text in texts:
        number, _, name = text.partition("=")
        if not number.isdecimal() or not name:
            raise InvalidValueError("--lora-name", text, "ID=NAME, such as 1=my-adapter")
        if names.setdefault(int(number), name) != name:
            raise InvalidValueError("--lora-name", text, f"one name an ID; {number} is {names[int(number)]} already")
    return names

"""`kvist serve`: the bundled engine behind OpenAI's HTTP API, its cache events published."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.cli._kv_transfer import add_transfer_arguments, read_transfer_settings
from kvist.errors import InvalidValueError
from kvist.tracing import open_tracing

if TYPE_CHECKING:
    import uvicorn
    from prometheus_client.registry import Collector
    from starlette.types import ASGIApp

    from kvist.cli._rank_transfers import RankTransfers
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.loading import LoadedEngine
    from kvist.engine.rank_processes import Followers
    from kvist.publisher import KvEventPublisher
    from kvist.tracing.otlp import Tracing

HELP = "serve a model with the bundled engine"

# Together below the 5 s that whoever sends SIGTERM should have to wait.
_HTTP_CLOSE_S, _ENGINE_CLOSE_S, _PUBLISHER_CLOSE_S, _TRANSFER_CLOSE_S, _TRACES_CLOSE_S = 2, 1.0, 1.0, 0.5, 0.4
_DRAIN_S = 1.5  # running requests may finish; then each is told, while HTTP is still there to tell it

_RANK_LOSS_EXIT_S = 10.0  # longer than closing in order takes: a GPU may wait for a lost rank for ever

_SERVICES = {"both": "kvist-worker", "prefill": "kvist-prefill", "decode": "kvist-decode"}
"""What traces call the worker, by its role."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; those about the engine go to the fields of its configuration."""
    add = parser.add_argument
    add("--model", dest="model_dir", type=Path, required=True, help="directory of the checkpoint (Hugging Face layout)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names of the model (default: the path)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8100, help="port, 0 for a free one (default: %(default)s)")
    add(
        "--kv-events",
        default="tcp://127.0.0.1:0",
        metavar="URL",
        help="where to publish cache events, 'none' for nowhere (default: a free loopback port)",
    )
    add(
        "--groups",
        choices=("largest", "all"),
        default="largest",
        help="'all' also publishes what window groups beside the largest hold, as kvist publish does",
    )
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", help="bfloat16, float16 or float32 (default: float32 on the CPU, else bfloat16)")
    add("--max-model-len", type=int, help="longest sequence in tokens (default: the model's)")
    _add_memory_arguments(parser)
    add("--max-num-seqs", type=int, default=64, help="sequences computed at once (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens in a step (default: %(default)s)")
    add("--max-num-waiting", type=int, default=1024, help="sequences that may queue (default: %(default)s)")
    add(
        "--no-cuda-graphs",
        dest="has_cuda_graphs",
        action="store_false",
        help="on a GPU, launch every kernel of a decode step",
    )
    add("--threads", dest="num_threads", type=int, default=1, help="torch threads on the CPU (default: %(default)s)")
    add(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="processes to split the model over, by heads; on GPUs, rank i on cuda:i (default: %(default)s)",
    )
    add_transfer_arguments(parser)
    add_tracing_argument(parser)


def add_tracing_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where to send traces, http://host:port[/v1/traces] (OTLP over HTTP; the extra tracing)",
    )


def _add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--block-size", type=int, default=16, help="tokens a KV block (default: %(default)s)")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--num-blocks", type=int, help="KV blocks of each window group")
    memory.add_argument("--kv-memory-mib", type=int, help="KV memory of all groups (default: 256; on a GPU, most)")
    add(
        "--kv-budget",
        default="bounded",
        metavar="POLICY",
        help="'bounded' gives sliding windows what sequences can hold, 'uniform' every group as many blocks (default: "
        "%(default)s)",
    )
    add("--kv-cache-dtype", metavar="DTYPE", help="fp8_e5m2, fp8_e4m3 or as --dtype (default: --dtype)")
    add(
        "--swa-scratch",
        dest="has_swa_scratch",
        action="store_true",
        help="blocks of a prompt that slide out of their window within a step share memory; less of it can be reused",
    )
    add("--no-prefix-cache", dest="has_prefix_cache", action="store_false", help="compute every prompt anew")


def run(args: argparse.Namespace) -> int:
    from kvist.engine.config import EngineConfig
    from kvist.engine.loading import load_with_memory

    config = EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})
    with _listen(args.host, args.port) as listener:
        worker = f"{args.host}:{listener.getsockname()[1]}"
        traces = args.otlp_traces_endpoint
        tracing = None if traces is None else open_tracing(traces, _SERVICES[args.role], worker)
        settings = read_transfer_settings(args, f"{worker}/{uuid.uuid4().hex}", _names(args)[0])
        transfers, allocate, open_server = None, None, None
        if settings is not None:
            from kvist.cli._rank_transfers import RankTransfers

            open_server = partial(RankTransfers, settings)
            transfers = open_server(0)
            allocate = transfers.allocate
        with _publisher(args, worker) as publisher:
            with ExitStack() as where_it_fails:
                if transfers is not None:
                    where_it_fails.callback(transfers.close)
                loaded = load_with_memory(config, publisher, allocate, open_server)
                where_it_fails.pop_all()
            return asyncio.run(_serve(args, listener, loaded, publisher, transfers, tracing))


def _publisher(args: argparse.Namespace, worker: str) -> AbstractContextManager[KvEventPublisher | None]:
    from kvist.publisher import KvEventPublisher, PublisherLimits

    if args.kv_events == "none":
        return nullcontext()
    return KvEventPublisher(
        args.kv_events,
        worker=worker,
        block_size=args.block_size,
        has_all_groups=args.groups == "all",
        limits=PublisherLimits(close_timeout_s=_PUBLISHER_CLOSE_S),
    )


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(args.served_model_name or [str(args.model_dir)])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise InvalidValueError("host and port", f"{host}:{port}", f"an address to listen on ({error})") from None


async def _serve(
    args: argparse.Namespace,
    listener: socket.socket,
    loaded: LoadedEngine,
    publisher: KvEventPublisher | None,
    rank_0: RankTransfers | None,
    tracing: Tracing | None,
) -> int:
    from kvist.cli._worker_metrics import PublisherCollector, TransferCollector
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.server.app import ServedModel, ServedTransfers, create_app
    from kvist.engine.server.spans import WorkerSpans
    from kvist.openai.tokenization import ChatTokenizer

    tokenizer = ChatTokenizer.load(args.model_dir)
    names = _names(args)
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    events = "no KV events" if publisher is None else f"KV events on {publisher.endpoint}"
    collectors: list[Collector] = [PublisherCollector(publisher)] if publisher else []
    engine = AsyncEngine(loaded.core, args.max_num_seqs + args.max_num_waiting, _ENGINE_CLOSE_S)
    async with AsyncExitStack() as exits:
        served, spans, followers = None, None, loaded.followers
        if tracing is not None:
            exits.push_async_callback(asyncio.to_thread, tracing.close, _TRACES_CLOSE_S)
            collectors.append(tracing)
            spans = WorkerSpans(tracing, names[0], asyncio.get_running_loop())
        if followers is not None:
            exits.callback(followers.close)
        if rank_0 is not None:
            transfers = rank_0.open_transfers(loaded, engine)
            exits.callback(transfers.close, _TRANSFER_CLOSE_S)
            collectors.append(TransferCollector(transfers))
            served = ServedTransfers(
                role=args.role,
                endpoints=transfers.endpoints,
                agent=args.kv_transfer_agent,
                is_alive=lambda: transfers.is_alive,
            )
            if spans is not None:
                transfers.observe(spans.on_transfer)
            transfers.start()
        await exits.enter_async_context(engine)
        num_blocks = max(pool.num_blocks for pool in engine.statistics().kv_cache.pools)
        model = ServedModel(
            names=names,
            block_size=args.block_size,
            max_model_len=loaded.core.limits.max_model_len,
            max_total_num_tokens=num_blocks * args.block_size if args.has_prefix_cache else 0,
            kv_events_endpoint=None if publisher is None else publisher.endpoint,
            transfers=served,
            tensor_parallel_size=args.tensor_parallel_size,
        )
        app = create_app(engine, tokenizer, model, collectors=collectors, spans=spans)
        server = _server(app, engine, ready_line=f"kvist serve: {names[0]} on {url}, {events}")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
        if followers is not None:
            _end_on_loss(followers, server)
        await server.serve(sockets=[listener])
    if followers is not None and followers.error is not None:
        raise followers.error
    return 0


def _end_on_loss(followers: Followers, server: uvicorn.Server) -> None:
    """Have the server end when a rank is lost, in order if it can; from the event loop that it runs in."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        last_resort = threading.Timer(_RANK_LOSS_EXIT_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        loop.call_soon_threadsafe(setattr, server, "should_exit", True)

    followers.on_loss(end)


def _server(app: ASGIApp, engine: AsyncEngine, ready_line: str) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """Says when it is ready, and ends requests in order, where uvicorn would cut them off.

        Leaves signals to this command: uvicorn would end the process by them.
        """

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(ready_line, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(_DRAIN_S, engine.stop)
            await super().shutdown(sockets)

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    options = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_HTTP_CLOSE_S
    )
    return Server(options)

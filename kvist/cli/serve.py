"""`kvist serve`: the bundled engine behind OpenAI's HTTP API, its cache events published."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import threading
import uuid
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from kvist.cli._settings import add_settings, read_config
from kvist.cli._terminal import on_signal
from kvist.engine.config import EngineConfig
from kvist.errors import InvalidValueError
from kvist.settings import Secret
from kvist.tracing import open_tracing

if TYPE_CHECKING:
    from kvist.cli._rank_transfers import RankTransfers
    from kvist.engine.loading import LoadedEngine
    from kvist.publisher import KvEventPublisher
    from kvist.tracing.otlp import Tracing


_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")
_MAX_PORT = 65_535
HELP = "serve a model with the bundled engine"
_DRAIN_S = 1.5  # for running requests to finish; then each gets an error, while HTTP can still send it
_RANK_LOSS_EXIT_S = 10.0  # longer than an orderly end takes: a GPU may wait for a lost rank for ever
_SERVICES = {"both": "kvist-worker", "prefill": "kvist-prefill", "decode": "kvist-decode"}
"""The worker's name in traces, by its role."""
_SWITCHES = ("prefix_cache", "swa_scratch")
_GROUPS = {"model_dir": "engine", "served_model_name": "service", "kv_transfer": "transfers between workers"}
"""Titles of the help, each from its key on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """The settings of one bundled worker."""

    served_model_name: tuple[str, ...] = ()
    """names of the model, the first of which is in answers; by default its path"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = 8100
    """port to listen on; 0: any free one"""
    api_key: Secret | None = field(default=None, repr=False)
    """bearer key for everything but /health and /metrics"""
    kv_events: str = "tcp://127.0.0.1:0"
    """endpoint to publish KV events at, port 0: any free one; none: publish nothing"""
    groups: Literal["largest", "all"] = "largest"
    """layer groups whose events are published: the one with the largest window, or all"""
    otlp_traces_endpoint: str | None = None
    """OTLP endpoint for traces, http://host:port[/v1/traces]; needs the extra tracing"""
    kv_transfer: str | None = None
    """tcp://host:port where other workers fetch this one's KV; an address they can reach"""
    role: Literal["both", "prefill", "decode"] = "both"
    """what routers use this worker for; needs --kv-transfer"""
    kv_transfer_agent: Literal["shared_memory", "nixl"] = "shared_memory"
    """how KV bytes are moved: shared_memory within a host, nixl between hosts"""
    kv_transfer_bounce_mib: Annotated[int, Meta(ge=0)] = 0
    """MiB of each of two regions that gather thousands of small pieces into one write; 0: off"""
    kv_transfer_timeout: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    """seconds after which a transfer has failed, up to 86400; prompts are held for twice as long"""
    kv_transfer_fallback: bool = True
    """compute a prompt here if it cannot be fetched"""
    kv_transfer_tokens_per_s: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    """speed of fetching prompts until it is measured; with it, routers let this worker fetch prefixes where that is
    cheaper than computing them"""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if self.kv_transfer is not None:
            _check_endpoint(self.kv_transfer)
            if self.kv_transfer_agent == "shared_memory" and self.device != "cpu":
                expected = f"nixl: the KV memory is on {self.device}"
                raise InvalidValueError("kv_transfer_agent", "shared_memory", expected)
            return
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.startswith(("role", "kv_transfer_")) and value != each.default:
                raise InvalidValueError(each.name, value, f"{each.default}, or --kv-transfer to be given as well")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests may use for the model."""
        return self.served_model_name or (str(self.model_dir),)

    @property
    def model_path(self) -> str:
        """Return the folder of the model's files, for routers on this machine, which tokenize prompts."""
        return str(self.model_dir.absolute())


def _check_endpoint(endpoint: str) -> None:
    """Raise InvalidValueError for an address that cannot be bound, or that other workers cannot reach."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_tcp = endpoint.startswith("tcp://") and re.fullmatch(r"[0-9]{1,5}", port) is not None
    if not is_tcp or not host or host in _WILDCARDS:
        raise InvalidValueError("kv_transfer", endpoint, "tcp://host:port that other workers can reach")
    if int(port) > _MAX_PORT:  # getaddrinfo wraps it around
        raise InvalidValueError("kv_transfer", endpoint, f"a port of at most {_MAX_PORT}")
    try:
        socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InvalidValueError("kv_transfer", endpoint, f"a host with an IPv4 address ({error})") from None


# Together below 5 s, within which a process should end after SIGTERM.
_HTTP_CLOSE_S, _ENGINE_CLOSE_S, _PUBLISHER_CLOSE_S, _TRANSFER_CLOSE_S, _TRACES_CLOSE_S = 2, 1.0, 1.0, 0.5, 0.4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    special: dict[str, dict[str, Any]] = {
        "model_dir": {"flag": "--model", "required": True},
        "num_threads": {"flag": "--threads"},
        **{f"has_{name}": {"flag": f"--{name.replace('_', '-')}"} for name in _SWITCHES},
    }
    add_settings(parser, ServeConfig, special, _GROUPS, has_file=False)


def run(args: argparse.Namespace) -> int:
    config = read_config(args, ServeConfig, {"model_dir": Path})
    with reserve(config.host, config.port) as listener:
        worker = worker_name(config.host, listener.getsockname()[1])
        traces = config.otlp_traces_endpoint
        tracing = None if traces is None else open_tracing(traces, _SERVICES[config.role], worker)
        transfers, allocate, open_server = None, None, None
        if config.kv_transfer is not None:
            from kvist.cli._rank_transfers import RankTransfers

            open_server = partial(RankTransfers, config, config.kv_transfer, f"{worker}/{uuid.uuid4().hex}")
            transfers = open_server(0)
            allocate = transfers.allocate
        with _open_publisher(config, worker) as publisher:
            with ExitStack() as on_failure:
                if transfers is not None:
                    on_failure.callback(transfers.close)
                from kvist.engine.loading import load_engine  # for seconds: what is wrong with settings is known before

                loaded = load_engine(config, publisher, allocate, open_server)
                on_failure.pop_all()
            return asyncio.run(_serve(config, listener, loaded, publisher, transfers, tracing))


def worker_name(host: str, port: int) -> str:
    """Return the worker's name in its event stream; one that listens on all addresses has its machine's name."""
    return f"{socket.gethostname() if host in _WILDCARDS else host}:{port}"


def _open_publisher(config: ServeConfig, worker: str) -> AbstractContextManager[KvEventPublisher | None]:
    from kvist.publisher import KvEventPublisher, PublisherLimits

    if config.kv_events == "none":
        return nullcontext()
    return KvEventPublisher(
        config.kv_events,
        worker=worker,
        block_size=config.block_size,
        has_all_groups=config.groups == "all",
        limits=PublisherLimits(close_timeout_s=_PUBLISHER_CLOSE_S),
    )


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address; raises InvalidValueError.

    Until it listens, connections are refused: so a router asks another worker instead of waiting for this one's model.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _not_listening(host, port, error) from None
    # asyncio leaves Nagle's algorithm on for this socket: a token would wait 40 ms for a delayed acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _not_listening(host: str, port: int, error: Exception) -> InvalidValueError:
    return InvalidValueError("host and port", f"{host}:{port}", f"an address to listen on ({error})")


async def _serve(
    config: ServeConfig,
    listener: socket.socket,
    loaded: LoadedEngine,
    publisher: KvEventPublisher | None,
    rank_0: RankTransfers | None,
    tracing: Tracing | None,
) -> int:
    from kvist.cli._worker_metrics import publisher_metrics, transfer_metrics
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.server.api import Api, MakeMetrics, ServedModel, ServedTransfers
    from kvist.http import HttpLimits, HttpServer, default_max_connections
    from kvist.openai.tokenization import ChatTokenizer

    tokenizer = ChatTokenizer.load(config.model_dir)
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    events = "no KV events" if publisher is None else f"KV events on {publisher.endpoint}"
    metrics: list[MakeMetrics] = [] if publisher is None else [partial(publisher_metrics, publisher)]
    engine = AsyncEngine(loaded.core, config.max_num_seqs + config.max_num_waiting, _ENGINE_CLOSE_S)
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    on_signal(stopped.set)
    async with AsyncExitStack() as exits:
        served, followers = None, loaded.followers
        if tracing is not None:
            exits.push_async_callback(asyncio.to_thread, tracing.close, _TRACES_CLOSE_S)
        if followers is not None:
            exits.callback(followers.close)
        if rank_0 is not None:
            transfers = rank_0.open_transfers(loaded, engine)
            exits.callback(transfers.close, _TRANSFER_CLOSE_S)
            metrics.append(partial(transfer_metrics, transfers))
            served = ServedTransfers(
                role=config.role,
                endpoints=transfers.endpoints,
                agent=config.kv_transfer_agent,
                is_alive=lambda: transfers.is_alive,
            )
            transfers.start()
        await exits.enter_async_context(engine)
        model = ServedModel(
            names=config.names,
            path=config.model_path,
            kv_cache_dtype=loaded.kv_cache_dtype,
            kv_events_endpoint=None if publisher is None else publisher.endpoint,
            transfers=served,
            tensor_parallel_size=config.tensor_parallel_size,
        )
        api = Api(engine, tokenizer, model, metrics=metrics, tracing=tracing, api_key=config.api_key)
        limits = HttpLimits(max_connections=default_max_connections(), close_timeout_s=_HTTP_CLOSE_S)
        try:
            await exits.enter_async_context(HttpServer(api.handle, bound=listener, limits=limits))
        except OSError as error:  # another process was ready before
            raise _not_listening(config.host, config.port, error) from None
        exits.callback(loop.call_later, _DRAIN_S, engine.stop)
        if followers is not None:
            followers.on_loss(partial(_end_soon, loop, stopped))
        print(f"kvist serve: {config.names[0]} on {url}, {events}", flush=True)
        await stopped.wait()
    if followers is not None and followers.error is not None:
        raise followers.error
    return 0


def _end_soon(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """End the server as a signal does, from any thread, and if that takes too long the process."""
    last_resort = threading.Timer(_RANK_LOSS_EXIT_S, os._exit, (1,))
    last_resort.daemon = True
    last_resort.start()
    loop.call_soon_threadsafe(stopped.set)

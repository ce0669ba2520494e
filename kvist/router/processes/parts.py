"""One process of a router: what a supervisor starts it as."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from prometheus_client.core import Metric

from kvist.http import UpstreamPool
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.load import LoadTracker
from kvist.router.metrics import RouterMetrics
from kvist.router.processes.front import RemoteKeeper
from kvist.router.processes.keeper import KeeperProcess
from kvist.router.processes.supervisor import KEEPER, Part
from kvist.router.recording import Beginning


def make_part(
    config: RouterConfig, part: Part, started_s: float, recording: Beginning | None = None
) -> RouterService | KeeperProcess:
    """Return what this process has to run."""
    is_keeper, directory = part.front == KEEPER, Path(part.directory)
    rows = {"num_fronts": part.num_fronts, "num_replicas": part.num_replicas}
    board = LoadBoard(mmap.mmap(part.board, 0), **rows, names_columns=is_keeper)
    load = LoadTracker(board, max(0, part.front))
    if is_keeper:
        return KeeperProcess(config, directory, load, started_s)

    def knowledge(
        pool: UpstreamPool, metrics: RouterMetrics, gauges: Callable[[], Iterator[Metric | None]]
    ) -> RemoteKeeper:
        return RemoteKeeper(config, directory, load, part.front, pool, metrics, gauges)

    return RouterService(replace(config, port=part.port), started_s, knowledge, recording)


@asynccontextmanager
async def ending_with_supervisor(part: Part) -> AsyncIterator[None]:
    """End this process, in order, when the one that started it is gone; the keeper then removes their directory."""
    loop, descriptor, is_alone = asyncio.get_running_loop(), sys.stdin.fileno(), False

    def on_end() -> None:
        nonlocal is_alone
        is_alone = True
        loop.remove_reader(descriptor)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(descriptor, on_end)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        if is_alone and part.front == KEEPER:
            shutil.rmtree(part.directory, ignore_errors=True)

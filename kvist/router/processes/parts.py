"""One process of a router: what a supervisor starts it as."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
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
    is_keeper = part.front == KEEPER
    rows = {"num_fronts": len(part.bells), "num_replicas": part.num_replicas}
    board = LoadBoard(mmap.mmap(part.board, 0), **rows, names_columns=is_keeper)
    load = LoadTracker(board, max(0, part.front))
    if is_keeper:
        return KeeperProcess(config, Path(part.directory), load, started_s)

    def knowledge(
        pool: UpstreamPool, metrics: RouterMetrics, gauges: Callable[[], Iterator[Metric | None]]
    ) -> RemoteKeeper:
        return RemoteKeeper(config, part, load, pool, metrics, gauges)

    return RouterService(replace(config, port=part.port), started_s, knowledge, recording)


def end_with_supervisor(part: Part) -> None:
    """End this process, in order, when the one that started it is gone, which may have left its directory behind."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_end() -> None:
        loop.remove_reader(descriptor)
        shutil.rmtree(part.directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(descriptor, on_end)

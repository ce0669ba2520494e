"""Saves the learnt speeds of ranks in a file, so that a router that restarts need not learn them again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvist.contexts import BackgroundTasks
from kvist.events import WorkerRank
from kvist.files import in_thread, write_atomically
from kvist.router.fleet.board import LoadBoard

_logger = logging.getLogger(__name__)

_Positive = Annotated[float, Meta(gt=0, lt=1e15)]


class _LearntSpeed(msgspec.Struct, frozen=True):
    """How much work a rank did, in units of `kvist.router.policy.work`, in how many seconds."""

    worker: str
    rank: int
    seconds: _Positive
    work: _Positive


@asynccontextmanager
async def saved_speeds(path: Path, board: LoadBoard, interval_s: float) -> AsyncIterator[None]:
    """Load the board's speeds from a file, and save them every `interval_s` and at the end.

    A file that cannot be read or written is logged, and nothing else.
    """
    try:
        saved = msgspec.json.decode(await asyncio.to_thread(path.read_bytes), type=list[_LearntSpeed])
        board.saved_speeds = {WorkerRank(each.worker, each.rank): (each.seconds, each.work) for each in saved}
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        _logger.warning("learnt speeds not loaded: %s path=%s", error, path)
    try:
        async with BackgroundTasks() as tasks:
            tasks.create_task(_save_regularly(path, board, interval_s), name="kvist-speeds")
            yield
    finally:
        await _save(path, board)


async def _save_regularly(path: Path, board: LoadBoard, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _save(path, board)


async def _save(path: Path, board: LoadBoard) -> None:
    learnt = [_LearntSpeed(*target, *speed) for target, speed in board.learnt_speeds().items()]
    try:
        await in_thread(write_atomically, path, msgspec.json.encode(learnt))
    except OSError as error:
        _logger.warning("learnt speeds not saved: %s path=%s", error, path)

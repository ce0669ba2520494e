"""Speeds that were learnt of ranks, in a file, so that a router that starts again need not learn them anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvist.events import WorkerRank
from kvist.files import write_atomically
from kvist.router.fleet.board import LoadBoard

_logger = logging.getLogger(__name__)

_Positive = Annotated[float, Meta(gt=0, lt=1e15)]


class _LearntSpeed(msgspec.Struct, frozen=True):
    """What a rank computed, in units of `kvist.router.policy.work`, and in how many seconds."""

    worker: str
    rank: int
    seconds: _Positive
    work: _Positive


@asynccontextmanager
async def kept_speeds(path: Path, board: LoadBoard) -> AsyncIterator[None]:
    """Put on a board what was learnt before, and save what is there at the end; a failing disk costs no more."""
    try:
        saved = msgspec.json.decode(await asyncio.to_thread(path.read_bytes), type=list[_LearntSpeed])
        board.learnt_before = {WorkerRank(each.worker, each.rank): (each.seconds, each.work) for each in saved}
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        _logger.warning("learnt speeds not loaded: %s path=%s", error, path)
    try:
        yield
    finally:
        learnt = [_LearntSpeed(*target, *speed) for target, speed in board.learnt().items()]
        try:
            await asyncio.to_thread(write_atomically, path, msgspec.json.encode(learnt))
        except OSError as error:
            _logger.warning("learnt speeds not saved: %s path=%s", error, path)

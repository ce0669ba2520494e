"""Speeds that were learnt of ranks, in a file, so that a router that starts again need not learn them anew."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from kvist.events import WorkerRank
from kvist.files import write_atomically
from kvist.router.fleet.board import LoadBoard

_logger = logging.getLogger(__name__)

_Positive = Annotated[float, Meta(gt=0, lt=1e15)]


class LearntSpeed(msgspec.Struct, frozen=True):
    """What a rank computed, in units of `kvist.router.policy.work`, and in how many seconds."""

    worker: str
    rank: int
    seconds: _Positive
    work: _Positive


class Speeds:
    """Puts on a board what was learnt before, while its context is open; a failing disk costs no more than that."""

    def __init__(self, path: Path, board: LoadBoard) -> None:
        self._path, self._board = path, board

    async def __aenter__(self) -> Self:
        """Read the file, if there is one."""
        try:
            saved = msgspec.json.decode(await asyncio.to_thread(self._path.read_bytes), type=list[LearntSpeed])
            self._board.learnt_before = {WorkerRank(each.worker, each.rank): each for each in saved}
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.warning("learnt speeds not loaded: %s path=%s", error, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Save what is on the board."""
        learnt = [LearntSpeed(*target, *speed) for target, speed in self._board.learnt().items()]
        try:
            await asyncio.to_thread(write_atomically, self._path, msgspec.json.encode(learnt))
        except OSError as error:
            _logger.warning("learnt speeds not saved: %s path=%s", error, self._path)

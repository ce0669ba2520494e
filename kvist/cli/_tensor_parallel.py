"""How `kvist serve` runs a model split over processes: its flag, and what a lost rank means."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

    from kvist.engine.ranks import Followers

_EXIT_S = 10.0  # longer than closing in order takes: a GPU may wait for a lost rank for ever


def add_tensor_parallel_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="processes to split the model over, by heads; on GPUs, rank i on cuda:i (default: %(default)s)",
    )


def end_on_loss(followers: Followers, server: uvicorn.Server) -> None:
    """Have the server end when a rank is lost, in order if it can; from the event loop that it runs in."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        last_resort = threading.Timer(_EXIT_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        loop.call_soon_threadsafe(setattr, server, "should_exit", True)

    followers.on_loss(end)

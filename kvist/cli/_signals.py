"""How a command that runs until it is told ends: SIGINT and SIGTERM ask for it, and all is closed in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_signal(do: Callable[[], object]) -> None:
    """Have the running loop call `do` at SIGINT and SIGTERM, instead of what they do by themselves."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, do)


async def finish(task: asyncio.Task[None]) -> None:
    """Wait for a task's end and raise what it failed of; having been cancelled, by a signal, is no failure of it."""
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise

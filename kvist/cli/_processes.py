"""Kvist commands run as child processes: started together, known to be ready by the line they print, ended together."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvist.errors import KvistError

_URL = re.compile(rb"http://[^\s,]+")


class ProcessStartError(KvistError):
    """A child ended, or stayed silent, before it was ready; its own words are on stderr above."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Child:
    """A command that is ready: the URL it serves, and the process behind it."""

    name: str
    url: str
    process: asyncio.subprocess.Process


class ProcessGroup:
    """Owns child processes: leaving the context ends every one of them, by SIGTERM and then by SIGKILL."""

    def __init__(self, *, start_timeout_s: float = 300.0, stop_timeout_s: float = 4.0) -> None:
        """Set how long a child may take to be ready (compiling included) and to end when asked."""
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._processes: list[asyncio.subprocess.Process] = []
        self._drains: list[asyncio.Task[bytes]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await asyncio.gather(*(process.wait() for process in self._processes))
        except TimeoutError:
            for process in self._processes:
                with suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in self._processes))
        await asyncio.gather(*self._drains)

    async def start(self, name: str, *arguments: str) -> Child:
        """Start `kvist ARGUMENTS` and wait until it prints the line with its URL; raises ProcessStartError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvist", "--log-level", "warning", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends its children in order
        )
        self._processes.append(process)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while line := await process.stdout.readline():
                    if match := _URL.search(line):
                        self._drains.append(asyncio.create_task(process.stdout.read(), name=f"drain {name}"))
                        return Child(name, match[0].decode(), process)
        except TimeoutError:
            raise ProcessStartError(name, f"not ready after {self._start_timeout_s:g} s") from None
        raise ProcessStartError(name, f"ended with exit code {await process.wait()} before it was ready")

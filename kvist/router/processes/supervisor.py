"""Starts the processes of a router and restarts those that die, until a signal stops it.

It holds what outlives them: the port, which nobody else can take meanwhile, and the board. It has no event loop and no
threads, and reads no input, so that it does nothing that could fail.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvist import __version__
from kvist.errors import InvalidValueError
from kvist.machine_code import digest_of
from kvist.router.fleet.board import MAX_FRONTS, FrontField, LoadBoard, board_bytes, clear_row
from kvist.router.recording import Beginning

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_LIVED_LONG_S = 5.0
"""A process that dies sooner than this is restarted after a pause, which doubles each time."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_KILL_AFTER_S = 3.0
"""A process that still runs so long after the second signal is killed."""
_STRONGLY_ORDERED = frozenset({"x86_64", "AMD64"})
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
KEEPER = -1


class Part(msgspec.Struct, frozen=True):
    """Which process of a router this one is, and what it shares with the others."""

    front: int
    """Its number, or `KEEPER`."""
    directory: str
    board: int
    """A file descriptor, like those of `bells`, eventfds with which fronts wake each other."""
    bells: tuple[int, ...]
    port: int
    num_replicas: int = 0
    code: str = "an earlier version"
    """What started it, as `installed_code` said then."""


def installed_code() -> str:
    """Return the version of the package as it is on disk now, and a hash of its sources."""
    return f"{__version__} ({digest_of(Path(__file__).parents[2])})"


def num_fronts(processes: int | str) -> int:
    """Return how many fronts a router has; raises InvalidValueError where there cannot be several."""
    number = max(1, _num_cores() - 1) if isinstance(processes, str) else processes
    if number > 1 and (sys.platform != "linux" or platform.machine() not in _STRONGLY_ORDERED):
        raise InvalidValueError("processes", processes, "1, as several need Linux on x86-64")
    if number > MAX_FRONTS:
        raise InvalidValueError("processes", processes, f"at most {MAX_FRONTS}")
    return number


def _num_cores() -> int:
    """Return how many cores this process may keep busy, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup of version 2, or no quota
        quota_us, period_us = map(int, _QUOTA.read_text().split())
        cores = min(cores, quota_us // period_us)
    return cores


@dataclass(slots=True, eq=False)
class _Child:
    front: int
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)


class Supervisor:
    """Runs the processes of a router; while it does, it passes SIGTERM, SIGINT and SIGHUP on to them."""

    def __init__(self, command: Sequence[str], host: str, port: int, number: int, num_replicas: int = 0) -> None:
        """Run `command --part …` once for each of `number` fronts and once for the keeper.

        Raises OSError if another process listens on the port.
        """
        self._command, self._num_replicas = [*command], num_replicas
        self._sockets = _reserve(host, port)
        self._directory = tempfile.mkdtemp(prefix="kvist-route-")
        self._descriptor = os.memfd_create("kvist-board")
        os.ftruncate(self._descriptor, board_bytes(number + num_replicas))
        self._memory = mmap.mmap(self._descriptor, 0)
        self._board = LoadBoard(self._memory, num_fronts=number, num_replicas=num_replicas)
        self._bells = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(number))
        self._recording = Beginning()
        self._code = installed_code()
        self._children: dict[int, _Child] = {}
        self._due_s: dict[int, float] = {}
        self._pauses_s: dict[int, float] = {}
        self._num_stops = 0
        self._is_reload_due = False

    @property
    def port(self) -> int:
        """Return the port that all fronts listen on."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    def run(self, on_ready: Callable[[], None]) -> int:
        """Run until all processes have ended, and return 0, or the exit code of a process that could not start.

        Calls `on_ready` once all fronts listen.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            self._due_s = dict.fromkeys((KEEPER, *range(len(self._bells))), 0.0)
            code, is_ready = 0, False
            while not self._num_stops and not code:
                self._start_due()
                fronts = self._board.row_starts[: len(self._bells)]
                if not is_ready and all(self._board.ints[front + FrontField.LISTENING] for front in fronts):
                    is_ready = True
                    on_ready()
                time.sleep(_POLL_S)
                code = self._handle_deaths(may_restart=is_ready)
                if self._is_reload_due:
                    self._is_reload_due = False
                    for child in self._children.values():
                        child.process.send_signal(signal.SIGHUP)
            self._stop()
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for child in self._children.values():
                child.process.kill()
            for each in self._sockets:
                each.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            self._is_reload_due = True
        else:
            self._num_stops += 1

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for front in [front for front, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[front]
            part = Part(
                front, self._directory, self._descriptor, self._bells, self.port, self._num_replicas, self._code
            )
            process = subprocess.Popen(
                [*self._command, "--part", msgspec.json.encode(part).decode()],
                stdin=subprocess.PIPE,  # gets one line; its end tells a child that this process is gone
                pass_fds=(self._descriptor, *self._bells),
                start_new_session=True,  # a terminal's Ctrl-C is for this process, which then ends the others
            )
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has just died
                process.stdin.write(msgspec.json.encode(self._recording) + b"\n")
                process.stdin.flush()
            self._children[front] = _Child(front, process)

    def _handle_deaths(self, *, may_restart: bool) -> int:
        """Schedule a restart of each process that died or, if they may not be restarted, return its exit code."""
        for child in [child for child in self._children.values() if child.process.poll() is not None]:
            name = "keeper" if child.front == KEEPER else f"front {child.front}"
            code, lived_s = child.process.returncode, time.monotonic() - child.started_s
            self._remove(child)
            if not may_restart:
                logger.error("process ended before the router listened process=%s code=%d", name, code)
                return code if code > 0 else 1
            pause_s = 0.0
            if lived_s < _LIVED_LONG_S:
                pause_s = min(_MAX_PAUSE_S, 2 * self._pauses_s.get(child.front, 0.0) or _FIRST_PAUSE_S)
            self._pauses_s[child.front] = pause_s
            self._due_s[child.front] = time.monotonic() + pause_s
            logger.error("process ended, restarting process=%s code=%d pause_s=%g", name, code, pause_s)
        return 0

    def _remove(self, child: _Child) -> None:
        del self._children[child.front]
        if child.process.stdin is not None:
            child.process.stdin.close()
        if child.front != KEEPER:
            clear_row(self._memory, child.front)

    def _stop(self) -> None:
        """Stop the fronts, and then the keeper."""
        self._num_stops = max(1, self._num_stops)
        self._terminate([child for child in self._children.values() if child.front != KEEPER])
        self._terminate([*self._children.values()])

    def _terminate(self, children: list[_Child]) -> None:
        """Send SIGTERM for each stop signal received until all have ended; kill those that ignore a second one."""
        num_passed_on, kill_at_s = 0, math.inf
        while children:
            if self._num_stops > num_passed_on:
                num_passed_on += 1
                kill_at_s = math.inf if num_passed_on == 1 else min(kill_at_s, time.monotonic() + _KILL_AFTER_S)
                for child in children:
                    child.process.terminate()
            if time.monotonic() >= kill_at_s:
                for child in children:
                    child.process.kill()
            time.sleep(_POLL_S)
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                self._remove(child)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _reserve(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to the port and do not listen: only this user's fronts can share it."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            held = socket.socket(family, kind, protocol)
            sockets.append(held)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((address[0], port, *address[2:]))  # refused if anybody listens, even one who would share
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = held.getsockname()[1]
            # A bound socket that does not listen yet refuses nobody: of two supervisors that start at once only one can
            # bind this name, which it has for as long as it lives.
            name = socket.socket(socket.AF_UNIX)
            sockets.append(name)
            name.bind(f"\0kvist-route {address[0]} {port}")
    except OSError as error:
        for each in sockets:
            each.close()
        raise OSError(error.errno, f"{error.strerror}: {host}:{port}") from None
    return sockets

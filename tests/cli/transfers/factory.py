"""Starts `kvist serve` processes as forks of this one, in which everything is imported, each in tenths of a second.

Each line of the standard input asks for one, in JSON: its `arguments`, the `log` that its output goes to, and what is
to be changed in it. `is_bounced` has every transfer bounced, also where that is slower; the first scatter
then waits until somebody opens `scatter_gate`, a FIFO, if there is one. With `stops_amid_copy` it stops itself, as
SIGSTOP does, amid a long copy to shared memory. `hash_root` is what its block hashes start with, in place of what all
others have. The answer is a process id.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from kvist.cli import main
from kvist.transfer import service
from kvist.transfer.agents import shared_memory
from kvist.transfer.bounce import Bounce
from kvist.transfer.copier import TorchCopier

IMPORTED = (  # what the command imports when it runs
    "kvist.cli._worker_metrics",
    "kvist.cli.serve",
    "kvist.engine.loading",
    "kvist.engine.server.api",
    "kvist.openai.tokenization",
)
_PR_SET_PDEATHSIG = 1


def serve(asked: dict[str, Any]) -> None:
    """Be the worker that was asked for, until it ends or the factory does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1)
    os.environ |= asked["environment"]
    if asked["is_bounced"]:
        Bounce.max_fragment_bytes = 1 << 40
    if asked["hash_root"] is not None:
        service.root_digest = lambda *_: bytes([asked["hash_root"]] * 32)
    if asked["scatter_gate"]:
        hold_first_scatter(asked["scatter_gate"])
    if asked["stops_amid_copy"]:
        stop_amid_copies()
    code = main(asked["arguments"])
    sys.stdout.flush()
    os._exit(code)


def hold_first_scatter(gate: str) -> None:
    """Say when the first scatter begins, and let it wait at the gate."""
    scatter, is_first = TorchCopier.scatter, threading.Lock()

    def held(*arguments: Any) -> None:
        if is_first.acquire(blocking=False):
            print("scattering", flush=True)
            with open(gate):
                pass
        scatter(*arguments)

    TorchCopier.scatter = held  # type: ignore


def stop_amid_copies() -> None:
    """Stop this process at the eighth step of each copy."""
    copy = shared_memory._copy

    def stopping(*arguments: Any) -> Iterator[bool]:
        for number, step in enumerate(copy(*arguments), 1):
            if number == 8:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield step

    shared_memory._copy = stopping


if __name__ == "__main__":
    gc.set_threshold(10_000)  # as the command does
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what all have in common no worker looks through
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them but by their descriptors
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(json.loads(line))
        print(pid, flush=True)

"""Brokers as child processes on free ports, for the duration of a benchmark."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_PLACES = os.pathsep.join((os.environ["PATH"], "/usr/sbin", str(Path(sys.executable).parent)))


class Broker:
    """A running broker: where it listens, and its process."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.pid = process.pid


@contextmanager
def nats_server() -> Iterator[Broker]:
    """Run nats-server, with JetStream in a folder of its own."""
    with (
        TemporaryDirectory() as folder,
        _running("nats-server", "-a", "127.0.0.1", "-js", "-sd", folder, "-p") as broker,
    ):
        yield broker


@contextmanager
def mosquitto() -> Iterator[Broker]:
    """Run mosquitto, with room for a burst in a subscriber's queue."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "mosquitto.conf"
        user = "user root\n" if os.getuid() == 0 else ""
        config.write_text(f"{user}allow_anonymous true\nmax_queued_messages 100000\n")
        with _running("mosquitto", "-c", str(config), "-p") as broker:
            yield broker


@contextmanager
def _running(name: str, *arguments: str) -> Iterator[Broker]:
    program = shutil.which(name, path=_PLACES)
    if program is None:
        raise SystemExit(f"{name} is not installed, in none of {_PLACES}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [program, *arguments, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _listens(port):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.01)
        yield Broker(port, process)
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

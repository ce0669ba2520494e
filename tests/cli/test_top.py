"""`kvist top` in a terminal of its own, before a router that runs."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import pyte
import pytest

from kvist.cli import main
from kvist.cli.top import _quantile

DEADLINE_S = 180.0
GIVES_BACK = b"\x1b[?1049l"


class Worker(BaseHTTPRequestHandler):
    """Answers everything alike, and names its model so that a terminal would be cleared."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = (
            b'{"data": [{"id": "evil\\u001b[2Jmodel"}], "choices": [{"text": "x"}], "usage": {"completion_tokens": 3}}'
        )
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def worker_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Worker) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def settings(tmp_path: Path, worker_url: str) -> Path:
    path = tmp_path / "router.toml"
    path.write_text(f'worker_urls = ["{worker_url}"]\nadmin_key = "right"\npolicy = "round-robin"\n')
    return path


@contextmanager
def routed(settings: Path, port: int) -> Iterator[str]:
    command = [sys.executable, "-m", "kvist", "route", "--config", settings, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as router:
        try:
            assert router.stdout is not None
            assert "listening" in router.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            router.terminate()


class Terminal:
    """A pseudo-terminal, and what a program has drawn on it."""

    def __init__(self, *command: str, columns: int = 120, lines: int = 30) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            # The terminal says how large it is, and not what readline has told the environment of the tests' own.
            known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            os.execve(sys.executable, [sys.executable, "-m", "kvist", *command], known | {"TERM": "xterm"})
        self.resize(columns, lines)
        self.bytes, self._has_ended = b"", False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, is_so: Callable[[str], bool]) -> str:
        """Read on until what is shown is so."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not is_so(text := "\n".join(self.screen.display)):
            assert time.monotonic() < give_up_s, text
            self.read()
        return text

    def read(self) -> bool:
        """Draw what has come; return whether the program is still there."""
        if select.select([self.descriptor], [], [], 0.1)[0]:
            try:
                told = os.read(self.descriptor, 65536)
            except OSError:  # its other end is closed
                return False
            self.bytes += told
            self._stream.feed(told)
        return True

    def end(self) -> int:
        """Wait for the program's end and return its exit code."""
        while self.read():
            pass
        self._has_ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_the_fleet_is_shown_while_the_router_changes_dies_and_comes_back(settings: Path, free_port, worker_url) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as ends:
        with routed(settings, port):
            terminal = ends.enter_context(Terminal("top", url, "--admin-key", "right", "--interval", "0.2"))
            told = (urlsplit(worker_url).netloc, "healthy", "\ufffd[2J")
            terminal.until(lambda text: all(each in text for each in told))
            body = json.dumps({"model": "evil\x1b[2Jmodel", "prompt": "x"}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})

            def has_rates(text: str) -> bool:
                urllib.request.urlopen(request).read()
                return "p50 0." in text and " 0.0 requests/s" not in text

            terminal.until(has_rates)
            terminal.resize(80, 20)
            terminal.until(lambda text: "healthy" in text and "tok/s" in text)
            terminal.resize(50, 16)
            terminal.until(lambda text: f"{urlsplit(worker_url).netloc}  healthy" in text and "tok/s" not in text)
            settings.write_text(settings.read_text().replace('"right"', '"another"'))
            terminal.until(lambda text: "not ready" in text and "401" in text)
        terminal.until(lambda text: "refused" in text)
        settings.write_text(settings.read_text().replace('"another"', '"right"'))
        with routed(settings, port):
            terminal.until(lambda text: " ready" in text and "healthy" in text)
            os.write(terminal.descriptor, b"\x03")
            assert terminal.end() == 0
    assert GIVES_BACK in terminal.bytes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_gives_the_screen_back(settings: Path, free_port, number: signal.Signals) -> None:
    with routed(settings, free_port()) as url, Terminal("top", url, "--admin-key", "right") as terminal:
        terminal.until(lambda text: "healthy" in text)
        os.kill(terminal.pid, number)
        assert terminal.end() == 0
    assert GIVES_BACK in terminal.bytes


def test_without_a_terminal_it_is_told_once_without_colours(settings: Path, free_port, capsys, monkeypatch) -> None:
    with routed(settings, free_port()) as url:
        monkeypatch.setenv("ROUTER_KEY", "right")
        assert main(["top", url, "--admin-key", "env:ROUTER_KEY", "--interval", "0.1"]) == 0
        told = capsys.readouterr().out
        assert "ready" in told
        assert "\x1b" not in told
        assert main(["top", url, "--admin-key", "wrong"]) == 1
        assert "401" in capsys.readouterr().err
        assert main(["why", f"{url}/ui", "--admin-key", "right"]) == 0
        assert "0 requests in 0 s, 0 prompt tokens, of which" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["localhost:30000"], 2, "URL: got 'localhost:30000', expected a router's"),
        (["http://127.0.0.1:9"], 1, "refused"),
        (["http://127.0.0.1:9", "--interval", "0"], 2, "--interval: got 0.0, expected seconds from 0.1 to 60"),
        (["http://127.0.0.1:9", "--admin-key", "env:NO_SUCH"], 2, "admin_key: got 'env:NO_SUCH'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], code: int, said: str, capsys) -> None:
    assert main(["top", *arguments]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("command", "field"), [("top", "fleet"), ("why", "total")])
def test_a_router_of_another_version_is_named_with_what_its_answers_lack(worker_url, command, field, capsys) -> None:
    assert main([command, worker_url]) == 1
    assert f"{worker_url} cannot be read: its answers have no '{field}', so its version" in capsys.readouterr().err


def test_times_are_read_from_a_histogram_as_prometheus_does() -> None:
    grown = Counter({"0.1": 10, "0.5": 90, "+Inf": 100, "requests": 100})
    assert [_quantile(grown, part) for part in (0.05, 0.5, 0.99)] == ["0.05 s", "0.30 s", "0.50 s"]
    assert _quantile(Counter({"0.1": 0, "+Inf": 0}), 0.5) == "–"

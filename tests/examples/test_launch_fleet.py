"""The launcher is strict: no router in front of workers that could not be prepared."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

FreePorts = Callable[[int], int]
SCRIPT = Path(__file__).parents[2] / "examples" / "launch_fleet.sh"

# Stands in for `kvist`: writes down how it was called, and as a worker refuses to clear its cache.
STUB = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
with open(sys.argv[0] + ".calls", "a") as calls:
    calls.write(sys.argv[1] + "\\n")
class Worker(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
    def do_POST(self):
        self.send_response(500), self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Worker).serve_forever()
"""


def test_the_router_is_not_started_when_a_cache_cannot_be_cleared(tmp_path: Path, free_ports: FreePorts) -> None:
    stub = tmp_path / "kvist"
    stub.write_text(STUB)
    stub.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, "some-model", str(free_ports(3))],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 1
    assert "did not clear its cache" in done.stderr
    assert (tmp_path / "kvist.calls").read_text().split() == ["serve", "serve"]


def test_scripts_stop_at_the_first_failure_and_end_in_a_newline() -> None:
    for script in SCRIPT.parent.glob("*.sh"):
        text = script.read_text()
        assert "set -euo pipefail" in text
        assert text.endswith("\n")


@pytest.mark.xdist_group("whole system")
def test_the_fleet_serves_and_ends_with_the_script(free_ports: FreePorts) -> None:
    from kvist.engine import bundled_model_path

    port = free_ports(3)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with subprocess.Popen([SCRIPT, str(bundled_model_path()), str(port)], env=environment) as process:
        deadline = time.monotonic() + 240
        while not _is_ready(f"http://127.0.0.1:{port}/readiness"):
            assert process.poll() is None
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=180) == 0
    for offset in range(3):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port + offset)) != 0


def _is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=180).status == 200)
    except OSError:
        return False

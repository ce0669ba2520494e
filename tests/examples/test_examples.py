"""Each example runs as printed in it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> str:
    """Return what an example prints; it must end well."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_embedded_publisher_is_followed_by_an_index() -> None:
    assert "gpu-0 rank 0 holds 3 of 4 blocks" in run(str(EXAMPLES / "embedded_publisher.py"))


class Worker(BaseHTTPRequestHandler):
    """A worker that is healthy, says nothing of itself, and answers each chat alike."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        answer = json.dumps({"choices": [{"message": {"content": "It scatters."}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def test_a_gateway_routes_by_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # A worker may be slow to answer on a busy machine, and the example asks once.
    monkeypatch.setattr("kvist.router.fleet.membership.FIRST_CHECKS_S", 180.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Worker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(sys, "argv", ["embedded_router.py", url])
        runpy.run_path(str(EXAMPLES / "embedded_router.py"), run_name="__main__")
        printed = capsys.readouterr().out.splitlines()
        server.shutdown()
    assert printed[0].startswith(f"{url} held 0 of ")
    assert printed[1] == "It scatters."


def test_an_engine_reports_from_a_fork_a_thread_and_an_event_loop_and_the_documents_show_how() -> None:
    example = EXAMPLES / "embedded_engine.py"
    printed = run(str(example)).splitlines()
    assert printed == [f"{where} 1 block held" for where in ("forked", "thread", "asyncio")]
    assert f"```python\n{example.read_text()}```" in (EXAMPLES.parent / "docs" / "engines.md").read_text()


def test_a_recording_played_twice_gives_the_same_index_twice() -> None:
    held = [line for line in run(str(EXAMPLES / "record_and_replay.py")).splitlines() if "3 blocks" in line]
    assert len(held) == 2
    assert held[0] == held[1]


def test_the_tiny_model_can_be_trained_again(tmp_path: Path) -> None:
    quick = ("--minutes", "0.01", "--max-files", "10", "--answer-tokens", "2")
    output = run(str(EXAMPLES / "train_tiny_model"), "--out", str(tmp_path), *quick)
    assert "held_out_loss=" in output
    assert (tmp_path / "model.safetensors").is_file()


def test_a_trace_is_shown_as_a_tree(free_port: Callable[[], int]) -> None:
    from kvist.tracing import open_tracing

    port = free_port()
    command = [sys.executable, str(EXAMPLES / "show_traces.py"), "--port", str(port), "--quiet-s", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as showing:
        assert showing.stdout is not None
        tracing = open_tracing(f"http://127.0.0.1:{port}", "kvist-router", "here:1")  # which tries until it listens
        with tracing.request("POST /v1/completions", [], {"kvist.prompt_tokens": 9}) as request:
            with request.step("read"):
                pass
            with request.call("prefill") as call:
                call.fail("answered 503")
        tracing.close(60)
        lines = [showing.stdout.readline().rstrip() for _ in range(5)]
        showing.kill()
    assert [line[19:].split() for line in lines[2:]] == [
        ["POST", "/v1/completions", "[kvist-router]", "prompt_tokens=9"],
        ["read"],
        ["prefill", "error:", "answered", "503"],
    ]


def test_examples_are_short() -> None:
    for example in EXAMPLES.glob("*.py"):
        assert len(example.read_text().splitlines()) <= 80, example


def test_serve_sends_chats_to_the_replica_that_holds_them() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvist[ray]'")
    printed = run(str(EXAMPLES / "ray_serve_router.py"))
    asked = re.findall(r"(?m)^(\w+) had (\d+) of \d+ tokens of '[^']*' about '(.*)'$", printed)
    assert len(asked) == 8
    for document in {document for _, _, document in asked}:
        (_, _), (_, _), (third, _), (last, num_cached) = (
            (who, int(num)) for who, num, what in asked if what == document
        )
        assert third == last
        assert num_cached > 400

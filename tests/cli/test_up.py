"""The main job for real: router, two workers, conversations, as the command runs them."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvist.cli import main

UP = [sys.executable, "-m", "kvist", "--log-level", "warning", "up", "--port", "0"]
UP_WITHOUT_ENGINES = """
import sys
from kvist.cli import main, up

up._serve_command = lambda args, _: up._route_command(args, ["http://127.0.0.1:9"], "round-robin", "127.0.0.1", "0")
sys.exit(main())
"""
"""Runs the command with routers in place of workers, which start in a tenth of the time."""


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command for as long as the block lasts, whatever happens in it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    """Whatever a command started must be gone when it is."""
    yield
    left = [process for process in psutil.Process().children(recursive=True) if "kvist" in process.cmdline()]
    assert left == []


@pytest.mark.xdist_group("whole system")
def test_the_demo_routes_by_prefix_and_beats_round_robin(tmp_path: Path) -> None:
    command = [*UP, "--record-requests", str(tmp_path), "--exit", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["requests"] == facts["completed"] == facts["baseline_completed"] == 60
    assert facts["prompt_tokens"] == facts["baseline_prompt_tokens"]
    assert facts["cached_tokens"] > facts["baseline_cached_tokens"]
    assert facts["events_filtered"] > 0
    assert facts["ttft_ms_p50"] > 0
    (part,) = tmp_path.iterdir()
    recorded = [json.loads(line) for line in gzip.decompress(part.read_bytes()).splitlines()]
    assert [line["status"] for line in recorded] == [200] * facts["requests"]
    assert sum(line["input_length"] for line in recorded) == facts["prompt_tokens"]
    assert sum(line["cached_tokens"] for line in recorded) == facts["cached_tokens"]
    assert main(["simulate", str(tmp_path), "--policy", "kv,round-robin", "--workers", "2", "--seeds", "1"]) == 0


@pytest.mark.xdist_group("whole system")
def test_envoy_asks_a_picker_that_routes_by_prefix() -> None:
    done = subprocess.run([*UP, "--envoy", "--exit", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["requests"] == facts["completed"] == facts["baseline_completed"] == 60
    assert facts["cached_tokens"] > facts["baseline_cached_tokens"]
    assert re.search("picker: http.*\n *envoy: http", done.stderr)
    assert {"worker 0", "worker 1"} <= set(re.findall("worker [01]", done.stderr.partition("Routed by prefix")[2]))


@pytest.mark.parametrize("more", [["--disaggregated"], ["--record-requests", "/tmp"]])
def test_what_only_the_router_does_is_refused_beside_envoy(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--envoy", *more]) == 2
    assert "--envoy: got True, expected no --disaggregated" in capsys.readouterr().err


@pytest.mark.xdist_group("whole system")
def test_one_worker_computes_the_demos_prompts_and_another_answers() -> None:
    command = [*UP, "--disaggregated", "--exit", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["requests"] == facts["completed"] == facts["baseline_completed"] == 60
    assert facts["prompt_tokens"] == facts["baseline_prompt_tokens"]
    assert facts["transfers"] > 30
    assert facts["bytes_transferred"] > facts["transfers"] * 1000
    assert facts["fallbacks"] == 0
    assert "worker 0 → worker 1" in done.stderr


@pytest.mark.xdist_group("whole system")
@pytest.mark.parametrize(
    ("number", "has_engine"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, False)]
)
def test_a_signal_stops_everything(number: signal.Signals, has_engine: bool, request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored, as after nohup: then it stays so
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    command = UP if has_engine else [sys.executable, "-c", UP_WITHOUT_ENGINES, *UP[3:]]
    with started(*command, "--no-demo", "--workers", "1") as process:
        assert process.stdout is not None
        curl, url, flag, body = shlex.split(next(line for line in process.stdout if "curl" in line))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        if has_engine:
            assert (curl, flag) == ("curl", "-d")
            greedy = json.dumps(json.loads(body) | {"temperature": 0}).encode()
            with urllib.request.urlopen(url, greedy, timeout=180) as answer:
                assert json.load(answer)["choices"][0]["message"]["content"]
        os.kill(process.pid, number)
        assert process.wait(timeout=180) == 0
        assert not [child for child in children if child.is_running()]

"""`kvist index` from the outside: flags and file, the ready line, the end."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvist.cli import index, main
from kvist.indexer.service import IndexConfig
from kvist.indexer.service.config import Worker

WORKERS = "1=tcp://127.0.0.1:5557,1:1=tcp://127.0.0.1:5558?engine=sglang&replay_port=9"


def config(*argv: str) -> IndexConfig:
    parser = argparse.ArgumentParser()
    index.add_arguments(parser)
    return index.make_config(parser.parse_args(argv))


def test_without_arguments_the_defaults_hold() -> None:
    assert config() == IndexConfig()
    assert (IndexConfig().host, IndexConfig().port, IndexConfig().model_name) == ("127.0.0.1", 8090, "default")


def test_flags_are_read_in_their_keys_types() -> None:
    read = config(
        *("--workers", WORKERS, "--block-size", "16", "--port", "0", "--model-name", "m", "--max-blocks", "1000"),
        *("--peers", "http://a:8090, http://b:8091/", "--allow-endpoints", "10.0.0.0/8", "--no-replay"),
    )
    assert read.parsed_workers() == [
        Worker(1, 0, "tcp://127.0.0.1:5557"),
        Worker(1, 1, "tcp://127.0.0.1:5558?engine=sglang&replay_port=9"),
    ]
    assert (read.block_size, read.port, read.model_name, read.max_blocks) == (16, 0, "m", 1000)
    assert (read.peers, read.allow_endpoints) == (("http://a:8090", "http://b:8091/"), ("10.0.0.0/8",))
    assert not read.replay
    assert config("--replay").replay
    assert config("--full-reports").full_reports


def test_a_comma_between_a_brokers_hosts_parts_no_workers() -> None:
    nats = "nats://u:p@a:4222,b:4222/m/w?jetstream=S"
    read = config("--workers", f"1={nats}, 2=tcp://h:1,2:1=mqtt://h/m/w,", "--block-size", "16")
    assert [worker.endpoint for worker in read.parsed_workers()] == [nats, "tcp://h:1", "mqtt://h/m/w"]


def test_a_flag_of_several_values_may_also_be_repeated() -> None:
    read = config("--workers", "1=tcp://a:1,2=tcp://b:1", "--workers", "3=tcp://c:1", "--block-size", "16")
    assert [worker.endpoint for worker in read.parsed_workers()] == ["tcp://a:1", "tcp://b:1", "tcp://c:1"]


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "index.toml"
    path.write_text('port = 1\nblock_size = 8\nworkers = ["3=tcp://h:1"]\nreplay = false\n')
    read = config("--config", str(path), "--port", "2")
    assert (read.port, read.block_size, read.workers, read.replay) == (2, 8, ("3=tcp://h:1",), False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "x=tcp://h:1", "--block-size", "4"], "workers: got 'x=tcp://h:1', expected id[:rank]=endpoint"),
        (["--workers", "1:x=tcp://h:1", "--block-size", "4"], "workers: got '1:x=tcp://h:1', expected id[:rank]="),
        (["--workers", f"{1 << 64}=tcp://h:1", "--block-size", "4"], "id and rank in digits"),
        (
            ["--workers", "1=nats://u:p@h/m", "--block-size", "4"],
            "workers: got '1=nats://***@h/m', expected id",
        ),
        (["--workers", "1=tcp://h:1,x=tcp://h:2", "--block-size", "4"], "workers: got 'x=tcp://h:2', expected id"),
        (["--workers", "1=h:1", "--block-size", "4"], "expected id[:rank]=endpoint (endpoint: got 'h:1'"),
        (["--workers", "1=tcp://h:1,1:0=tcp://h:2", "--block-size", "4"], "expected each id and rank once"),
        (["--workers", "1=tcp://h:1"], "block_size: got None, expected the workers' tokens per block"),
        (["--block-size", "0"], "block_size: got '0', expected int >= 1"),
        (["--port", "70000"], "port: got '70000', expected int <= 65535"),
        (["--max-blocks", "x"], "max_blocks: got 'x', expected int"),
        (["--peers", "a:8090"], "peers: got 'a:8090', expected http://host[:port]"),
        (["--peers", "http://a:8090/dump"], "peers: got 'http://a:8090/dump', expected http://host[:port]"),
        (["--allow-endpoints", "10.0.0.0/33"], "allow_endpoints: got '10.0.0.0/33', expected a network as CIDR"),
        (["--admin-key", ""], "admin_key: got '', expected str of length >= 1"),
    ],
)
def test_a_wrong_flag_ends_with_code_2_and_its_name(capsys, argv: list[str], message: str) -> None:
    assert main(["index", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return what starts the command with more environment."""
    command = [sys.executable, "-m", "kvist", "index", "--port", "0", "--workers", WORKERS, "--block-size", "16"]
    with ExitStack() as exits:

        def start(**environment: str) -> subprocess.Popen[str]:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = exits.enter_context(subprocess.Popen(command, env={**os.environ, **environment}, **pipes))
            exits.callback(process.kill)
            return process

        yield start


@pytest.fixture
def process(start_process: Callable[..., subprocess.Popen[str]]) -> subprocess.Popen[str]:
    return start_process()


def ask(url: str, path: str, body: bytes | None = None) -> tuple[int, Any, Any]:
    """Return status, header fields and JSON of an answer."""
    try:
        with urllib.request.urlopen(url + path, body, timeout=180) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, json.load(error)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    ready = re.fullmatch(r"kvist index: listening on (http://127\.0\.0\.1:\d+) streams=2 start_s=\d+\.\d\d\n", line)
    assert ready, line
    return ready[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_and_a_signal_ends_it_with_0(process, until_true, number: int) -> None:
    url = url_of(process)
    until_true(lambda: ask(url, "/readiness")[0] == 200)
    assert [worker["instance_id"] for worker in ask(url, "/workers")[2]] == [1]
    os.kill(process.pid, number)
    assert process.wait(timeout=180) == 0


def test_with_an_empty_cache_it_answers_before_anything_is_compiled_and_a_signal_ends_all_of_it(
    tmp_path: Path, start_process
) -> None:
    process = start_process(NUMBA_CACHE_DIR=str(tmp_path))
    url = url_of(process)
    status, _, health = ask(url, "/health")
    assert (status, health["status"], health["cold_start_s"]) == (200, "ok", None)
    status, headers, page = ask(url, "/readiness")
    assert (status, headers["retry-after"], page) == (503, "1", {"ready": False, "index": "compiling"})
    for path, body in [("/query", b"{}"), ("/register", b"{}"), ("/workers", None), ("/dump", None)]:
        status, headers, refusal = ask(url, path, body)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "the index is compiling" in refusal["error"]
    compiler = psutil.Process(process.pid).children()[0]
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=180) == 0
    assert not compiler.is_running()
    assert "compiling the index" in process.stderr.read()


def test_where_nothing_can_be_written_it_answers_and_ends_while_a_thread_compiles(start_process) -> None:
    process = start_process(NUMBA_CACHE_DIR="/proc/none")
    assert ask(url_of(process), "/readiness")[2] == {"ready": False, "index": "compiling"}
    assert psutil.Process(process.pid).children() == []
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=180) == 0
    assert "set NUMBA_CACHE_DIR" in process.stderr.read()


def test_a_port_in_use_is_a_clear_error(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["index", "--port", str(port)]) == 1
    assert f"{port}" in (error := capsys.readouterr().err)
    assert "address already in use" in error

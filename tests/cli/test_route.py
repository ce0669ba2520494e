"""`kvist route` from the outside: flags and file, the ready line, the end."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from kvist.cli import main, route
from kvist.errors import InvalidValueError
from kvist.router.config import RouterConfig

WORKER = "http://127.0.0.1:8001"


def config(*argv: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    route.add_arguments(parser)
    return route.make_config(parser.parse_args(argv))


def test_without_arguments_the_defaults_hold() -> None:
    assert config() == RouterConfig()


def test_flags_are_read_in_their_keys_types() -> None:
    read = config(
        *("--worker-urls", WORKER, "http://b:2", "--policy", "Round-Robin", "--block-size", "32", "--port", "0"),
        *(
            "--tier-credits",
            "1",
            "0.5",
            "0.25",
            "0",
            "--queue-timeout-s",
            "0.25",
            "--kv-event-source",
            f"{WORKER}=tcp://h:1",
        ),
        *("--kv-event-source", f"{WORKER}=tcp://h:3?replay_port=9"),
    )
    assert read.worker_urls == (WORKER, "http://b:2")
    assert (read.policy, read.block_size, read.port) == ("round-robin", 32, 0)
    assert (read.tier_credits, read.queue_timeout_s) == ((1.0, 0.5, 0.25, 0.0), 0.25)
    assert read.kv_event_sources == {WORKER: ("tcp://h:1", "tcp://h:3?replay_port=9")}


def test_a_flag_of_several_values_may_also_be_repeated() -> None:
    read = config("--worker-urls", WORKER, "http://b:2", "--worker-urls", "http://c:3", "--alias", "x=a", "y=b")
    assert read.worker_urls == (WORKER, "http://b:2", "http://c:3")
    assert read.aliases == {"x": {"a": 1.0}, "y": {"b": 1.0}}


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(f'port = 1\npolicy = "round-robin"\nworker_urls = ["{WORKER}"]\n')
    read = config("--config", str(path), "--port", "2")
    assert (read.port, read.policy, read.worker_urls) == (2, "round-robin", (WORKER,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("polciy = 1", "polciy: got 1, expected a known key, such as policy"),
        ('port = "1"', "port: got '1', expected int"),
        ("[router]\nport = 1", "router: got {'port': 1}, expected a known key"),
        ("port = ", "valid TOML"),
    ],
)
def test_a_wrong_file_ends_with_code_2_and_the_key(tmp_path: Path, capsys, content: str, message: str) -> None:
    path = tmp_path / "router.toml"
    path.write_text(content)
    assert main(["route", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "x"], "port: got 'x', expected int"),
        (["--worker-urls", "w:1"], "worker_urls: got 'w:1', expected http(s)://host[:port][/prefix]"),
        (["--kv-event-source", WORKER], f"kv-event-source: got '{WORKER}', expected URL=ENDPOINT"),
        (["--model-path", "/nowhere"], "model_path: got '/nowhere', expected a model's directory"),
        (["--model", "m=/nowhere"], "models: got '/nowhere', expected a model's directory"),
    ],
)
def test_a_wrong_flag_ends_with_code_2_and_its_name(capsys, argv: list[str], message: str) -> None:
    assert main(["route", *argv]) == 2
    assert message in capsys.readouterr().err


def test_keys_come_from_flags_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    monkeypatch.setenv("KVIST_TEST_KEY", "from-the-environment")
    file = tmp_path / "router.toml"
    file.write_text(f'admin_key = "env:KVIST_TEST_KEY"\n[worker_api_keys]\n"{WORKER}" = "file:{tmp_path}/key"\n')
    read = config("--config", str(file), "--api-key", "as:it-is", "--worker-api-key", f"file:{tmp_path}/key")
    assert (read.api_key, read.admin_key, read.worker_api_key) == ("as:it-is", "from-the-environment", "from-a-file")
    assert read.authorization(WORKER) == [(b"authorization", b"Bearer from-a-file")]
    assert "from-" not in repr(read)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('api_key = "se cret"', "api_key: got '***', expected str matching regex"),
        ("admin_key = 12345", "admin_key: got '***', expected str"),
        ('worker_api_key = "env:KVIST_NOT_SET"', "worker_api_key: got 'env:KVIST_NOT_SET', expected the name of a"),
        ('api_key = "file:/nowhere/key"', "api_key: got 'file:/nowhere/key', expected a file that can be read"),
        ('[worker_api_keys]\n"http://w:1" = 12345', "worker_api_keys: got '***', expected str"),
        ('[worker_api_keys]\n"w:1" = "12345"', "worker_api_keys: got 'w:1', expected http(s)://host[:port]"),
    ],
)
def test_an_error_about_a_key_does_not_show_it(tmp_path: Path, capsys, content: str, message: str) -> None:
    path = tmp_path / "router.toml"
    path.write_text(content)
    assert main(["route", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "12345" not in error
    assert "cret" not in error


def test_help_says_where_keys_may_be(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["route", "--help"])
    assert " ".join(capsys.readouterr().out.split()).count("env:NAME or file:PATH") == 4


def test_help_is_in_groups_and_every_key_of_the_file_but_mappings_is_a_flag(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["route", "--help"])
    text = capsys.readouterr().out
    assert "requests may go on after that (default: 180.0)" in " ".join(text.split())
    _, *groups = re.split(r"\n(?=[a-z][a-z ]+:\n)", text)
    flags = {group.partition(":")[0]: set(re.findall(r"\n  --(\S+?)[ ,\n]", group)) for group in groups}
    assert flags.pop("options") == {"log-level", "config"}
    assert {"connect-timeout-s", "first-byte-timeout-s", "idle-timeout-s", "request-timeout-s"} <= flags["timeouts"]
    assert {"worker-urls", "kv-event-source"} <= flags["workers"]
    assert {"policy", "tier-credits"} <= flags["routing"]
    assert {"api-key", "client-ca", "worker-ca", "tls-key"} <= flags["security"]
    keys = {field.name.replace("_", "-") for field in fields(RouterConfig)}
    mappings = {"worker-api-keys", "kv-event-sources", "models", "aliases"}
    assert set().union(*flags.values()) == keys - mappings | {"kv-event-source", "model", "alias"}


def test_models_and_aliases_are_named_by_flags() -> None:
    given = config(
        "--model", "a=/models/a", "--model", "b=/b=c", "--alias", "gpt=a@9", "--alias", "gpt=b", "--alias", "x=b"
    )
    assert {name: model.path for name, model in given.models.items()} == {"a": "/models/a", "b": "/b=c"}
    assert given.aliases == {"gpt": {"a": 9.0, "b": 1.0}, "x": {"b": 1.0}}
    for flags, field in ((("--model", "a"), "model"), (("--alias", "=b"), "alias"), (("--alias", "a=b@0"), "aliases")):
        with pytest.raises(InvalidValueError, match=f"^{field}"):
            config(*flags)


def test_a_text_with_a_nul_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text('state_dir = "\\u0000"')
    with pytest.raises(InvalidValueError, match=r"^state_dir: got .*, expected text without NUL"):
        config("--config", str(path))


def test_a_value_out_of_range_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="breaker_failures"):
        config("--breaker-failures", "0")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvist", "route", "--port", "0", "--policy", "least-loaded"]
    command += ["--discover", f"file://{tmp_path}/workers.toml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        yield running
        running.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_when_it_is_ready_and_a_signal_ends_it_with_0(process, number: int) -> None:
    line = process.stdout.readline()
    told = r"kvist route: listening on (http://127\.0\.0\.1:\d+) policy=least-loaded workers=0 discover=1\n"
    ready = re.fullmatch(told, line)
    assert ready, line
    with urllib.request.urlopen(ready[1] + "/health", timeout=180) as answer:
        assert json.load(answer)["status"] == "ok"
    os.kill(process.pid, number)
    assert process.wait(timeout=180) == 0


@pytest.mark.parametrize(("code", "earlier"), [({"code": "0.0.9 (1f)"}, "0.0.9 (1f)"), ({}, "an earlier version")])
def test_a_process_of_a_router_that_other_code_started_refuses_to_be_one(capsys, code: dict[str, str], earlier) -> None:
    part = {"front": 0, "directory": "/nowhere", "board": 0, "bells": [], "port": 0} | code
    assert main(["route", "--part", json.dumps(part)]) == 1
    assert f"is installed, but the router was started by {earlier}: restart the router" in capsys.readouterr().err


def test_processes_start_where_a_folder_is_named_like_the_package(tmp_path: Path) -> None:
    (tmp_path / "kvist").mkdir()
    (tmp_path / "kvist" / "__init__.py").touch()
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvist",
        "route",
        "--port",
        "0",
        "--policy",
        "round-robin",
        "--processes",
        "2",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": environment}
    with subprocess.Popen(command, **options) as running:
        assert running.stdout.readline().endswith(" policy=round-robin workers=0 processes=2\n")
        running.terminate()
        assert running.wait(timeout=180) == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_address_that_cannot_be_listened_on_is_named(capsys, processes: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["route", "--policy", "round-robin", "--processes", processes, "--port", str(port)]) == 1
    assert f"{port}" in (error := capsys.readouterr().err)
    assert "address already in use" in error.lower()
    assert main(["route", "--policy", "round-robin", "--processes", processes, "--host", "nobody.invalid"]) == 1
    assert "nobody.invalid" in capsys.readouterr().err

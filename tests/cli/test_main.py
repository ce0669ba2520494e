"""The command's edge: lazy imports, exit codes, errors that say what to do."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvist.cli import COMMANDS, main

HEAVY = ("torch", "numba", "triton", "tokenizers", "uvicorn", "starlette", "rich", "zmq", "numpy")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from kvist.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as ended: code = ended.code\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "loaded: [] 0" in output
    assert all(f"  {command} " in output for command in COMMANDS)


def test_a_process_of_its_own_collects_rarely() -> None:
    program = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_threshold()[0]))\nfrom kvist.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "why", "--help"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("\n10000\n")


def test_an_interrupt_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", Mock(side_effect=KeyboardInterrupt))
    assert main(["route"]) == 130


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: kvist {command}" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "told"), [("/dev/full", "error: [Errno 28] No space left on device"), (None, "")])
def test_what_cannot_be_printed_is_a_failure_of_one_line_and_none_for_a_reader_who_has_seen_enough(
    device: str | None, told: str
) -> None:
    program = "import sys; from kvist.cli import main; sys.exit(main(['simulate', '--policy', 'list']))"
    if device is None:
        read_end, stdout = os.pipe()
        os.close(read_end)
    else:
        stdout = os.open(device, os.O_WRONLY)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(stdout)
    assert ended.returncode == 1
    assert ended.stderr == (f"kvist simulate: {told}\n" if told else "")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_log_level_stands_before_or_behind_each_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: levels.append(options["level"]))
    monkeypatch.setattr(f"kvist.cli.{command}.run", lambda _: 0)
    monkeypatch.setattr(f"kvist.cli.{command}.add_arguments", lambda _: None)
    for argv in ([command], ["--log-level", "error", command], [command, "--log-level", "error"]):
        assert main(argv) == 0
    assert main(["--log-level", "error", command, "--log-level", "debug"]) == 0
    assert levels == ["INFO", "ERROR", "ERROR", "DEBUG"]


@needs_torch
def test_a_wrong_value_ends_with_code_2_and_names_flag_value_and_expectation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--workers", "0"]) == 2
    assert capsys.readouterr().err == "kvist up: error: --workers: got 0, expected at least 1\n"
    assert main(["up", "--disaggregated", "--workers", "1"]) == 2
    assert "--workers: got 1, expected at least 2 with --disaggregated" in capsys.readouterr().err


WITHOUT = """
import contextlib, importlib.abc, io, json, sys
from kvist.cli import main

missing, commands = json.loads(sys.argv[1])

class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{each}.") for each in missing):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
for command in commands:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(["--log-level", "error", *command.split()])
    print(json.dumps([code, errors.getvalue()]))
"""
SERVE = "serve --port 0 --model kvist/engine/bundled_model"
ROUTER = ("numba", "llvmlite", "tokenizers", "jinja2", "prometheus_client", "rich")
ENGINE = ("torch", "safetensors")


@needs_torch
@pytest.mark.parametrize(
    ("missing", "commands", "extra"),
    [
        ([*ROUTER, *ENGINE], ["up", SERVE], "engine"),
        ([*ROUTER, *ENGINE], ["route", "index --port 0", "compile", "replay --into-index {new}"], "router"),
        (ROUTER, ["up", "route", "index --port 0", SERVE, "compile", "replay --into-index {new}"], "router"),
        (["numba", "llvmlite"], ["index --port 0", "compile", "replay --into-index {new}"], "router"),
        (ENGINE, ["up", SERVE], "engine"),
        (
            ["nats", "nkeys"],
            [
                SERVE + " --kv-events nats://localhost/m",
                "publish --engine vllm --endpoint tcp://localhost:1 --block-size 4 --to nats://localhost/m",
                "record --from nats://localhost/m/w --to {new}",
            ],
            "nats",
        ),
        (
            ["aiomqtt", "paho"],
            [
                SERVE + " --kv-events mqtt://localhost/m",
                "publish --engine vllm --endpoint tcp://localhost:1 --block-size 4 --to mqtt://localhost/m",
                "record --from mqtt://localhost/m/w --to {new}",
            ],
            "mqtt",
        ),
        (["opentelemetry"], ["route --otlp-traces-endpoint http://localhost:1"], "tracing"),
        (["opentelemetry.trace"], ["route --otlp-traces-endpoint http://localhost:1"], "tracing"),  # as beside `epp`
    ],
)
def test_each_command_whose_extra_is_missing_says_which(
    missing: list[str], commands: list[str], extra: str, tmp_path: Path
) -> None:
    commands = [each.format(new=tmp_path / "recording") for each in commands]
    argv = [sys.executable, "-c", WITHOUT, json.dumps([missing, commands])]
    process = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    for command, line in zip(commands, process.stdout.splitlines(), strict=True):
        code, errors = json.loads(line)
        assert code == 2, (command, errors)
        assert errors.startswith(f"kvist {command.split()[0]}: error: "), errors
        assert errors.endswith(f" is not installed: pip install 'kvist[{extra}]'\n"), errors


@pytest.mark.parametrize("command", ["route", "route --processes 2", "index", "epp", "publish --engine vllm"])
def test_a_state_folder_that_cannot_be_written_is_refused_before_anything_listens(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    port = "--to=tcp://127.0.0.1:0" if "publish" in command else "--port=0"
    arguments = [*command.split(), port, f"--state-dir={tmp_path}/file/state", "--log-level=warning"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}  # the index would be compiled after the start
    started = [sys.executable, "-m", "kvist", *arguments]
    ended = subprocess.run(started, capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        f"kvist {arguments[0]}: error: state_dir: got '{tmp_path}/file/state', expected a folder"
    )
    assert len(ended.stderr.splitlines()) == 1 + ("--processes" in command)


def test_the_first_process_of_a_container_ends_at_sigterm_though_its_service_does_not_listen_for_it_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("kvist.cli.compile.run", lambda _: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit, match="143"):
            main(["compile"])
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["fly"], "kvist: error: argument command: invalid choice: 'fly'"),
        (["route", "--fly"], "kvist route: error: unrecognized arguments: --fly (see kvist route --help"),
        (["route", "--policy", "best"], "kvist route: error: argument --policy: invalid choice: 'best'"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)

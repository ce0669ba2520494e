"""The command's edge: lazy imports, exit codes, errors that say what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvist.cli import COMMANDS, main

HEAVY = ("torch", "numba", "triton", "tokenizers", "uvicorn", "starlette", "rich", "zmq", "numpy")


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


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: kvist {command}" in capsys.readouterr().out


def test_a_wrong_value_ends_with_code_2_and_names_flag_value_and_expectation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--workers", "0"]) == 2
    assert capsys.readouterr().err == "kvist up: error: --workers: got 0, expected at least 1\n"
    assert main(["up", "--kv-transfer-bounce-mib", "32"]) == 2
    assert "--kv-transfer-bounce-mib: got 32, expected at least 0 MiB, and 0 without" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["up"]) == 2
    assert "pip install 'kvist[router]'" in capsys.readouterr().err


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2

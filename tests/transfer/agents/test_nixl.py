"""What is NIXL's own: its settings, and the traps that are caught before they cost an hour."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from kvist.errors import InvalidValueError
from kvist.transfer.agents.nixl import NixlAgent, check_ucx_transports, parse_num_threads


@pytest.mark.parametrize("setting", ["", "x", "0", "-2", "1.5"])
def test_a_number_of_threads_that_is_no_positive_integer_is_ignored_and_logged(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_num_threads(setting) is None
    assert repr(setting) in caplog.text


def test_a_number_of_threads_is_taken_and_none_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_num_threads("4") == 4
    assert parse_num_threads(None) is None
    assert not caplog.records


@pytest.mark.parametrize("setting", [None, "all", "tcp,self", "shm, tcp", "^ib"])
def test_ucx_transports_that_can_connect_are_accepted(setting: str | None) -> None:
    check_ucx_transports(setting)


@pytest.mark.parametrize("setting", ["shm", "rc,self", ""])
def test_ucx_transports_without_tcp_are_refused_by_name(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", setting)
    with pytest.raises(InvalidValueError, match=r"UCX_TLS: got .*, expected a list with tcp"):
        NixlAgent("writer")


def test_without_nixl_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['nixl'] = None\n"
        "from kvist.errors import MissingExtraError\n"
        "import kvist.transfer.agents\n"
        "try:\n    import kvist.transfer.agents.nixl\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "nixl is not installed: pip install 'kvist[nixl]'\n"


def test_an_import_that_fails_for_another_reason_is_not_called_a_missing_extra() -> None:
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'nixl': raise ImportError('libucx is broken')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "import kvist.transfer.agents.nixl\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "ImportError: libucx is broken" in answer.stderr
    assert "MissingExtraError" not in answer.stderr

"""`kvist compile` fills the cache, says what is in it, and fails where there can be none."""

from __future__ import annotations

import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvist.cli import main
from kvist.indexer import compilation


def test_it_says_where_the_machine_code_lies_and_how_much_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kvist.kernels._loops", raising=False)
    assert main(["compile"]) == 0
    if find_spec("torch") is not None:
        loops = sys.modules["kvist.kernels._loops"]
        cache_path = Path(loops._attend.stats.cache_path)
        assert len(list(cache_path.glob("_loops._attend-*.nbc"))) >= 2, "of each type of numbers"
        assert not cache_path.is_relative_to(Path(loops.__file__).parent), "pip could not remove the package"
    line = r"kvist compile: machine code is in /.*/kvist after \d+\.\d s\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_it_says_so_too_where_all_is_there_and_nothing_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["compile"]) == 0

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(compilation, "only_one_compiles", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert main(["compile"]) == 0
    first, second = (line.partition(" after ")[0] for line in capsys.readouterr().out.splitlines())
    assert first == second


def test_it_fails_where_nothing_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none")
    assert main(["compile"]) == 1
    assert "no directory for machine code can be written: set NUMBA_CACHE_DIR to one" in capsys.readouterr().err

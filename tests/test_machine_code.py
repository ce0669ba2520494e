"""Machine code lies in a directory named by its source, and is known to be all there or not."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvist import machine_code


def test_the_directory_is_named_by_the_source_and_lies_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "_module.py"
    source.write_text("a = 1")
    first = machine_code.cache_directory(source)
    source.write_text("a = 2")
    second = machine_code.cache_directory(source)
    assert first is not None
    assert second is not None
    assert first != second
    assert first.parent == second.parent == tmp_path / "cache" / "kvist"


def test_there_is_none_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    assert machine_code.cache_directory(in_the_way) is None


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return what stands for the sources of all compiled modules; their cache has one file each."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    sources = [tmp_path / "index.py", tmp_path / "indexer.py", tmp_path / "router.py"]
    for source, constant in zip(sources, ("RADIX_SOURCES", "INDEXER_SOURCES", "ROUTER_SOURCES"), strict=True):
        source.write_text("a = 1")
        monkeypatch.setattr(machine_code, constant, (source,))
        directory = machine_code.cache_directory(source)
        assert directory is not None
        (directory / "a.nbc").write_bytes(b"code")
    return sources


def machine_code_of(source: Path) -> Path:
    directory = machine_code.cache_directory(source)
    assert directory is not None
    return directory / "a.nbc"


def test_a_cache_is_filled_once_that_was_noted(sources: list[Path]) -> None:
    assert machine_code.find_filled() is None
    filled = machine_code.mark_filled()
    assert filled == machine_code_of(sources[0]).parent.parent
    assert machine_code.find_filled() == filled


def test_a_filled_cache_is_none_for_another_source_or_other_settings_of_numba(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = machine_code.mark_filled()
    monkeypatch.setenv("NUMBA_OPT", "0")
    assert machine_code.find_filled() is None
    monkeypatch.delenv("NUMBA_OPT")
    assert machine_code.find_filled() == filled
    sources[1].write_text("a = 2")
    assert machine_code.find_filled() is None


@pytest.mark.usefixtures("sources")
def test_only_what_was_compiled_for_every_cpu_is_used_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, is_used in (("generic", True), ("native", False)):
        monkeypatch.setenv("NUMBA_CPU_NAME", name)
        assert machine_code.mark_filled() is not None
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("llvmlite.binding.get_host_cpu_name", lambda: "another")
            assert (machine_code.find_filled() is not None) == is_used


def test_a_directory_that_cannot_be_written_is_used_when_it_is_full(
    sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = machine_code_of(sources[0]).parent

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as read_only:
        read_only.setattr(tempfile, "TemporaryFile", refuse)
        assert machine_code.cache_directory(sources[0]) is None
    machine_code.mark_filled()
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert machine_code.cache_directory(sources[0]) == directory


HOLDS_THE_LOCK = """
import signal, sys
from pathlib import Path
from kvist import machine_code
machine_code.INDEXER_SOURCES = (Path(sys.argv[1]),)
with machine_code.only_one_compiles():
    print("held", flush=True)
    signal.pause()
"""


def test_one_process_compiles_at_a_time_and_one_that_is_killed_is_in_nobodys_way(sources: list[Path]) -> None:
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(sources[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        lock = machine_code_of(sources[1]).with_name("lock")
        with lock.open("wb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(other.pid, signal.SIGKILL)
        with machine_code.only_one_compiles():
            pass

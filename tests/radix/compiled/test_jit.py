"""The index compiles into a directory named by its source, and without one where nothing can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvist.radix.compiled import jit
from kvist.radix.compiled.jit import cache_directory


def test_the_directory_is_named_by_the_source_and_lies_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "_module.py"
    source.write_text("a = 1")
    first = cache_directory(source)
    source.write_text("a = 2")
    second = cache_directory(source)
    assert first is not None
    assert second is not None
    assert first != second
    assert first.parent == second.parent == tmp_path / "cache" / "kvist"


def test_a_directory_of_an_older_version_goes_once_it_was_not_used_for_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "_module.py"
    directories = []
    for version in range(3):
        source.write_text(f"a = {version}")
        directories.append(cache_directory(source))
    unused, recent, current = (directory for directory in directories if directory is not None)
    now_s, day_s = current.stat().st_mtime, 24 * 3600
    os.utime(unused, (now_s - 31 * day_s, now_s - 31 * day_s))
    os.utime(recent, (now_s - 29 * day_s, now_s - 29 * day_s))
    assert cache_directory(source) == current
    assert not unused.exists()
    assert recent.exists()


def test_there_is_none_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    assert cache_directory(in_the_way) is None


def test_functions_compile_and_run_without_a_writable_directory(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    module = tmp_path / "alone.py"
    module.write_text(
        "import importlib.util, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('jit', sys.argv[1])\n"
        "jit = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(jit)\n"
        "assert jit.cache_directory(pathlib.Path(__file__)) is None\n"
        "@jit.jit_for(pathlib.Path(__file__))('i8(i8)', is_entry=True)\n"
        "def double(number):\n    return 2 * number\n"
        "assert double(21) == 42\n"
    )
    environment = {**os.environ, "HOME": str(in_the_way), "XDG_CACHE_HOME": str(in_the_way), "NUMBA_CACHE_DIR": ""}
    command = [sys.executable, str(module), jit.__file__]
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)

"""The index compiles into a directory named by its source, and without one where nothing can be written."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvist.radix.compiled import jit
from kvist.radix.compiled.jit import Helper, cache_directory


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


CALLS_A_HELPER = """
from pathlib import Path
from kvist.radix.compiled.jit import jit_for
jit = jit_for(Path(__file__))

@jit("u8(u8)")
def low_half(number):
    return number & 0xFFFFFFFF

@jit("u8(i8)", is_entry=True)
def half_of(number):
    return low_half(number)
"""


def loaded(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("calls_a_helper", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_compiled(helper: Helper) -> bool:
    return "compiled" in vars(helper)


def test_a_helper_is_compiled_for_its_callers_alone_and_not_at_all_where_the_cache_holds_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "calls_a_helper.py"
    source.write_text(CALLS_A_HELPER)
    first, second = loaded(source), loaded(source)
    assert first.half_of(-1) == second.half_of(-1) == 0xFFFF_FFFF
    assert is_compiled(first.low_half)
    assert not is_compiled(second.low_half)
    assert [file.name.partition("-")[0] for file in tmp_path.rglob("*.nbi")] == ["calls_a_helper.half_of"]


def test_python_cannot_call_a_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(TypeError, match="'Helper' object is not callable"):
        jit.jit_for(tmp_path)("i8(i8)")(abs)(1)


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

"""Functions compile into the cache and come out of it, and compile where there is none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvist.radix.compiled import jit
from kvist.radix.compiled.jit import Helper

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

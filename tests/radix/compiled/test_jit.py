"""Functions compile into the cache and come out of it, and compile where there is none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvist.radix.compiled

CALLS_A_HELPER = """
import sys
from pathlib import Path
from numba import int64, uint64
from kvist.radix.compiled.jit import helper, jit_for
jit = jit_for(Path(__file__))

@helper
def low_half(number):
    return number & 0xFFFFFFFF

@jit((int64,))
def half_of(number):
    return low_half(number)

assert half_of(-1) == 0xFFFF_FFFF
"""


ALONE = f"""
import sys, types
radix = types.ModuleType("kvist.radix")  # which would else compile the index, for ten seconds
radix.__path__ = {list(kvist.radix.__path__)}
sys.modules["kvist.radix"] = radix
"""


def loaded(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("calls_a_helper", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_helper_is_compiled_for_its_callers_and_not_at_all_where_the_cache_holds_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    source = tmp_path / "calls_a_helper.py"
    source.write_text(CALLS_A_HELPER)
    first, second = loaded(source), loaded(source)
    assert first.low_half.signatures
    assert not second.low_half.signatures
    assert [file.name.partition("-")[0] for file in tmp_path.rglob("*.nbi")] == ["calls_a_helper.half_of"]


def test_functions_compile_and_run_without_a_writable_directory(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    module = tmp_path / "alone.py"
    module.write_text(ALONE + CALLS_A_HELPER)
    environment = {**os.environ, "HOME": str(in_the_way), "XDG_CACHE_HOME": str(in_the_way), "NUMBA_CACHE_DIR": ""}
    subprocess.run([sys.executable, str(module)], env=environment, check=True, cwd=tmp_path)


def test_no_compiled_code_looks_behind_numba_or_switches_the_checks_of_bounds() -> None:
    for file in Path(kvist.radix.compiled.__file__).parent.glob("*.py"):
        text = file.read_text()
        for word in ("intrinsic", "llvmlite", "boundscheck", "ctypes", "numba.core", "carray"):
            assert word not in text, f"{file.name} has {word}"

"""Machine code is cached per user and per version of its source; without a writable directory it still compiles.

Only what Python calls has machine code of its own. A helper is compiled with the first of its callers that the cache
does not hold, to LLVM's intermediate form only, and optimised in each of them: three times less work for LLVM than with
code for each, and a process whose cache is filled does not touch helpers at all.

Numba notices an edit of a function's own file by its time and size only, and none of a function that it calls. The
directory used here is named by a hash of all sources, so stale machine code is never loaded, whatever a package manager
did to the files' times. Directories of other versions that nobody has used for a month are removed.
"""

# mypy: disable-error-code="no-untyped-call"
# Numba has few types.
from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import typeof_impl

_config: Any = numba.config
_njit: Any = numba.njit
_MAX_UNUSED_S = 30 * 24 * 3600
_Decorator = Callable[[Callable[..., Any]], Any]


def cache_directory(*sources: Path) -> Path | None:
    """Return a directory for the machine code of `sources` that can be written now, or None where there is none.

    A source is a file, or a folder with all its modules; the directory bears the name of the first, and of its folder.
    `NUMBA_CACHE_DIR` is honoured; otherwise it lies in `XDG_CACHE_HOME`, or in `.cache` of the home directory.
    """
    files = [file for source in sources for file in (sorted(source.glob("*.py")) if source.is_dir() else [source])]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    try:
        base = _config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base) / "kvist" / f"{sources[0].parent.name}-{sources[0].stem}-{digest}"
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # which also marks the directory as used now
            _remove_unused(directory)
            return directory
    except (OSError, RuntimeError):  # RuntimeError: no home directory at all
        return None


def _remove_unused(directory: Path) -> None:
    """Remove the directories of other versions of these sources that were last used long ago."""
    oldest_s = directory.stat().st_mtime - _MAX_UNUSED_S
    for other in directory.parent.glob(f"{directory.name.rpartition('-')[0]}-*"):
        if other.stat().st_mtime < oldest_s:
            shutil.rmtree(other, ignore_errors=True)


class _HelperLibrary(JITCodeLibrary):
    """Code to link into that of callers: neither optimised as a whole nor made into machine code."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _HelperCompiler(Compiler):
    """Numba's own passes, with a library of that kind at their end."""

    def define_pipelines(self) -> Any:
        self.state.library = _HelperLibrary(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        self.state.flags.no_compile = True
        return super().define_pipelines()

    def _compile_core(self) -> Any:
        result = super()._compile_core()
        name: Any = [].append  # Numba knows a callee by its built-in function: this one stands for none, and is unique
        result.target_context.insert_user_function(name, result.fndesc, [result.library])
        return result._replace(entry_point=name)


class Helper:
    """A function that only compiled ones call; to them it is what it was compiled to when one first needed it."""

    def __init__(self, function: Callable[..., Any], signature: str, options: dict[str, Any]) -> None:
        self._function, self._signature, self._options = function, signature, options

    @cached_property
    def compiled(self) -> Any:
        """Return it as Numba's type inference takes it."""
        return _njit(self._signature, pipeline_class=_HelperCompiler, **self._options)(self._function)


@typeof_impl.register(Helper)
def _typeof_helper(helper: Helper, context: Any) -> Any:
    return typeof_impl(helper.compiled, context)


def jit_for(*sources: Path) -> Callable[..., _Decorator]:
    """Return a decorator factory for functions of these sources, each with one explicit signature.

    Sources are those that `cache_directory` takes: name every module whose functions are called, too. A function with
    `is_entry` may be called from Python, and is compiled or loaded at once; any other becomes a `Helper`.
    """
    directory = cache_directory(*sources)

    def jit(signature: str, *, is_entry: bool = False, is_inlined: bool = False) -> _Decorator:
        options = {"error_model": "numpy", "boundscheck": False, "forceinline": is_inlined, "no_cfunc_wrapper": True}

        def decorate(function: Callable[..., Any]) -> Any:
            if not is_entry:
                return Helper(function, signature, {**options, "no_cpython_wrapper": True})
            before = _config.CACHE_DIR
            _config.CACHE_DIR = "" if directory is None else str(directory)
            try:
                return _njit(signature, cache=directory is not None, **options)(function)
            finally:
                _config.CACHE_DIR = before

        return decorate

    return jit


jit = jit_for(Path(__file__).parent)

"""Machine code comes out of the cache (`kvist.machine_code`); without a directory for that it still compiles.

Only what Python calls has machine code of its own. A helper is compiled with the first of its callers that the cache
does not hold, to LLVM's intermediate form only, and optimised in each of them: three times less work for LLVM than with
code for each, and a process whose cache is filled does not touch helpers at all.

Numba notices an edit of a function's own file, and none of a function that it calls: the directory used here is named
by a hash of all sources.
"""

# mypy: disable-error-code="no-untyped-call"
# Numba has few types.
from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import typeof_impl

from kvist.machine_code import RADIX_SOURCES, cache_directory

_config: Any = numba.config
_njit: Any = numba.njit
_Decorator = Callable[[Callable[..., Any]], Any]


class _Locator:
    """Tells Numba where machine code lies: its own locators want a directory that can be written, full as it may be."""

    directory: ClassVar[Path]
    """Of the function that is being declared."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._directory = self.directory
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator:  # noqa: ARG003
        return cls(function)

    def ensure_cache_path(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._directory)

    def get_disambiguator(self) -> str:
        return str(self._line)

    def get_source_stamp(self) -> None:
        """All sources stand in the directory's name."""


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
        options = {"error_model": "numpy", "forceinline": is_inlined, "no_cfunc_wrapper": True}

        def decorate(function: Callable[..., Any]) -> Any:
            if not is_entry:
                return Helper(function, signature, {**options, "no_cpython_wrapper": True})
            if directory is None:
                return _njit(signature, **options)(function)
            before, _Locator.directory = _config.CACHE_LOCATOR_CLASSES, directory
            _config.CACHE_LOCATOR_CLASSES = f"{__name__}.{_Locator.__name__}"
            try:
                return _njit(signature, cache=True, **options)(function)
            finally:
                _config.CACHE_LOCATOR_CLASSES = before

        return decorate

    return jit


jit = jit_for(*RADIX_SOURCES)

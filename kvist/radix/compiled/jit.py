"""Compiles functions with Numba and caches their machine code (`kvist.machine_code`), if there is a directory for it.

Functions that Python calls are compiled, or loaded, when their module is imported; helpers with the first of those that
the cache does not hold. Numba notices an edit of a function's own file, but not of a function that it calls: so the
directory is named by a hash of all sources.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numba
import numpy as np

from kvist.machine_code import RADIX_SOURCES, cache_directory

_config: Any = numba.config
_njit: Any = numba.njit
_Function = TypeVar("_Function", bound=Callable[..., Any])
_OPTIONS = {"error_model": "numpy", "no_cfunc_wrapper": True}


class _Locator:
    """Tells Numba where the cache is: its own locators refuse a read-only directory, even a complete one."""

    directory: ClassVar[Path]
    """That of the function which is being declared."""

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
        """Return None: the directory's name is a hash of all sources."""


def helper(function: _Function) -> _Function:
    """Declare a function that only compiled ones call; it is compiled when one of these is and needs it."""
    compiled: _Function = _njit(no_cpython_wrapper=True, **_OPTIONS)(function)
    return compiled


def inlined(function: _Function) -> _Function:
    """Declare a small helper that is inlined into each caller: LLVM would not, as an array is seven arguments."""
    compiled: _Function = _njit(forceinline=True, no_cpython_wrapper=True, **_OPTIONS)(function)
    return compiled


def jit_for(*sources: Path) -> Callable[[tuple[Any, ...]], Callable[[_Function], _Function]]:
    """Return a decorator factory for functions that Python calls, each with the Numba types of its arguments.

    `sources` are passed to `cache_directory`: include every module whose functions are called.
    """
    directory = cache_directory(*sources)

    def jit(arguments: tuple[Any, ...]) -> Callable[[_Function], _Function]:
        def decorate(function: _Function) -> _Function:
            compiled: _Function
            if directory is None:
                compiled = _njit(arguments, **_OPTIONS)(function)
                return compiled
            before, _Locator.directory = _config.CACHE_LOCATOR_CLASSES, directory
            _config.CACHE_LOCATOR_CLASSES = f"{__name__}.{_Locator.__name__}"
            try:
                compiled = _njit(arguments, cache=True, **_OPTIONS)(function)
                return compiled
            finally:
                _config.CACHE_LOCATOR_CLASSES = before

        return decorate

    return jit


jit = jit_for(*RADIX_SOURCES)


@helper
def signed(number: Any) -> int:
    """Return a number as int64, as all places and counts are: Numba makes a float of an int64 with a uint64."""
    return np.int64(number)  # type: ignore[return-value]  # which is what an int is when it is compiled

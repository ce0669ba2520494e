"""Machine code comes out of the cache (`kvist.machine_code`); without a directory for that it still compiles.

Functions that Python calls are compiled, or loaded, when their module is imported; helpers with the first of those that
the cache does not hold. Numba notices an edit of a function's own file, and none of a function that it calls: the
directory used here is named by a hash of all sources.
"""

# mypy: disable-error-code="no-untyped-call"
# Numba has few types.
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


def helper(function: _Function) -> _Function:
    """Compile a function that only compiled ones call, when one that is not in the cache first needs it."""
    compiled: _Function = _njit(no_cpython_wrapper=True, **_OPTIONS)(function)
    return compiled


def jit_for(*sources: Path) -> Callable[[tuple[Any, ...]], Callable[[_Function], _Function]]:
    """Return a decorator factory for functions that Python calls, each with the Numba types of its arguments.

    Sources are those that `cache_directory` takes: name every module whose functions are called, too.
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
    """Return a number as all places and counts are: Numba makes a float of what is half signed."""
    return np.int64(number)  # type: ignore[return-value]  # which is what an int is when it is compiled

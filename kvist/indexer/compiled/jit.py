"""How the indexer's functions are compiled: those that Python calls at once, others with the first that calls them."""

# mypy: disable-error-code="no-untyped-call"
# Numba has few types.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types

from kvist.machine_code import INDEXER_SOURCES
from kvist.radix.compiled.jit import jit_for

_Function = TypeVar("_Function", bound=Callable[..., Any])

jit = jit_for(*INDEXER_SOURCES)

BYTES: Any = types.Array(types.uint8, 1, "C", readonly=True)
TEXT: Any = types.Array(types.uint8, 1, "C")
INTEGERS: Any = types.Array(types.int64, 1, "C")
U32S: Any = types.Array(types.uint32, 1, "C")
U64S: Any = types.Array(types.uint64, 1, "C")
TABLE: Any = types.Array(types.int64, 2, "C")


_OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def helper(function: _Function) -> _Function:
    """Compile a function that only compiled ones call, when one that is not in the cache first needs it."""
    compiled: Any = numba.njit(**_OPTIONS)(function)
    return compiled  # type: ignore[no-any-return]


def inlined(function: _Function) -> _Function:
    """Put a small function into each of its callers: an array is seven arguments, of which LLVM would be shy."""
    compiled: Any = numba.njit(forceinline=True, **_OPTIONS)(function)
    return compiled  # type: ignore[no-any-return]


def entry(*arguments: Any) -> Callable[[_Function], _Function]:
    """Compile a function that Python calls, with arguments of these types, or load it from the cache."""
    compiled: Any = jit(arguments, is_entry=True)
    return compiled  # type: ignore[no-any-return]

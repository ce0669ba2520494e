"""How the indexer's functions are compiled: those that Python calls at once, others with the first that calls them."""

# mypy: disable-error-code="no-untyped-call"
# Numba has few types.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types

from kvist.machine_code import INDEXER_SOURCES
from kvist.radix.compiled.jit import helper, jit_for

__all__ = ["BYTES", "TABLE", "U32S", "U64S", "helper", "inlined", "jit"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

BYTES: Any = types.Array(types.uint8, 1, "C", readonly=True)
U32S: Any = types.Array(types.uint32, 1, "C")
U64S: Any = types.Array(types.uint64, 1, "C")
TABLE: Any = types.Array(types.int64, 2, "C")

# Functions of the index are compiled into those here: an edit there makes this machine code stale, too.
jit = jit_for(*INDEXER_SOURCES)


def inlined(function: _Function) -> _Function:
    """Put a small function into each of its callers: an array is seven arguments, of which LLVM would be shy."""
    options: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Any = numba.njit(forceinline=True, **options)(function)
    return compiled  # type: ignore[no-any-return]

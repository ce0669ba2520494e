"""Decorators of the indexer's compiled functions: `jit` if Python calls them, otherwise `helper` or `inlined`."""

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
    """Inline a small function into each caller: LLVM would not, as an array is seven arguments."""
    options: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Any = numba.njit(forceinline=True, **options)(function)
    return compiled  # type: ignore[no-any-return]

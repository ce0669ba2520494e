"""Rows of what ranks have to do, read at each decision: from this module's import on by machine code."""

from __future__ import annotations

from numba import float64, int64, types

from kvist.machine_code import ROUTER_SOURCES
from kvist.radix.compiled.jit import jit_for
from kvist.router.policy import work

_ROWS = types.Array(float64, 3, "A")
_SIGNATURE = (_ROWS, int64[::1], float64, float64, float64[:, ::1])

read_rows = jit_for(*ROUTER_SOURCES)(_SIGNATURE)(work.read_rows)
work.WorkRows.reader = staticmethod(read_rows)

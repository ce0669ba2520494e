"""Loops that decisions run at each request: from this module's import on as machine code."""

from __future__ import annotations

from numba import float64, from_dtype, int64, types, uint64

from kvist.machine_code import ROUTER_SOURCES
from kvist.radix.compiled.jit import jit_for
from kvist.router.policy import in_flight, priced, work

_jit = jit_for(*ROUTER_SOURCES)
_SLOT = from_dtype(in_flight.SLOT)
_ROWS, _TABLES, _TABLE = types.Array(float64, 3, "A"), types.Array(_SLOT, 2, "A"), types.Array(_SLOT, 1, "A")
_MARKS, _INTS, _COSTS, _FLOATS = uint64[::1], int64[::1], float64[::1], float64[:, ::1]
_HELD, _ANY_INTS = types.Array(int64, 2, "A"), types.Array(int64, 1, "A")

read_rows = work.read_rows = _jit((_ROWS, _INTS, float64, float64, _FLOATS))(work.read_rows)
read_depths = in_flight.read_depths = _jit((_TABLES, _MARKS, _INTS, float64, _INTS, _INTS, _INTS, _COSTS))(
    in_flight.read_depths
)
add_marks = in_flight.add_marks = _jit((_TABLE, _MARKS, int64, float64, float64, float64))(in_flight.add_marks)
settle_marks = in_flight.settle_marks = _jit((_TABLE, _MARKS, int64, float64, float64))(in_flight.settle_marks)
weigh_ranks = priced.weigh_ranks = _jit(
    (_FLOATS, _ANY_INTS, _INTS, _COSTS, float64, _HELD, _COSTS, int64, int64, int64, *[float64] * 4, _FLOATS, _INTS)
)(priced.weigh_ranks)

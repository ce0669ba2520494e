"""Arrays across the border: what a match takes from Python and gives back, at a tenth of what Numba's own way costs.

An array of Numba's own owns its memory through an object of its own, which takes a quarter of a microsecond to make.
"""

# mypy: ignore-errors
# Numba has no types for its extension points.
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import box, intrinsic, models, register_model

HASHES = types.Array(types.uint64, 1, "C", readonly=True)
_BYTE, _I32, _WORD = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
_DATA_BYTES = 16  # where an array object has the address of its data: behind the header of every object


class _ScoresType(types.Type):
    """Rows at addresses; in Python two arrays with copies of them: slots, `[num_rows]`, and depths, `[num_rows, 4]`."""

    def __init__(self) -> None:
        super().__init__("Scores")


SCORES = _ScoresType()


@register_model(_ScoresType)
class _ScoresModel(models.StructModel):
    def __init__(self, manager: Any, scores: Any) -> None:
        super().__init__(manager, scores, [(name, types.int64) for name in ("num_rows", "slots", "depths")])


@intrinsic
def make_scores(_typing: Any, _num_rows: Any, _slots: Any, _depths: Any) -> Any:
    """Return so many rows, with slots at one address and depths at another."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        scores = cgutils.create_struct_proxy(SCORES)(context, builder)
        scores.num_rows, scores.slots, scores.depths = args
        return scores._getvalue()

    return SCORES(types.int64, types.int64, types.int64), generate


@box(_ScoresType)
def _box_scores(_type: Any, value: Any, native: Any) -> Any:
    builder, api = native.builder, native.pyapi
    scores = cgutils.create_struct_proxy(SCORES)(native.context, builder, value)
    shapes = ((scores.slots, [scores.num_rows]), (scores.depths, [scores.num_rows, _WORD(4)]))
    arrays = [_new_array(builder, shape) for _, shape in shapes]
    result = cgutils.alloca_once_value(builder, ir.Constant(_BYTE, None))
    are_made = builder.and_(*(cgutils.is_not_null(builder, array) for array in arrays))
    with builder.if_else(are_made, likely=True) as (then, otherwise):
        with then:
            pair = api.tuple_new(2)
            for index, (array, (address, shape)) in enumerate(zip(arrays, shapes, strict=True)):
                _fill(builder, array, address, shape)
                api.tuple_setitem(pair, index, array)
            builder.store(pair, result)
        with otherwise:  # out of memory, of which NumPy has told Python
            for array in arrays:
                api.decref(array)
    return builder.load(result, typ=_BYTE)


def _new_array(builder: Any, shape: list[Any]) -> Any:
    """Make an array of u32 that owns its memory, row by row; null where there is none."""
    kind, words = np.dtype(np.uint32), _WORD.as_pointer()
    strides = [_WORD(kind.itemsize)]
    for extent in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], extent))
    pair = []
    for numbers in (shape, strides):
        array = cgutils.alloca_once(builder, _WORD, len(shape))
        for index, number in enumerate(numbers):
            builder.store(number, builder.gep(array, [_I32(index)], source_etype=_WORD))
        pair.append(array)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_BYTE, [_I32, words, words, _BYTE, _I32, _I32]), "numba_ndarray_new"
    )
    new_data = ir.Constant(_BYTE, None)
    return builder.call(function, [_I32(len(shape)), *pair, new_data, _I32(kind.num), _I32(kind.itemsize)])


def _fill(builder: Any, array: Any, address: Any, shape: list[Any]) -> None:
    """Copy what lies at an address into a new array."""
    size_bytes = _WORD(4)
    for extent in shape:
        size_bytes = builder.mul(size_bytes, extent)
    at = builder.add(builder.ptrtoint(array, _WORD), _WORD(_DATA_BYTES))
    data = builder.load(builder.inttoptr(at, _BYTE.as_pointer()), typ=_BYTE)
    cgutils.raw_memcpy(builder, data, builder.inttoptr(address, _BYTE), size_bytes, 1)

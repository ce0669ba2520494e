"""What Numba lacks: loads and stores by address, and three instructions. Addresses and 32-bit values are int64.

Arrays handed to compiled functions would be counted references and carry their shape; an address is a number.
"""

# mypy: ignore-errors
# Numba has no types for its extension points.
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _access(name: str, bits: int, result: Any, *, is_store: bool = False) -> Any:
    """Return an intrinsic that loads from, or stores to, an address; 32-bit values are unsigned."""
    stored = ir.IntType(bits)

    def pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, stored.as_pointer())

    def load(_typing: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = builder.load(pointer(builder, args[0]), align=4, typ=stored)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return result(types.int64), generate

    def store(_typing: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = args[1] if bits == 64 else builder.trunc(args[1], stored)
            builder.store(value, pointer(builder, args[0]), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, result), generate

    function = store if is_store else load
    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


get32 = _access("get32", 32, types.int64)
get64 = _access("get64", 64, types.int64)
getu64 = _access("getu64", 64, types.uint64)
put32 = _access("put32", 32, types.int64, is_store=True)
put64 = _access("put64", 64, types.int64, is_store=True)
putu64 = _access("putu64", 64, types.uint64, is_store=True)


def _word_access(name: str, *, is_store: bool) -> Any:
    """Return an intrinsic on the words of an array, by address and index: in this form LLVM makes vectors of them."""
    word = ir.IntType(64)

    def pointer(builder: Any, args: Any) -> Any:
        return builder.gep(builder.inttoptr(args[0], word.as_pointer()), [args[1]], inbounds=True, source_etype=word)

    def load(_typing: Any, _array: Any, _index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args), align=4, typ=word)

        return types.uint64(types.int64, types.int64), generate

    def store(_typing: Any, _array: Any, _index: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store(args[2], pointer(builder, args), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.uint64), generate

    function = store if is_store else load
    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


get_word = _word_access("get_word", is_store=False)
put_word = _word_access("put_word", is_store=True)


@intrinsic
def nonzero_words(_typing: Any, _address: Any) -> Any:
    """Return eight bits: which of eight words are not zero. One vector comparison, and no jump to mispredict."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), 8)
        words = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=4, typ=vector)
        bits = builder.icmp_unsigned("!=", words, ir.Constant(vector, None))
        return builder.zext(builder.bitcast(bits, ir.IntType(8)), ir.IntType(64))

    return types.uint64(types.int64), generate


@intrinsic
def move(_typing: Any, _target: Any, _source: Any, _size: Any) -> Any:
    """Copy bytes between regions that may overlap."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(arg, byte) for arg in args[:2])
        cgutils.raw_memmove(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def prefetch(_typing: Any, _address: Any) -> Any:
    """Ask for the cache line of an address that will be read soon."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32]), "llvm.prefetch.p0"
        )
        builder.call(function, [builder.inttoptr(args[0], byte), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def lowest_bit(_typing: Any, _value: Any) -> Any:
    """Return the index of the lowest bit set of a value that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate

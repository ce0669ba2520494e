"""What Numba lacks: loads and stores by address, and some instructions. Addresses and narrow values are int64.

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
            value = builder.load(pointer(builder, args[0]), align=min(4, bits // 8), typ=stored)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return result(types.int64), generate

    def store(_typing: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = args[1] if bits == 64 else builder.trunc(args[1], stored)
            builder.store(value, pointer(builder, args[0]), align=min(4, bits // 8))
            return context.get_dummy_value()

        return types.void(types.int64, result), generate

    function = store if is_store else load
    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


get8 = _access("get8", 8, types.int64)
get32 = _access("get32", 32, types.int64)
get64 = _access("get64", 64, types.int64)
getu64 = _access("getu64", 64, types.uint64)
put8 = _access("put8", 8, types.int64, is_store=True)
put32 = _access("put32", 32, types.int64, is_store=True)
put64 = _access("put64", 64, types.int64, is_store=True)
putu64 = _access("putu64", 64, types.uint64, is_store=True)


@intrinsic
def get_word(_typing: Any, _array: Any, _index: Any) -> Any:
    """Return a word of an array, by address and index: in this form LLVM makes vectors of them."""
    word = ir.IntType(64)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = builder.inttoptr(args[0], word.as_pointer())
        return builder.load(builder.gep(array, [args[1]], inbounds=True, source_etype=word), align=4, typ=word)

    return types.uint64(types.int64, types.int64), generate


def _lanes(builder: Any, address: Any, bits: int, num_lanes: int) -> Any:
    """Load a vector of integers from an address."""
    vector = ir.VectorType(ir.IntType(bits), num_lanes)
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=4, typ=vector)


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    """Repeat a value in all eight lanes of a vector."""
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), 8), None))


def _mask(builder: Any, lanes: Any) -> Any:
    """Gather the outcomes of eight comparisons into the low bits of a word."""
    return builder.zext(builder.bitcast(lanes, ir.IntType(8)), ir.IntType(64))


@intrinsic
def intersect_words(_typing: Any, _active: Any, _payload: Any, _num_held: Any, _gone: Any) -> Any:
    """Take from eight active words what a set's words lack; return eight bits: which words have changed.

    Only the first `num_held` words of the set count (it may be none, or more than eight). A tier is taken only if the
    set has no faster one either. What is gone is written apart. No jump that could be mispredicted.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        active, payload, num_held, gone = args

        def each(word: int) -> Any:
            return ir.Constant(ir.VectorType(ir.IntType(64), 8), [word] * 8)

        before, words = _lanes(builder, active, 64, 8), _lanes(builder, payload, 64, 8)
        words = builder.or_(words, builder.and_(builder.shl(words, each(1)), each(0xEEEE_EEEE_EEEE_EEEE)))
        words = builder.or_(words, builder.and_(builder.shl(words, each(2)), each(0xCCCC_CCCC_CCCC_CCCC)))
        is_held = builder.icmp_signed(
            "<", ir.Constant(words.type, list(range(8))), _splat(builder, num_held, words.type)
        )
        after = builder.select(is_held, builder.and_(before, words), each(0))
        taken = builder.xor(before, after)
        for address, value in ((active, after), (gone, taken)):
            builder.store(value, builder.inttoptr(address, words.type.as_pointer()), align=4)
        return _mask(builder, builder.icmp_unsigned("!=", taken, each(0)))

    return types.uint64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def equal_keys(_typing: Any, _bucket: Any, _key: Any) -> Any:
    """Return five bits: which keys of a bucket are this one. One comparison of the whole cache line."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        keys = _lanes(builder, args[0], 64, 8)
        hits = builder.icmp_unsigned("==", keys, _splat(builder, args[1], keys.type))
        return builder.and_(_mask(builder, hits), ir.IntType(64)(31))

    return types.uint64(types.int64, types.uint64), generate


@intrinsic
def equal_prefixes(_typing: Any, _bucket: Any, _prefix: Any) -> Any:
    """Return five bits: which keys of a bucket, of held rows or not, have these upper 32 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        keys = _lanes(builder, args[0], 64, 8)
        prefixes = builder.lshr(keys, ir.Constant(keys.type, [32] * 8))
        hits = builder.icmp_unsigned("==", prefixes, _splat(builder, args[1], keys.type))
        return builder.and_(_mask(builder, hits), ir.IntType(64)(31))

    return types.uint64(types.int64, types.int64), generate


@intrinsic
def held_rows(_typing: Any, _bucket: Any) -> Any:
    """Return five bits: which set ids of a bucket are not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        tail = _lanes(builder, builder.add(args[0], ir.IntType(64)(32)), 32, 8)
        bits = _mask(builder, builder.icmp_unsigned("!=", tail, ir.Constant(tail.type, None)))
        return builder.and_(builder.lshr(bits, ir.IntType(64)(2)), ir.IntType(64)(31))

    return types.uint64(types.int64), generate


@intrinsic
def clear(_typing: Any, _address: Any, _size: Any) -> Any:
    """Set bytes to zero."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


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

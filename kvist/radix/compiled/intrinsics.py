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
    """Repeat a value in all lanes of a vector."""
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


def _mask(builder: Any, lanes: Any) -> Any:
    """Gather the outcomes of comparisons into the low bits of a word."""
    return builder.zext(builder.bitcast(lanes, ir.IntType(lanes.type.count)), ir.IntType(64))


def _each(vector: Any, value: int) -> Any:
    """Return a constant with the same value in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


@intrinsic
def intersect_words(_typing: Any, _active: Any, _payload: Any, _num_held: Any, _gone: Any) -> Any:
    """Take from eight active words what a set's words lack; return which words lost something, and which of the set's
    have something else, as eight bits each.

    Only the first `num_held` words of the set count (it may be none, or more than eight). A tier is taken only if the
    set has no faster one either. What is gone is written apart. No jump that could be mispredicted.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        active, payload, num_held, gone = args
        before, words = _lanes(builder, active, 64, 8), _lanes(builder, payload, 64, 8)
        for shift, above in ((1, 0xEEEE_EEEE_EEEE_EEEE), (2, 0xCCCC_CCCC_CCCC_CCCC)):
            slower = builder.shl(words, _each(words.type, shift))
            words = builder.or_(words, builder.and_(slower, _each(words.type, above)))
        is_held = builder.icmp_signed(
            "<", ir.Constant(words.type, list(range(8))), _splat(builder, num_held, words.type)
        )
        words = builder.select(is_held, words, _each(words.type, 0))
        after = builder.and_(before, words)
        taken = builder.xor(before, after)
        for address, value in ((active, after), (gone, taken)):
            builder.store(value, builder.inttoptr(address, words.type.as_pointer()), align=4)
        results = (
            _mask(builder, builder.icmp_unsigned("!=", lanes, others))
            for lanes, others in ((taken, _each(words.type, 0)), (words, after))
        )
        return context.make_tuple(builder, signature.return_type, list(results))

    return types.UniTuple(types.uint64, 2)(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def locate_eight(
    _typing: Any, _hashes: Any, _multiplier: Any, _bits: Any, _home_words: Any, _keys: Any, _homes: Any
) -> Any:
    """Write the keys of eight hashes, and the addresses of their homes, as `table.locate` says."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        hashes, multiplier, bits, home_words, to_keys, to_homes = args
        vector, flags = ir.VectorType(ir.IntType(64), 8), ir.VectorType(ir.IntType(1), 8)
        pointers = ir.VectorType(ir.IntType(8).as_pointer(), 8)

        def shifted(shift: Any, lanes: Any, by: Any) -> Any:
            return shift(lanes, _each(vector, by) if isinstance(by, int) else by)

        right, left, bits = builder.lshr, builder.shl, _splat(builder, bits, vector)
        keys = builder.mul(_lanes(builder, hashes, 64, 8), _splat(builder, multiplier, vector))
        segments = shifted(right, shifted(right, keys, 1), builder.sub(_each(vector, 63), bits))
        places = shifted(left, shifted(right, keys, 32), builder.add(_each(vector, 32), bits))
        at = builder.add(shifted(left, segments, 3), _splat(builder, home_words, vector))
        gather = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [pointers, ir.IntType(32), flags, vector]),
            "llvm.masked.gather.v8i64.v8p0",
        )
        operands = [
            builder.inttoptr(at, pointers),
            ir.IntType(32)(8),
            _each(flags, 1),
            ir.Constant(vector, ir.Undefined),
        ]
        words = builder.call(gather, operands)
        products = builder.mul(shifted(right, places, 32), builder.and_(words, _each(vector, (1 << 28) - 1)))
        offsets = builder.and_(shifted(right, products, 26), _each(vector, -64))
        homes = builder.add(shifted(left, shifted(right, words, 28), 12), offsets)
        for address, value in ((to_keys, keys), (to_homes, homes)):
            builder.store(value, builder.inttoptr(address, vector.as_pointer()), align=8)
        return context.get_dummy_value()

    i8 = types.int64
    return types.void(i8, types.uint64, i8, i8, i8, i8), generate


@intrinsic
def are_changes(_typing: Any, _numbers: Any) -> Any:
    """Return 32 bits: which of 32 numbers, of 32 bits each, differ from the one before."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        now = _lanes(builder, args[0], 32, 32)
        before = _lanes(builder, builder.sub(args[0], ir.IntType(64)(4)), 32, 32)
        return _mask(builder, builder.icmp_unsigned("!=", now, before))

    return types.uint64(types.int64), generate


@intrinsic
def are_below(_typing: Any, _numbers: Any, _bound: Any) -> Any:
    """Return 32 bits: which of 32 numbers, of 32 bits each, are less than a bound."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers = _lanes(builder, args[0], 32, 32)
        bound = _splat(builder, builder.trunc(args[1], ir.IntType(32)), numbers.type)
        return _mask(builder, builder.icmp_unsigned("<", numbers, bound))

    return types.uint64(types.int64, types.int64), generate


def _put_lanes(name: str, num_lanes: int, step: int) -> Any:
    """Return an intrinsic that stores a 32-bit value, or it and those that follow it by steps, side by side."""

    def put(_typing: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            vector = ir.VectorType(ir.IntType(32), num_lanes)
            lanes = _splat(builder, builder.trunc(args[1], ir.IntType(32)), vector)
            lanes = builder.add(lanes, ir.Constant(vector, [lane * step for lane in range(num_lanes)]))
            builder.store(lanes, builder.inttoptr(args[0], vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    put.__name__ = put.__qualname__ = name
    return intrinsic(put)


put_same_4 = _put_lanes("put_same_4", 4, 0)
put_same_16 = _put_lanes("put_same_16", 16, 0)
put_next_16 = _put_lanes("put_next_16", 16, 1)


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
def equal_keys_at(_typing: Any, _bucket: Any, _key: Any) -> Any:
    """Return eight bits, of which five count: which keys of a bucket are the one at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        keys = _lanes(builder, args[0], 64, 8)
        key = builder.load(builder.inttoptr(args[1], word.as_pointer()), align=8, typ=word)
        return _mask(builder, builder.icmp_unsigned("==", keys, _splat(builder, key, keys.type)))

    return types.uint64(types.int64, types.int64), generate


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


def _prefetch(name: str, locality: int) -> Any:
    """Return an intrinsic that asks for the cache line of an address that will be read soon."""

    def ask(_typing: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32]), "llvm.prefetch.p0"
            )
            builder.call(function, [builder.inttoptr(args[0], byte), i32(0), i32(locality), i32(1)])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    ask.__name__ = ask.__qualname__ = name
    return intrinsic(ask)


prefetch = _prefetch("prefetch", 3)
prefetch_far = _prefetch("prefetch_far", 2)  # not into the nearest cache, which has only so many lines under way


@intrinsic
def lowest_bit(_typing: Any, _value: Any) -> Any:
    """Return the index of the lowest bit set of a value that is not zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate

"""Wide products, vectors and texts, which Numba lacks. Addresses are int64, as in the index's own intrinsics."""

# mypy: ignore-errors
# Numba has no types for its extension points.
from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_LANES = ir.VectorType(_WORD, 8)
_I32 = ir.IntType(32)
_FIRST_LANES = [
    0xC2B2_AE3D,
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x85EB_CA77,
    0x27D4_EB2F_1656_67C5,
    0x9E37_79B1,
]


def _load(builder: Any, address: Any) -> Any:
    """Load eight words from any address."""
    return builder.load(builder.inttoptr(address, _LANES.as_pointer()), align=1, typ=_LANES)


def _each(value: int) -> Any:
    return ir.Constant(_LANES, [value] * 8)


def _alternating(builder: Any, even: Any) -> Any:
    """Return eight lanes of a value, the odd ones with the opposite sign."""
    pair = ir.Constant(_LANES, ir.Undefined)
    for lane, value in enumerate((even, builder.neg(even))):
        pair = builder.insert_element(pair, value, _I32(lane))
    return builder.shuffle_vector(pair, pair, ir.Constant(ir.VectorType(_I32, 8), [0, 1] * 4))


def _mix(builder: Any, lanes: Any, data: Any, key: Any) -> Any:
    """One stripe of XXH3's long form: each lane takes its neighbour's data, and the product of its keyed halves."""
    keyed = builder.xor(data, key)
    product = builder.mul(builder.and_(keyed, _each(0xFFFF_FFFF)), builder.lshr(keyed, _each(32)))
    swapped = builder.shuffle_vector(data, data, ir.Constant(ir.VectorType(_I32, 8), [1, 0, 3, 2, 5, 4, 7, 6]))
    return builder.add(lanes, builder.add(product, swapped))


@intrinsic
def folded_product(_typing: Any, _left: Any, _right: Any) -> Any:
    """Return the low half of a 128-bit product XOR its high half."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        high = builder.trunc(builder.lshr(product, wide(64)), _WORD)
        return builder.xor(builder.trunc(product, _WORD), high)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def byteswap(_typing: Any, _value: Any) -> Any:
    """Return a word with its bytes in reverse."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def trailing_zeros(_typing: Any, _value: Any) -> Any:
    """Return how many of a word's lowest bits are zero: 64 of zero."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(0))

    return types.int64(types.uint64), generate


@intrinsic
def classify(_typing: Any, _address: Any) -> Any:
    """Return which of 64 bytes are digits, zeros, commas and JSON's white space, a word of bits each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), 64)
        text = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1, typ=kind)

        def each(character: str) -> Any:
            return ir.Constant(kind, [ord(character)] * 64)

        def equal(character: str) -> Any:
            return builder.icmp_unsigned("==", text, each(character))

        digits = builder.icmp_unsigned("<", builder.sub(text, each("0")), ir.Constant(kind, [10] * 64))
        spaces = reduce(builder.or_, map(equal, " \t\n\r"))
        masks = [builder.bitcast(lanes, _WORD) for lanes in (digits, equal("0"), equal(","), spaces)]
        return context.make_tuple(builder, signature.return_type, masks)

    return types.UniTuple(types.uint64, 4)(types.int64), generate


def constant_bytes(name: str, content: bytes) -> Any:
    """Return an intrinsic for the address of bytes that lie beside the machine code."""

    def address(_typing: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            data = ir.Constant(ir.ArrayType(ir.IntType(8), len(content)), bytearray(content))
            variable = cgutils.global_constant(builder, f"kvist.{name}", data)
            return builder.ptrtoint(variable, _WORD)

        return types.int64(), generate

    address.__name__ = address.__qualname__ = name
    return intrinsic(address)


def text_writer(name: str, text: bytes) -> Any:
    """Return an intrinsic that writes a text to an address, and returns the address behind it."""

    def write(_typing: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            data = ir.Constant(ir.ArrayType(ir.IntType(8), len(text)), bytearray(text))
            source = cgutils.global_constant(builder, f"kvist.{name}", data)
            target = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
            cgutils.raw_memcpy(builder, target, source, _WORD(len(text)), 1)
            return builder.add(args[0], _WORD(len(text)))

        return types.int64(types.int64), generate

    write.__name__ = write.__qualname__ = name
    return intrinsic(write)


@intrinsic
def first_lanes(_typing: Any) -> Any:
    """Return the address of eight lanes as XXH3's long form begins with them, good until the function returns."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        lanes = cgutils.alloca_once(builder, _LANES)
        builder.store(ir.Constant(_LANES, _FIRST_LANES), lanes, align=1)
        return builder.ptrtoint(lanes, _WORD)

    return types.int64(), generate


@intrinsic
def mix_stripe(_typing: Any, _lanes: Any, _data: Any, _secret: Any, _seed: Any) -> Any:
    """Mix 64 bytes into the eight lanes at an address, with eight words of the secret.

    The secret is seeded here: even words plus the seed, odd ones minus it; give minus the seed to begin at an odd word.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes, data, secret, seed = args
        key = builder.add(_load(builder, secret), _alternating(builder, seed))
        mixed = _mix(builder, _load(builder, lanes), _load(builder, data), key)
        builder.store(mixed, builder.inttoptr(lanes, _LANES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.uint64), generate


@intrinsic
def mix_last_stripe(_typing: Any, _lanes: Any, _data: Any, _secret: Any, _seed: Any) -> Any:
    """As `mix_stripe`, for the secret that begins one byte after an odd word, whose address is given."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes, data, secret, seed = args
        odd = builder.add(_load(builder, secret), _alternating(builder, builder.neg(seed)))
        even = builder.add(_load(builder, builder.add(secret, _WORD(8))), _alternating(builder, seed))
        key = builder.or_(builder.lshr(odd, _each(8)), builder.shl(even, _each(56)))
        mixed = _mix(builder, _load(builder, lanes), _load(builder, data), key)
        builder.store(mixed, builder.inttoptr(lanes, _LANES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.uint64), generate


@intrinsic
def scramble(_typing: Any, _lanes: Any, _secret: Any, _seed: Any) -> Any:
    """End a block of 16 stripes: shift, key and multiply the eight lanes at an address."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes, secret, seed = args
        key = builder.add(_load(builder, secret), _alternating(builder, seed))
        before = _load(builder, lanes)
        shifted = builder.xor(before, builder.lshr(before, _each(47)))
        after = builder.mul(builder.xor(shifted, key), _each(0x9E37_79B1))
        builder.store(after, builder.inttoptr(lanes, _LANES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.uint64), generate

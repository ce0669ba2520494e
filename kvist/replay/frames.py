"""Framing of a recording: a file is a preamble and frames, each with its length and two checksums. No I/O.

    preamble   6 bytes  89 "KVREC"
               2 bytes  version of the format, little-endian
    frame      4 bytes  kind: "STRT", "BLCK" or "DONE"
               4 bytes  length of the body as it stands in the file, little-endian as all that follow
               4 bytes  length of the body itself; larger than the one before it if the body is compressed (zlib)
               8 bytes  XXH3-64 of the body as it stands in the file
               4 bytes  low half of the XXH3-64 of the 20 bytes before
               body

Lengths have a checksum of their own, so that a frame that was cut off can be told from one that was damaged.
"""

from __future__ import annotations

import struct
import zlib
from enum import Enum
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvist.events.transports.base import MAX_MESSAGE_BYTES

VERSION: Final = 1
MAGIC: Final = b"\x89KVREC"
PREAMBLE: Final = MAGIC + VERSION.to_bytes(2, "little")
MAX_BODY_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""No frame is larger, so that a reader's memory has a bound whatever a file says."""
HEADER_BYTES: Final = 24

_LENGTHS = struct.Struct("<4sIIQ")
_CHECK_MASK = 0xFFFF_FFFF
_ZLIB_LEVEL = 1


class FrameKind(Enum):
    """What a frame's body is (`kvist.replay.format`)."""

    START = b"STRT"
    BLOCK = b"BLCK"
    END = b"DONE"


class FrameHeader(NamedTuple):
    """What stands before a body."""

    kind: FrameKind
    stored_bytes: int
    body_bytes: int
    checksum: int


class DamagedFrameError(ValueError):
    """These bytes are no frame that was written: what was found, and what was expected."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"found {found}, expected {expected}")
        self.found = found
        self.expected = expected


def pack_frame(kind: FrameKind, body: bytes) -> bytes:
    """Return the frame's bytes; the body is compressed where that makes it smaller."""
    compressed = zlib.compress(body, _ZLIB_LEVEL)
    stored = compressed if len(compressed) < len(body) else body
    lengths = _LENGTHS.pack(kind.value, len(stored), len(body), xxh3_64_intdigest(stored))
    return lengths + _check(lengths) + stored


def unpack_header(data: bytes) -> FrameHeader:
    """Return the header in these `HEADER_BYTES` bytes; raises DamagedFrameError when it is none."""
    lengths, check = data[: _LENGTHS.size], data[_LENGTHS.size :]
    if check != _check(lengths):
        raise DamagedFrameError("a wrong checksum", "the header of a frame")
    mark, stored_bytes, body_bytes, checksum = _LENGTHS.unpack(lengths)
    try:
        kind = FrameKind(mark)
    except ValueError:
        raise DamagedFrameError(f"a frame of kind {mark!r}", "STRT, BLCK or DONE") from None
    if not stored_bytes <= body_bytes <= MAX_BODY_BYTES:
        raise DamagedFrameError(f"a body of {body_bytes} bytes in {stored_bytes}", f"at most {MAX_BODY_BYTES} bytes")
    return FrameHeader(kind, stored_bytes, body_bytes, checksum)


def unpack_body(header: FrameHeader, stored: bytes) -> bytes:
    """Return the body that stands in the file as these bytes; raises DamagedFrameError when it is another one."""
    if xxh3_64_intdigest(stored) != header.checksum:
        raise DamagedFrameError("a wrong checksum", "the body of a frame")
    if header.stored_bytes == header.body_bytes:
        return stored
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(stored, header.body_bytes)
    except zlib.error as error:
        raise DamagedFrameError(str(error), "a compressed body") from error
    if len(body) != header.body_bytes:
        raise DamagedFrameError(f"a body of {len(body)} bytes", f"one of {header.body_bytes}")
    return body


def _check(lengths: bytes) -> bytes:
    return (xxh3_64_intdigest(lengths) & _CHECK_MASK).to_bytes(4, "little")

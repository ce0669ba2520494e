"""The bytes of ZMTP 3.1 (RFC 37 of rfc.zeromq.org) that a subscriber needs: greeting, frame headers and commands.

And the contract of a splitter, which finds ordinary messages among them in bulk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports.block import Buffer

MORE, LONG, COMMAND = 1, 2, 4
"""The flags of a frame; the other five bits are reserved, and zero."""
MAX_COMMAND_BYTES = 4096
"""A command's body. A PING's is at most 18 bytes; READY carries what properties the peer's application added."""

GREETING_BYTES = 64
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""That of a client that speaks ZMTP 3.1 without security."""

_MAX_SIZE = (1 << 63) - 1


SplitResult: TypeAlias = tuple[int, int, bool]
"""The number of rows written, the position after the last of these messages, and whether what begins there is unusual:
`Connection` must parse it. Otherwise the bytes end there, or within an ordinary message, or the table is full."""

Splitter: TypeAlias = Callable[[Buffer, int, int, NDArray[np.int64], int], SplitResult]
"""Finds whole ordinary messages: `split(buffer, start, end, table, max_message_bytes)`.

The bytes are `buffer[start:end]`, a message beginning at `start`. `table` is C-contiguous int64 [num_rows, 5], num_rows
may be 0; from row 0 on each message found becomes a row topic_start, topic_bytes, sequence, payload_start,
payload_bytes, with starts that count from the buffer's first byte and the eight bytes of the sequence read as a
big-endian two's complement.

An ordinary message is three frames, each a byte of flags, a length, and a body (ZMTP 3.1, RFC 37 of rfc.zeromq.org):

    topic     01 and one byte of length, or 03 and eight bytes of length, big-endian and unsigned
    sequence  01 08, then the eight bytes
    payload   00 and one byte of length, or 02 and eight bytes of length, big-endian and unsigned

where topic and payload together have at most `max_message_bytes`. Anything else is unusual, and must be reported early:
flags are checked as soon as they are there, and a length as soon as it is whole, before any of its body is there. A
full table is reported before reading further.

The returned position is `start` when nothing was found. A splitter never raises, has no state, and does work only in
proportion to what it found: it is called again with the same start when more bytes have come.
"""


class PeerError(Exception):
    """The peer breaks the protocol, or speaks another one: this connection is over."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FrameHeader(NamedTuple):
    """A frame's flags, and where its body is in the buffer."""

    flags: int
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


def read_greeting(received: bytes) -> int | None:
    """Return the minor version of a ZMTP 3 greeting, None while it is not whole; raises PeerError for another."""
    # The eight bytes within the signature are for the peer's use.
    if received[:1] not in (b"", b"\xff") or (len(received) > 9 and not received[9] & 1):
        raise PeerError(f"it does not greet as ZMTP 3 does, but with {received[:10]!r}")
    if len(received) > 10 and received[10] < 3:
        raise PeerError("it speaks ZMTP 2, as ZeroMQ did before version 4, and not ZMTP 3")
    if len(received) < GREETING_BYTES:
        return None
    mechanism = received[12:32].rstrip(b"\0")
    if mechanism != b"NULL":
        raise PeerError(f"it asks for the security mechanism {mechanism!r}, not NULL")
    return received[11] if received[10] == 3 else 1


def read_frame_header(buffer: Buffer, at: int, end: int) -> FrameHeader | None:
    """Return the header of the frame at `at`, None while it is not whole; raises PeerError if there can be none."""
    if at >= end:
        return None
    flags = buffer[at]
    if flags > 7 or flags & (COMMAND | MORE) == COMMAND | MORE:
        raise PeerError(f"a frame has the flags {flags:#04x}")
    if not flags & LONG:
        return FrameHeader(flags, at + 2, buffer[at + 1]) if at + 2 <= end else None
    if at + 9 > end:
        return None
    num_bytes = int.from_bytes(buffer[at + 1 : at + 9], "big")
    if num_bytes > (MAX_COMMAND_BYTES if flags & COMMAND else _MAX_SIZE):
        raise PeerError(f"a {'command' if flags & COMMAND else 'frame'} has {num_bytes} bytes")
    return FrameHeader(flags, at + 9, num_bytes)


def frame(body: bytes, flags: int = 0) -> bytes:
    size = bytes((flags, len(body))) if len(body) < 256 else bytes((flags | LONG, *len(body).to_bytes(8, "big")))
    return size + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes((len(name),)) + name + body, COMMAND)


PING = command(b"PING", bytes(2))
"""Without context, and without a time after which the peer should give us up."""


def read_command(frame_body: bytes) -> tuple[bytes, bytes]:
    """Return a command's name and body; raises PeerError when there is none."""
    name = frame_body[1 : 1 + frame_body[0]] if frame_body else b""
    if not name or len(name) != frame_body[0]:
        raise PeerError(f"a command has no name: {frame_body[:20]!r}")
    return name, frame_body[1 + len(name) :]


def ready(socket_type: bytes) -> bytes:
    return command(b"READY", b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)


def read_socket_type(ready_body: bytes) -> bytes:
    """Return the type of the peer's socket; raises PeerError when its READY command does not tell."""
    for name, value in _properties(ready_body):
        if name.lower() == b"socket-type":
            return value
    raise PeerError("its READY command names no Socket-Type")


def subscribe_to_all(minor_version: int) -> bytes:
    """Return the subscription to every topic: a command since ZMTP 3.1, a message of one byte before."""
    return command(b"SUBSCRIBE") if minor_version >= 1 else b"\x00\x01\x01"


def pong(ping_body: bytes) -> bytes:
    """Return the PONG that a PING asks for: its context, without the two bytes of its time to live."""
    if not 2 <= len(ping_body) <= 18:
        raise PeerError(f"a PING has a body of {len(ping_body)} bytes")
    return command(b"PONG", ping_body[2:])


def _properties(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(body):
        value_at = at + 1 + body[at] + 4
        name = body[at + 1 : value_at - 4]
        end = value_at + int.from_bytes(body[value_at - 4 : value_at], "big")
        if not name or end > len(body) or value_at > len(body):
            raise PeerError("a property of its READY command is cut")
        yield name, body[value_at:end]
        at = end

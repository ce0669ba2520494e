"""Message bodies in their three framings.

For each, `feed(data)` returns the payload in `data` until `is_complete`; `excess` then holds the bytes that followed.
Chunk boundaries are not kept; chunk extensions and trailers are checked, bounded and dropped.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from kvist.http.errors import MalformedHttpError
from kvist.http.fields import BARE_LINE_END, TOKEN, parse_fields

_QUOTED = rb'"[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]*+"'
_EXTENSION = rb";" + TOKEN + rb"++(?:=(?:" + TOKEN + rb"++|" + _QUOTED + rb"))?+"
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16}+)((?:" + _EXTENSION + rb")*+)\r\n")
MAX_CHUNK_LINE_BYTES = 256
MAX_EXTENSION_BYTES = 4096
"""All chunk extensions of one body, which nobody here reads."""
MAX_TRAILER_BYTES = 8192
_FRAMING = frozenset((b"content-length", b"host", b"transfer-encoding"))
"""Fields that say where a message ends or goes; RFC 9110 (6.5.1) forbids them in trailers."""


class LengthBody:
    """A body of `content-length` bytes."""

    __slots__ = ("_num_missing", "excess", "is_complete")

    def __init__(self, length: int) -> None:
        self._num_missing = length
        self.is_complete = length == 0
        self.excess = b""

    def feed(self, data: bytes) -> bytes:
        payload, self.excess = data[: self._num_missing], data[self._num_missing :]
        self._num_missing -= len(payload)
        self.is_complete = self._num_missing == 0
        return payload


@dataclass(slots=True, eq=False)
class UntilCloseBody:
    """A response body that ends with the connection: whoever sees the end of the stream sets `is_complete`."""

    is_complete: bool = False
    excess: bytes = b""

    def feed(self, data: bytes) -> bytes:
        return data


@dataclass(slots=True, eq=False)
class ChunkedBody:
    """A chunked body: sizes in plain hex, CRLF exact, extensions and trailers bounded."""

    is_complete: bool = False
    excess: bytes = b""
    _tail: bytes = b""  # an unfinished framing line: bounded, never payload
    _num_missing: int = 0
    _is_chunk_open: bool = False  # within a chunk: its payload or the CRLF behind it is still to come
    _is_in_trailer: bool = False
    _num_extension_bytes: int = 0

    def feed(self, data: bytes) -> bytes:
        if self._tail:
            data, self._tail = self._tail + data, b""
        pieces: list[bytes] = []
        pos = 0
        while not self._is_in_trailer:
            if self._is_chunk_open:
                piece = data[pos : pos + self._num_missing]
                pieces.append(piece)
                pos += len(piece)
                self._num_missing -= len(piece)
                if not self._ends_chunk(data, pos):
                    break
                pos += 2
            end = self._open_chunk(data, pos)
            if end is None:
                break
            pos = end
        if self._is_in_trailer:
            self._read_trailer(data, pos)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _ends_chunk(self, data: bytes, pos: int) -> bool:
        """Whether the chunk's closing CRLF stands at `pos`; False while bytes are missing."""
        if self._num_missing:
            return False
        ending = data[pos : pos + 2]
        if ending == b"\r\n":
            self._is_chunk_open = False
            return True
        if ending not in (b"", b"\r"):
            raise MalformedHttpError("a chunk is longer than its size says")
        self._tail = ending
        return False

    def _open_chunk(self, data: bytes, pos: int) -> int | None:
        """Reads the size line at `pos` and returns its end, or None while the line is not whole."""
        match = _CHUNK_LINE.match(data, pos, pos + MAX_CHUNK_LINE_BYTES)
        if match is None:
            line = data[pos : pos + MAX_CHUNK_LINE_BYTES]
            if b"\n" in line or len(line) == MAX_CHUNK_LINE_BYTES:
                raise MalformedHttpError("a chunk size is not plain hex ended by CRLF, or its line is too long")
            self._tail = line
            return None
        size, extension = match.groups()
        self._num_extension_bytes += len(extension)
        if self._num_extension_bytes > MAX_EXTENSION_BYTES:
            raise MalformedHttpError(f"chunk extensions exceed {MAX_EXTENSION_BYTES} bytes")
        self._num_missing = int(size, 16)
        self._is_chunk_open = self._num_missing > 0
        self._is_in_trailer = not self._is_chunk_open
        return match.end()

    def _read_trailer(self, data: bytes, pos: int) -> None:
        """Ends the body at the empty line behind the last chunk; the fields before it are checked and dropped."""
        if data.startswith(b"\r\n", pos):
            end = pos
        else:
            blank = data.find(b"\r\n\r\n", pos, pos + MAX_TRAILER_BYTES)
            if blank < 0:
                if len(data) - pos >= MAX_TRAILER_BYTES or BARE_LINE_END.search(data, pos):
                    raise MalformedHttpError(f"trailers exceed {MAX_TRAILER_BYTES} bytes or hold a bare CR or LF")
                self._tail = data[pos:]
                return
            end = blank + 2
            if any(name in _FRAMING for name, _ in parse_fields(data[pos:end])):
                raise MalformedHttpError("a trailer says content-length, host or transfer-encoding")
        self.excess = data[end + 2 :]
        self.is_complete = True


Body: TypeAlias = LengthBody | UntilCloseBody | ChunkedBody
"""The rest of a message whose head has been read; `feed` raises MalformedHttpError."""

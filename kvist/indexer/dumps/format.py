"""The bytes of a dump: frames of msgpack, each behind its length; the last has a count and a checksum.

docs/index-service.md specifies them. A dump is not trusted: each frame is checked before compiled code reads it.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from xxhash import xxh3_64

from kvist.errors import MalformedMessageError
from kvist.events import WorkerRank
from kvist.events.codec import DECODE_ERRORS
from kvist.events.types import Rank, RankOrCompanion, Tier
from kvist.indexer.engine_rank import Names
from kvist.indexer.source import Progress
from kvist.radix import Residencies

FORMAT: Final = "kvist-index-dump"
VERSION: Final = 5
MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4
_U64, _U32 = np.dtype("<u8"), np.dtype("<u4")


class DumpHead(msgspec.Struct, tag=FORMAT, array_like=True, frozen=True):
    """The first frame."""

    version: int


class StreamState(msgspec.Struct, array_like=True, frozen=True):
    """A stream and how far it was followed, None if none of its blocks can be trusted. URLs are without logins."""

    worker: str
    rank: Rank
    """Of batches that name none."""
    endpoint: str
    """The URL as it was given, and `url` as it is followed, with a replay port or without."""
    url: str
    has_login: bool
    """Whether a login is needed as well to follow it."""
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    progress: Progress | None


class NamespaceHead(msgspec.Struct, tag="namespace", array_like=True, frozen=True):
    """The namespace of all frames up to the next head; its blocks are those held at this moment of the streams.

    A router's one index has an empty model name and group.
    """

    model_name: str
    group: str
    streams: list[StreamState]


class Blocks(msgspec.Struct, tag="blocks", array_like=True, frozen=True):
    """`Residencies` as arrays of little-endian u64 and u32; a rank, or companion, is its worker and its number."""

    ranks: list[tuple[str, RankOrCompanion]]
    hashes: bytes
    depths: bytes
    members: bytes


class NamesFrame(msgspec.Struct, tag="names", array_like=True, frozen=True):
    """A stock engine's hashes in a tier of a rank, and the blocks they name: arrays of little-endian u64."""

    worker: str
    rank: Rank
    tier: Tier
    engine_hashes: bytes
    blocks: bytes


class DumpEnd(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """The last frame: `checksum` is the XXH3-64 of all bytes before it."""

    num_frames: int
    num_blocks: int
    checksum: int


Frame: TypeAlias = DumpHead | NamespaceHead | NamesFrame | Blocks | DumpEnd

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class DumpWriter:
    """Encodes the frames of one dump, in order."""

    def __init__(self) -> None:
        self._digest = xxh3_64()
        self._num_frames = 0
        self._num_blocks = 0

    def frame(self, frame: Frame) -> bytes:
        body = _encoder.encode(frame)
        encoded = len(body).to_bytes(_LENGTH_BYTES, "big") + body
        self._digest.update(encoded)
        self._num_frames += 1
        return encoded

    def names(self, rank: WorkerRank, names: Names) -> bytes:
        engine_hashes, blocks = (each.astype(_U64, copy=False).tobytes() for each in names[1:])
        return self.frame(NamesFrame(*rank, names.tier, engine_hashes, blocks))

    def blocks(self, held: Residencies) -> bytes:
        self._num_blocks += len(held.hashes)
        hashes, *numbers = held[1:]
        parts = [each.astype(_U32, copy=False).tobytes() for each in numbers]
        return self.frame(Blocks([*held.ranks], hashes.astype(_U64, copy=False).tobytes(), *parts))

    def end(self) -> bytes:
        return self.frame(DumpEnd(self._num_frames, self._num_blocks, self._digest.intdigest()))


class DumpReader:
    """Decodes pieces of any size into frames; raises MalformedMessageError for what is no dump, or is cut short."""

    def __init__(self, source: str) -> None:
        """`source` names the dump in errors."""
        self._source = source
        self._buffer = bytearray()
        self._digest = xxh3_64()
        self._num_frames = 0
        self._num_blocks = 0
        self.is_complete = False

    def feed(self, piece: bytes) -> list[Frame]:
        """Add a piece; return the frames that it completes."""
        self._buffer += piece
        frames, start = [], 0
        while (end := self._frame_end(start)) is not None:
            frames.append(self._frame(memoryview(self._buffer)[start:end]))
            start = end
        del self._buffer[:start]
        return frames

    def close(self) -> None:
        """Raise MalformedMessageError unless the dump ended with its last frame and nothing behind it."""
        if not self.is_complete or self._buffer:
            raise self._malformed(f"cut short after {self._num_frames} frames")

    def _frame_end(self, start: int) -> int | None:
        if len(self._buffer) - start < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "big")
        if size > MAX_FRAME_BYTES:
            raise self._malformed(f"a frame of {size} bytes, expected at most {MAX_FRAME_BYTES}")
        end = start + _LENGTH_BYTES + size
        return end if end <= len(self._buffer) else None

    def _frame(self, encoded: memoryview) -> Frame:
        with encoded:
            try:
                frame = _decoder.decode(encoded[_LENGTH_BYTES:])
            except DECODE_ERRORS as error:
                raise self._malformed(f"frame {self._num_frames}: {error}") from None
            self._check(frame)
            self._digest.update(encoded)
        self._num_frames += 1
        return frame

    def _check(self, frame: Frame) -> None:
        if self.is_complete or isinstance(frame, DumpHead) != (self._num_frames == 0):
            raise self._malformed(f"frame {self._num_frames} is out of place")
        if isinstance(frame, DumpHead) and frame.version != VERSION:
            raise self._malformed(f"version {frame.version}, expected {VERSION}")
        if isinstance(frame, Blocks):
            self._num_blocks += len(frame.hashes) // _U64.itemsize
        if isinstance(frame, DumpEnd):
            expected = DumpEnd(self._num_frames, self._num_blocks, self._digest.intdigest())
            if frame != expected:
                raise self._malformed(f"it ends with {frame}, expected {expected}")
            self.is_complete = True

    def _malformed(self, reason: str) -> MalformedMessageError:
        return MalformedMessageError(self._source, f"dump: {reason}")


def residencies_of(blocks: Blocks, source: str) -> Residencies:
    """Return a frame's residencies; raises MalformedMessageError unless its parts fit each other."""
    hashes, depths, members = _array(blocks.hashes, _U64), _array(blocks.depths, _U32), _array(blocks.members, _U32)
    if not len(hashes) == len(depths) == len(members) or (members >> 4 >= len(blocks.ranks)).any():
        raise MalformedMessageError(source, "dump: the parts of a frame of blocks do not fit each other")
    return Residencies(tuple(WorkerRank(*rank) for rank in blocks.ranks), hashes, depths, members)


def names_of(frame: NamesFrame, source: str) -> Names:
    """Return the names of a frame; raises MalformedMessageError unless each has its block."""
    engine_hashes, blocks = _array(frame.engine_hashes, _U64), _array(frame.blocks, _U64)
    if len(engine_hashes) != len(blocks):
        raise MalformedMessageError(source, "dump: a frame of names has not as many blocks")
    return Names(frame.tier, engine_hashes, blocks)


def _array(part: bytes, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(part[: len(part) // dtype.itemsize * dtype.itemsize], dtype)

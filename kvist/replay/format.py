"""What a recording's frames say, in msgpack: who was recorded, and what came when.

A session is one run of a recorder; its monotonic clock orders its messages and says how far apart they were. A set of
files is one recording: FILE, FILE.1, FILE.2 and so on, each beginning with a `Start` of its own.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec

from kvist.events.codec import DECODE_ERRORS
from kvist.events.transports import Message
from kvist.events.types import NonNegative
from kvist.replay.frames import DamagedFrameError

Engine: TypeAlias = Annotated[str, msgspec.Meta(pattern="^(vllm|sglang)$")]  # whose dialects are known
_T = TypeVar("_T")


class RecordedSource(msgspec.Struct, array_like=True, frozen=True):
    """A stream that was recorded: its name, its URL without secrets, and whose dialect it speaks if not Kvist's own."""

    name: str
    url: str
    engine: Engine = "vllm"


class Start(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What follows is of this session and part; repeated when a source is added. Blocks name sources by position."""

    recording_id: NonNegative
    part: NonNegative
    session: NonNegative
    sources: tuple[RecordedSource, ...]
    wall_ns: int


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One message, `delta_ns` after its block's first."""

    source_idx: NonNegative
    delta_ns: NonNegative
    topic: bytes
    sequence: NonNegative
    payload: bytes


class Block(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Some messages in the order in which they came; the first came at these readings of the two clocks."""

    mono_ns: int
    wall_ns: int
    entries: list[Entry]


class End(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The session ended here, or goes on in the next file."""

    is_continued: bool


class Record(NamedTuple):
    """One recorded message. `mono_ns` orders the messages of a session; `wall_ns` is Unix time."""

    session: int
    source: RecordedSource
    mono_ns: int
    wall_ns: int
    message: Message


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[object]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Start, Block, End)
}


def encode(value: Start | Block | End) -> bytes:
    """Return a frame's body."""
    return _encoder.encode(value)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Return what a frame's body says; raises DamagedFrameError when it is something else."""
    try:
        value = _decoders[kind].decode(body)
    except DECODE_ERRORS as error:
        raise DamagedFrameError(str(error), f"a {kind.__name__.lower()}") from error
    assert isinstance(value, kind)
    return value


def records(block: Block, start: Start) -> list[Record]:
    """Return a block's messages; raises DamagedFrameError when one names a source that the session does not have."""
    session, sources = start.session, start.sources
    try:
        return [
            Record(
                session,
                sources[entry.source_idx],
                block.mono_ns + entry.delta_ns,
                block.wall_ns + entry.delta_ns,
                Message(entry.topic, entry.sequence, entry.payload),
            )
            for entry in block.entries
        ]
    except IndexError:
        raise DamagedFrameError("a message of an unknown source", f"one of {len(sources)} sources") from None

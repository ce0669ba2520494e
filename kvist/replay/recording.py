"""The format of a recording: messages, sources, names of files, and the error for what cannot be read.

A recording is a set of MCAP files, its parts: fleet.mcap, fleet.1.mcap, fleet.2.mcap. Each begins with
a metadata record that says which part of which recording it is (`About`). A channel is one topic of one source. MCAP's
sequence numbers have 32 bits and those of streams 64, so a channel also stands for the upper half of a number.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from kvist.errors import InvalidValueError, KvistError
from kvist.events.transports import Message
from kvist.events.transports.base import MAX_MESSAGE_BYTES
from kvist.events.types import NonNegative

VERSION: Final = 2  # 1 was a framing of its own
PROFILE: Final = "kvist"
ABOUT: Final = "kvist.recording"
"""The metadata record that begins a part: `About`, as JSON under the key `about`."""
MAX_CHUNK_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""The most that a chunk may have, compressed or not, and all channels of a part: it bounds a reader's memory whatever a
file says. A topic may be as large as a message, and takes twice that in a file."""
MESSAGE_START: Final = struct.Struct("<HIQQ")
"""The head of an MCAP message: channel, lower half of the sequence number, log time and publish time."""

Engine: TypeAlias = Annotated[str, msgspec.Meta(pattern="^(vllm|sglang)$")]  # whose dialects are known


class RecordedSource(msgspec.Struct, array_like=True, frozen=True):
    """A recorded stream: its name, its URL without secrets, and the dialect that it has unless it is canonical."""

    name: str
    url: str
    engine: Engine = "vllm"


class Record(NamedTuple):
    """A recorded message with its Unix time of arrival; times do not decrease within a session, one recorder's run."""

    session: int
    source: RecordedSource
    time_ns: int
    message: Message


class About(msgspec.Struct, frozen=True):
    """What a part says of itself: its recording, its number, the recorder's session, and the sources."""

    version: int
    recording: str
    part: NonNegative
    session: NonNegative
    sources: tuple[RecordedSource, ...]


class RecordingError(KvistError):
    """A recording cannot be read beyond this byte; what came before it is usable."""

    def __init__(self, path: Path, offset: int, found: str, expected: str) -> None:
        super().__init__(f"{path}: byte {offset}: found {found}, expected {expected}")
        self.path = path
        self.offset = offset
        self.found = found
        self.expected = expected


def part_path(path: Path, part: int) -> Path:
    """Return the path of a recording's part: fleet.mcap, fleet.1.mcap, fleet.2.mcap."""
    return path if part == 0 else path.with_name(f"{path.stem}.{part}{path.suffix}")


def part_numbers(path: Path, action: str) -> list[int]:
    """Return the numbers of a recording's parts that exist, ascending; raises InvalidValueError without a folder."""
    if not path.name:
        raise InvalidValueError("recording", str(path), "the name of a file")
    start, numbers = f"{path.stem}.", []
    try:
        for name in (entry.name for entry in path.parent.iterdir()):
            number = name.removeprefix(start).removesuffix(path.suffix)
            if name == path.name:
                numbers.append(0)
            elif number.isascii() and number.isdecimal() and part_path(path, int(number)).name == name:
                numbers.append(int(number))
    except OSError as error:
        raise file_error(path, action, error) from None
    return sorted(numbers)


def file_error(path: Path, action: str, error: OSError) -> InvalidValueError:
    """Return the error for a file that cannot be "read" or "created", which is the action."""
    return InvalidValueError("recording", str(path), f"a file that can be {action} ({error.strerror})")

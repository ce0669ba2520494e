"""What a recording is made of: its messages, their sources, its files, and the one error of all of them.

A recording is a set of MCAP files, its parts: fleet.mcap, fleet.1.mcap, fleet.2.mcap. Each says at its beginning, in a
metadata record, whose part it is (`About`). A channel is one topic of one source; since MCAP counts messages in 32
bits, and streams count in 64, the upper half of a sequence number is a channel's, too.
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
END: Final = "kvist.end"
"""The metadata record that a recorder leaves where it ended on purpose: no part follows of its session."""
MAX_CHUNK_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""No chunk is larger, compressed or not, nor are all channels of a part, so that a reader's memory has a bound whatever
a file says. A topic may be as large as a message, and is written twice as large."""
MESSAGE_START: Final = struct.Struct("<HIQQ")
"""What stands before the payload in an MCAP message: channel, lower half of the sequence, log and publish time."""

Engine: TypeAlias = Annotated[str, msgspec.Meta(pattern="^(vllm|sglang)$")]  # whose dialects are known


class RecordedSource(msgspec.Struct, array_like=True, frozen=True):
    """A stream that was recorded: its name, its URL without secrets, and whose dialect it speaks if not Kvist's own."""

    name: str
    url: str
    engine: Engine = "vllm"


class Record(NamedTuple):
    """One recorded message, and when it came in Unix time; a session is one run of a recorder, its times keep order."""

    session: int
    source: RecordedSource
    time_ns: int
    message: Message


class About(msgspec.Struct, frozen=True):
    """Whose part a file is: of which recording, its place in it, and who was recorded by which run of a recorder."""

    version: int
    recording: str
    part: NonNegative
    session: NonNegative
    sources: tuple[RecordedSource, ...]


class RecordingError(KvistError):
    """A recording cannot be read beyond this byte: use what came before it, or another file."""

    def __init__(self, path: Path, offset: int, found: str, expected: str) -> None:
        super().__init__(f"{path}: byte {offset}: found {found}, expected {expected}")
        self.path = path
        self.offset = offset
        self.found = found
        self.expected = expected


def part_path(path: Path, part: int) -> Path:
    """Return where a recording's part is: fleet.mcap, fleet.1.mcap, fleet.2.mcap."""
    return path if part == 0 else path.with_name(f"{path.stem}.{part}{path.suffix}")


def first_part_path(path: Path, part: int) -> tuple[Path, int]:
    """Return where the first part was by what a later one says, and that number; 0 if the name is no part's."""
    names = path.stem.removesuffix(f".{part}") + path.suffix, path.name.removesuffix(f".{part}")
    firsts = (path.with_name(name) for name in names if name)
    return next(((first, part) for first in firsts if part_path(first, part) == path), (path, 0))


def part_numbers(path: Path, done: str) -> list[int]:
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
        raise impossible(path, done, error) from None
    return sorted(numbers)


def impossible(path: Path, done: str, error: OSError) -> InvalidValueError:
    """Return the error that says why a file cannot be read or created."""
    return InvalidValueError("recording", str(path), f"a file that can be {done} ({error.strerror})")

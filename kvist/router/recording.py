"""Records requests as lines of a Mooncake trace with more fields, which `docs/recording.md` describes.

part       a gzip file, followed by another once it is large or old; what was flushed can be read even after a crash
recording  the parts of one run of a router, of all its processes: with one clock, and one secret that is never written
folder     the size of all parts in it together is bounded: the oldest are deleted
"""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.router.access_log import LineWriter, write_all

SESSION_HEADERS = (b"x-session-id", b"x-claude-code-agent-id", b"x-claude-code-session-id", b"thread-id")
"""In which clients name the conversation that a request belongs to, the first that is there: opencode and others, a
subagent of Claude Code, Claude Code, Codex."""

PART_SHARE = 64
"""A part is closed at this fraction of the folder's bound, and so many may be open."""
MAX_PART_AGE_S = 3600.0
MAX_SESSIONS = 100_000
_BLOCKS_AT_WEIGHT = 16  # so many take as long to write as the rest of a line
_PARTS = "requests-*.jsonl.gz"

Hashes: TypeAlias = Callable[[], NDArray[np.uint64]]
"""Returns the canonical hashes of a prompt's full blocks, on the thread that writes."""

_encode_lines = msgspec.json.Encoder().encode_lines


class Beginning(msgspec.Struct, frozen=True):
    """What all processes of a recording share: its start, by the wall and the monotonic clock, and its secret."""

    at: float = msgspec.field(default_factory=time.time)
    at_s: float = msgspec.field(default_factory=time.monotonic)
    secret: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(32))


class Recorded(NamedTuple):
    """A request that has ended, by the monotonic clock; `fields` are written unless they are None."""

    arrived_s: float
    ended_s: float
    session: bytes | None
    hashes: Hashes
    fields: dict[str, object]


class RequestRecorder(LineWriter[Recorded]):
    """Writes parts into a folder, whose parts together never have more than `max_bytes`."""

    def __init__(self, folder: str, max_bytes: int, beginning: Beginning) -> None:
        """Begin the first part; raises InvalidValueError where the folder cannot be written."""
        self._folder, self._max_bytes, self._part_bytes = Path(folder), max_bytes, max_bytes // PART_SHARE
        self._beginning = beginning
        self._descriptor: int | None = None
        self._part_size = 0
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(beginning.at))
        self._own_name, self._numbers = f"{began}-{secrets.token_hex(4)}", itertools.count()
        self._ended_s: dict[str, float] = {}
        try:
            self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._begin_part()
        except OSError as error:
            expected = f"a folder that can be written ({error.strerror})"
            raise InvalidValueError("record_requests", folder, expected) from None
        super().__init__("recording of requests")

    def write(self, request: Recorded, num_blocks: int) -> None:
        """Queue a request's line, or drop it where too many wait. Only one thread may call this."""
        self._put(request, 1 + num_blocks // _BLOCKS_AT_WEIGHT)

    def _write(self, lines: list[Recorded]) -> None:
        data = _encode_lines([*self._rows(lines)])
        age_s = time.monotonic() - self._part_began_s
        is_full = self._part_size and self._part_size + len(data) > self._part_bytes
        if self._descriptor is None or is_full or age_s > MAX_PART_AGE_S:
            self._end()
            self._begin_part()
        assert self._descriptor is not None
        packed = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        self._part_size += len(packed)
        try:
            write_all(self._descriptor, packed)
        except OSError:
            self._close()  # its end may be torn: nothing after that could be read
            raise

    def _rows(self, lines: list[Recorded]) -> Iterator[dict[str, object]]:
        secret, began_s = self._beginning.secret, self._beginning.at_s
        for line in lines:
            fields = {"timestamp": round(1e3 * (line.arrived_s - began_s)), **line.fields}
            fields["recording_started_at"] = self._beginning.at
            fields["hash_ids"] = _keyed(secret[:16], line.hashes())
            if line.session is not None:
                fields["session"] = session = blake2b(line.session, key=secret[16:], digest_size=8).hexdigest()
                fields["pause_s"] = self._pause_s(session, line)
            yield {name: value for name, value in fields.items() if value is not None}

    def _pause_s(self, session: str, line: Recorded) -> float | None:
        """Return the time since the session's last turn ended, None where it had not, or is not known."""
        last_s = self._ended_s.pop(session, None)
        self._ended_s[session] = line.ended_s
        if len(self._ended_s) > MAX_SESSIONS:
            del self._ended_s[next(iter(self._ended_s))]
        return None if last_s is None or last_s > line.arrived_s else round(line.arrived_s - last_s, 6)

    def _begin_part(self) -> None:
        path = self._folder / f"requests-{self._own_name}-{next(self._numbers):06}.jsonl.gz"
        hidden = path.with_name(f".{path.name}")
        self._descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # so that other processes see that it is being written to
        hidden.rename(path)
        self._gzip, self._part_size, self._part_began_s = zlib.compressobj(1, wbits=31), 0, time.monotonic()
        self._make_room()

    def _make_room(self) -> None:
        """Delete the oldest parts, so that those being written to have room to grow."""
        left, closed = self._max_bytes, []
        for path in self._folder.glob(_PARTS):
            try:
                with path.open("rb") as part:
                    fcntl.flock(part, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    status = os.fstat(part.fileno())
                    closed.append((status.st_mtime_ns, status.st_size, path))
            except BlockingIOError:
                left -= self._part_bytes
            except FileNotFoundError:
                pass  # another process deleted it
        for _, size_bytes, path in sorted(closed, reverse=True):
            left -= size_bytes
            if left < 0:
                path.unlink(missing_ok=True)

    def _end(self) -> None:
        if self._descriptor is not None:
            try:
                write_all(self._descriptor, self._gzip.flush())
            finally:
                self._close()

    def _close(self) -> None:
        assert self._descriptor is not None
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)


def _keyed(secret: bytes, hashes: NDArray[np.uint64]) -> list[int]:
    """Return keyed hashes of 53 bits, exact in any JSON reader: they show which blocks are equal, and nothing else."""
    words = hashes.tobytes()
    digests = (blake2b(words[at : at + 8], key=secret, digest_size=7).digest() for at in range(0, len(words), 8))
    return [int.from_bytes(digest) >> 3 for digest in digests]

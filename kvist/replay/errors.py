"""The one error of recordings."""

from __future__ import annotations

from pathlib import Path

from kvist.errors import KvistError


class RecordingError(KvistError):
    """A recording cannot be read beyond this byte, or not be continued: use what came before it, or another file."""

    def __init__(self, path: Path, offset: int, found: str, expected: str) -> None:
        super().__init__(f"{path}: byte {offset}: found {found}, expected {expected}")
        self.path = path
        self.offset = offset
        self.found = found
        self.expected = expected

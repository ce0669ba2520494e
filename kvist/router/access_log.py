"""One line of JSON for each request, to be read by people and their tools."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from random import random

import msgspec

from kvist.errors import InvalidValueError
from kvist.http import Request
from kvist.router.lines import LineWriter, write_all

MAX_CHARS = 300  # of texts that clients have a say in

_encode_lines = msgspec.json.Encoder().encode_lines


class AccessLog(LineWriter[dict[str, object]]):
    """Appends lines to a file, or to stdout if that is `-`. A file that was moved away is begun anew."""

    def __init__(self, path: str, sample: float) -> None:
        """Log such a share of the requests that go well, and all others; raises InvalidValueError."""
        self._path = path
        self._sample = sample
        self._is_torn = False
        try:
            self._descriptor = 1 if path == "-" else self._open()
        except OSError as error:
            raise InvalidValueError("access_log", path, f"a file that can be appended to ({error.strerror})") from None
        super().__init__("access log")

    def write(self, request: Request, request_id: bytes, status: int, error: str | None, **more: object) -> None:
        """Have a line written soon, which also says `more`, or drop it where too many wait. For one thread alone."""
        if error is None and random() >= self._sample:
            return
        asked = {"request_id": request_id.decode("latin-1"), "method": request.method, "path": request.path[:MAX_CHARS]}
        told = {"status": status, "error": None if error is None else error[:MAX_CHARS]}
        self._put({"time": datetime.now(UTC), **asked, **told, **more})

    def _write(self, lines: list[dict[str, object]]) -> None:
        self._follow_path()
        begin, self._is_torn = b"\n" * self._is_torn, True
        write_all(self._descriptor, begin + _encode_lines(lines))
        self._is_torn = False

    def _end(self) -> None:
        if self._path != "-":
            os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def _follow_path(self) -> None:
        """Begin a new file where the old one is no longer in its place."""
        try:
            if self._path == "-" or os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        except FileNotFoundError:
            pass
        moved, self._descriptor, self._is_torn = self._descriptor, self._open(), False
        os.close(moved)

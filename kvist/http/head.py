"""A client says nearly the same in front of each of its requests; what was read once need not be read again.

No second reading is done here: a head is taken for another only if all its bytes are the same, but for the digits of
its one content-length.
"""

import re
from typing import Literal, NamedTuple

from kvist.http.fields import Headers

HttpVersion = Literal["1.0", "1.1"]
MAX_LENGTH_DIGITS = 18
_LENGTH_FIELD = re.compile(rb"(?i)\r\ncontent-length:[\t ]*+([0-9]{1,18})\r\n")


class Head(NamedTuple):
    """What a head says, but for the length of its body."""

    method: str
    target: str
    headers: Headers
    http_version: HttpVersion
    is_keep_alive: bool
    expects_continue: bool


class KnownHead:
    """A valid head, by which others are known that differ from it in nothing but the digits of their length."""

    __slots__ = ("_before", "_behind", "_digits", "_head", "_length")

    def __init__(self, head: Head, length: int | None, text: bytes) -> None:
        """`length` is that of the body, None for a chunked one."""
        self._head, self._length = head, length
        self._before, self._digits, self._behind = text, b"", b""
        field = _LENGTH_FIELD.search(text)  # as the head is valid, there is no other
        if field is not None:
            self._before, self._digits, self._behind = text[: field.start(1)], field[1], text[field.end(1) :]

    def find(self, text: bytes) -> tuple[bytes, int] | None:
        """Return the digits, if any, and where the body begins, if the text begins with such a head."""
        if not text.startswith(self._before):
            return None
        start = len(self._before)
        if not self._digits:
            return b"", start
        end = text.find(b"\r", start, start + MAX_LENGTH_DIGITS + 1)
        digits = text[start:end]
        if end < 0 or not digits.isdigit() or not text.startswith(self._behind, end):
            return None
        return digits, end + len(self._behind)

    def with_digits(self, digits: bytes) -> tuple[Head, int | None]:
        """Return such a head, and the length of its body."""
        if digits == self._digits:
            return self._head, self._length
        headers = [(name, digits if name == b"content-length" else value) for name, value in self._head.headers]
        return self._head._replace(headers=headers), int(digits)

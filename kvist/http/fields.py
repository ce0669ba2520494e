"""Header blocks are parsed exactly as RFC 9110 and 9112 say, or refused; those we write cannot be split by a value.

One regular expression decides both what a field line is and what its name and value are, so no second parser can
disagree with the first.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from http import HTTPStatus

from kvist.http.errors import MalformedHttpError

Headers = list[tuple[bytes, bytes]]
"""Lower-cased names and their values, in the order of the wire."""

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
# Possessive (`++`): no backtracking, so a hostile block costs linear time.
_FIELD_LINE = re.compile(rb"(?m)^(" + TOKEN + rb"++):([\t\x20-\x7e\x80-\xff]*+)\r$")
BARE_LINE_END = re.compile(rb"\r[^\n]|(?<!\r)\n")
_LENGTH = re.compile(rb"[0-9]{1,18}")

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)


def parse_fields(block: bytes) -> Headers:
    r"""The fields of `block`, which holds whole lines, each ended by CRLF, without the empty line.

    A match spans exactly one line, since neither name nor value may hold CR or LF; so as many matches as line feeds
    means that every line is a valid field: a folded line, a bare LF, a space before the colon all leave one short.
    """
    fields = _FIELD_LINE.findall(block)
    if len(fields) != block.count(b"\n"):
        raise MalformedHttpError(_explain(block))
    return [(name.lower(), value.strip(b" \t")) for name, value in fields]


def _explain(block: bytes) -> str:
    """Names the first invalid line by its number; its bytes stay out of logs and answers."""
    for line_idx, line in enumerate(block.split(b"\n")):
        if not _FIELD_LINE.fullmatch(line):
            return f"header line {line_idx + 1} is not 'token: value' ended by CRLF"
    raise AssertionError("the block is valid")


def content_length(value: bytes) -> int:
    """The length, if `value` is plain digits; a sign, a list, a base or 19 digits are refused."""
    if not _LENGTH.fullmatch(value):
        raise MalformedHttpError("content-length is not a plain decimal number")
    return int(value)


def pick(headers: Headers, names: frozenset[bytes]) -> Mapping[bytes, list[bytes]]:
    """All values of each of `names`, in order; an empty list for a field that is absent."""
    picked: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for name, value in headers:
        if name in names:
            picked[name].append(value)
    return picked


def list_members(values: list[bytes]) -> set[bytes]:
    """The lower-cased members of a comma-separated field, over all its lines."""
    if not values:  # as in nearly every message
        return set()
    members = {member.strip(b" \t") for value in values for member in value.lower().split(b",")}
    members.discard(b"")
    return members


def end_to_end(headers: Headers, dropped: frozenset[bytes] = HOP_BY_HOP) -> Headers:
    """`headers` without `dropped`, those that concern one connection only, and without those `Connection` names."""
    for name, value in headers:
        if name == b"connection":
            dropped = dropped | list_members([value])
    return [field for field in headers if field[0] not in dropped]


def status_line(status: int) -> bytes:
    """The first line of a response, without its CRLF."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status


def render_head(start_line: bytes, headers: Headers) -> bytes:
    """The head as bytes, its empty line included; raises ValueError if a name or value would break out of its line."""
    head = b"\r\n".join([start_line, *[name + b": " + value for name, value in headers], b"", b""])
    num_lines = len(headers) + 2
    if head.count(b"\n") != num_lines or head.count(b"\r") != num_lines or b"\0" in head:
        raise ValueError("a header name or value holds CR, LF or NUL")
    return head

"""Fields are read exactly, filtered by hop, and cannot be written so that they break out of their line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.http.errors import MalformedHttpError
from kvist.http.fields import end_to_end, list_members, parse_fields, render_head

NAMES = st.from_regex(rb"[a-z0-9!#$%&'*+.^_`|~-]{1,10}", fullmatch=True)
VALUES = st.from_regex(rb"([!-~\x80-\xff]([\t -~\x80-\xff]{0,9}[!-~\x80-\xff])?)?", fullmatch=True)


@given(st.lists(st.tuples(NAMES, VALUES)))
def test_what_is_written_is_read_back(headers: list[tuple[bytes, bytes]]) -> None:
    head = render_head(b"GET / HTTP/1.1", headers)
    first_line, _, block = head.partition(b"\r\n")
    assert first_line == b"GET / HTTP/1.1"
    assert parse_fields(block[:-2]) == headers


@given(st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=6)), max_size=3))
def test_what_can_be_written_has_one_line_for_each_header(headers: list[tuple[bytes, bytes]]) -> None:
    try:
        head = render_head(b"HTTP/1.1 200 OK", headers)
    except ValueError:
        return
    assert len(head.split(b"\r\n")) == len(headers) + 3
    assert head.replace(b"\r\n", b"").translate(None, b"\r\n\0") == head.replace(b"\r\n", b"")


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nx: y", b"a\rb", b"a\0b", b"a\r\n\r\nGET / HTTP/1.1"])
def test_a_value_that_would_split_the_head_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="CR, LF or NUL"):
        render_head(b"HTTP/1.1 200 OK", [(b"location", value)])


def test_an_invalid_line_is_named_by_its_number_and_not_quoted() -> None:
    with pytest.raises(MalformedHttpError, match="header line 2 is not") as error:
        parse_fields(b"a: b\r\nsecret key: c\r\nd: e\r\n")
    assert "secret" not in str(error.value)


def test_hop_by_hop_headers_and_those_connection_names_stay_behind() -> None:
    headers = [
        (b"connection", b"close, X-One"),
        (b"x-one", b"1"),
        (b"X-two".lower(), b"2"),
        (b"connection", b"x-three"),
        (b"x-three", b"3"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-connection", b"keep-alive"),
        (b"proxy-authorization", b"Basic eA=="),
        (b"te", b"trailers"),
        (b"trailer", b"x-sum"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"tls/1.3"),
        (b"authorization", b"Bearer k"),
    ]
    assert end_to_end(headers) == [(b"x-two", b"2"), (b"authorization", b"Bearer k")]


def test_list_members_come_from_all_lines_in_lower_case() -> None:
    assert list_members([b"Keep-Alive,  TE\t", b"", b",a,,"]) == {b"keep-alive", b"te", b"a"}

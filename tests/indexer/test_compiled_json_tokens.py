"""The compiled reader of token ids agrees with a JSON parser wherever it gives an answer at all."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.indexer.compiled.json_tokens import MARK, split_token_ids

_KEY = b"token_ids"
_LAYOUTS = ({"separators": (",", ":")}, {}, {"indent": 2}, {"indent": "\t"})

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_arrays = st.lists(st.integers(0, 2**32 - 1), max_size=40)
_fields = st.dictionaries(st.sampled_from(["model", "token_ids ", "tokens", "", "[", '"token_ids":[1]']), _values)


def _split(body: bytes) -> tuple[list[Any], Any] | None:
    """Return the token ids and the rest, decoded; None unless that says that they are the key's value."""
    split = split_token_ids(body, _KEY)
    if split is None:
        return None
    token_ids, ends, rest = split
    try:
        fields = msgspec.json.decode(rest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_value = isinstance(fields, dict) and fields.get("token_ids") == [MARK]
    arrays = [] if ends is None else [each.tolist() for each in np.split(token_ids, ends[:-1])]
    return (arrays or token_ids.tolist(), fields) if is_value else None


def _check_against_parser(body: bytes) -> None:
    split = _split(body)
    if split is not None:
        token_ids, rest = split
        assert msgspec.json.decode(body) == rest | {"token_ids": token_ids}


@given(
    before=_fields,
    tokens=_arrays | st.lists(_arrays.filter(bool), min_size=1, max_size=5),
    after=_fields,
    layout=st.sampled_from(_LAYOUTS),
)
def test_an_array_is_found_wherever_it_stands_and_the_rest_is_kept(
    before: dict[str, Any], tokens: list[Any], after: dict[str, Any], layout: dict[str, Any]
) -> None:
    fields = before | {"token_ids": tokens} | after
    body = json.dumps(fields, ensure_ascii=False, **layout).encode(errors="replace")
    assert _split(body) == (tokens, msgspec.json.decode(body) | {"token_ids": [MARK]})


@pytest.mark.parametrize("item", ["4294967295", "0", "12345678", "99999999", "100000000"])
def test_integers_of_32_bits_are_plain(item: str) -> None:
    assert _split(b'{"token_ids":[%s]}' % item.encode()) == ([int(item)], {"token_ids": [MARK]})


@pytest.mark.parametrize(
    "item",
    ["4294967296", "18446744073709551616", "-1", "-0", "1.0", "1e3", "1E3", "00", "01", "+1", "1 2", "0x1", "1,", ",1",
     "null", "true", '"1"', "[1]", "{}", "1]", "", " ", "1a", "1\x00", "１", "123456789012345678901", "1,,2"],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_the_parser(item: str) -> None:
    body = b'{"token_ids":[7,%s,8]}' % item.encode()
    assert _split(body) is None


@pytest.mark.parametrize(
    "batch", ["[[]]", "[[1],[]]", "[[1],]", "[[1],2]", "[2,[1]]", "[[1] [2]]", "[[[1]]]", "[[1]", "[[1],[2", "[[01]]"]
)
def test_what_is_no_batch_of_arrays_is_left_to_the_parser(batch: str) -> None:
    assert _split(b'{"token_ids":%b}' % batch.encode()) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"token_ids"}',
        b'{"token_ids":null}',
        b'{"token_ids":[1',
        b'{"token_ids":[1]',
        b'{"token_ids":[1]} x',
        b'{"token_ids":[1],"token_ids":[2]}',
        b'{"token_ids":[1],"token_\\u0069ds":[2]}',
        b'{"other":"\\"token_ids\\":[1]"}',
        b'{"other":{"token_ids":[1]}}',
        b'{"other":[{"token_ids":[1]}]}',
        b'{"other":"token_ids","x":[1]}',
        b'{"token_ids ":[1]}',
        b'{"token_id":[1]}',
        b"{'token_ids':[1]}",
        b'\xef\xbb\xbf{"token_ids":[1]}',
    ],
)
def test_bodies_without_one_such_key_at_the_top_are_left_to_the_parser(body: bytes) -> None:
    assert _split(body) is None


def test_a_broken_rest_stays_broken() -> None:
    for body in (
        b'{"a":,"token_ids":[1]}',
        b'{"token_ids":[1],}',
        b'{"a":[},"token_ids":[1]}',
        b'{"a" 1,"token_ids":[]}',
    ):
        assert _split(body) is None


@given(st.data())
def test_corrupted_bodies_never_disagree_with_the_parser(data: st.DataObject) -> None:
    array = st.lists(st.integers(0, 2**33), max_size=6)
    tokens = data.draw(array | st.lists(array, min_size=1, max_size=4))
    fields = data.draw(_fields) | {"token_ids": tokens, "x": {"token_ids": [1]}, "y": '"token_ids": [1]'}
    body = bytearray(json.dumps(fields).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(body) - 1))
        byte = data.draw(st.sampled_from(list(b'"\\{}[]:,0129 \n-.e\x00\xfft')))
        match data.draw(st.sampled_from(["replace", "insert", "delete"])):
            case "replace":
                body[position] = byte
            case "insert":
                body.insert(position, byte)
            case _ if len(body) > 1:
                del body[position]
    _check_against_parser(bytes(body))


def _long_array(rng: random.Random) -> str:
    """Return an array that fills several blocks of 64 bytes, with every kind of space between its items."""
    space = rng.choice(["", " ", "\n    ", "mixed"])
    largest = rng.choice([9, 10**6, 10**8 - 1, 2**32 - 1])

    def gap() -> str:
        return rng.choice(["", " ", "\t", "\r\n", " " * rng.randint(1, 130)]) if space == "mixed" else space

    items = [str(rng.choice([0, 9, 10, largest, rng.randint(0, largest)])) for _ in range(rng.randint(10, 80))]
    return "[" + gap() + (gap() + "," + gap()).join(items) + gap() + "]"


@pytest.mark.parametrize("seed", range(8))
def test_long_arrays_are_read_whatever_stands_between_their_integers(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        text = _long_array(rng)
        assert _split(b'{"token_ids":%s}' % text.encode()) == (json.loads(text), {"token_ids": [MARK]})


@pytest.mark.parametrize("item", ["01", "00", "1 2", "1,,2", "1, ,2", "-1", "1.5", "123456789", "4294967296", "1]"])
def test_what_is_not_plain_is_found_wherever_it_lies_in_a_block(item: str) -> None:
    for num_spaces in range(130):
        body = b'{"token_ids":[%s%s%s]}' % (b" " * num_spaces, item.encode(), b",12" * 100)
        expected = {"token_ids": [MARK]} if item == "123456789" else None
        split = _split(body)
        assert (None if split is None else split[1]) == expected


@pytest.mark.parametrize("seed", range(8))
def test_corrupted_long_arrays_never_disagree_with_the_parser(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        body = bytearray(b'{"token_ids":%s,"x":1}' % _long_array(rng).encode())
        for _ in range(rng.randint(1, 2)):
            position, byte = rng.randrange(13, len(body)), rng.choice(b'0129 ,,[]-.e/:\n\x0b\x00\xff"')
            match rng.choice(["replace", "insert", "delete"]):
                case "replace":
                    body[position] = byte
                case "insert":
                    body.insert(position, byte)
                case "delete":
                    del body[position]
        _check_against_parser(bytes(body))

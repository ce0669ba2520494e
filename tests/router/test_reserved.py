"""Whatever a router passes on says nothing of other workers, in any reading of its bytes."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvist.openai.errors import RequestError
from kvist.router.prompts import OneModel, PromptReader
from kvist.router.reserved import CONTAINERS, FIELDS

READER = PromptReader(OneModel(None))
NAMES = sorted(FIELDS | CONTAINERS)


def readings(body: bytes) -> list[Any]:
    """What other parsers make of the bytes: each encoding that a worker may guess, the first and the last of a name."""

    def first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(reversed(pairs))

    found: list[Any] = []
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        for errors in ("surrogatepass", "replace", "ignore"):
            with suppress(ValueError):
                text = body.decode(encoding, errors)
                found += [json.loads(text, strict=False), json.loads(text, object_pairs_hook=first, strict=False)]
                found.append(json.JSONDecoder(strict=False).raw_decode(text)[0])
    with suppress(msgspec.DecodeError, ValueError):
        found.append(msgspec.json.decode(body))
    return found


def says(value: Any, *, in_container: bool = True) -> bool:
    if isinstance(value, list):
        return any(says(each, in_container=in_container) for each in value)
    if not isinstance(value, dict):
        return False
    if in_container and FIELDS & value.keys():
        return True
    return any(says(each) for name, each in value.items() if in_container or name in CONTAINERS)


def spelt(name: str, escaped: int) -> str:
    return "".join(f"\\u{ord(char):04x}" if escaped >> idx & 1 else char for idx, char in enumerate(name))


keys = st.builds(spelt, st.sampled_from([*NAMES, "model", "prompt", "x"]), st.integers(0, 255) | st.just(0))
atoms = st.sampled_from(["1", "null", '"m"', "NaN", "1e999", r'"\ud800"', r'"\ud83d\ude00"', "[1,2]", '"\ufeff"'])
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(st.tuples(keys, inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
        )
        | st.lists(inner, max_size=2).map(lambda each: "[" + ",".join(each) + "]")
    ),
    max_leaves=6,
)
objects = st.lists(st.tuples(keys, values), max_size=4).map(
    lambda pairs: "{" + ",".join(f'"{key}": {value}' for key, value in pairs) + "}"
)
encodings = st.sampled_from(["utf-8"] * 4 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
noise = st.sampled_from([b""] * 6 + [b"\xff", b"\xed\xa0\x80", b"\x00", b"{}", b" ", b"//", b","])


@given(objects | values, encodings, noise, noise)
def test_what_passes_says_nothing_of_other_workers_in_any_reading(
    text: str, encoding: str, before: bytes, after: bytes
) -> None:
    body = before + text.encode(encoding) + after
    for path in ("/v1/completions", "/v1/responses"):
        try:
            ask = asyncio.run(READER.read(path, body))
        except RequestError:
            continue
        assert json.loads(body or b"{}") == ask.fields
        for reading in readings(body):
            if isinstance(reading, dict):
                assert not FIELDS & reading.keys()
                assert not says(reading, in_container=False)

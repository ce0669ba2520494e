from __future__ import annotations

import msgspec
import pytest

from kvist.events.transports.mqtt import Announcement, decode_announcement

ALIVE = Announcement("pod-1", "org/model", "alive", "000000000000002a")
JSON = msgspec.json.encode(ALIVE)


def test_an_announcement_is_json_that_people_can_read():
    text = b'{"worker":"pod-1","model":"org/model","state":"alive","publication_id":"000000000000002a"}'
    assert text == JSON
    assert decode_announcement(text) == ALIVE


def test_what_an_earlier_version_says_beside_is_passed_over():
    assert decode_announcement(JSON[:-1] + b',"epoch":7,"block_size":16,"ranks":[1]}') == ALIVE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[" * 5000,
        b"\xff",
        JSON.replace(b"alive", b"asleep"),
        JSON.replace(b"2a", b"2x"),
    ],
    ids=range(6),
)
def test_anything_else_is_none(data):
    assert decode_announcement(data) is None

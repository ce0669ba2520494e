from __future__ import annotations

import msgspec
import pytest

from kvist.errors import MalformedMessageError
from kvist.events import Batch, Cleared
from kvist.events.codec import encode_batch
from kvist.events.transports.mqtt.stream import Announcement, decode_announcement

FRESH = Announcement("pod-1", "org/model", "alive", "000000000000002a")


def batch(rank: int = 0, epoch: int = 7, block_size: int = 16) -> bytes:
    return encode_batch(Batch("pod-1", rank, epoch, 0, block_size, 0.5, (Cleared(),)))


def test_an_announcement_is_json_that_people_can_read():
    assert FRESH.after(batch(rank=1)).encode() == (
        b'{"worker":"pod-1","model":"org/model","state":"alive","publication_id":"000000000000002a",'
        b'"epoch":7,"block_size":16,"ranks":[1]}'
    )


def test_a_batch_has_news_when_its_rank_epoch_or_block_size_is_new():
    known = FRESH.after(batch(rank=1))
    assert known.after(batch(rank=1)) is known
    assert known.after(batch(rank=0)).ranks == (0, 1)
    assert known.after(batch(rank=1, epoch=8)).epoch == 8
    assert known.after(batch(rank=1, block_size=32)).block_size == 32


def test_a_later_version_of_the_batch_is_understood_as_far_as_it_begins_alike():
    fields = msgspec.msgpack.decode(batch())
    assert FRESH.after(msgspec.msgpack.encode([*fields, "more"])) == FRESH.after(batch())


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.5, [], 0]), batch()[:20], b"\x91" * 5000])
def test_what_is_no_canonical_batch_has_no_news(payload):
    assert FRESH.after(payload) is FRESH


def test_an_announcement_is_read_back_and_one_that_is_gone_says_so():
    known = FRESH.after(batch())
    assert decode_announcement(known.encode(), "x") == known
    assert decode_announcement(known.gone().encode(), "x").state == "gone"


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 5000, b"\xff", FRESH.encode().replace(b"alive", b"asleep")])
def test_anything_else_is_malformed_and_says_where_it_came_from(data):
    with pytest.raises(MalformedMessageError, match="kvist/m/w"):
        decode_announcement(data, "kvist/m/w")

"""What a publisher tells about itself: one retained JSON object for each worker, which people can read as well.

    {"worker":"pod-1","model":"m","state":"alive","publication_id":"00…2a","epoch":7,"block_size":16,"ranks":[0,1]}

`epoch` and `block_size` are those of its latest batches, null before the first and for an engine's own events.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvist.errors import MalformedMessageError


class Announcement(msgspec.Struct, frozen=True):
    """A publication and what is known of its streams. `publication_id` tells one start of a publisher from the next."""

    worker: str
    model: str
    state: Literal["alive", "gone"]
    publication_id: str
    epoch: int | None = None
    block_size: int | None = None
    ranks: tuple[int, ...] = ()

    def gone(self) -> Announcement:
        """Return the announcement that this publication has ended."""
        return msgspec.structs.replace(self, state="gone")

    def after(self, payload: bytes) -> Announcement:
        """Return the announcement as it is once this payload is sent: itself, unless that has news."""
        try:
            batch = _decode_head(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self
        if (batch.epoch, batch.block_size) == (self.epoch, self.block_size) and batch.rank in self.ranks:
            return self
        ranks = tuple(sorted({*self.ranks, batch.rank}))
        return msgspec.structs.replace(self, epoch=batch.epoch, block_size=batch.block_size, ranks=ranks)

    def encode(self) -> bytes:
        """Return the announcement as JSON."""
        return msgspec.json.encode(self)


class _BatchHead(msgspec.Struct, tag="kvist1", array_like=True, frozen=True, gc=False):
    """How a canonical batch begins; the rest is passed over."""

    worker: str
    rank: int
    epoch: int
    sequence: int
    block_size: int


_decode_head = msgspec.msgpack.Decoder(_BatchHead).decode
_decode = msgspec.json.Decoder(Announcement).decode


def decode_announcement(data: bytes, source: str) -> Announcement:
    """Return the announcement in JSON; raises MalformedMessageError for anything else."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessageError(source, f"not an announcement: {error}") from None

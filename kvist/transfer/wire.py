"""The first frame of what two workers send each other, after a ROUTER's name of the peer: what the others are."""

from __future__ import annotations

from typing import Final

MESSAGE: Final = b"m"  # one frame: a message of `kvist.transfer.messages`
REPORT: Final = b"r"  # the frames of a report, as in `kvist.transfer.frames`
PING: Final = b"p"  # nothing: whether it can be sent is what the sender wants to know

MAX_MESSAGE_BYTES: Final = 64 * 2**20  # a million blocks, and room

"""Server-sent events, of which streamed answers are made, and the reasons for which an answer ends."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]

DONE = b"data: [DONE]\n\n"
_LAST = (b"[DONE]", b'{"type":"message_stop"}')  # the last events of OpenAI's and Anthropic's streams

_encoder = msgspec.json.Encoder()


def encode_event(value: Any) -> bytes:
    """Return a server-sent event with the value as JSON."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def last_event_data(tail: bytes) -> bytes | None:
    """Return the data of a stream's last complete event but `_LAST`, from the stream's tail; None if there is none."""
    for event in reversed(tail.replace(b"\r\n", b"\n").split(b"\n\n")):
        lines = [line.removeprefix(b"data: ") for line in event.split(b"\n") if line.startswith(b"data: ")]
        if lines and lines[-1][:64].strip().replace(b" ", b"") not in _LAST:
            return lines[-1]
    return None

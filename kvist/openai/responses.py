"""What ends an answer, and what a stream of it is made of: chunks as server-sent events, `[DONE]` last."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]

DONE = b"data: [DONE]\n\n"
_LAST = (b"[DONE]", b'{"type":"message_stop"}')  # by which OpenAI and Anthropic end a stream

_encoder = msgspec.json.Encoder()


def encode_event(value: Any) -> bytes:
    """Return one event with the value as JSON."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def last_event_data(tail: bytes) -> bytes | None:
    """Return the data of the last complete event that says something in the tail of a stream; None when cut off."""
    for event in reversed(tail.replace(b"\r\n", b"\n").split(b"\n\n")):
        lines = [line.removeprefix(b"data: ") for line in event.split(b"\n") if line.startswith(b"data: ")]
        if lines and lines[-1][:64].strip().replace(b" ", b"") not in _LAST:
            return lines[-1]
    return None

"""Server-sent events as OpenAI streams them: one JSON object a `data:` line, `[DONE]` last."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def encode_event(value: Any) -> bytes:
    """Return one event with the value as JSON."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def last_event_data(tail: bytes) -> bytes | None:
    """Return the data of the last complete event but `[DONE]` in the tail of a stream; None when it was cut off."""
    for event in reversed(tail.replace(b"\r\n", b"\n").split(b"\n\n")):
        _, found, data = event.rpartition(b"data: ")
        if found and data.strip() != b"[DONE]":
            return data
    return None

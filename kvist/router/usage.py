"""Reads what a worker says of a request's cached tokens out of its answer, without holding or altering the answer."""

from __future__ import annotations

import msgspec

from kvist.openai.responses import last_event_data

MAX_JSON_BYTES = 256 * 1024
TAIL_BYTES = 4096


class ReportedUsage(msgspec.Struct, frozen=True):
    """`usage` of an OpenAI answer; `cached_tokens` is None where the engine does not report it."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class UsageReader:
    """Keeps at most the end of a stream, or a whole answer that is short enough, until it is asked for the usage."""

    __slots__ = ("_is_event_stream", "_is_overlong", "_num_kept", "_tail")

    def __init__(self, *, is_event_stream: bool, is_last_event_long: bool = False) -> None:
        """Its last event may have all that the stream brought."""
        self._is_event_stream = is_event_stream
        self._num_kept = MAX_JSON_BYTES if is_last_event_long else TAIL_BYTES
        self._is_overlong = False
        self._tail = b""

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the answer's body."""
        if self._is_overlong:
            return
        self._tail += piece
        if self._is_event_stream:
            self._tail = self._tail[-self._num_kept :]
        elif len(self._tail) > MAX_JSON_BYTES:
            self._is_overlong, self._tail = True, b""

    @property
    def is_between_events(self) -> bool:
        """Return whether a stream of events, cut here, is still a stream of whole events."""
        return self._is_event_stream and self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    def answer(self) -> bytes | None:
        """Return the JSON of the answer, or of the last event of a stream; None where that was too long."""
        return last_event_data(self._tail) if self._is_event_stream else self._tail

    def usage(self) -> ReportedUsage | None:
        """Return the usage that the answer, or the last event of a stream, carried."""
        data = self.answer()
        if not data:
            return None
        try:
            usage = _decode_answer(data).usage
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if usage is None:
            return None
        details = usage.prompt_tokens_details
        cached_tokens = details.cached_tokens if details else None
        return ReportedUsage(usage.prompt_tokens, cached_tokens, usage.completion_tokens)

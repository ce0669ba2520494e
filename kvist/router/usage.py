"""Reads the usage that a worker reports out of its answer, without holding or altering the answer."""

from __future__ import annotations

import re

import msgspec

from kvist.openai.responses import last_event_data

MAX_JSON_BYTES = 256 * 1024
TAIL_BYTES = 4096
_USAGE = re.compile(rb'("usage" *: *\{(?:[^{}]|\{[^{}]*\})*\})')
"""In JSON, where quotes within a text are escaped: a usage, whose own values nest once."""


class ReportedUsage(msgspec.Struct, frozen=True):
    """The tokens of a whole answer; `cached_tokens` is None where the engine does not report them."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    cached_tokens: int | None = None  # of SGLang's /generate
    # Responses and messages:
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def reported(self) -> ReportedUsage | None:
        """Return the usage in one form for all APIs; None where it leaves the prompt's tokens out."""
        details = self.prompt_tokens_details or self.input_tokens_details or _Details(self.cached_tokens)
        if self.prompt_tokens is not None:
            return ReportedUsage(self.prompt_tokens, details.cached_tokens, self.completion_tokens)
        if self.input_tokens is None:
            return None
        # Anthropic leaves cached tokens out of the input tokens; the others include them.
        num_read, num_written = self.cache_read_input_tokens, self.cache_creation_input_tokens
        num_tokens = self.input_tokens + (num_read or 0) + (num_written or 0)
        return ReportedUsage(num_tokens, details.cached_tokens if num_read is None else num_read, self.output_tokens)


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    meta_info: _Usage | None = None  # of SGLang's /generate
    response: _Answer | None = None  # of the last event of a stream of responses


_decode_answer = msgspec.json.Decoder(_Answer).decode


class UsageReader:
    """Keeps the end of a stream, or an answer, of a long one both ends, until it is asked for the usage."""

    __slots__ = ("_head", "_is_event_stream", "_num_kept", "_tail")

    def __init__(self, *, is_event_stream: bool, is_last_event_long: bool = False) -> None:
        """`is_last_event_long` says that a stream's last event repeats the whole answer."""
        self._is_event_stream = is_event_stream
        self._num_kept = MAX_JSON_BYTES if is_last_event_long else TAIL_BYTES
        self._head = self._tail = b""

    def feed(self, piece: bytes) -> int:
        """Add the next piece of the answer's body; return how many events of a stream end in it."""
        if self._is_event_stream:
            last = self._tail[-3:]
            seen = last + piece
            self._tail = (self._tail + piece)[-self._num_kept :]
            return seen.count(b"\n\n") + seen.count(b"\r\n\r\n") - last.count(b"\n\n")
        self._tail += piece
        if self._head or len(self._tail) > MAX_JSON_BYTES:
            self._head, self._tail = self._head or self._tail[:TAIL_BYTES], self._tail[-TAIL_BYTES:]
        return 0

    @property
    def is_between_events(self) -> bool:
        """Return whether a stream of events, cut here, is still a stream of whole events."""
        return self._is_event_stream and self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    def answer(self) -> bytes | None:
        """Return the JSON of the answer, or of the last event of a stream; None where that was too long."""
        return last_event_data(self._tail) if self._is_event_stream else None if self._head else self._tail

    def usage(self) -> ReportedUsage | None:
        """Return the usage that the answer, or the last event of a stream, carried."""
        data = self.answer()
        if self._head and (found := _USAGE.findall(self._tail) or _USAGE.findall(self._head)):
            data = b"{%b}" % found[-1]
        if not data:
            return None
        try:
            answer = _decode_answer(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        answer = answer.response or answer
        usage = answer.usage or answer.meta_info
        return None if usage is None else usage.reported()

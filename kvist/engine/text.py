"""Output tokens as text, up to the first stop string."""

from __future__ import annotations

from typing import Protocol


class Detokenizer(Protocol):
    """One output's tokens to text, as they come."""

    def step(self, token_id: int) -> str:
        """Return the text this token completes."""

    def flush(self) -> str:
        """Return what is left at the end."""


class TextStream:
    """Text is released once no stop string can begin in it; a stop string and all behind it never are.

    With `is_stop_included` the stop string itself is released.
    """

    def __init__(self, detokenizer: Detokenizer | None, stops: tuple[str, ...], is_stop_included: bool = False) -> None:
        """Follow one output; without a detokenizer the text stays empty and nothing stops it."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._is_stop_included = is_stop_included
        self._held = ""
        self.is_stopped = False

    def step(self, token_id: int, can_stop: bool = True) -> str:
        """Return the text to release after this token; sets `is_stopped` when a stop string is complete.

        Unless `can_stop`, all text is released, and no stop string that begins in it counts.
        """
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.step(token_id)
        return self._feed(piece) if can_stop else piece

    def finish(self) -> str:
        """Return what was held back, at the end of an output that nothing stopped."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        released = self._feed(self._detokenizer.flush())
        if not self.is_stopped:
            released, self._held = released + self._held, ""
        return released

    def _feed(self, piece: str) -> str:
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda each: each[0])
            self.is_stopped, self._held = True, ""
            return text[: at + len(stop)] if self._is_stop_included else text[:at]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        released, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

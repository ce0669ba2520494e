"""What comes in over any transport: the malformed is counted, and answers are bounded.

Answers are bounded one by one, and all of a process together, since many publishers may lie at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvist.events.transports import base
from kvist.events.transports.base import Message

_logger = logging.getLogger(__name__)

MAX_ANSWERS_BYTES = 4 << 30
"""What the answers of a process may take at a time; one that does not fit beside the others is asked for again."""


class MalformedCounter:
    """Counts, for one source, messages that were skipped and peers that were left; logs the first of each."""

    def __init__(self, source: str) -> None:
        self.num = 0
        self.source = source
        self._has_logged_message = False
        self._has_logged_peer = False

    def skip_message(self, frame_bytes: Sequence[int]) -> None:
        """Count a message whose frames have these sizes, as far as they are known."""
        self.num += 1
        if not self._has_logged_message:
            self._has_logged_message = True
            _logger.warning(
                "malformed message skipped: not topic, 8 bytes and a payload of at most %d MiB "
                "source=%s num_frames=%d frame_bytes=%s",
                base.MAX_MESSAGE_BYTES >> 20,
                self.source,
                len(frame_bytes),
                list(frame_bytes[:4]),
            )

    def leave_peer(self, reason: str) -> None:
        """Count a peer that broke the protocol, or speaks another; the connection to it is given up."""
        self.num += 1
        if not self._has_logged_peer:
            self._has_logged_peer = True
            _logger.warning("peer left, and tried again: %s source=%s", reason, self.source)


def message_of(frames: list[bytes], malformed: MalformedCounter) -> Message | None:
    """Return the message of topic, sequence and payload; None, counted, when they are something else."""
    if len(frames) != 3 or len(frames[1]) != 8 or len(frames[0]) + len(frames[2]) > base.MAX_MESSAGE_BYTES:
        malformed.skip_message([len(frame) for frame in frames])
        return None
    return Message(frames[0], int.from_bytes(frames[1], "big"), frames[2])


class AnswerBudget:
    """Knows what all answers take together; safe to use from any thread."""

    def __init__(self) -> None:
        self.num_refused = 0
        """Answers given up because they did not fit."""
        self.taken_bytes = 0
        self._lock = threading.Lock()

    def takes(self, size_bytes: int) -> bool:
        """Count so many bytes more, if there is room for them; return whether."""
        with self._lock:
            if self.taken_bytes + size_bytes > MAX_ANSWERS_BYTES:
                self.num_refused += 1
                _logger.warning("answer refused: all that come in take too much size_bytes=%d", self.taken_bytes)
                return False
            self.taken_bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Count so many bytes less."""
        with self._lock:
            self.taken_bytes -= size_bytes


BUDGET = AnswerBudget()
"""What all answers of the process share."""


class Collected(list[Message]):
    """The messages of one answer; they count as taken until it is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def grows(self, size_bytes: int) -> bool:
        """Count so many bytes more; return whether there is room for them, in this answer and beside the others."""
        if self._size_bytes + size_bytes > base.MAX_ANSWER_BYTES or not BUDGET.takes(size_bytes):
            return False
        self._size_bytes += size_bytes
        return True

    def takes(self, message: Message) -> bool:
        """Append a message; return whether there was room for it."""
        has_room = self.grows(base.MESSAGE_BYTES + len(message.topic) + len(message.payload))
        if has_room:
            self.append(message)
        return has_room

    def __del__(self) -> None:
        BUDGET.give_back(self._size_bytes)

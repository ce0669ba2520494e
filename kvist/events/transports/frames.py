"""A message's frames, as engines send them, and the count of those that are something else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvist.events.transports import base
from kvist.events.transports.base import Message

_logger = logging.getLogger(__name__)


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

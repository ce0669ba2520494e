"""What a publisher says once it is ready: bytes in the inbox become messages there, and bytes to send."""

from __future__ import annotations

from kvist.events.transports import base
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.inbox import Inbox
from kvist.events.transports.zmtp.wire import COMMAND, MORE, FrameHeader, PeerError, Splitter, StopReason

MAX_FRAMES = 1000
"""Frames of one message that are skipped in patience; a peer that sends more never means to end it."""

MAX_COMMANDS_WITHIN = 16
"""Commands between the frames of one message: a sign of life may fall there, and for each the frames before it move."""


class Connection:
    """Takes what a publisher says, from the handshake to its last message. No I/O, no clock.

    The owner puts bytes into the inbox, calls `advance`, and sends `take_outgoing`. After a PeerError it is over.
    """

    def __init__(
        self, inbox: Inbox, splitter: Splitter | None, malformed: MalformedCounter, minor_version: int = 1
    ) -> None:
        """Subscribe at a peer of ZMTP 3.`minor_version`; `inbox` has nothing of another connection."""
        self.has_pong = minor_version >= 1
        """Whether the peer is known to answer a PING, so that its silence means something."""
        self.num_messages = 0
        self._inbox = inbox
        self._splitter = splitter
        self._malformed = malformed
        self._outgoing = bytearray(wire.subscribe_to_all(minor_version))
        self._num_skip_bytes = 0
        self._num_refused_frames = 0  # of a message that is skipped just now
        self._num_commands_within = 0  # the message that is coming just now

    def take_outgoing(self) -> bytes:
        """Return what is to be sent, once."""
        if not self._outgoing:
            return b""
        outgoing = bytes(self._outgoing)
        self._outgoing.clear()
        return outgoing

    def ping(self) -> None:
        self._outgoing += wire.ping()

    def advance(self) -> None:
        """Take from the inbox what is there, until a message is cut or the table is full; raises PeerError."""
        while self._read_traffic():
            pass

    def _read_traffic(self) -> bool:
        inbox = self._inbox
        if self._num_skip_bytes:
            num_bytes = min(self._num_skip_bytes, inbox.end - inbox.begin)
            inbox.begin += num_bytes
            self._num_skip_bytes -= num_bytes
        if inbox.begin == inbox.end or inbox.num_messages == base.MAX_DRAIN:
            return False
        if self._splitter is not None and not self._num_refused_frames:
            num_messages, begin, reason = self._splitter(
                inbox.buffer, inbox.begin, inbox.end, inbox.free_rows, base.MAX_MESSAGE_BYTES
            )
            if num_messages:
                self._add(num_messages, begin)
            if reason != StopReason.UNUSUAL:
                return False
        return self._read_frames()

    def _read_frames(self) -> bool:
        """Take a command, a message frame by frame, or a frame of one that is none; return whether it was all there."""
        inbox = self._inbox
        frames: list[FrameHeader] = []
        at = inbox.begin
        while len(frames) < 3:
            header = wire.read_frame_header(inbox.buffer, at, inbox.end)
            if header is None:
                return False
            if header.flags & COMMAND:
                return self._take_command(at, header)
            if self._num_refused_frames or not _is_expected(frames, header):
                self._refuse_frame(frames, header)
                return True
            if header.end > inbox.end:
                return False
            frames.append(header)
            at = header.end
        topic, sequence, payload = frames
        number = int.from_bytes(inbox.buffer[sequence.start : sequence.end], "big", signed=True)
        inbox.free_rows[0] = topic.start, topic.num_bytes, number, payload.start, payload.num_bytes
        self._add(1, at)
        return True

    def _add(self, num_messages: int, end: int) -> None:
        self._inbox.add(num_messages, end)
        self.num_messages += num_messages
        self._num_commands_within = 0

    def _take_command(self, at: int, header: FrameHeader) -> bool:
        """Do what a command says, if it is all there; the frames before it move up to those behind it."""
        inbox, num_bytes = self._inbox, header.end - at
        if header.end > inbox.end:
            return False
        self._on_command(*wire.read_command(inbox.buffer[header.start : header.end]))
        self._num_commands_within += at > inbox.begin
        if self._num_commands_within > MAX_COMMANDS_WITHIN:
            raise PeerError(f"a message has more than {MAX_COMMANDS_WITHIN} commands between its frames")
        inbox.buffer.move(inbox.begin + num_bytes, inbox.begin, at - inbox.begin)
        inbox.begin += num_bytes
        return True

    def _refuse_frame(self, before: list[FrameHeader], header: FrameHeader) -> None:
        """Skip a frame of a message that is not ours, with all that came of it; its body is never buffered."""
        if not self._num_refused_frames:
            self._malformed.skip_message([*(frame.num_bytes for frame in before), header.num_bytes])
            self._num_refused_frames, self._num_commands_within = len(before), 0
        self._num_refused_frames += 1
        if self._num_refused_frames > MAX_FRAMES:
            raise PeerError(f"a message has more than {MAX_FRAMES} frames")
        self._inbox.begin = header.start
        self._num_skip_bytes = header.num_bytes
        if not header.flags & MORE:
            self._num_refused_frames = 0

    def _on_command(self, name: bytes, body: bytes) -> None:
        """Do what a command says; one that nobody knows says nothing."""
        if name == b"PING":
            self.has_pong = True
            self._outgoing += wire.pong(body)
        elif name == b"PONG":
            self.has_pong = True
        elif name == b"ERROR":
            raise PeerError(f"it reports an error: {body[1:100]!r}")


def _is_expected(before: list[FrameHeader], header: FrameHeader) -> bool:
    """Return whether a frame can be the next one of topic, sequence and payload."""
    is_last = len(before) == 2
    if bool(header.flags & MORE) == is_last:
        return False
    if len(before) == 1:
        return header.num_bytes == 8
    return header.num_bytes + (before[0].num_bytes if is_last else 0) <= base.MAX_MESSAGE_BYTES

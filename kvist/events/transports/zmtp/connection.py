"""One connection to a publisher as a state machine: bytes in the inbox become messages there, and bytes to send."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvist.events.transports import base
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.inbox import Inbox
from kvist.events.transports.zmtp.wire import COMMAND, MORE, FrameHeader, PeerError, Splitter, StopReason

MAX_FRAMES = 1000
"""Frames of one message that are skipped in patience; a peer that sends more never means to end it."""

_GREETING, _HANDSHAKE, _TRAFFIC = range(3)


@dataclass(slots=True)
class _FrameByFrame:
    """A message that no splitter found: frames of a good one wait in the inbox, those of a bad one go at once."""

    frames: list[tuple[int, int]] = field(default_factory=list)
    """Where each body is, from the message's first byte on, and its size."""
    offset: int = 0
    """Where the next frame is, from there on."""
    num_frames: int = 0
    is_refused: bool = False


class Connection:
    """Takes what a publisher says, from its greeting to its last message. No I/O, no clock.

    The owner puts bytes into the inbox, calls `advance`, and sends `take_outgoing`. After a PeerError it is over.
    """

    def __init__(self, inbox: Inbox, splitter: Splitter | None, malformed: MalformedCounter) -> None:
        """Begin with the greeting; `inbox` has nothing of another connection."""
        self.has_pong = False
        """Whether the peer is known to answer a PING, so that its silence means something."""
        self.num_messages = 0
        """How many messages were put into the inbox so far."""
        self._inbox = inbox
        self._splitter = splitter
        self._malformed = malformed
        self._outgoing = bytearray(wire.greeting())
        self._stage = _GREETING
        self._minor_version = 0
        self._num_skip_bytes = 0
        self._message: _FrameByFrame | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the handshake is over: messages may come."""
        return self._stage == _TRAFFIC

    def take_outgoing(self) -> bytes:
        """Return what is to be sent, once."""
        if not self._outgoing:
            return b""
        outgoing = bytes(self._outgoing)
        self._outgoing.clear()
        return outgoing

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._outgoing += wire.ping()

    def advance(self) -> None:
        """Take from the inbox what is there, until a message is cut or the table is full; raises PeerError."""
        while self._stage != _TRAFFIC:
            if not (self._greet() if self._stage == _GREETING else self._shake_hands()):
                return
        while self._read_traffic():
            pass

    def _greet(self) -> bool:
        half = self._inbox.filling
        received = half.buffer[half.begin : min(half.begin + wire.GREETING_BYTES, half.end)]
        minor_version = wire.read_greeting(received)
        if minor_version is None:
            return False
        half.begin += wire.GREETING_BYTES
        self._minor_version = minor_version
        self.has_pong = minor_version >= 1
        self._outgoing += wire.ready(b"SUB")
        self._stage = _HANDSHAKE
        return True

    def _shake_hands(self) -> bool:
        half = self._inbox.filling
        header = wire.read_frame_header(half.buffer, half.begin, half.end)
        if header is None:
            return False
        if not header.flags & COMMAND:
            raise PeerError("it sends a message before it is ready")
        body = self._command_body(header)
        if body is None:
            return False
        half.begin = header.end
        name, rest = wire.read_command(body)
        if name != b"READY":
            raise PeerError(f"it answers the handshake with {name!r} {rest[:100]!r}, not with READY")
        socket_type = wire.read_socket_type(rest)
        if socket_type not in (b"PUB", b"XPUB"):
            raise PeerError(f"its socket is a {socket_type!r}, not a PUB")
        self._outgoing += wire.subscribe_to_all(self._minor_version)
        self._stage = _TRAFFIC
        return True

    def _read_traffic(self) -> bool:
        half = self._inbox.filling
        if self._num_skip_bytes:
            num_bytes = min(self._num_skip_bytes, half.end - half.begin)
            half.begin += num_bytes
            self._num_skip_bytes -= num_bytes
        if half.begin == half.end or half.num_messages == base.MAX_DRAIN:
            return False
        if self._message is not None:
            return self._read_frame(self._message)
        if self._splitter is not None:
            num_messages, begin, reason = self._splitter(
                half.buffer, half.begin, half.end, half.free_rows, base.MAX_MESSAGE_BYTES
            )
            half.add(num_messages, begin)
            self.num_messages += num_messages
            if reason != StopReason.UNUSUAL:
                return False
        self._message = _FrameByFrame()
        return True

    def _read_frame(self, message: _FrameByFrame) -> bool:
        """Take the next frame of a message that is not ordinary, or a command; return whether there was one."""
        half = self._inbox.filling
        header = wire.read_frame_header(half.buffer, half.begin + message.offset, half.end)
        if header is None:
            return False
        if header.flags & COMMAND:
            body = self._command_body(header)
            if body is None:
                return False
            self._on_command(*wire.read_command(body))
            self._pass_command(message, header.end)
        elif message.is_refused or not self._is_expected(message, header):
            self._refuse_frame(message, header)
        elif header.end > half.end:
            return False
        else:
            self._keep_frame(message, header)
        return True

    def _pass_command(self, message: _FrameByFrame, end: int) -> None:
        half = self._inbox.filling
        if message.frames:  # they stay where they are, and the command between them too
            message.offset = end - half.begin
            return
        half.begin = end
        if not message.is_refused:
            self._message = None

    def _is_expected(self, message: _FrameByFrame, header: FrameHeader) -> bool:
        """Return whether a frame can be the next one of topic, sequence and payload."""
        idx = len(message.frames)
        if idx < 2 and not header.flags & MORE:
            return False
        if idx == 1:
            return header.num_bytes == 8
        topic_bytes = message.frames[0][1] if idx else 0
        return not (idx and header.flags & MORE) and topic_bytes + header.num_bytes <= base.MAX_MESSAGE_BYTES

    def _keep_frame(self, message: _FrameByFrame, header: FrameHeader) -> None:
        half = self._inbox.filling
        message.frames.append((header.start - half.begin, header.num_bytes))
        message.offset = header.end - half.begin
        if len(message.frames) == 3:
            (topic_at, topic_bytes), (sequence_at, _), (payload_at, payload_bytes) = message.frames
            sequence_start = half.begin + sequence_at
            sequence = int.from_bytes(half.buffer[sequence_start : sequence_start + 8], "big", signed=True)
            row = half.begin + topic_at, topic_bytes, sequence, half.begin + payload_at, payload_bytes
            half.free_rows[0] = row
            half.add(1, header.end)
            self.num_messages += 1
            self._message = None

    def _refuse_frame(self, message: _FrameByFrame, header: FrameHeader) -> None:
        """Skip a frame of a message that is not ours, with all that was kept of it; its body is never buffered."""
        if not message.is_refused:
            self._malformed.skip_message([*(size for _, size in message.frames), header.num_bytes])
            message.num_frames = len(message.frames)
            message.frames.clear()
            message.is_refused = True
        message.num_frames += 1
        if message.num_frames > MAX_FRAMES:
            raise PeerError(f"a message has more than {MAX_FRAMES} frames")
        self._inbox.filling.begin = header.start
        message.offset = 0
        self._num_skip_bytes = header.num_bytes
        if not header.flags & MORE:
            self._message = None

    def _command_body(self, header: FrameHeader) -> bytes | None:
        """Return a command's body, None while it is not whole."""
        if header.num_bytes > wire.MAX_COMMAND_BYTES:
            raise PeerError(f"a command has {header.num_bytes} bytes")
        half = self._inbox.filling
        return half.buffer[header.start : header.end] if header.end <= half.end else None

    def _on_command(self, name: bytes, body: bytes) -> None:
        """Do what a command says; one that nobody knows says nothing."""
        if name == b"PING":
            self.has_pong = True
            self._outgoing += wire.pong(body)
        elif name == b"PONG":
            self.has_pong = True
        elif name == b"ERROR":
            raise PeerError(f"it reports an error: {body[1:100]!r}")

"""The protocol behind the handshake: bytes in the inbox become messages there, and commands become bytes to send."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from kvist.events.transports import base
from kvist.events.transports.base import MAX_DRAIN
from kvist.events.transports.block import PADDING_BYTES, MessageBlock
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.wire import COMMAND, MORE, FrameHeader, PeerError, Splitter

CAPACITY_BYTES = 256 << 10
"""What is read ahead of the consumer; more only while a larger message is being received."""
MIN_READ_BYTES = 16 << 10
"""With less room than this an inbox counts as full: small reads cost as much as large ones."""
MAX_FRAMES = 1000
"""Frames of one message that are skipped; a peer that sends more will not end it."""

MAX_COMMANDS_WITHIN = 16
"""Commands between the frames of one message: a PING may fall there, and each one moves the frames before it."""
OVERHEAD_BYTES = 64 << 10
"""Room for what one message may contain beside topic and payload: frame headers, and commands between its frames."""


class Inbox:
    """A buffer `[messages in the table | not split yet, from begin to end | room]`.

    Messages do not move while they are in the table; `take` copies them, and moves up what is not split.
    """

    def __init__(self, max_bytes: int) -> None:
        """Hold messages of up to almost `max_bytes` each, including commands between their frames."""
        self._max_bytes = max_bytes
        self._table = np.empty((MAX_DRAIN, 5), np.int64)
        self.num_messages = self.begin = self.end = 0
        self._use_new_memory(CAPACITY_BYTES)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing, not even part of a message."""
        return self.num_messages == 0 and self.begin == self.end

    @property
    def is_full(self) -> bool:
        """Whether messages must be taken before more can be read."""
        has_room = self.num_messages < MAX_DRAIN and self.capacity - self.end >= MIN_READ_BYTES
        return self.num_messages > 0 and not has_room

    @property
    def free_rows(self) -> NDArray[np.int64]:
        return self._table[self.num_messages :]

    def space(self) -> memoryview:
        """Return the memory to read into; call it only if not full. Raises PeerError when a message does not fit."""
        if self.num_messages == 0:
            num_bytes = self.end - self.begin
            if self.capacity - num_bytes < MIN_READ_BYTES and self.capacity < self._max_bytes:
                self._use_new_memory(min(self.capacity * 2, self._max_bytes), self._view[self.begin : self.end])
            elif self.begin > 0:
                self.buffer.move(0, self.begin, num_bytes)
                self.begin, self.end = 0, num_bytes
        if self.end == self.capacity:
            raise PeerError(f"a message needs more than {self._max_bytes} bytes")
        return self._view[self.end : self.capacity]

    def take(self) -> MessageBlock:
        """Remove and return all whole messages."""
        block = MessageBlock(self.buffer[: self.begin + PADDING_BYTES], self._table[: self.num_messages].copy())
        num_rest_bytes = self.end - self.begin
        if self.capacity > CAPACITY_BYTES >= 2 * num_rest_bytes:
            self._use_new_memory(CAPACITY_BYTES, self._view[self.begin : self.end])
        else:
            self.buffer.move(0, self.begin, num_rest_bytes)
            self.num_messages, self.begin, self.end = 0, 0, num_rest_bytes
        return block

    def _use_new_memory(self, capacity: int, rest: bytes | memoryview = b"") -> None:
        """Continue with nothing but `rest`, in new memory."""
        self.capacity = capacity
        # Anonymous memory: a page that no message has reached costs nothing, so a quiet source holds little.
        self.buffer = mmap.mmap(-1, capacity + PADDING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self.buffer)
        self._view[: len(rest)] = rest
        self.num_messages, self.begin, self.end = 0, 0, len(rest)


class Connection:
    """Reads what a publisher sends after the handshake: its stream, or replies to a request. No I/O, no clock.

    The owner puts bytes into the inbox, calls `advance`, and sends `take_outgoing`. A PeerError ends the connection.
    """

    def __init__(
        self,
        inbox: Inbox,
        splitter: Splitter | None,
        malformed: MalformedCounter,
        minor_version: int = 1,
        request: bytes | None = None,
    ) -> None:
        """Subscribe at a peer of ZMTP 3.`minor_version`, or send it a `request`; `inbox` is empty.

        Before the frames of a reply comes an empty one, which may take the place of the topic.
        """
        self.has_pong = minor_version >= 1
        """Whether the peer is known to answer a PING, so that its silence means something."""
        self.inbox = inbox
        self._splitter = splitter
        self._malformed = malformed
        self._outgoing = bytearray(wire.subscribe_to_all(minor_version) if request is None else request)
        self._max_frames = 3 if request is None else 4
        self._num_skip_bytes = 0
        self._num_refused_frames = 0  # of the message that is being skipped
        self._num_commands_within = 0  # the message that is being received

    def take_outgoing(self) -> bytes:
        outgoing, self._outgoing = bytes(self._outgoing), bytearray()
        return outgoing

    def ping(self) -> None:
        self._outgoing += wire.PING

    def advance(self) -> None:
        """Process the bytes in the inbox, until a message is cut or the table is full; raises PeerError."""
        while self._read_traffic():
            pass

    def _read_traffic(self) -> bool:
        inbox = self.inbox
        if self._num_skip_bytes:
            num_bytes = min(self._num_skip_bytes, inbox.end - inbox.begin)
            inbox.begin += num_bytes
            self._num_skip_bytes -= num_bytes
        if inbox.begin == inbox.end or inbox.num_messages == MAX_DRAIN:
            return False
        if self._splitter is not None and not self._num_refused_frames:
            num_messages, begin, is_unusual = self._splitter(
                inbox.buffer, inbox.begin, inbox.end, inbox.free_rows, base.MAX_MESSAGE_BYTES
            )
            if num_messages:
                self._add(num_messages, begin)
            if not is_unusual:
                return False
        return self._read_frames()

    def _read_frames(self) -> bool:
        """Read a command, a message, or a frame of a malformed message; return whether it was all there."""
        inbox = self.inbox
        frames: list[FrameHeader] = []
        at = inbox.begin
        while not frames or frames[-1].flags & MORE:
            header = wire.read_frame_header(inbox.buffer, at, inbox.end)
            if header is None:
                return False
            if header.flags & COMMAND:
                return self._read_command(at, header)
            if self._num_refused_frames or not _is_expected(frames, header, self._max_frames):
                self._refuse_frame(frames, header)
                return True
            if header.end > inbox.end:
                return False
            frames.append(header)
            at = header.end
        topic, sequence, payload = frames[-3:]
        number = int.from_bytes(inbox.buffer[sequence.start : sequence.end], "big", signed=True)
        inbox.free_rows[0] = topic.start, topic.num_bytes, number, payload.start, payload.num_bytes
        self._add(1, at)
        return True

    def _add(self, num_messages: int, end: int) -> None:
        """Keep the messages written to the inbox's free rows, of which the last ends at `end`."""
        self.inbox.num_messages += num_messages
        self.inbox.begin = end
        self._num_commands_within = 0

    def _read_command(self, at: int, header: FrameHeader) -> bool:
        """Execute a command, if it is all there, and close the gap it leaves between the frames of a message."""
        inbox, num_bytes = self.inbox, header.end - at
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
        """Skip a frame of a malformed message, and those before it; its body is never buffered."""
        if not self._num_refused_frames:
            self._malformed.count_message([*(frame.num_bytes for frame in before), header.num_bytes])
            self._num_refused_frames, self._num_commands_within = len(before), 0
        self._num_refused_frames += 1
        if self._num_refused_frames > MAX_FRAMES:
            raise PeerError(f"a message has more than {MAX_FRAMES} frames")
        self.inbox.begin = header.start
        self._num_skip_bytes = header.num_bytes
        if not header.flags & MORE:
            self._num_refused_frames = 0

    def _on_command(self, name: bytes, body: bytes) -> None:
        """Execute a command; unknown ones are ignored."""
        if name == b"PING":
            self.has_pong = True
            self._outgoing += wire.pong(body)
        elif name == b"PONG":
            self.has_pong = True
        elif name == b"ERROR":
            raise PeerError(f"it reports an error: {body[1:100]!r}")


def _is_expected(before: list[FrameHeader], header: FrameHeader, max_frames: int) -> bool:
    """Return whether a frame can be the next of topic, sequence and payload, with another in front of up to four."""
    if header.flags & MORE and len(before) == max_frames - 2:
        return header.num_bytes == 8
    if header.flags & MORE:
        return len(before) < max_frames - 2 and header.num_bytes <= base.MAX_MESSAGE_BYTES
    num_bytes = header.num_bytes + sum(frame.num_bytes for frame in before) - 8
    return len(before) >= 2 and before[-1].num_bytes == 8 and num_bytes <= base.MAX_MESSAGE_BYTES

"""The transfer service of a rank: a thread beside the engine's that serves receivers, fetches, and reports."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import zmq

from kvist.errors import InvalidValueError
from kvist.kvcache.sequences import root_digest
from kvist.transfer import commands
from kvist.transfer.agents import TransferAgent
from kvist.transfer.bounce import Bounce, BounceStatistics
from kvist.transfer.heads import WHOLE, Part
from kvist.transfer.messages import MAX_MESSAGE_BYTES, GroupShape, Hello, PoolPlace, slot_sizes
from kvist.transfer.receiver import Receiver, SenderConnections
from kvist.transfer.sender import Sender

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_PING_S = 5.0
_WRITING_TICK_S = 0.001
_WRITING_SLICE_S = 0.002  # how long to move bytes before messages are read again

_STATISTICS_S = 1.0

Channel: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """A rank's counts since its start, and its transfers under way; seconds are summed over writes."""

    num_writing: int
    num_fragments_written: int
    bytes_written: int
    bounce: BounceStatistics
    bytes_received: int
    quarantined_bytes: int
    write_seconds: float
    num_refused_greetings: int
    num_malformed: int


def make_hello(
    model: str,
    block_size: int,
    groups: tuple[GroupShape, ...],
    pools: tuple[PoolPlace, ...],
    agent: TransferAgent,
    part: Part = WHOLE,
) -> Hello:
    """Return a rank's `Hello`, under a new name; raises InvalidValueError for pools that do not fit the groups."""
    hello = Hello(
        worker=uuid.uuid4().hex,
        model=model,
        block_size=block_size,
        hash_seed=int.from_bytes(root_digest(None, None)[:7]),
        groups=groups,
        tensor_parallel_size=part.num_ranks,
        tensor_parallel_rank=part.rank,
        agent=agent.kind,
        agent_metadata=agent.metadata(),
        pools=pools,
    )
    for _, expected, got in slot_sizes(hello):
        if expected != got:
            raise InvalidValueError("pools", got, f"{expected} on {part}")
    return hello


class KvTransferService:
    """Offers and fetches blocks while it is open, and reports from its own thread.

    Its methods may be called from any thread, and none but `close` waits. The constructor binds the endpoint, whose
    port may be 0. Commands from a `link` are read before messages that arrive after them.
    """

    def __init__(
        self,
        endpoint: str,
        agent: TransferAgent,
        hello: Hello,
        report: Callable[[commands.Report], None],
        limits: commands.TransferLimits | None = None,
        bounce: Bounce | None = None,
        link: FollowerLink | None = None,
    ) -> None:
        limits = commands.TransferLimits() if limits is None else limits
        self._agent = agent
        self._bounce = bounce
        self._link = link
        self._report = report
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
        ):
            self._router.setsockopt(option, value)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidValueError("kv_transfer", endpoint, f"an endpoint to listen on ({error})") from None
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup).atexit = False  # not before, as any thread may write to it
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)
        if link is not None:
            self._poller.register(link.fileno(), zmq.POLLIN)
        self._sender = Sender(self._router, agent, hello, limits, report, bounce)
        self._senders = SenderConnections(self._context, self._poller, hello.worker.encode())
        self._receiver = Receiver(self._senders, hello, limits, report, bounce)
        self._commands: queue.SimpleQueue[commands.Command] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvist-transfer", daemon=True)
        self.start = self._thread.start

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop the thread, end the writes under way, and release all memory."""
        self._is_closing = True
        os.eventfd_write(self._wakeup, 1)
        if self._thread.ident is None:
            self._context.destroy(linger=0)
        else:
            self._thread.join(timeout_s)
        if self._bounce is not None:
            self._bounce.close()
        self._agent.close()

    def command(self, command: commands.Command) -> None:
        self._commands.put(command)
        os.eventfd_write(self._wakeup, 1)

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(
            self._sender.num_writing,
            self._agent.num_fragments_written,
            self._agent.bytes_written,
            BounceStatistics() if self._bounce is None else self._bounce.statistics(),
            self._receiver.bytes_received,
            self._receiver.quarantined_bytes,
            self._sender.write_seconds,
            self._sender.num_refused_greetings,
            self._sender.num_malformed + self._receiver.num_malformed,
        )

    def _run(self) -> None:
        try:
            self._serve()
            self._agent.is_closing = True
            self._sender.finish_writes()
        finally:
            if not self._is_closing:
                logger.critical("transfer thread died")
                self._report(commands.TransfersStopped())
            if self._link is not None:
                self._link.close()
            self._senders.threads.shutdown(wait=False)
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        next_tick_s = next_ping_s = time.monotonic()
        has_moved = False
        while not self._is_closing:
            timeout_s = 0.0 if has_moved else _WRITING_TICK_S if self._sender.has_writes else _TICK_S
            self._poller.poll(round(timeout_s * 1000))
            messages = self._sender.read()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            if self._link is not None and not self._link.poll(self):
                self._is_closing = True
            self._run_commands()  # before `messages`: a request for an offer may have arrived with it
            self._sender.handle(messages, time.monotonic())
            self._receiver.receive(time.monotonic())
            ends_at_s = time.monotonic() + _WRITING_SLICE_S
            while (has_moved := self._sender.advance_writes(time.monotonic)) and time.monotonic() < ends_at_s:
                pass
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._sender.tick(now_s)
                self._receiver.tick(now_s)
            if now_s >= next_ping_s:
                next_ping_s = now_s + _PING_S
                self._sender.ping()

    def _run_commands(self) -> None:
        now_s = time.monotonic()
        while not self._commands.empty():
            match self._commands.get():
                case commands.Offer() as offer:
                    self._sender.offer(offer, now_s)
                case commands.Computed() as computed:
                    self._sender.on_computed(computed, now_s)
                case commands.Fetch() as fetch:
                    self._receiver.fetch(fetch, now_s)
                case commands.CancelFetch(request_id):
                    self._receiver.cancel(request_id, now_s)
                case commands.WithdrawOffer(remote_request_id):
                    self._sender.withdraw(remote_request_id)


class FollowerLink:
    """A follower's end of its pipe to rank 0 (`kvist.transfer.ranks`): commands come in, reports and counts go out.

    After construction, only the service's thread uses it. Reports are dropped once rank 0 has ended.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.fileno, self.close = channel.fileno, channel.close
        self._next_s = 0.0

    def poll(self, service: KvTransferService) -> bool:
        """Pass commands to the service, and send its counts every second; return False once rank 0 has ended."""
        try:
            while self._channel.poll():
                service.command(self._channel.recv())
        except (EOFError, OSError):
            return False
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _STATISTICS_S
            self.report(service.statistics())
        return True

    def report(self, message: commands.Report | TransferStatistics) -> None:
        with suppress(OSError):
            self._channel.send(message)

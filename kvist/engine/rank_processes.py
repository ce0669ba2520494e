"""The processes of an engine that is split over ranks: starts, watches and ends them, and sends them each step.

Rank 0 schedules and samples. It sends each batch to the other ranks, over a pipe for each, before it computes it; they
compute the same batch on their shards and drop the logits. Only the sums of activations go through torch.distributed.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvist.engine.batch import HostBatch
from kvist.engine.models.transformer import CausalLM
from kvist.engine.runner import Runner
from kvist.errors import KvistError
from kvist.kvcache import WindowPlan
from kvist.kvcache.tensors import KvTensors

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_STEP_TIMEOUT = timedelta(minutes=5)  # a rank's first steps may compile kernels
_CLOSE_S = 2.0


class RankLostError(KvistError):
    """A rank has ended, or failed in a step, so nothing can be computed any more: the engine must be restarted."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"tensor-parallel rank {rank} {reason}")
        self.rank = rank


class Followers:
    """Ranks 1 and up, as child processes, seen from rank 0; they end when this process ends, however it does.

    Each process calls `target` with its `Leader` and `args`. Both sides call `agree_on_num_blocks`, then `connect`.
    When a rank is lost, `error` is set, and nothing can be computed any more. Any thread may call `send` and `fail`,
    one at a time. The `side_channels`, pipes to each `Leader.side_channel`, carry the ranks' other messages.
    """

    def __init__(self, num_ranks: int, target: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.error: RankLostError | None = None
        self._is_closing = False
        self._on_loss: Callable[[], object] | None = None
        self._lock, self._reaping = threading.Lock(), threading.Lock()
        self._channels: list[Connection[Any, Any]] = []
        self.side_channels: list[Connection[Any, Any]] = []
        self._processes = []
        for rank in range(1, num_ranks):
            (ours, theirs), (our_side, their_side) = context.Pipe(), context.Pipe()
            leader = Leader(rank, theirs, their_side)
            process = context.Process(target=_run, args=(target, leader, *args), daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            their_side.close()
            self._channels.append(ours)
            self.side_channels.append(our_side)
            self._processes.append(process)
        atexit.register(self.close)  # else multiprocessing waits for ever: the processes ignore its SIGTERM

    def agree_on_num_blocks(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        """Return, on every rank, the most blocks of each group for which all ranks have room."""
        offers = [num_blocks, *self._receive()]
        fewest = tuple(map(min, zip(*offers, strict=True)))
        self._send(fewest)
        return fewest

    def connect(self, device: torch.device) -> None:
        """Connect the ranks once all have allocated their memory; raises RankLostError."""
        self._receive()
        num_ranks = len(self._processes) + 1
        store = TCPStore(_HOST, 0, num_ranks, True, _STEP_TIMEOUT, wait_for_workers=False)
        self._send(store.port)
        _init(store, 0, num_ranks, device)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def on_loss(self, call: Callable[[], object]) -> None:
        """Call `call` when a rank is lost, from any thread; at once if one is lost already."""
        with self._lock:
            self._on_loss = call
            if self.error is None:
                return
        call()

    def send(self, batch: HostBatch) -> None:
        """Send a step to the other ranks, which compute it; raises RankLostError."""
        if self.error is not None:
            raise self.error
        self._send(batch)

    def fail(self, reason: str) -> RankLostError:
        """Record that rank 0 failed; return the error to raise, which names a rank that has ended, or else rank 0."""
        ended = wait([process.sentinel for process in self._processes], timeout=1.0)
        for rank, process in enumerate(self._processes, 1):
            if process.sentinel in ended:
                return self._lose(self._ended(rank))
        return self._lose(RankLostError(0, reason))

    def close(self) -> None:
        """End the other processes, by a message and then by SIGKILL, between steps. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        atexit.unregister(self.close)
        for side_channel in self.side_channels:  # first: a rank that waits there does not read the other pipe
            side_channel.close()
        for channel in self._channels:
            with suppress(OSError):
                channel.send(None)
        for process in self._processes:
            process.join(_CLOSE_S)
            process.kill()
            process.join()
        for channel in self._channels:
            channel.close()
        if self.error is None and distributed.is_initialized():
            distributed.destroy_process_group()

    def _receive(self) -> list[Any]:
        received = []
        for rank, channel in enumerate(self._channels, 1):
            try:
                received.append(channel.recv())
            except (EOFError, OSError):
                raise self._lose(self._ended(rank)) from None
        return received

    def _send(self, message: object) -> None:
        encoded = ForkingPickler.dumps(message)
        for rank, channel in enumerate(self._channels, 1):
            try:
                channel.send_bytes(encoded)
            except OSError:
                raise self._lose(self._ended(rank)) from None

    def _watch(self) -> None:
        """Report the first of the other processes that ends."""
        ended = wait([process.sentinel for process in self._processes])
        if not self._is_closing:
            rank = next(i for i, process in enumerate(self._processes, 1) if process.sentinel in ended)
            self._lose(self._ended(rank))

    def _ended(self, rank: int) -> RankLostError:
        process = self._processes[rank - 1]
        with self._reaping:  # if two threads wait for a process at once, one of them gets no exit code
            process.join(_CLOSE_S)
            return RankLostError(rank, f"has ended with exit code {process.exitcode}")

    def _lose(self, error: RankLostError) -> RankLostError:
        with self._lock:
            if self.error is not None:
                return self.error
            self.error, call = error, self._on_loss
        logger.critical("engine cannot go on error=%s", error)
        if call is not None:
            call()
        return error


class LeadingRunner(Runner):
    """Rank 0's runner, which sends every step to the other ranks. A step that fails here raises RankLostError."""

    def __init__(
        self, followers: Followers, model: CausalLM, plan: WindowPlan, tensors: KvTensors, block_size: int
    ) -> None:
        super().__init__(model, plan, tensors, block_size)
        self._followers = followers

    @property
    def can_wait(self) -> bool:
        """Return False: the other ranks do not know a token before rank 0 does."""
        return False

    def compute(self, batch: HostBatch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        self._followers.send(batch)
        try:
            return super().compute(batch, drawn)
        except (RuntimeError, ValueError) as error:
            raise self._followers.fail(f"failed in a step: {error}") from error


class Leader:
    """Rank 0 as seen from another rank: the other end of `Followers`."""

    def __init__(self, rank: int, channel: Connection[Any, Any], side_channel: Connection[Any, Any]) -> None:
        self.rank = rank
        self.side_channel = side_channel
        self._channel = channel

    def agree_on_num_blocks(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        self._channel.send(tuple(num_blocks))
        fewest: tuple[int, ...] = self._receive()
        return fewest

    def connect(self, num_ranks: int, device: torch.device) -> None:
        """Connect to the other ranks, once this one's memory is allocated."""
        self._channel.send(None)
        store = TCPStore(_HOST, self._receive(), num_ranks, False, _STEP_TIMEOUT)
        _init(store, self.rank, num_ranks, device)

    def compute_steps(self, runner: Runner) -> None:
        """Compute the steps that rank 0 sends, until it ends."""
        with suppress(EOFError):
            while True:
                runner.compute(self._receive())
        distributed.destroy_process_group()

    def _receive(self) -> Any:
        """Return the next message of rank 0; raises EOFError when it ends."""
        message = self._channel.recv()
        if message is None:
            raise EOFError
        return message


def _init(store: TCPStore, rank: int, num_ranks: int, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_STEP_TIMEOUT)


def _run(target: Callable[..., None], leader: Leader, *args: object) -> None:
    """Run a follower's process: it ignores signals sent to the whole process group, and ends when rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)  # the main thread may wait for a sum that never arrives

    threading.Thread(target=exit_with_parent, name="watch rank 0", daemon=True).start()
    with suppress(EOFError):
        target(leader, *args)

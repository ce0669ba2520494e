"""The other processes of an engine that is split over ranks: started, told of each step, watched, ended.

Rank 0 schedules and samples. What it computes it sends to the others first, over a pipe each; they compute the same on
their shards and drop the logits. Only the sums of activations go through torch.distributed.
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
    """A rank has ended or is no longer at the others' step, so nothing can be computed: restart the engine."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"tensor-parallel rank {rank} {reason}")
        self.rank = rank
        self.reason = reason


class Followers:
    """Ranks 1 and up, as child processes; they end with this one, however it ends.

    `target` is called in each with its `Leader` and `args`. Both sides `agree`, then `join`; from then on
    `error` says why nothing can be computed any more, if so. Any thread may call `send` and `lose`, one at a time.

    `side_channels` lead to each one's `Leader.side_channel`, for what the ranks have to say to each other beside steps.
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
        atexit.register(self.close)  # or multiprocessing waits for them for ever: they do not heed its SIGTERM

    def agree(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        """Return, here and in `Leader.agree`, the fewest blocks of each group that any rank has room for."""
        offers = [num_blocks, *self._receive()]
        fewest = tuple(map(min, zip(*offers, strict=True)))
        self._send(fewest)
        return fewest

    def join(self, device: torch.device) -> None:
        """Connect the ranks, whose memory is in place; raises RankLostError."""
        self._receive()
        num_ranks = len(self._processes) + 1
        store = TCPStore(_HOST, 0, num_ranks, True, _STEP_TIMEOUT, wait_for_workers=False)
        self._send(store.port)
        _init(store, 0, num_ranks, device)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def on_loss(self, call: Callable[[], object]) -> None:
        """Have this called, in a thread of its own, when a rank is lost; at once if one is."""
        with self._lock:
            self._on_loss = call
            if self.error is None:
                return
        call()

    def send(self, batch: HostBatch) -> None:
        """Have the others compute a step; raises RankLostError."""
        if self.error is not None:
            raise self.error
        self._send(batch)

    def lose(self, reason: str) -> RankLostError:
        """Note that the step failed here and return what to raise: of a rank that has ended, or else of this one."""
        ended = wait([process.sentinel for process in self._processes], timeout=1.0)
        for rank, process in enumerate(self._processes, 1):
            if process.sentinel in ended:
                return self._lose(self._ended(rank))
        return self._lose(RankLostError(0, reason))

    def close(self) -> None:
        """End the others, by asking and then by SIGKILL. No step may be under way. Does nothing the second time."""
        if self._is_closing:
            return
        self._is_closing = True
        atexit.unregister(self.close)
        for side_channel in self.side_channels:  # first: who waits there does not hear of the end from the other
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
        """Wait for the first of the others to end."""
        ended = wait([process.sentinel for process in self._processes])
        if not self._is_closing:
            rank = next(i for i, process in enumerate(self._processes, 1) if process.sentinel in ended)
            self._lose(self._ended(rank))

    def _ended(self, rank: int) -> RankLostError:
        process = self._processes[rank - 1]
        with self._reaping:  # of two threads that wait for a process, one does not get its exit code
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
    """Rank 0's runner: every step is the others' too. One that fails here alone ends the engine, by a RankLostError."""

    def __init__(
        self, followers: Followers, model: CausalLM, plan: WindowPlan, tensors: KvTensors, block_size: int
    ) -> None:
        super().__init__(model, plan, tensors, block_size)
        self._followers = followers

    def compute(self, batch: HostBatch) -> torch.Tensor:
        self._followers.send(batch)
        try:
            return super().compute(batch)
        except (RuntimeError, ValueError) as error:
            raise self._followers.lose(f"failed in a step: {error}") from error


class Leader:
    """Rank 0, as a follower sees it: the other end of `Followers`."""

    def __init__(self, rank: int, channel: Connection[Any, Any], side_channel: Connection[Any, Any]) -> None:
        self.rank = rank
        self.side_channel = side_channel
        self._channel = channel

    def agree(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        self._channel.send(tuple(num_blocks))
        fewest: tuple[int, ...] = self._receive()
        return fewest

    def join(self, num_ranks: int, device: torch.device) -> None:
        """Connect to the other ranks; this one's memory is in place."""
        self._channel.send(None)
        store = TCPStore(_HOST, self._receive(), num_ranks, False, _STEP_TIMEOUT)
        _init(store, self.rank, num_ranks, device)

    def follow(self, runner: Runner) -> None:
        """Compute what comes, until rank 0 says that nothing will."""
        with suppress(EOFError):
            while True:
                runner.compute(self._receive())
        distributed.destroy_process_group()

    def _receive(self) -> Any:
        """Return what rank 0 sends; raises EOFError when it says, or shows, that it ends."""
        message = self._channel.recv()
        if message is None:
            raise EOFError
        return message


def _init(store: TCPStore, rank: int, num_ranks: int, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_STEP_TIMEOUT)


def _run(target: Callable[..., None], leader: Leader, *args: object) -> None:
    """Be a follower: end with rank 0, and not by signals that are meant for it as well."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def outlive_nobody() -> None:
        wait([parent.sentinel])
        os._exit(1)  # the main thread may wait for a sum that never comes

    threading.Thread(target=outlive_nobody, name="watch rank 0", daemon=True).start()
    with suppress(EOFError):
        target(leader, *args)

"""The transfers of a worker's ranks over pipes: rank 0 has the engine and speaks for all, the others follow.

The engine's thread writes an offer into every rank's pipe before anybody hears of the prompt. A follower's service
reads its pipe after it has read what others ask, and before it looks at that: so no rank is asked for a prompt that it
does not know.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias, TypeVar, cast

from kvist.transfer.handoff import Cancelled, OfferedBlocks, TransferObserver, TransferReports, WantedBlocks, Withdrawn
from kvist.transfer.ranks import Ranks, RanksAction, Report, Reporter, Tell, deliver
from kvist.transfer.service import KvTransferService, TransferStatistics

logger = logging.getLogger(__name__)

_STATISTICS_S = 1.0

T = TypeVar("T")
Channel: TypeAlias = "Connection[Any, Any]"


class RankedTransfers:
    """All ranks' transfers as one `KvTransfers`, whose methods belong to the engine's thread.

    `open_service` makes rank 0's own service, which reports to what it is given. Every follower sends its endpoint
    first (`FollowerInlet`); a constructor that waits for one that has ended raises EOFError.
    """

    def __init__(
        self,
        open_service: Callable[[TransferReports], KvTransferService],
        channels: Sequence[Channel],
        reports: TransferReports,
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        self._ranks = Ranks(1 + len(channels))
        self._channels = tuple(channels)
        self._reports = reports
        self._submit = submit
        self._followers: dict[int, TransferStatistics] = {}
        self._has_lost = False
        self._service = open_service(Reporter(partial(self._on_report, 0)))
        try:
            self.endpoints: tuple[str, ...] = (self._service.endpoint, *(each.recv() for each in self._channels))
        except (EOFError, OSError):
            self._service.close()
            raise EOFError("a follower has ended") from None
        self._stopped, self._stop = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._read, name="kvist-transfer-ranks", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Return whether all ranks serve transfers."""
        return self._service.is_alive and not self._has_lost

    def observe(self, observer: TransferObserver) -> None:
        """Tell of what ends at rank 0 from now on."""
        self._service.observe(observer)

    def start(self) -> None:
        """Begin to serve; the followers have begun."""
        self._service.start()
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Serve no more, here and at the followers, and let go of this rank's memory."""
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        for channel in self._channels:
            channel.close()
        self._service.close(timeout_s)

    def offer(self, offered: OfferedBlocks) -> None:
        """Let the blocks be fetched from all ranks.

        Rank 0 has sampled a token of the prompt's last step, so every rank has its part of the KV: the logits came
        behind a sum over all ranks, to which each adds behind its own writes (on a GPU, in the order of its stream).
        """
        self._do(self._ranks.command(offered))

    def fetch(self, wanted: WantedBlocks) -> None:
        """Have the blocks filled on all ranks."""
        self._do(self._ranks.command(wanted))

    def cancel(self, request_id: str) -> None:
        """End a fetch that nobody waits for."""
        self._do(self._ranks.command(Cancelled(request_id)))

    def withdraw(self, remote_request_id: str) -> None:
        """End an offer that nobody will come for."""
        self._do(self._ranks.command(Withdrawn(remote_request_id)))

    def statistics(self) -> TransferStatistics:
        """Return the sums over all ranks, the followers' as of a second ago; prompts are counted once.

        The seconds of fetches are those of rank 0: the ranks fetch side by side.
        """
        own, prompts = self._service.statistics(), self._ranks.statistics()
        total = _sum([own, *self._followers.values()])
        return replace(
            total,
            sender=replace(
                total.sender,
                num_held=prompts.num_held,
                num_fetched=prompts.num_fetched,
                num_given_up=prompts.num_given_up,
            ),
            receiver=replace(
                total.receiver,
                num_active=prompts.num_active,
                num_quarantined=prompts.num_quarantined,
                num_completed=prompts.num_completed,
                num_failed=prompts.num_failed,
            ),
            fetch_seconds=own.fetch_seconds,
        )

    def _on_report(self, rank: int, report: Report) -> None:
        self._do(self._ranks.reported(rank, report))

    def _lose(self, rank: int) -> None:
        self._do(self._ranks.lost(rank))

    def _do(self, actions: Sequence[RanksAction]) -> None:
        """Do what is to be done, on the engine's thread; the engine hears of it after what it is doing."""
        for action in actions:
            if not isinstance(action, Tell):
                self._submit(partial(deliver, self._reports, action))
            elif action.rank == 0:
                self._service.command(action.command)
            else:
                with suppress(OSError):  # it has ended, which `_read` sees as well
                    self._channels[action.rank - 1].send(action.command)

    def _read(self) -> None:
        """Take what the followers send, until told to stop."""
        ranks = {channel: rank for rank, channel in enumerate(self._channels, 1)}
        while True:
            ready = wait([self._stopped, *ranks])
            if self._stopped in ready:
                return
            for channel in cast(list[Channel], ready):
                try:
                    message: Report | TransferStatistics = channel.recv()
                except (EOFError, OSError):
                    rank = ranks.pop(channel)
                    logger.critical("transfers of a rank have stopped rank=%d", rank)
                    self._has_lost = True
                    self._submit(partial(self._lose, rank))
                else:
                    if isinstance(message, TransferStatistics):
                        self._followers[ranks[channel]] = message
                    else:
                        self._submit(partial(self._on_report, ranks[channel], message))


class FollowerInlet:
    """A follower's end of the pipe: its service reads rank 0's commands from it, and rank 0 the service's reports.

    But for the constructor's, all calls are the service's thread's. Once rank 0 has ended, nobody hears a report.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._said: TransferStatistics | None = None
        self._next_s = 0.0
        self.reports: TransferReports = Reporter(self._send)

    def fileno(self) -> int:
        """Return what to poll for commands."""
        return self._channel.fileno()

    def poll(self, service: KvTransferService) -> bool:
        """Give the service what has come, and each second say what it has counted; False: rank 0 has ended."""
        try:
            while self._channel.poll():
                service.command(self._channel.recv())
        except (EOFError, OSError):
            return False
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _STATISTICS_S
            statistics = service.statistics()
            if statistics != self._said:
                self._said = statistics
                self._send(statistics)
        return True

    def close(self) -> None:
        """Let rank 0 know that nothing is served here any more."""
        self._channel.close()

    def _send(self, message: Report | TransferStatistics) -> None:
        with suppress(OSError):
            self._channel.send(message)


def _sum(values: Sequence[T]) -> T:
    """Return numbers added up, and dataclasses of them field by field."""
    first = values[0]
    if not is_dataclass(first):
        return cast(T, sum(cast(Sequence[float], values)))
    parts = {field.name: _sum([getattr(value, field.name) for value in values]) for field in fields(first)}
    return cast(T, replace(cast(Any, first), **parts))

"""Routers side by side: what each has given workers to do is a row on the boards of the others.

Each router is complete by itself, from the same streams, and decides alone. What it cannot see is what the others have
in flight: that it hears from them, every `TICK_S` what has changed and every `WHOLE_S` all, over a broker. Who is
silent for `SILENT_S` counts no more. There is no leader, and nothing to agree on; what is lost is told within a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.errors import leave_group
from kvist.events import WorkerRank
from kvist.events.transports import Endpoint, Message, Publication, Subscription, open_publication, open_subscription
from kvist.router.config import RouterConfig
from kvist.router.fleet.board import MAX_COLUMNS, Cell, LoadBoard, Whole, clear_row
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.worker import CircuitState
from kvist.router.policy import in_flight
from kvist.router.policy.work import (
    ANSWERED_AT,
    BUSY_UNTIL,
    GIVEN_AT,
    NUM_FIELDS,
    RECENT_HALF_LIFE_S,
    STARTED_AT,
    Floats,
    merged,
)

logger = logging.getLogger(__name__)

TICK_S, WHOLE_S, SILENT_S = 0.01, 1.0, 2.0
"""How long eight simulated replicas let requests wait with this tick is in benchmarks/results/replicas.md."""
MAX_REPLICAS = 15
"""Besides this one."""
MAX_RESPONSES = 1000
"""Told in one summary."""

_NUM_NUMBERS, _RECENT = NUM_FIELDS + len(Cell), NUM_FIELDS + Cell.RECENT
_TIMES = [GIVEN_AT, ANSWERED_AT, BUSY_UNTIL, STARTED_AT, *range(_RECENT + 1, _NUM_NUMBERS)]


class PromptMarks(NamedTuple):
    """A prompt in flight: at which of a summary's ranks, for how many seconds more, and its marks as bytes of u64."""

    rank_idx: int
    left_s: float
    marks: bytes


class Summary(msgspec.Struct, array_like=True, frozen=True):
    """What a router has given workers to do: of the ranks that are named, of all where it `is_whole`.

    `numbers` is `[NUM_FIELDS + cells, ranks]` of little-endian f64, as they stand on a board, but with times as seconds
    from now. Who `is_asking` has just started.
    """

    is_whole: bool
    num_running: int
    ranks: list[tuple[str, int]]
    numbers: bytes
    prompts: list[PromptMarks]
    is_asking: bool = False
    open_circuits: list[str] = []
    responses: list[tuple[str, str]] = []
    """Who has which response of `/v1/responses`, of those that are new."""


_decode = msgspec.msgpack.Decoder(Summary).decode


class Teller:
    """Makes summaries of what the fronts' rows of a board say, each of what has changed since the one before."""

    def __init__(self, board: LoadBoard) -> None:
        self._board = board
        self._told = np.zeros((_NUM_NUMBERS, MAX_COLUMNS))
        self._told_until_s = board.in_flight["until_s"][: board.num_fronts].copy()

    def summary(self, now_s: float, *, is_whole: bool) -> Summary:
        """Return what there is to tell of ranks now."""
        board, fronts = self._board, slice(self._board.num_fronts)
        columns = np.array([*board.columns.values()], np.intp)
        cells = board.cell_ints[fronts][:, 1 + columns, : len(Cell)]
        recent, at_s = cells.view(float)[:, :, Cell.RECENT], cells.view(float)[:, :, Cell.RECENT_AT :]
        since_s = at_s[:, :, 0] - at_s[:, :, 0].max(0)
        numbers = np.concatenate([merged(board.work[fronts][:, :, columns]), cells.sum(0).T])
        numbers[_RECENT] = (recent * np.exp2(since_s / RECENT_HALF_LIFE_S)).sum(0)
        numbers[_RECENT + 1 :] = at_s.max(0).T
        changed = numbers.any(0) if is_whole else (numbers != self._told[:, columns]).any(0)
        self._told[:, columns] = numbers
        prompts = list(self._prompts(now_s, is_whole=is_whole))
        changed |= (np.array([column for column, *_ in prompts])[:, None] == columns).any(0)
        idx_of = {column: idx for idx, column in enumerate(columns[changed].tolist())}
        return Summary(
            is_whole,
            sum(board.ints[whole + Whole.RUNNING] for whole in board.wholes[fronts]),
            [*compress(board.columns, changed.tolist())],
            _shifted(numbers[:, changed], -now_s, 0.0, -math.inf).astype("<f8").tobytes(),
            [PromptMarks(idx_of[column], left_s, marks) for column, left_s, marks in prompts if column in idx_of],
        )

    def _prompts(self, now_s: float, *, is_whole: bool) -> Iterator[tuple[int, float, bytes]]:
        """Yield column, time left and marks of prompts in flight that are new, or count longer or shorter than told."""
        ours = self._board.in_flight[: self._board.num_fronts]
        until_s = ours["until_s"].copy()
        is_new = until_s > now_s if is_whole else until_s != self._told_until_s
        self._told_until_s = until_s
        entries = np.unravel_index(np.flatnonzero(is_new), is_new.shape)  # five times as fast as np.nonzero of all axes
        columns, until_s, hashes = ours["rank"][entries], until_s[entries], ours["hash"][entries[:2]]
        order = np.lexsort((until_s, columns))
        columns, until_s, hashes = columns[order], until_s[order], hashes[order]
        starts = np.flatnonzero(np.diff(columns, prepend=-1) | (np.diff(until_s, prepend=-1.0) != 0)).tolist()
        for start, end in zip(starts, [*starts[1:], len(columns)], strict=False):
            left_s = max(0.0, float(until_s[start]) - now_s)
            yield int(columns[start]), left_s, hashes[start:end].astype("<u8").tobytes()


class Listener:
    """Keeps a row of a board for each router that is heard."""

    def __init__(self, board: LoadBoard, is_known: Callable[[str], bool]) -> None:
        """Take what is said of workers that are known here, too."""
        self._board, self._is_known = board, is_known
        self._heard: dict[str, tuple[int, float]] = {}
        """The row of each, and when it was last heard."""

    def __len__(self) -> int:
        return len(self._heard)

    def take(self, replica: str, summary: Summary, now_s: float) -> bool:
        """Put what a router says on its row; return whether there is one. Raises ValueError for what is no summary."""
        board = self._board
        if len(summary.numbers) != _NUM_NUMBERS * len(summary.ranks) * 8:
            raise ValueError(f"{len(summary.numbers)} bytes of numbers for {len(summary.ranks)} ranks")
        taken = {row for row, _ in self._heard.values()}
        free = (row for row in range(board.num_fronts, board.num_rows) if row not in taken)
        row = self._heard[replica][0] if replica in self._heard else next(free, None)
        if row is None:
            return False
        self._heard[replica] = row, now_s
        ranks = [WorkerRank(*rank) if self._is_known(rank[0]) else None for rank in summary.ranks]
        columns = np.array([-1 if rank is None else board.column(rank) for rank in ranks], np.int64)
        is_here = columns >= 0
        told = np.frombuffer(summary.numbers, "<f8").reshape(_NUM_NUMBERS, len(ranks))
        numbers, named = _shifted(told[:, is_here], now_s, -math.inf, 0.0), columns[is_here]
        if summary.is_whole:
            gone = np.setdiff1d(np.array([*board.columns.values()], np.intp), named)
            board.work[row][:, gone] = 0.0
            board.cell_ints[row, 1 + gone] = 0
        board.work[row][:, named] = numbers[:NUM_FIELDS]
        board.cell_ints[row, 1 + named, : Cell.RECENT] = numbers[NUM_FIELDS:_RECENT].T
        board.cell_floats[row, 1 + named, Cell.RECENT : len(Cell)] = numbers[_RECENT:].T
        board.ints[board.wholes[row] + Whole.RUNNING] = summary.num_running
        for prompt in summary.prompts:
            if 0 <= prompt.rank_idx < len(columns) and (column := int(columns[prompt.rank_idx])) >= 0:
                marks = np.frombuffer(prompt.marks, "<u8").copy()  # compiled code takes no bytes
                in_flight.add_marks(board.in_flight[row], marks, column, now_s + prompt.left_s)
        return True

    def forget_silent(self, now_s: float) -> list[str]:
        """Clear the rows of those that were not heard for long, and return who they are."""
        silent = [replica for replica, (_, at_s) in self._heard.items() if now_s - at_s > SILENT_S]
        for replica in silent:
            clear_row(self._board.memory, self._heard.pop(replica)[0])
        return silent


class Replicas:
    """Tells other routers of this one, and hears of them, while its context is open."""

    def __init__(self, url: str, board: LoadBoard, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """Meet the others at a broker's URL, `nats://host:port/FLEET/routers`."""
        self._url, self._fleet, self._now_s = url, fleet, now_s
        self._name = secrets.token_hex(8)
        self._teller = Teller(board)
        self._listener = Listener(board, lambda worker: fleet.get(worker) is not None)
        self._publication: Publication
        self._subscription: Subscription
        self._new_responses: list[tuple[str, str]] = []
        self._is_wanted = True
        self._num_malformed = 0
        self.on_response: Callable[[str, str], None] = lambda *_: None
        """Is told which worker has a response that another router relayed."""
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Begin; a broker that is away is waited for meanwhile."""
        self._publication = await asyncio.to_thread(open_publication, self._url)
        self._subscription = open_subscription(Endpoint.parse(self._url))
        await self._subscription.__aenter__()
        await self._tasks.__aenter__()
        self._running = [self._tasks.create_task(self._tell()), self._tasks.create_task(self._hear())]
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for task in self._running:
            task.cancel()
        await leave_group(self._tasks, error)
        await self._subscription.__aexit__(kind, error, trace)
        await asyncio.to_thread(self._publication.close, 1.0)

    def relayed(self, response_id: str, worker: str) -> None:
        """Tell the others who has a response."""
        if len(self._new_responses) < MAX_RESPONSES:
            self._new_responses.append((response_id, worker))

    def __len__(self) -> int:
        """Return how many other routers are heard."""
        return len(self._listener)

    def described(self) -> dict[str, Any]:
        """Return how it is, for people to read."""
        return {"heard": len(self), "problem": self._subscription.problem, "malformed": self._num_malformed}

    async def _tell(self) -> None:
        whole_at_s, sequence, is_asking = -WHOLE_S, 0, True
        while True:
            now_s = self._now_s()
            is_whole = self._is_wanted or now_s - whole_at_s >= WHOLE_S
            circuits = [worker.url for worker in self._fleet.workers if worker.breaker.state is CircuitState.OPEN]
            responses, self._new_responses = self._new_responses, []
            summary = msgspec.structs.replace(
                self._teller.summary(now_s, is_whole=is_whole),
                is_asking=is_asking,
                open_circuits=circuits if is_whole else [],
                responses=responses,
            )
            if is_whole or summary.ranks or responses:
                sequence += 1
                try:
                    self._publication.send(Message(self._name.encode(), sequence, msgspec.msgpack.encode(summary)))
                    is_asking = False
                except OSError as error:  # it can take no more, or is broken: the others know by the silence
                    logger.debug("replicas were not told: %s", error)
            if is_whole:
                whole_at_s, self._is_wanted = now_s, False
            for replica in self._listener.forget_silent(now_s):
                logger.warning("replica is silent, and counts no more replica=%s", replica)
                self._fleet.on_room()
            await asyncio.sleep(TICK_S)

    async def _hear(self) -> None:
        while True:
            for message in await self._subscription.receive():
                replica = message.topic.decode("latin-1")
                if replica != self._name:
                    try:
                        self._take(replica, _decode(message.payload))
                    except ValueError as error:  # msgspec's errors are, too
                        self._num_malformed += 1
                        if self._num_malformed == 1:
                            logger.warning("summary is malformed, and further ones are counted: %s", error)

    def _take(self, replica: str, summary: Summary) -> None:
        num_before = len(self._listener)
        if not self._listener.take(replica, summary, self._now_s()):
            return
        if len(self._listener) > num_before:
            logger.info("replica is heard replica=%s", replica)
        self._is_wanted |= summary.is_asking
        for url in summary.open_circuits:
            if (worker := self._fleet.get(url)) is not None:
                worker.breaker.doubt()
        for response_id, worker_url in summary.responses:
            self.on_response(response_id, worker_url)
        self._fleet.on_room()


def num_replicas(config: RouterConfig) -> int:
    """Return how many rows there are for other routers."""
    return 0 if config.replicas is None else MAX_REPLICAS


def _shifted(numbers: Floats, by_s: float, none: float, none_then: float) -> NDArray[np.float64]:
    """Return numbers of ranks with times moved, but for those that are none: what is 0 there may be now here."""
    shifted = numbers.copy()
    times = shifted[_TIMES]
    shifted[_TIMES] = np.where(times == none, none_then, times + by_s)
    return shifted

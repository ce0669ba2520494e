"""Several routers for one fleet: each sends the others summaries of the load that it gives to workers.

Each router is complete by itself, from the same streams, and decides alone; only the others' load it cannot see. They
send it over a broker, what has changed every `TICK_S` and all of it every `WHOLE_S`, and it becomes a row on the board.
The row of a router that is silent for `SILENT_S` is cleared. There is no leader and no agreement; a lost summary is
made up for within `WHOLE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import compress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.events import WorkerRank
from kvist.events.transports import Endpoint, Message, Publication, Subscription, open_publication, open_subscription
from kvist.router.config import RouterConfig
from kvist.router.fleet.board import MAX_COLUMNS, FrontField, LoadBoard, RankField, clear_row
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.worker import CircuitState
from kvist.router.policy import in_flight
from kvist.router.policy.work import (
    ANSWERED_AT,
    BUSY_UNTIL,
    DISPATCHED_AT,
    NUM_FIELDS,
    NUM_LEARNT,
    STARTED_AT,
    UNSTREAMED_WEIGHT,
    Floats,
    merged,
)

logger = logging.getLogger(__name__)

TICK_S, WHOLE_S, SILENT_S = 0.01, 1.0, 2.0
"""How long eight simulated replicas let requests wait with this tick is in benchmarks/results/replicas.md."""
MAX_REPLICAS = 15
"""Besides this one."""
MAX_RESPONSES = 1000
"""The most that one summary has."""

_NUM_NUMBERS, _LAST_BYTE_AT = NUM_FIELDS + len(RankField), NUM_FIELDS + RankField.LAST_BYTE_AT
_MIN_NUMBERS = UNSTREAMED_WEIGHT + 1 + len(RankField)
"""What the first version sent of a rank; later ones appended to its work, in front of the cells. No time is missing."""
_TIMES = [DISPATCHED_AT, ANSWERED_AT, BUSY_UNTIL, STARTED_AT, _LAST_BYTE_AT]


class PromptMarks(NamedTuple):
    """A prompt in flight: the index of its rank in the summary, how many seconds it counts more, its marks as u64."""

    rank_idx: int
    left_s: float
    marks: bytes


class Summary(msgspec.Struct, array_like=True, frozen=True):
    """The load that a router gives to these ranks; to all ranks that have any if it `is_whole`.

    `numbers` is `[NUM_FIELDS + cells, ranks]` of little-endian f64, as on a board, but with times as seconds from now;
    other versions have fewer or more fields of work. A router that has just started `is_asking` for whole summaries.
    """

    is_whole: bool
    num_running: int
    ranks: list[tuple[str, int]]
    numbers: bytes
    prompts: list[PromptMarks]
    is_asking: bool = False
    open_circuits: list[str] = []
    responses: list[tuple[str, str]] = []
    """New responses of `/v1/responses`, each with the worker that has it."""


_decode = msgspec.msgpack.Decoder(Summary).decode


class SummaryBuilder:
    """Makes summaries of the fronts' rows of a board, each of what has changed since the one before."""

    def __init__(self, board: LoadBoard) -> None:
        self._board = board
        self._last = np.zeros((_NUM_NUMBERS, MAX_COLUMNS))
        self._last_until_s = board.in_flight["until_s"][: board.num_fronts].copy()

    def build(self, now_s: float, *, is_whole: bool) -> Summary:
        """Return the changes since the last call, or everything if it `is_whole`."""
        board, fronts = self._board, slice(self._board.num_fronts)
        columns = np.array([*board.columns.values()], np.intp)
        cells = board.cell_ints[fronts][:, 1 + columns, : len(RankField)]
        work = board.work[:, :, columns]
        numbers = np.concatenate([merged(work[fronts], work[:, NUM_LEARNT].sum(0)), cells.sum(0).T])
        numbers[_LAST_BYTE_AT] = cells.view(float)[:, :, RankField.LAST_BYTE_AT].max(0)
        changed = numbers.any(0) if is_whole else (numbers != self._last[:, columns]).any(0)
        self._last[:, columns] = numbers
        prompts = list(self._prompts(now_s, is_whole=is_whole))
        changed |= (np.array([column for column, *_ in prompts])[:, None] == columns).any(0)
        idx_of = {column: idx for idx, column in enumerate(columns[changed].tolist())}
        return Summary(
            is_whole,
            sum(board.ints[row + FrontField.RUNNING] for row in board.row_starts[fronts]),
            [*compress(board.columns, changed.tolist())],
            _shifted(numbers[:, changed], -now_s, 0.0, -math.inf).astype("<f8").tobytes(),
            [PromptMarks(idx_of[column], left_s, marks) for column, left_s, marks in prompts if column in idx_of],
        )

    def _prompts(self, now_s: float, *, is_whole: bool) -> Iterator[tuple[int, float, bytes]]:
        """Yield column, time left and marks of prompts in flight, by default of those whose time has changed."""
        ours = self._board.in_flight[: self._board.num_fronts]
        until_s = ours["until_s"].copy()
        is_new = until_s > now_s if is_whole else until_s != self._last_until_s
        self._last_until_s = until_s
        entries = np.unravel_index(np.flatnonzero(is_new), is_new.shape)  # five times as fast as np.nonzero of all axes
        columns, until_s, hashes = ours["rank"][entries], until_s[entries], ours["hash"][entries[:2]]
        order = np.lexsort((until_s, columns))
        columns, until_s, hashes = columns[order], until_s[order], hashes[order]
        starts = np.flatnonzero(np.diff(columns, prepend=-1) | (np.diff(until_s, prepend=-1.0) != 0)).tolist()
        for start, end in zip(starts, [*starts[1:], len(columns)], strict=False):
            left_s = max(0.0, float(until_s[start]) - now_s)
            yield int(columns[start]), left_s, hashes[start:end].astype("<u8").tobytes()


class ReplicaRows:
    """Writes the summaries of each other router to a row of the board."""

    def __init__(self, board: LoadBoard, is_known: Callable[[str], bool]) -> None:
        """Ignore ranks of workers that are not known to this router."""
        self._board, self._is_known = board, is_known
        self._rows: dict[str, tuple[int, float]] = {}
        """The row of each router, and when its last summary came."""

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, replica: str, summary: Summary, now_s: float) -> bool:
        """Write a summary to the router's row; return False if no row is free for it.

        Raises ValueError for a malformed summary.
        """
        board = self._board
        received = _read_numbers(summary)
        taken = {row for row, _ in self._rows.values()}
        free = (row for row in range(board.num_fronts, board.num_rows) if row not in taken)
        row = self._rows[replica][0] if replica in self._rows else next(free, None)
        if row is None:
            return False
        self._rows[replica] = row, now_s
        ranks = [WorkerRank(*rank) if self._is_known(rank[0]) else None for rank in summary.ranks]
        columns = np.array([-1 if rank is None else board.column(rank) for rank in ranks], np.int64)
        is_here = columns >= 0
        numbers, named = _shifted(received[:, is_here], now_s, -math.inf, 0.0), columns[is_here]
        if summary.is_whole:
            gone = np.setdiff1d(np.array([*board.columns.values()], np.intp), named)
            board.work[row][:, gone] = 0.0
            board.cell_ints[row, 1 + gone] = 0
        board.work[row][:, named] = numbers[:NUM_FIELDS]
        board.cell_ints[row, 1 + named, : RankField.LAST_BYTE_AT] = numbers[NUM_FIELDS:_LAST_BYTE_AT].T
        board.cell_floats[row, 1 + named, RankField.LAST_BYTE_AT] = numbers[_LAST_BYTE_AT]
        board.ints[board.row_starts[row] + FrontField.RUNNING] = summary.num_running
        for prompt in summary.prompts:
            if 0 <= prompt.rank_idx < len(columns) and (column := int(columns[prompt.rank_idx])) >= 0:
                marks = np.frombuffer(prompt.marks, "<u8").copy()  # compiled code takes no bytes
                is_new = not summary.is_whole and prompt.left_s > in_flight.UNTIL_INDEXED_S
                until_s = now_s + prompt.left_s
                in_flight.add_marks(board.in_flight[row], marks, column, until_s, now_s, float(is_new))
        return True

    def forget_silent(self, now_s: float) -> list[str]:
        """Clear the rows of routers that were silent for `SILENT_S`, and return their names."""
        silent = [replica for replica, (_, at_s) in self._rows.items() if now_s - at_s > SILENT_S]
        for replica in silent:
            clear_row(self._board.memory, self._rows.pop(replica)[0])
        return silent


class Replicas(ComposedContext):
    """Exchanges summaries with other routers while its context is open."""

    def __init__(self, url: str, board: LoadBoard, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """Use a broker's URL, `nats://host:port/FLEET/routers`, that all of these routers share."""
        self._url, self._fleet, self._now_s = url, fleet, now_s
        self._name = secrets.token_hex(8)
        self._builder = SummaryBuilder(board)
        self._rows = ReplicaRows(board, lambda worker: fleet.get(worker) is not None)
        self._publication: Publication
        self._subscription: Subscription
        self._new_responses: list[tuple[str, str]] = []
        self._is_whole_due = True
        self._num_malformed = 0
        self.on_response: Callable[[str, str], None] = lambda *_: None
        """Is called with the id of a response that another router relayed, and the worker that has it."""

    async def _open(self, exits: AsyncExitStack) -> None:
        """Start to connect; a broker that is away delays nothing."""
        self._publication = await asyncio.to_thread(open_publication, self._url)
        exits.push_async_callback(asyncio.to_thread, self._publication.close, 1.0)
        self._subscription = await exits.enter_async_context(open_subscription(Endpoint.parse(self._url)))
        tasks = await exits.enter_async_context(BackgroundTasks())
        tasks.create_task(self._send(), name="kvist-replicas-send")
        tasks.create_task(self._receive(), name="kvist-replicas-receive")

    def add_response(self, response_id: str, worker: str) -> None:
        """Tell the other routers which worker has a response."""
        if len(self._new_responses) < MAX_RESPONSES:
            self._new_responses.append((response_id, worker))

    def __len__(self) -> int:
        """Return how many other routers there are, by their summaries."""
        return len(self._rows)

    def describe(self) -> dict[str, Any]:
        """Return the state, for an operator to read."""
        return {"active": len(self), "problem": self._subscription.problem, "malformed": self._num_malformed}

    async def _send(self) -> None:
        whole_at_s, sequence, is_asking = -WHOLE_S, 0, True
        while True:
            now_s = self._now_s()
            is_whole = self._is_whole_due or now_s - whole_at_s >= WHOLE_S
            circuits = [worker.url for worker in self._fleet.workers if worker.breaker.state is CircuitState.OPEN]
            responses, self._new_responses = self._new_responses, []
            summary = msgspec.structs.replace(
                self._builder.build(now_s, is_whole=is_whole),
                is_asking=is_asking,
                open_circuits=circuits if is_whole else [],
                responses=responses,
            )
            if is_whole or summary.ranks or responses:
                sequence += 1
                try:
                    self._publication.send(Message(self._name.encode(), sequence, msgspec.msgpack.encode(summary)))
                    is_asking = False
                except OSError as error:  # its queue is full, or it is broken: the others notice the silence
                    logger.debug("summary not sent to replicas: %s", error)
            if is_whole:
                whole_at_s, self._is_whole_due = now_s, False
            for replica in self._rows.forget_silent(now_s):
                logger.warning("replica is silent, its load no longer counts replica=%s", replica)
                self._fleet.on_room(None)
            await asyncio.sleep(TICK_S)

    async def _receive(self) -> None:
        while True:
            for message in await self._subscription.receive():
                replica = message.topic.decode("latin-1")
                if replica != self._name:
                    try:
                        self._apply(replica, _decode(message.payload))
                    except ValueError as error:  # msgspec's errors are ValueErrors, too
                        self._num_malformed += 1
                        if self._num_malformed == 1:
                            logger.warning("malformed summary skipped, further ones are only counted: %s", error)

    def _apply(self, replica: str, summary: Summary) -> None:
        num_before = len(self._rows)
        if not self._rows.apply(replica, summary, self._now_s()):
            return
        if len(self._rows) > num_before:
            logger.info("replica is active replica=%s", replica)
        self._is_whole_due |= summary.is_asking
        for url in summary.open_circuits:
            if (worker := self._fleet.get(url)) is not None:
                worker.breaker.doubt()
        for response_id, worker_url in summary.responses:
            self.on_response(response_id, worker_url)
        self._fleet.on_room(None)


def _read_numbers(summary: Summary) -> Floats:
    """Return a summary's numbers with this version's fields: 0 for what an earlier one lacks, without later ones'."""
    num_ranks = len(summary.ranks)
    num_received, rest = divmod(len(summary.numbers), num_ranks * 8) if num_ranks else (_NUM_NUMBERS, 0)
    if rest or num_received < _MIN_NUMBERS:
        text = f"expected a multiple of {num_ranks * 8}, at least {_MIN_NUMBERS} times"
        raise ValueError(f"{len(summary.numbers)} bytes of numbers for {num_ranks} ranks, {text}")
    received = np.frombuffer(summary.numbers, "<f8").reshape(num_received, num_ranks)
    numbers = np.zeros((_NUM_NUMBERS, num_ranks))
    num_fields = min(num_received - len(RankField), NUM_FIELDS)
    numbers[:num_fields], numbers[NUM_FIELDS:] = received[:num_fields], received[-len(RankField) :]
    return numbers


def num_replicas(config: RouterConfig) -> int:
    """Return how many rows the board needs for other routers."""
    return 0 if config.replicas is None else MAX_REPLICAS


def _shifted(numbers: Floats, by_s: float, none: float, none_then: float) -> NDArray[np.float64]:
    """Return the numbers of ranks with all times moved by `by_s`; a time that equals `none` becomes `none_then`."""
    shifted = numbers.copy()
    times = shifted[_TIMES]
    shifted[_TIMES] = np.where(times == none, none_then, times + by_s)
    return shifted

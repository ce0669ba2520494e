"""Ranks of workers in one process: real sockets, real agents, pools whose bytes say which block and head they are."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kvist.events import FULL
from kvist.kvcache import ABSENT, num_stale_blocks
from kvist.transfer.agents import SharedMemoryAgent, TransferAgent, Write
from kvist.transfer.bounce import Bounce
from kvist.transfer.commands import (
    Computed,
    Fetch,
    FetchCompleted,
    FetchFailed,
    FetchReleased,
    Offer,
    OfferReleased,
    Report,
    TransferLimits,
    TransfersStopped,
)
from kvist.transfer.copier import TorchCopier
from kvist.transfer.heads import Part, heads_of
from kvist.transfer.messages import GroupShape, PoolPlace
from kvist.transfer.service import KvTransferService, make_hello

B, W, NUM_SLOTS = 4, 9, 24
FIRST_TOKEN_ID = 300
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _workers_of_one_process(workers_of_one_process: None) -> None:
    """Let agents of this process reach each other in every test here."""


@dataclass
class Reports:
    """What a service says, in order; any thread may wait for it."""

    heard: list[tuple[Any, ...]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, *what: Any) -> None:
        with self.changed:
            self.heard.append(what)
            self.changed.notify_all()

    def __call__(self, report: Report) -> None:
        match report:
            case OfferReleased(remote_request_id, is_fetched):
                self.note("release", remote_request_id, is_fetched)
            case FetchCompleted(request_id, first_token_id):
                assert first_token_id == FIRST_TOKEN_ID
                self.note("completed", request_id)
            case FetchFailed(request_id, reason):
                self.note("failed", request_id, reason)
            case FetchReleased(request_id):
                self.note("released", request_id)
            case TransfersStopped():
                self.note("stopped")

    def wait_for(self, *what: Any) -> tuple[Any, ...]:
        """Return the first report that begins so."""

        return self._wait(lambda each: each[: len(what)] == what, what)

    def wait_for_either(self, one: str, other: str, name: str) -> str:
        """Return which of two reports comes first."""
        kind: str = self._wait(lambda each: each[0] in (one, other) and each[1] == name, (one, other, name))[0]
        return kind

    def _wait(self, is_it: Callable[[tuple[Any, ...]], bool], what: object) -> tuple[Any, ...]:
        with self.changed:
            assert self.changed.wait_for(lambda: any(map(is_it, self.heard)), PATIENCE_S), (what, self.heard)
            return next(filter(is_it, self.heard))


class Rank:
    """One rank of a worker: pools, an agent and a service, not started."""

    def __init__(
        self, shapes: Sequence[GroupShape], part: Part, make_agent: Callable[[str], TransferAgent], **options: Any
    ) -> None:
        self.part, self.shapes = part, tuple(shapes)
        self.agent = make_agent(f"agent-{uuid.uuid4().hex}")
        self.pools = []
        places = []
        for shape in shapes:
            slot_bytes = shape.slot_bytes(B, part)
            memory = self.agent.allocate(NUM_SLOTS * slot_bytes)
            self.agent.register(memory.ctypes.data, len(memory))
            places.append(PoolPlace(memory.ctypes.data, slot_bytes, NUM_SLOTS))
            self.pools.append(memory.reshape(NUM_SLOTS, shape.num_planes, -1, shape.head_bytes(B)))
        bounce = None
        if options.pop("has_bounce"):
            copier = TorchCopier([torch.from_numpy(pool) for pool in self.pools])
            bounce = Bounce(self.agent, copier, lambda: torch.from_numpy(self.agent.allocate(1 << 20)))
            bounce.max_fragment_bytes = 1 << 40
        hello = make_hello("tiny", B, self.shapes, tuple(places), self.agent, part)
        self.reports = Reports()
        endpoint = options.pop("endpoint", "tcp://127.0.0.1:*")
        self.service = KvTransferService(endpoint, self.agent, hello, self.reports, bounce=bounce, **options)

    def holds(self, whole: Sequence[np.ndarray], tables: Sequence[Sequence[int]]) -> bool:
        """Return whether this rank's heads of a prompt are in these blocks, by ordinal."""
        return all(
            np.array_equal(pool[block_id], blocks[ordinal][:, heads_of(shape.num_kv_heads, self.part)])
            for pool, shape, blocks, table in zip(self.pools, self.shapes, whole, tables, strict=True)
            for ordinal, block_id in enumerate(table)
            if block_id != ABSENT
        )

    def fill(self, whole: Sequence[np.ndarray], tables: Sequence[Sequence[int]]) -> None:
        """Put this rank's heads of a prompt into these blocks."""
        for pool, shape, blocks, table in zip(self.pools, self.shapes, whole, tables, strict=True):
            for ordinal, block_id in enumerate(table):
                if block_id != ABSENT:
                    pool[block_id] = blocks[ordinal][:, heads_of(shape.num_kv_heads, self.part)]

    def hold_writes(self) -> Callable[[], None]:
        """Begin writes, and do them only when the returned function is called."""
        write, may_go_on = self.agent.write, threading.Event()

        def held(peer: Any, fragments: Any) -> Write:
            while not may_go_on.is_set():
                if self.agent.is_closing:
                    return
                yield False
            yield from write(peer, fragments)

        self.agent.write = held  # type: ignore[method-assign]
        return may_go_on.set

    def assert_nothing_left(self) -> None:
        """Raise AssertionError if a transfer, a block or a part of a region is still in another's reach."""
        statistics = self.service.statistics()
        assert statistics.quarantined_bytes == 0
        assert statistics.num_writing == len(self.service._sender._held) == 0
        assert not self.service._receiver._transfers
        bounce = statistics.bounce
        assert bounce.used_bytes == bounce.quarantined_bytes == 0


class Worker:
    """All ranks of a worker; what its engine says is said to each."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(rank.service.endpoint for rank in self.ranks)

    def offer(self, prompt: Prompt, tables: Sequence[Sequence[int]]) -> None:
        for rank in self.ranks:
            rank.fill(prompt.whole, tables)
            rank.service.command(Offer(prompt.name, prompt.num_tokens))
            rank.service.command(Computed(prompt.name, tuple(map(tuple, tables)), True, FIRST_TOKEN_ID))

    def fetch(self, prompt: Prompt, tables: Sequence[Sequence[int]], endpoints: tuple[str, ...]) -> None:
        for rank in self.ranks:
            self.fetch_by(rank, prompt, tables, endpoints)

    def fetch_by(self, rank: Rank, prompt: Prompt, tables: Sequence[Sequence[int]], endpoints: tuple[str, ...]) -> None:
        """Have one rank alone fetch its part."""
        block_ids = tuple(map(tuple, tables))
        rank.service.command(Fetch(prompt.name, endpoints, prompt.name, prompt.num_tokens, block_ids))

    def hand_over(self, target: Worker, prompt: Prompt) -> list[list[int]]:
        """Have a prompt offered and fetched; return where it is."""
        tables = prompt.tables(2)
        self.offer(prompt, prompt.tables(1))
        target.fetch(prompt, tables, self.endpoints)
        for rank in target.ranks:
            rank.reports.wait_for("completed", prompt.name)
        for rank in self.ranks:
            assert rank.reports.wait_for("release", prompt.name)[2] is True
        return tables

    def assert_hands_over(self, target: Worker, prompt: Prompt) -> None:
        """Raise AssertionError unless a prompt goes over whole, and nothing is left in anybody's reach."""
        tables = self.hand_over(target, prompt)
        for rank in target.ranks:
            assert rank.holds(prompt.whole, tables)
        for rank in (*self.ranks, *target.ranks):
            rank.assert_nothing_left()


class Prompt:
    """A prompt's KV of all heads, `[blocks, planes, heads, bytes of a head]` a group, all of random bytes."""

    def __init__(self, shapes: Sequence[GroupShape], num_tokens: int = 30, seed: int = 0) -> None:
        self.name, self.num_tokens, self.seed = f"prompt-{seed}", num_tokens, seed
        self.shapes = tuple(shapes)
        total = -(-num_tokens // B)
        rng = np.random.default_rng(seed)
        self.whole = [
            rng.integers(1, 256, (total, shape.num_planes, shape.num_kv_heads, shape.head_bytes(B)), np.uint8)
            for shape in shapes
        ]

    def tables(self, seed: int) -> list[list[int]]:
        """Return blocks for it, by ordinal, in any order; windowed groups lack the stale ones."""
        rng = random.Random(seed * 1000 + self.seed)
        total = -(-self.num_tokens // B)
        windows = [FULL if shape.window is None else shape.window for shape in self.shapes]
        stale = [num_stale_blocks(self.num_tokens, window, B) for window in windows]
        return [[ABSENT] * first + rng.sample(range(NUM_SLOTS), total - first) for first in stale]


@pytest.fixture(scope="session")
def shapes() -> tuple[GroupShape, ...]:
    """A group that sees everything, and a windowed one of half as many heads."""
    return (GroupShape(None, 4, 8, "float32", 2, (0, 2)), GroupShape(W, 2, 8, "bfloat16", 2, (1,)))


@pytest.fixture
def make_prompt(shapes: tuple[GroupShape, ...]) -> Callable[..., Prompt]:
    """Return a function that makes a prompt of groups of these, or other, shapes."""

    def make(seed: int = 0, num_tokens: int = 30, of_shapes: Sequence[GroupShape] = shapes) -> Prompt:
        return Prompt(of_shapes, num_tokens, seed)

    return make


@pytest.fixture
def open_worker(shapes: tuple[GroupShape, ...]) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker of so many ranks; all are closed at the end."""
    with ExitStack() as exits:

        def open_(
            num_ranks: int,
            *,
            of_shapes: Sequence[GroupShape] = shapes,
            kind: str = "shared_memory",
            has_bounce: bool = False,
            limits: TransferLimits | None = None,
            endpoints: Sequence[str] = (),
            is_started: bool = True,
            link: Any = None,
        ) -> Worker:
            make_agent: Callable[[str], TransferAgent] = SharedMemoryAgent
            if kind == "nixl":
                from kvist.transfer.agents.nixl import NixlAgent

                make_agent = NixlAgent
            ranks = []
            for rank in range(num_ranks):
                options: dict[str, Any] = {"endpoint": endpoints[rank]} if endpoints else {}
                part = Part(rank, num_ranks)
                options |= {"has_bounce": has_bounce, "limits": limits, "link": link}
                ranks.append(Rank(of_shapes, part, make_agent, **options))
                exits.callback(ranks[-1].service.close)
                if is_started:
                    ranks[-1].service.start()
            return Worker(ranks)

        yield open_

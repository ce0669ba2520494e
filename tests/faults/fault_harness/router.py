"""The router's side of a simulated fleet: registry, indexers, dumps and state of the index service, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fault_harness.engine import BLOCK_SIZE, Held
from kvist.contexts import BackgroundTasks
from kvist.events import Tier, WorkerRank
from kvist.events.session import SourceState
from kvist.indexer import Indexer
from kvist.indexer.canonical import CanonicalFollower
from kvist.indexer.dumps.dumper import write_dump
from kvist.indexer.dumps.format import DumpReader
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.indexer.dumps.takeover import Takeover
from kvist.indexer.service.registry import EndpointRules, Member, Namespace, Registry, Stream
from kvist.indexer.service.restore import Registrations
from kvist.indexer.source import Source
from kvist.indexer.statistics import SourceStatistics
from kvist.radix import RadixIndex

NAMESPACE = Namespace("model", "default")


def _name(number: int) -> str:
    return f"{number}:0"


class Router:
    """One process of it: knows workers by their number and URL, and may keep its state in a folder."""

    def __init__(self, urls: Iterable[str], folder: Path | None = None, interval_s: float = 1.0) -> None:
        self._urls = list(urls)
        self._folder = folder
        self._interval_s = interval_s
        self._now_s = asyncio.get_running_loop().time
        self._registry = Registry(partial(Indexer, clock=self._now_s), is_held=True)
        self._registrations = Registrations(self._registry, EndpointRules([]))
        self._keeper: StateKeeper | None = None
        self._tasks = BackgroundTasks()

    async def start(self, peer: Router | None = None) -> None:
        """Follow everybody: from nothing, from what is in the folder, or from what a peer has."""
        await self._registry.__aenter__()
        for number, url in enumerate(self._urls):
            await self._registry.register(NAMESPACE, BLOCK_SIZE, number, 0, Stream(url, url))
        if peer is not None:
            await self._take_over(peer)
        if self._folder is not None:
            self._keeper = StateKeeper(self._folder, "index", self._interval_s, lambda: self._registry, self._now_s)
            await self._tasks.__aenter__()
            if peer is None:
                await self._keeper.load(self._registrations)
            self._keeper.start(self._tasks)
        self._registry.release()

    async def kill(self) -> None:
        """End without a word: nothing more is saved."""
        if self._keeper is not None:
            await self._tasks.__aexit__(None, None, None)
        await self._registry.__aexit__(None, None, None)

    async def stop(self) -> None:
        """End in an orderly way."""
        if self._keeper is not None:
            await self._keeper.stop()
        await self.kill()

    async def _take_over(self, peer: Router) -> None:
        give_up_s = self._now_s() + 2.0
        while not self._registry.are_all_connected and self._now_s() < give_up_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for member in self._registry:
            member.indexer.record_connects()
        reader, takeover = DumpReader("peer"), Takeover(self._registrations, "peer")

        async def take(piece: bytes) -> None:
            for frame in reader.feed(piece):
                takeover.load_frame(frame)
                await asyncio.sleep(0)

        await write_dump([*peer._registry], take)
        reader.close()

    @property
    def _member(self) -> Member:
        member = self._registry.find(NAMESPACE)
        assert member is not None
        return member

    @property
    def index(self) -> RadixIndex:
        return self._member.index

    @property
    def resyncing(self) -> set[tuple[int, int]]:
        """Return the ranks whose blocks count for nothing now."""
        return {(int(worker.partition(":")[0]), rank) for worker, rank in self._member.indexer.resyncing}

    def state(self, number: int, rank: int) -> SourceState | None:
        return self._member.indexer.states(_name(number)).get(rank)

    def position(self, number: int, rank: int) -> tuple[int, int] | None:
        """Return epoch and next sequence of a stream as it is followed, None while an answer is taken."""
        source = self._source(number)
        follower: Any = source._follower
        session = None
        if isinstance(follower, CanonicalFollower):
            session = follower._ranks[rank].session if rank in follower._ranks else None
        elif follower is not None:
            (session,) = follower.sessions
        if session is None or session.epoch is None or source.is_applying_answer:
            return None
        return session.epoch, session.expected_sequence

    def digest(self, number: int, rank: int) -> tuple[int, int]:
        held = self.index.digest(WorkerRank(_name(number), rank))
        return held.num_blocks, held.digest

    def num_lost(self, number: int) -> int:
        """Return how often something of a stream was lost beyond recovery."""
        return self.statistics(number).num_cleared

    def statistics(self, number: int) -> SourceStatistics:
        """Return the counters of a stream since this router was started."""
        return self._source(number).statistics(self._now_s())

    def lose(self, number: int, rank: int) -> None:
        """Forget a rank's blocks by a fault of our own."""
        self.index.clear(_name(number), rank)

    def held(self) -> dict[tuple[int, int], Held]:
        """Return all that the index says anyone holds."""
        pairs: dict[tuple[int, int], set[tuple[int, Tier]]] = {}
        for chunk in self.index.snapshot():
            for block, member in zip(chunk.hashes.tolist(), chunk.members.tolist(), strict=True):
                worker, rank = chunk.ranks[member >> 4]
                held = pairs.setdefault((int(worker.partition(":")[0]), rank), set())
                held |= {(block, tier) for tier in Tier if member & 1 << tier}
        return {source: frozenset(held) for source, held in pairs.items()}

    def _source(self, number: int) -> Source:
        (source,) = (each for each in self._member.indexer.sources if each.worker == _name(number))
        return source

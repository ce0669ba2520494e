"""A dump of indexes, each as it is at one moment: at the receiver's pace, in constant memory, while events go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from kvist.events import WorkerRank
from kvist.events.transports import public_url
from kvist.indexer import Indexer
from kvist.indexer.dumps.format import VERSION, DumpHead, DumpWriter, NamespaceHead, StreamState
from kvist.indexer.residency import Names
from kvist.indexer.source import Source
from kvist.radix import RadixIndex

BLOCKS_AT_ONCE, ROWS_PER_FRAME = 4096, 1 << 16
SETTLE_S = 5.0
"""How long is waited for answers that are taken just now: their streams would be left out."""
_LOOK_S = 0.02


class Namespaced(Protocol):
    """An index, what it is about, and who feeds it."""

    @property
    def namespace(self) -> tuple[str, str]:
        """Return the model's name and the routing group."""

    @property
    def index(self) -> RadixIndex: ...

    @property
    def indexer(self) -> Indexer: ...

    def endpoint_of(self, source: Source) -> str:
        """Return the URL that was given for a stream that is followed."""


class Dumper:
    """Makes dumps, one at a time: each holds on to a moment of an index, of which what changes is kept twice."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        return self._turn.locked()

    async def dump(self, indexes: Iterable[Namespaced], write: Callable[[bytes], Awaitable[object]]) -> None:
        """Hand all that the indexes hold to `write`, once no other dump is under way; raises what `write` raises."""
        async with self._turn:
            writer = DumpWriter()
            await write(writer.frame(DumpHead(VERSION)))
            for each in [*indexes]:
                await _settled(each.indexer)
                with each.index.snapshot(BLOCKS_AT_ONCE) as snapshot:
                    await write(writer.frame(_head_of(each)))  # of the same moment: nothing ran in between
                    for rank, names in _names_of(each.indexer):
                        await write(writer.names(rank, names))
                        await asyncio.sleep(0)
                    for held in snapshot:
                        for start in range(0, len(held.hashes), ROWS_PER_FRAME):
                            await write(writer.blocks(held.part(start, start + ROWS_PER_FRAME)))
                        await asyncio.sleep(0)
            await write(writer.end())


async def _settled(indexer: Indexer) -> None:
    """Wait, not for ever, until no answer is taken bit by bit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while any(source.is_taking_answer for source in indexer.sources):  # noqa: ASYNC110 - too many to tell
                await asyncio.sleep(_LOOK_S)


def _names_of(indexer: Indexer) -> Iterator[tuple[WorkerRank, Names]]:
    """Yield what engine hashes name now, which may be later than the snapshot.

    A block that is without a name by now was removed since: whoever takes over from here will hear so.
    """
    for source in indexer.sources + indexer.parked:
        for rank, names in source.engine.names() if source.engine is not None else ():
            yield WorkerRank(source.worker, rank), names


def _head_of(each: Namespaced) -> NamespaceHead:
    indexer = each.indexer
    endpoints = [each.endpoint_of(source) for source in indexer.sources] + [source.url for source in indexer.parked]
    states = map(_state_of, indexer.sources + indexer.parked, endpoints)
    return NamespaceHead(*each.namespace, [state for state in states if state is not None])


def _state_of(source: Source, endpoint: str) -> StreamState | None:
    """Return a stream as it is kept; one that has told of no blocks yet is not."""
    if source.block_size is None:
        return None
    has_login = source.url != source.public_url
    urls = public_url(endpoint), source.public_url
    return StreamState(source.worker, source.rank, *urls, has_login, source.block_size, source.progress())

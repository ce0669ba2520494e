"""Writing a dump of indexes, each as of one moment: at the receiver's pace, in constant memory, while events go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing, suppress
from typing import Protocol

from kvist.events import WorkerRank
from kvist.events.transports import public_url
from kvist.indexer import Indexer
from kvist.indexer.dumps.format import VERSION, DumpHead, DumpWriter, NamespaceHead, StreamState
from kvist.indexer.source import Source
from kvist.radix import RadixIndex

BLOCKS_AT_ONCE, ROWS_PER_FRAME = 4096, 1 << 16
ANSWER_TIMEOUT_S = 5.0
"""How long to wait for answers that are being applied: their streams' progress would be left out."""
_POLL_S = 0.02


class Namespaced(Protocol):
    """An index with its namespace and the indexer that feeds it."""

    @property
    def namespace(self) -> tuple[str, str]:
        """Return the model's name and the routing group."""

    @property
    def index(self) -> RadixIndex: ...

    @property
    def indexer(self) -> Indexer: ...

    def endpoint_of(self, source: Source) -> str:
        """Return the URL as it was given for a stream that is followed."""


async def write_dump(indexes: Iterable[Namespaced], write: Callable[[bytes], Awaitable[object]]) -> None:
    """Pass all that the indexes hold to `write`, one dump of them at a time; raises what `write` raises.

    Meanwhile the index that is being written keeps the rows that change twice.
    """
    writer = DumpWriter()
    await write(writer.frame(DumpHead(VERSION)))
    for each in [*indexes]:
        await _wait_for_answers(each.indexer)
        with closing(each.index.snapshot(BLOCKS_AT_ONCE)) as snapshot:
            await write(writer.frame(_head_of(each)))  # of the same moment: nothing ran in between
            # Names may be newer than the snapshot: a block that has lost its name since was removed, and whoever loads
            # the dump receives that event, too.
            for source in each.indexer.sources + each.indexer.parked:
                for rank, names in source.engine.dump_names() if source.engine is not None else ():
                    await write(writer.names(WorkerRank(source.worker, rank), names))
                    await asyncio.sleep(0)
            for held in snapshot:
                for start in range(0, len(held.hashes), ROWS_PER_FRAME):
                    await write(writer.blocks(held.part(start, start + ROWS_PER_FRAME)))
                await asyncio.sleep(0)
    await write(writer.end())


async def _wait_for_answers(indexer: Indexer) -> None:
    """Wait until no answer is being applied, for `ANSWER_TIMEOUT_S` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while any(source.is_applying_answer for source in indexer.sources):  # noqa: ASYNC110 - too many for an event each
                await asyncio.sleep(_POLL_S)


def _head_of(each: Namespaced) -> NamespaceHead:
    indexer = each.indexer
    endpoints = [each.endpoint_of(source) for source in indexer.sources] + [source.url for source in indexer.parked]
    states = map(_state_of, indexer.sources + indexer.parked, endpoints)
    return NamespaceHead(*each.namespace, [state for state in states if state is not None])


def _state_of(source: Source, endpoint: str) -> StreamState | None:
    """Return a stream's state for the dump, None if its block size is not known yet."""
    if source.block_size is None:
        return None
    has_login = source.url != source.public_url
    urls = public_url(endpoint), source.public_url
    return StreamState(source.worker, source.rank, *urls, has_login, source.block_size, source.progress())

"""`GET /dump`: every index as it is at one moment, at the client's pace and in constant memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from http import HTTPStatus

from kvist.events.transports import public_url
from kvist.http import Responder
from kvist.indexer.engine_map import Names
from kvist.indexer.service.answers import stream_name
from kvist.indexer.service.dump_format import DumpFailed, DumpWriter, NamespaceHead, StreamState
from kvist.indexer.service.errors import ApiError
from kvist.indexer.service.registry import Member
from kvist.radix import SnapshotLostError

BLOCKS_PER_FRAME = 4096
TIMEOUT_S = 600.0
"""While a dump is under way, what changes in its index is kept twice: a client that never ends would cost disk space,
and memory for the sets of holders that it has still to be told."""


class Dumper:
    """Sends dumps, one at a time: each holds on to a moment of the index."""

    def __init__(self) -> None:
        self._is_busy = False

    async def send(self, members: Iterable[Member], responder: Responder) -> None:
        """Send all that the members hold; raises ApiError (503) while another dump is under way.

        Raises SnapshotLostError when the disk has no room for what changes meanwhile, which ends the connection.
        """
        if self._is_busy:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "another dump is under way; try again")
        self._is_busy = True
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._send([*members], responder)
        finally:
            self._is_busy = False

    async def _send(self, members: Iterable[Member], responder: Responder) -> None:
        writer = DumpWriter()
        responder.start(HTTPStatus.OK, [(b"content-type", b"application/octet-stream")])
        await responder.write(writer.head())
        for member in members:
            with member.index.snapshot(BLOCKS_PER_FRAME) as snapshot:
                await responder.write(writer.frame(_head_of(member)))  # of the same moment: nothing ran in between
                for stream, rank, names in _names_of(member):
                    await responder.write(writer.names(stream, rank, names))
                    await asyncio.sleep(0)
                try:
                    for chunk in snapshot:
                        if len(chunk.hashes):
                            await responder.write(writer.blocks(chunk))
                        await asyncio.sleep(0)
                except SnapshotLostError as error:
                    await responder.write(writer.frame(DumpFailed(str(error))))
                    raise
        await responder.write(writer.end())
        await responder.finish()


def _names_of(member: Member) -> Iterator[tuple[str, int, Names]]:
    """Yield what engine hashes name now, which may be later than the snapshot.

    A block that is without a name by now was removed since: whoever takes over from here will hear so.
    """
    for stream in member.streams():
        engine = member.indexer.engine_of(stream) if member.indexer.has_source(stream) else None
        for rank, names in engine.names() if engine is not None else ():
            yield stream, rank, names


def _head_of(member: Member) -> NamespaceHead:
    streams = [
        StreamState(
            instance_id,
            dp_rank,
            public_url(stream.endpoint),
            public_url(stream.url),
            member.indexer.progress(stream_name(instance_id, dp_rank)),
        )
        for instance_id, ranks in member.instances.items()
        for dp_rank, stream in ranks.items()
    ]
    return NamespaceHead(*member.namespace, member.block_size, streams)

"""`GET /dump`: every index as it is at one moment, at the client's pace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus

from kvist.http import Responder
from kvist.indexer.dumps.dumper import Dumper
from kvist.indexer.service.errors import ApiError
from kvist.indexer.service.registry import Member

TIMEOUT_S = 600.0
"""While a dump is under way, what changes in its index is kept twice: a client that never ends would cost disk space,
and memory for the sets of holders that it has still to be told."""


async def send_dump(dumper: Dumper, members: Iterable[Member], responder: Responder) -> None:
    """Send all that the members hold; raises ApiError (503) while another dump is under way.

    Raises SnapshotLostError when the disk has no room for what changes meanwhile, which ends the connection.
    """
    if dumper.is_busy:
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "another dump is under way; try again")
    async with asyncio.timeout(TIMEOUT_S):
        responder.start(HTTPStatus.OK, [(b"content-type", b"application/octet-stream")])
        await dumper.dump(members, responder.write)
        await responder.finish()

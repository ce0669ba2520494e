"""Dumps tell one moment, are taken for cut short where they end early, and their frames stay small."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from kvist.errors import MalformedMessageError
from kvist.events import Tier, WorkerRank
from kvist.http import HttpServer
from kvist.indexer import Indexer, engine_rank
from kvist.indexer.dumps.format import Blocks, DumpReader, NamesFrame, names_of, residencies_of
from kvist.indexer.service.api import send_dump
from kvist.indexer.service.registry import Member, Namespace
from kvist.radix import RadixIndex

BLOCK_SIZE = 4
BLOCKS = np.arange(1, 10_001, dtype=np.uint64)


class ChangingMeanwhile:
    """A responder during whose second write, the head of a namespace, all blocks are removed."""

    def __init__(self, responder, index):
        self._responder, self._index, self._num_writes = responder, index, 0
        self.start, self.end = responder.start, responder.end

    async def write(self, chunk):
        self._num_writes += 1
        if self._num_writes == 2:
            self._index.remove(WorkerRank("1:0", 0), Tier.GPU, BLOCKS)
        await self._responder.write(chunk)


@pytest.fixture
async def served():
    """Return a server whose every request is answered with a dump of an index, which changes meanwhile."""
    index, dump_lock = RadixIndex(), asyncio.Lock()
    member = Member(Namespace("m", "default"), BLOCK_SIZE, index, Indexer(index, block_size=BLOCK_SIZE))

    async def handle(_, responder):
        index.store(WorkerRank("1:0", 0), Tier.GPU, None, BLOCKS)
        await send_dump(dump_lock, [member], ChangingMeanwhile(responder, index))

    async with HttpServer(handle) as server:
        yield server


async def read(server):
    """Return the blocks of a dump, and the reason why there are no more; an error of the connection is one."""
    reader, frames = DumpReader("peer"), []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("GET", f"http://127.0.0.1:{server.port}/") as response,
    ):
        try:
            async for piece in response.aiter_bytes():
                frames += reader.feed(piece)
            reader.close()
        except (MalformedMessageError, httpx.RemoteProtocolError, httpx.ReadError) as error:
            assert not reader.is_complete
            return frames, str(error)
    return [block for each in frames if isinstance(each, Blocks) for block in residencies_of(each, "peer").hashes], None


async def test_a_dump_tells_its_moment_though_all_blocks_go_meanwhile(served):
    for _ in range(2):
        blocks, reason = await read(served)
        assert sorted(blocks) == BLOCKS.tolist()
        assert reason is None


async def test_names_of_a_large_engine_come_in_frames_of_bounded_size(
    client, start_vllm, free_port, eventually, monkeypatch
):
    port = free_port()
    engine = start_vllm(port)
    await client.register(port)
    hashes, tokens = list(range(1, 6_001)), list(range(6_000 * BLOCK_SIZE))
    event = ["BlockStored", hashes, None, tokens, BLOCK_SIZE, None, "GPU"]

    async def is_heard():
        engine.publish(event)
        return await client.scores(tokens[:BLOCK_SIZE])

    await eventually(is_heard)
    monkeypatch.setattr(engine_rank, "_NAMES_AT_ONCE", 500)
    reader = DumpReader("peer")
    frames = reader.feed((await client.get("/dump")).content)
    reader.close()
    names = [names_of(frame, "peer") for frame in frames if isinstance(frame, NamesFrame)]
    assert max(len(part.blocks) for part in names) == 500
    engine_hashes, blocks = (np.concatenate(part) for part in list(zip(*names, strict=True))[1:])
    assert sorted(engine_hashes.tolist()) == hashes
    assert len(np.unique(blocks)) == 6_000

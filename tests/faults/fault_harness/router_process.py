"""A router's index as a process: answers each line on standard input with what it holds; ends by kill -9.

`router_process.py FOLDER URL...` keeps its state in FOLDER, unless that is "-", and knows workers by their number.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from fault_harness.engine import BLOCK_SIZE
from kvist.contexts import BackgroundTasks
from kvist.events import WorkerRank
from kvist.indexer import Indexer
from kvist.indexer.dumps.keeper import StateKeeper
from kvist.radix import RadixIndex
from kvist.router.index import FleetState

SAVE_INTERVAL_S = 0.1


async def main(folder: str, urls: list[str]) -> None:
    index = RadixIndex()
    async with AsyncExitStack() as exits:
        indexer = await exits.enter_async_context(Indexer(index, block_size=BLOCK_SIZE))
        if folder != "-":
            fleet = FleetState(index, indexer)
            keeper = StateKeeper(Path(folder), "router", SAVE_INTERVAL_S, lambda: [fleet], time.monotonic)
            await keeper.load(fleet)
            keeper.start(await exits.enter_async_context(BackgroundTasks()))
        for number, url in enumerate(urls):
            indexer.add_source(str(number), url)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps([_told(index, indexer, number) for number in range(len(urls))]), flush=True)


def _told(index: RadixIndex, indexer: Indexer, number: int) -> dict[int, tuple[str, int, int]]:
    """Return, by rank, the state of a worker's blocks, their number and their digest."""
    states = indexer.states(str(number))
    held = {rank: index.digest(WorkerRank(str(number), rank)) for rank in states}
    return {rank: (state.value, held[rank].num_blocks, held[rank].digest) for rank, state in states.items()}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))

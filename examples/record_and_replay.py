"""Record what a publisher streams, then play it into an index as often as you like.

    python examples/record_and_replay.py

The command line does the same: `kvist record --from URL --to FILE`, then `kvist replay FILE --into-index`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from kvist.events import FULL
from kvist.publisher import KvEventPublisher
from kvist.radix import RadixIndex
from kvist.replay import RecordingWriter
from kvist.replay.indexing import IndexPlayer
from kvist.replay.recorder import Recorder, SourceSpec
from kvist.replay.script import Script

BLOCK_SIZE = 16
PROMPT = list(range(4 * BLOCK_SIZE))


async def record(path: Path) -> None:
    """Record a publisher until its blocks have arrived."""
    with (
        KvEventPublisher("tcp://127.0.0.1:0", worker="gpu-0", block_size=BLOCK_SIZE) as publisher,
        RecordingWriter(path) as writer,
    ):
        recorder = Recorder([SourceSpec.parse(f"gpu-0={publisher.endpoint}")], writer)
        recording = asyncio.create_task(recorder.run())
        async with asyncio.timeout(30):
            while writer.num_messages == 0:  # noqa: ASYNC110 - a heartbeat shows that the stream is received
                await asyncio.sleep(0.01)
            publisher.stored([901, 902, 903, 904], PROMPT, window=FULL, group=0)
            publisher.removed([904], window=FULL, group=0)
            num_before = writer.num_messages
            while writer.num_messages < num_before + 2:  # noqa: ASYNC110 - the batch, and a heartbeat behind it
                await asyncio.sleep(0.01)
        recording.cancel()
        await asyncio.wait([recording])


def replay(path: Path) -> None:
    """Play the recording into an index, and print what it holds then."""
    player = IndexPlayer(RadixIndex())
    for lines in Script(path).lines():
        player.apply(lines or [])
    print(player.report().to_text())


def main() -> None:
    """Record once, replay twice: the same blocks each time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpu-0.mcap"
        asyncio.run(record(path))
        replay(path)
        replay(path)


if __name__ == "__main__":
    main()

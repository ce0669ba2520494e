"""Report an engine's cache from a forked worker, from a thread, and from an event loop."""

import asyncio
import os
import sys
import threading

from kvist.publisher import KvEventPublisher


async def serve(name: str) -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:0", worker=name, block_size=16)
    publisher.stored([71, 72], list(range(32)))  # waits for nothing and never raises; from one thread at a time
    publisher.removed([72])  # the second block's slot was reused
    await asyncio.to_thread(publisher.close)  # delivers what was reported, which may take a moment
    print(name, publisher.statistics().ranks[0].num_blocks, "block held")


if os.fork() == 0:  # a worker makes its own: publishers have threads, which a fork leaves behind
    asyncio.run(serve("forked"))
    sys.exit()
os.wait()
thread = threading.Thread(target=asyncio.run, args=(serve("thread"),))
thread.start()
thread.join()
asyncio.run(serve("asyncio"))

"""Report an engine's cache from a forked worker, from a thread, and from an event loop."""

import asyncio
import os
import sys
import threading

from kvist.publisher import KvEventPublisher


async def serve(name: str) -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:0", worker=name, block_size=16)
    publisher.stored([71, 72], list(range(32)))  # never waits or raises; call it from one thread at a time
    publisher.removed([72])  # the second block's slot was reused
    await asyncio.to_thread(publisher.close)  # delivers pending events, which may take a moment
    print(name, publisher.statistics().ranks[0].num_blocks, "block held")


if os.fork() == 0:  # a forked worker creates its own publisher: threads do not survive a fork
    asyncio.run(serve("forked"))
    sys.exit()
os.wait()
thread = threading.Thread(target=asyncio.run, args=(serve("thread"),))
thread.start()
thread.join()
asyncio.run(serve("asyncio"))

"""A worker that answers as its prompts say, as a process: prints its port, and tells and takes orders by HTTP.

hold …   no byte before it is released          drip …    an event every 100 ms until it is released
flood …  64 MiB of events, as fast as they go   any else  answered at once, in 20 events if streamed

GET /told                            what came, in order, bytes of floods taken, and how often /metrics was read
POST /orders {"release": true}       ends what is held and dripping
POST /orders {"status": 429}         what is answered from now on; null for answers again
POST /orders {"room": 4}             its /metrics say it runs so many at once, and others wait; null for none

Its argument is what it says of its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

NUM_EVENTS = 20
EVENT = b'data: {"id":"c","choices":[{"index":0,"text":" token"}]}\n\n'
FLOOD = EVENT * 1024
FLOOD_BYTES = 64 * 2**20
DRIP_S = 0.1
ANSWER = b'{"id":"c","choices":[{"text":"hi"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def whole(body: bytes, status: int = 200) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Worker:
    """What came, and what was ordered."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.num_flooded_bytes = self.num_reports = self.num_open = 0
        self.status: int | None = None
        self.room: int | None = None
        self.released = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1]
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                if path == b"/v1/completions":
                    self.num_open += 1
                    try:
                        await self.answer(body, writer)
                    finally:
                        self.num_open -= 1
                elif path == b"/v1/messages":
                    writer.write(whole(ANSWER))
                elif path == b"/v1/responses":
                    self.prompts.append(body["input"])
                    response = {"id": f"resp_{os.getpid()}_{len(self.prompts)}", "status": "completed", "output": []}
                    writer.write(whole(json.dumps(response).encode()))
                else:
                    writer.write(self.page(path, body))
                await writer.drain()
                if b"connection: close" in head.lower():
                    break
        writer.close()

    def page(self, path: bytes, body: dict[str, Any]) -> bytes:
        if path == b"/told":
            told = {"prompts": self.prompts, "flooded_bytes": self.num_flooded_bytes, "num_reports": self.num_reports}
            return whole(json.dumps(told).encode())
        if path == b"/orders":
            if body.get("release"):
                self.released.set()
                self.released = asyncio.Event()
            if "status" in body:
                self.status = body["status"]
            if "room" in body:
                self.room = body["room"]
            return whole(b"{}")
        if path == b"/metrics":
            self.num_reports += 1
            if self.room is not None:
                num_running = min(self.num_open, self.room)
                counts = (num_running, self.num_open - num_running)
                return whole(b"vllm:num_requests_running %d\nvllm:num_requests_waiting %d\n" % counts)
        if path == b"/v1/models":
            return whole(b'{"object":"list","data":[%b]}' % sys.argv[1].encode())
        return whole(b"", 200 if path == b"/health" else 404)

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = str(body["prompt"])
        self.prompts.append(prompt)
        released = self.released
        if self.status is not None:
            writer.write(whole(b"{}", self.status))
            return
        if prompt.startswith("hold"):
            await released.wait()
        if not body.get("stream"):
            writer.write(whole(ANSWER))
            return
        writer.write(STREAM_HEAD)
        while prompt.startswith("drip") and not released.is_set():
            writer.write(chunk(EVENT))
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRIP_S):
                    await released.wait()
        if prompt.startswith("flood"):
            for _ in range(FLOOD_BYTES // len(FLOOD)):
                writer.write(chunk(FLOOD))
                await writer.drain()
                self.num_flooded_bytes += len(FLOOD)
        writer.write(chunk(EVENT) * NUM_EVENTS + STREAM_END)


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.start_server(Worker().serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

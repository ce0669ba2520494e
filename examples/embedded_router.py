"""Use Kvist's routing inside your own gateway: it follows the fleet, you send the requests.

    python examples/embedded_router.py http://127.0.0.1:8000 http://127.0.0.1:8001

Sends one chat to the worker with the lowest cost, and prints which one that was and how much it had cached.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httpx

from kvist.router import Router, RouterConfig

PATH = "/v1/chat/completions"


async def main() -> None:
    """Route one chat and send it there."""
    body = json.dumps({"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 16}).encode()
    async with Router(RouterConfig(worker_urls=tuple(sys.argv[1:]))) as router, httpx.AsyncClient() as client:
        with await router.route(PATH, body) as routed:
            headers = {"content-type": "application/json", **routed.headers}
            answer = await client.post(routed.worker + PATH, content=routed.body, headers=headers)
            answer.raise_for_status()
            routed.answered()
        print(f"{routed.worker} held {routed.decision.overlap_tokens} of {routed.decision.prompt.num_tokens} tokens")
        print(answer.json()["choices"][0]["message"]["content"])


if __name__ == "__main__":
    asyncio.run(main())

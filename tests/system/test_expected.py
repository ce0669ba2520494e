"""Real engines whose events are switched off: what they were given is what they are expected to find."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvist.cli.up import ProcessGroup
from kvist.engine import bundled_model_path

pytestmark = pytest.mark.xdist_group("whole system")

Until = Callable[[Callable[[], object]], Awaitable[None]]
MODEL = str(bundled_model_path())
SERVE = (
    "serve",
    "--model",
    MODEL,
    "--served-model-name",
    "m",
    "--kv-events",
    "none",
    "--num-blocks",
    "128",
    "--max-model-len",
    "2048",
)
BLOCK_SIZE = 16


def ask(url: str, *turns: str, **fields: Any) -> tuple[str | None, Any]:
    """Return the worker that answered a conversation, whose turns alternate, and the answer."""
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(idx, 2 - idx % 2)], "content": turn} for idx, turn in enumerate(turns)]
    body = json.dumps({"model": "m", "messages": messages, "temperature": 0, **fields}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return answer.headers["x-kvist-worker"], json.load(answer)


async def test_conversations_stay_where_they_are_until_their_worker_restarts(until: Until) -> None:
    async with ProcessGroup() as group:
        workers = await asyncio.gather(*(group.start(f"worker {idx}", *SERVE, "--port", "0") for idx in range(2)))
        children = {worker.url: worker for worker in workers}
        router = await group.start(
            *("router", "route", "--worker-urls", *children, "--model-path", MODEL, "--port", "0"),
            *("--health-interval-s", "0.2", "--health-failures", "1"),
        )
        chats, explain = f"{router.url}/v1/chat/completions", f"{router.url}/route"

        def candidate(url: str, *turns: str) -> Any:
            return next((one for one in ask(explain, *turns)[1]["candidates"] if one["worker"] == url), None)

        await until(lambda: json.load(urllib.request.urlopen(f"{router.url}/health"))["cold_start_s"])
        system = "You answer questions about Python's standard library in whole sentences. " * 6
        turns = [system, "What does os.path.join do?"]
        first_worker, answer = ask(chats, *turns, max_tokens=40)
        for question in ("And os.path.split?", "And os.walk?"):
            turns += [answer["choices"][0]["message"]["content"], question]
            decision = ask(explain, *turns)[1]
            assert candidate(first_worker, *turns)["approximate"] is True
            worker, answer = ask(chats, *turns, max_tokens=40)
            cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert worker == first_worker
            assert 0 < decision["overlap_tokens"] <= cached_tokens <= decision["overlap_tokens"] + 40 + BLOCK_SIZE

        number = 0
        while candidate(first_worker, *turns)["overlap_blocks"]["gpu"]:  # others drive it out, of both
            number += 1
            ask(chats, f"{number}. {system}", "Well?", max_tokens=1)
        _, answer = ask(f"{first_worker}/v1/chat/completions", *turns, max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

        worker, _ = ask(chats, *turns, max_tokens=1)
        assert candidate(worker, *turns)["overlap_blocks"]["gpu"]
        children[worker].process.kill()
        await until(lambda: candidate(worker, *turns) is None)
        await group.start("restarted", *SERVE, "--port", worker.rpartition(":")[2])
        await until(lambda: candidate(worker, *turns) is not None)
        assert candidate(worker, *turns)["overlap_blocks"]["gpu"] == 0

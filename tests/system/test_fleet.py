"""The main job over real processes: router, two workers, the openai client, and a worker that is killed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio

from kvist.cli.up import Child, ProcessGroup
from kvist.engine import bundled_model_path

pytestmark = [pytest.mark.xdist_group("whole system"), pytest.mark.asyncio(loop_scope="module")]

Until = Callable[[Callable[[], object]], Awaitable[None]]
MODEL = str(bundled_model_path())
SERVE = ("serve", "--model", MODEL, "--served-model-name", "kvist-tiny")
SYSTEM = {"role": "system", "content": "You answer questions about Python's standard library in whole sentences. " * 6}


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """A worker that a test starts anew is the module's."""


@dataclass
class Fleet:
    """What runs: the workers by URL, and a client of the router."""

    group: ProcessGroup
    router: Child
    workers: dict[str, Child]
    client: openai.AsyncOpenAI

    async def ask(self, *messages: dict[str, str], **options: Any) -> tuple[str, Any]:
        """Return the worker that answered and the answer."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model="kvist-tiny", messages=[SYSTEM, *messages], temperature=0, **options
        )
        return raw.headers["x-kvist-worker"], raw.parse()

    def explain(self, *messages: dict[str, str]) -> dict[str, Any]:
        """Return the router's decision on a request that is not sent."""
        body = json.dumps({"messages": [SYSTEM, *messages], "model": "kvist-tiny"}).encode()
        decision: dict[str, Any] = json.loads(fetch(f"{self.router.url}/route", body))
        return decision

    def candidate(self, url: str, *messages: dict[str, str]) -> dict[str, Any] | None:
        """Return what the router knows of one worker when it decides on a request; None when it is no candidate."""
        return next((one for one in self.explain(*messages)["candidates"] if one["worker"] == url), None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with ProcessGroup() as group:
        workers = await asyncio.gather(*(group.start(f"worker {index}", *SERVE, "--port", "0") for index in range(2)))
        urls = [worker.url for worker in workers]
        router = await group.start(
            *("router", "route", "--worker-urls", *urls, "--model-path", MODEL, "--port", "0"),
            *("--health-interval-s", "0.5", "--health-failures", "1"),
        )
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
            yield Fleet(group, router, dict(zip(urls, workers, strict=True)), client)


def fetch(url: str, body: bytes | None = None) -> bytes:
    """Return the body of an answer."""
    with urllib.request.urlopen(url, body, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_the_next_turn_goes_where_the_conversation_is_and_finds_what_was_predicted(
    fleet: Fleet, until: Until
) -> None:
    first_worker, first = await fleet.ask(question("What does os.path.join do?"), max_tokens=24)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    turn = [question("What does os.path.join do?"), answer, question("And os.path.split?")]
    num_held = (first.usage.total_tokens - 1) // 16 * 16  # the last token of an answer is never computed
    await until(lambda: fleet.explain(*turn)["overlap_tokens"] >= num_held)
    decision = fleet.explain(*turn)
    worker, second = await fleet.ask(*turn, max_tokens=24)
    assert worker == decision["worker"] == first_worker
    assert second.usage.prompt_tokens == decision["prompt_tokens"]
    assert second.usage.prompt_tokens_details.cached_tokens == decision["overlap_tokens"] > 0


async def test_the_openai_client_streams_lists_and_reads_errors(fleet: Fleet) -> None:
    assert [model.id async for model in await fleet.client.models.list()] == ["kvist-tiny"]
    turn = [question("What is a list?")]
    options: dict[str, Any] = {"model": "kvist-tiny", "messages": turn, "max_tokens": 16, "temperature": 0}
    stream = await fleet.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    whole = await fleet.client.chat.completions.create(**options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    completion = await fleet.client.completions.create(
        model="kvist-tiny", prompt=[[5, 6, 7], [8, 9]], max_tokens=4, n=2, seed=1, logprobs=2
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await fleet.client.chat.completions.create(**options | {"model": "no-such-model"})
    with pytest.raises(openai.BadRequestError, match="temperature: got -1"):
        await fleet.client.chat.completions.create(**options | {"temperature": -1})
    with pytest.raises(openai.BadRequestError, match="8192"):
        await fleet.client.completions.create(model="kvist-tiny", prompt=[7] * 9000)


async def test_a_worker_killed_mid_stream_hurts_only_its_stream_and_comes_back_empty(
    fleet: Fleet, until: Until
) -> None:
    turn = question("Tell me everything about asyncio.")
    stream = await fleet.client.chat.completions.with_raw_response.create(
        model="kvist-tiny",
        messages=[SYSTEM, turn],
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    url = stream.headers["x-kvist-worker"]
    chunks = stream.parse()
    await anext(chunks)
    await until(lambda: (fleet.candidate(url, turn) or {}).get("total_cached_blocks"))
    fleet.workers[url].process.kill()
    with pytest.raises(openai.APIError):
        async for _ in chunks:
            pass
    other, answer = await fleet.ask(turn, max_tokens=8)
    assert other != url
    assert answer.choices[0].message.content

    port = url.rpartition(":")[2]
    await fleet.group.start("worker reborn", *SERVE, "--port", port)
    await until(lambda: fleet.candidate(url, turn))
    assert fleet.candidate(url, turn)["overlap_blocks"]["external"] == 0


async def test_the_error_of_the_prediction_is_a_histogram_per_worker(fleet: Fleet, until: Until) -> None:
    worker, _ = await fleet.ask(question("What is a set?"), max_tokens=4)

    def is_counted() -> bool:
        lines = fetch(f"{fleet.router.url}/metrics").decode().splitlines()
        return any(line.startswith("kvist_router_overlap_error_tokens_count{") and worker in line for line in lines)

    await until(is_counted)

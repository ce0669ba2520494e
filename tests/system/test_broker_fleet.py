"""A router that hears one worker through NATS and one through MQTT, and what it costs when both brokers are killed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvist.cli.up import ProcessGroup
from kvist.engine import bundled_model_path

pytestmark = pytest.mark.xdist_group("whole system")

Until = Callable[[Callable[[], object]], Awaitable[None]]
MODEL = str(bundled_model_path())
SERVE = ("serve", "--model", MODEL, "--served-model-name", "kvist-tiny", "--port", "0", "--kv-events")


@dataclass
class Fleet:
    """URLs of a router and of its workers, and the brokers between them."""

    router: str
    workers: list[str]
    brokers: list[Any]

    def overlap(self, worker: str, prompt: str) -> int:
        """Return how many tokens of a prompt the router would spare by choosing this worker, 0 if it would not."""
        decision = post(f"{self.router}/route", prompt)[1]
        overlap_tokens: int = decision["overlap_tokens"]
        return overlap_tokens if decision["worker"] == worker else 0

    def failures(self) -> list[str | None]:
        """Return for each stream why nothing of it can be heard just now, None if it can be."""
        with urllib.request.urlopen(f"{self.router}/workers", timeout=60) as answer:
            workers = json.load(answer)["workers"]
        return [source["failure"] for worker in workers for source in worker["kv_events"]["sources"]]


@pytest.fixture
async def fleet(start_nats_server: Callable[..., Any], start_mqtt_broker: Callable[..., Any]) -> AsyncIterator[Fleet]:
    nats, mqtt = start_nats_server(), start_mqtt_broker()
    streams = (f"nats://127.0.0.1:{nats.port}/kvist-tiny", f"mqtt://127.0.0.1:{mqtt.port}/kvist-tiny")
    async with ProcessGroup() as group:
        workers = [each.url for each in await asyncio.gather(*(group.start(url, *SERVE, url) for url in streams))]
        router = await group.start("router", "route", "--worker-urls", *workers, "--model-path", MODEL, "--port", "0")
        yield Fleet(router.url, workers, [nats, mqtt])


def post(url: str, prompt: str) -> tuple[str | None, dict[str, Any]]:
    """Return which worker answered, if it was a router that was asked, and the answer."""
    body = json.dumps({"model": "kvist-tiny", "prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["x-kvist-worker"], json.load(answer)


def complete(url: str, prompt: str) -> tuple[str | None, int]:
    """Return which worker answered, likewise, and how many tokens of the prompt were in its cache."""
    worker, answer = post(f"{url}/v1/completions", prompt)
    return worker, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt_for(worker: str, about: str) -> str:
    """Return a prompt of more than a hundred tokens, of which no other begins with as many as fifty."""
    return f"What {worker} was told {about} is not what any other worker was told. " * 4


async def test_prefixes_are_known_through_brokers_and_again_when_those_were_killed(fleet: Fleet, until: Until) -> None:
    async def is_found_by_the_router(worker: str, about: str) -> None:
        longer = prompt_for(worker, about) + "Is it?"
        await until(lambda: fleet.overlap(worker, longer) > 50)
        overlap = fleet.overlap(worker, longer)
        assert complete(fleet.router, longer) == (worker, overlap)

    for worker in fleet.workers:
        complete(worker, prompt_for(worker, "at first"))  # past the router, which has only the events to go by
        await is_found_by_the_router(worker, "at first")
    for broker in fleet.brokers:
        broker.kill()
    await until(lambda: all(fleet.failures()))
    for worker in fleet.workers:
        complete(worker, prompt_for(worker, "meanwhile"))
    assert complete(fleet.router, "Is anybody there?")[0] in fleet.workers
    for broker in fleet.brokers:
        broker.start()
    for worker in fleet.workers:
        await is_found_by_the_router(worker, "meanwhile")
    assert not any(fleet.failures())

"""Real replicas of Ray Serve, whose engines are a few lines: a request goes where its prefix is.

Runs where `pip install 'kvist[ray]'` was.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvist.engine import bundled_model_path
from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.events.hashing import block_hashes
from kvist.openai.errors import RequestError
from kvist.openai.tokenization import ChatTokenizer
from kvist.publisher import KvEventPublisher
from kvist.router.prompts import CHAT_PATH, OneModel, PromptReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvist[ray]'")
    from pydantic import BaseModel
    from ray import cloudpickle, serve
    from ray.serve.config import ProxyLocation

    from kvist.router.doors.ray import KvistRequestRouter, request_of, request_router

if TYPE_CHECKING:
    from kvist.router.fleet.fleet import Fleet
    from kvist.router.index import FleetIndex

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]

BLOCK_SIZE = 16
RANDOM = Random(7)


class Replica:
    """Says who it is and how much of the prompt it had, and streams that it has all of it from then on."""

    def __init__(self, has_stream: bool) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        self.blocks: set[int] = set()
        self.reader = PromptReader(OneModel(ChatTokenizer.load(bundled_model_path())))
        self.publisher = None
        if has_stream:
            self.publisher = KvEventPublisher("tcp://127.0.0.1:0", worker=self.name, block_size=BLOCK_SIZE)

    def record_replica_metadata(self) -> dict[str, Any]:
        return {} if self.publisher is None else {"kv_event_sources": [self.publisher.endpoint]}

    async def __call__(self, request: Any, held_by: Path | None = None) -> dict[str, Any]:
        ask = await self.reader.read(*request_of([request]))
        hashes = block_hashes(ask.token_ids, BLOCK_SIZE).tolist()
        num_held = next((idx for idx, each in enumerate(hashes) if each not in self.blocks), len(hashes))
        self.blocks.update(hashes)
        if self.publisher is not None and num_held < len(hashes):
            tokens = ask.token_ids[num_held * BLOCK_SIZE : len(hashes) * BLOCK_SIZE].tolist()
            parent = hashes[num_held - 1] if num_held else None
            self.publisher.stored(hashes[num_held:], tokens, parent_block_hash=parent, window=FULL)
        while held_by is not None and held_by.exists():  # noqa: ASYNC110, ASYNC240 - in another process
            await asyncio.sleep(0.02)
        return {"replica": self.name, "pid": os.getpid(), "cached": num_held * BLOCK_SIZE}


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Let Ray keep threads and processes until it is shut down."""


@pytest.fixture(scope="module", autouse=True)
def _cluster(monkeymodule: pytest.MonkeyPatch) -> Iterator[None]:
    monkeymodule.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location=ProxyLocation.Disabled)
    yield
    serve.shutdown()
    ray.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def monkeymodule() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


class Deployed:
    """A deployment, a handle of it, and what the handle's router knows."""

    def __init__(self, name: str, until: Callable[[Callable[[], object]], None], num_replicas: int, **options: Any):
        settings = {"model_path": str(bundled_model_path()), **options.pop("settings", {})}
        has_stream = options.pop("has_stream", True)
        deployment = serve.deployment(Replica).options(
            name=name,
            num_replicas=None if "autoscaling_config" in options else num_replicas,
            ray_actor_options={"num_cpus": 0.1},
            graceful_shutdown_timeout_s=1,
            health_check_period_s=0.5,
            health_check_timeout_s=180,  # who is slow is not dead
            request_router_config=request_router(**settings),
            **options,
        )
        self.name, self.until = name, until
        self.handle = serve.run(deployment.bind(has_stream), name=name, route_prefix=None)
        self.ask([1])  # makes the router
        (self.router,) = (each for each in gc.get_objects() if self._is_ours(each))
        until(lambda: self.router._router is not None and self.index.has_joined)
        until(lambda: len(self.fleet.workers) == num_replicas)

    def _is_ours(self, each: Any) -> bool:
        return isinstance(each, KvistRequestRouter) and each._deployment_id.name == self.name

    def start(self, request: Any, **more: Any) -> Any:
        return self.handle.remote({"prompt": request} if isinstance(request, list) else request, **more)

    def ask(self, request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.start(request).result(timeout_s=180)
        return answer

    @property
    def fleet(self) -> Fleet:
        return self.router._fleet.fleet

    @property
    def index(self) -> FleetIndex:
        return self.router._fleet.index

    def num_blocks(self, replica: str) -> int:
        return sum(rank.num_blocks for rank in self.index.ranks(replica))

    def learn(self, request: Any, num_blocks: int) -> dict[str, Any]:
        """Ask something new, and wait until it is known who has it."""
        before = {worker.url: self.num_blocks(worker.url) for worker in self.fleet.workers}
        answer = self.ask(request)
        assert answer["cached"] == 0
        self.until(lambda: self.num_blocks(answer["replica"]) >= before[answer["replica"]] + num_blocks)
        return answer


@pytest.fixture
def deployed(until_true) -> Iterator[Callable[..., Deployed]]:
    names = []

    def deploy(num_replicas: int, **options: Any) -> Deployed:
        names.append(f"engines{len(names)}{RANDOM.randrange(10**6)}")
        return Deployed(names[-1], until_true, num_replicas, **options)

    yield deploy
    for name in names:
        serve.delete(name)


def tokens(num_tokens: int) -> list[int]:
    return [RANDOM.randrange(200) for _ in range(num_tokens)]


def test_requests_go_to_the_replica_that_has_their_prefix_and_others_elsewhere(deployed) -> None:
    engines = deployed(2)
    prompts = [tokens(4 * BLOCK_SIZE) for _ in range(8)]
    holders = [engines.learn(prompt, 4)["replica"] for prompt in prompts]
    assert set(holders) == {worker.url for worker in engines.fleet.workers}
    for prompt, holder in zip(prompts, holders, strict=True):
        answer = engines.ask(prompt + tokens(4))
        assert (answer["replica"], answer["cached"]) == (holder, 4 * BLOCK_SIZE)


def test_chats_are_read_as_engines_do_however_they_are_passed(deployed) -> None:
    engines = deployed(2)
    asked = [{"role": "user", "content": "Which of the two has this? " * 8}]
    holder = engines.learn({"messages": asked}, 4)["replica"]
    asked += [{"role": "assistant", "content": "This one."}, {"role": "user", "content": "Sure?"}]

    class Chat(BaseModel):
        messages: list[dict[str, str]]
        temperature: float | None = None

    for request in ({"messages": asked}, json.dumps({"messages": asked}), json.dumps({"messages": asked}).encode()):
        answer = engines.ask(request)
        assert answer["replica"] == holder
        assert answer["cached"] >= 4 * BLOCK_SIZE
    assert request_of([Chat(messages=asked)]) == (CHAT_PATH, msgspec.json.encode({"messages": asked}))
    for nothing in ([], [3], [[1]], ["{"], [object()]):
        with pytest.raises(RequestError, match="not OpenAI's fields"):
            request_of(nothing)


def test_a_replica_that_dies_is_nobodys_choice_and_the_next_is_followed(deployed, until_true) -> None:
    engines = deployed(2)
    prompt = tokens(4 * BLOCK_SIZE)
    first = engines.learn(prompt, 4)
    os.kill(first["pid"], signal.SIGKILL)
    answer = engines.ask(prompt)
    assert answer["replica"] != first["replica"]
    until_true(lambda: len(engines.fleet.workers) == 2 and engines.fleet.get(first["replica"]) is None)
    assert first["replica"] not in engines.index._streams
    until_true(lambda: engines.num_blocks(answer["replica"]) >= 4)
    assert engines.ask(prompt) == answer | {"cached": 4 * BLOCK_SIZE}
    (new,) = {worker.url for worker in engines.fleet.workers} - {answer["replica"]}
    until_true(lambda: engines.ask(tokens(4 * BLOCK_SIZE))["replica"] == new and engines.num_blocks(new) >= 4)


def test_replicas_come_and_go_and_the_others_keep_their_requests(deployed, until_true, tmp_path: Path) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 1, "look_back_period_s": 0.5}
    delays = {"upscale_delay_s": 0.1, "downscale_delay_s": 0.1, "metrics_interval_s": 0.1}
    engines = deployed(1, autoscaling_config=scaling | delays)
    prompt, held_by = tokens(4 * BLOCK_SIZE), tmp_path / "held"
    holder = engines.learn(prompt, 4)["replica"]
    held_by.touch()
    held = [engines.start(tokens(BLOCK_SIZE), held_by=held_by) for _ in range(3)]
    until_true(lambda: len(engines.fleet.workers) == 3)
    assert engines.ask(prompt)["replica"] == holder
    names, taken = {worker.url for worker in engines.fleet.workers}, set()
    until_true(lambda: taken.add(engines.ask(tokens(4 * BLOCK_SIZE))["replica"]) or taken == names)
    held_by.unlink()
    assert {each.result()["replica"] for each in held} <= names
    until_true(lambda: len(engines.fleet.workers) == 1)
    answers = [engines.ask(prompt) for _ in range(2)]
    assert [answer["replica"] for answer in answers] == [engines.fleet.workers[0].url] * 2
    assert answers[1]["cached"] == 4 * BLOCK_SIZE


def test_requests_count_while_they_run_and_go_elsewhere_where_a_replica_has_no_place(
    deployed, until_true, tmp_path: Path
) -> None:
    engines = deployed(2, max_ongoing_requests=1)
    prompt, held_by = tokens(4 * BLOCK_SIZE), tmp_path / "held"
    holder = engines.learn(prompt, 4)["replica"]
    held_by.touch()
    waiting = engines.start(prompt, held_by=held_by)
    load = engines.router._fleet.load
    until_true(lambda: load.running_requests(holder) == 1)
    elsewhere = engines.start(prompt, held_by=held_by)
    (other,) = {worker.url for worker in engines.fleet.workers} - {holder}
    until_true(lambda: load.running_requests(other) == 1)
    held_by.unlink()
    assert (waiting.result()["replica"], elsewhere.result()["replica"]) == (holder, other)
    until_true(lambda: load.running_requests(holder) + load.running_requests(other) == 0)
    assert not engines.router._running


def test_replicas_without_streams_are_expected_to_have_what_they_were_given(deployed, until_true) -> None:
    engines = deployed(2, has_stream=False, settings={"block_size": BLOCK_SIZE})
    until_true(lambda: all(engines.index.is_expecting(worker.url) for worker in engines.fleet.workers))
    prompts = [tokens(4 * BLOCK_SIZE) for _ in range(6)]
    holders = [engines.learn(prompt, 4)["replica"] for prompt in prompts]
    assert len(set(holders)) == 2
    assert [engines.ask(prompt)["replica"] for prompt in prompts] == holders


def test_settings_are_those_of_the_router() -> None:
    with pytest.raises(InvalidValueError, match=r"model_pth.*such as model_path"):
        request_router(model_pth="/nowhere")

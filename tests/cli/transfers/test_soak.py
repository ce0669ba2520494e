"""Minutes of everything at once over real workers: at the end nothing is held anywhere, and every answer was right."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvist.engine import bundled_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("transfer kills")]

NUM_CLIENTS, NUM_TROUBLES, TIMEOUT_S = 6, 40, 2.0
FLAGS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--kv-transfer-timeout", str(TIMEOUT_S))


@dataclass(frozen=True)
class Load:
    """What the workers serve, and how long prompts are."""

    flags: tuple[str, ...]
    num_requests: int
    max_stem_len: int
    max_tail_len: int


SMALL = Load(("--block-size", "8", "--kv-memory-mib", "40", "--max-model-len", "640"), 240, 400, 200)
# A copy takes as long as computing the prompt, so that most of what happens to a worker happens amid one.
LARGE = Load(("--block-size", "4", "--num-blocks", "96", "--max-model-len", "128"), 90, 60, 40)
KINDS = ["fetched"] * 6 + ["streamed", "cancelled", "left", "left", "never fetched", "twice", "local"]
REASONS = re.compile(
    r"rank 0 at tcp://[\d.:]+ is gone|no completion within 2 s|rank 0 reports (FAILED|CANCELLED)"
    r"|unknown_request|already_ended|busy|refused by tcp://[\d.:]+: .*"
)


class Fleet:
    """Two workers that prefill and two that decode, any of which may be killed and replaced at any time."""

    def __init__(self, rng: random.Random, start: Callable[[], Any]) -> None:
        self.rng = rng
        self.workers: dict[str, Any] = {}
        self.dead: list[Any] = []
        self._start = start

    async def open(self) -> None:
        names = ("P1", "P2", "D1", "D2")
        self.workers = dict(zip(names, await asyncio.gather(*(self._start() for _ in names)), strict=True))

    def choose(self, kind: str) -> tuple[str, Any]:
        names = [name for name in self.workers if name.startswith(kind)]
        alive = [name for name in names if self.workers[name] not in self.dead]
        name = self.rng.choice(alive or names)
        return name, self.workers[name]

    async def make_trouble(self) -> None:
        """Kill a worker and start another in its place, or stop one for a while, also for longer than the timeout."""
        name, victim = self.choose("")
        if self.rng.random() < 0.5:
            self.dead.append(victim)
            await victim.kill()
            self.workers[name] = await self._start()
        else:
            await victim.stop()
            await asyncio.sleep(self.rng.choice((0.05, 0.5, 1.5 * TIMEOUT_S)))
            victim.resume()


class Client:
    """Sends one request after the other, of every kind, and keeps what was answered."""

    def __init__(self, seed: str, load: Load, fleet: Fleet) -> None:
        self.rng = random.Random(seed)
        self.load = load
        self.fleet = fleet
        self.outcomes: Counter[str] = Counter()
        self.answers: list[tuple[list[int], int, str]] = []

    async def send(self) -> None:
        """Send a request; it may fail only if one of its workers is killed."""
        kind, num_tokens, prompt = self.rng.choice(KINDS), self.rng.randrange(1, 16), self.make_prompt()
        workers = [self.fleet.choose(name)[1] for name in "PDD"]
        try:
            text = await self.live(kind, prompt, num_tokens, *workers)
        except httpx.HTTPError as error:
            if not any(worker in self.fleet.dead for worker in workers):
                told = [await worker.describe() for worker in workers]
                raise AssertionError(f"{kind}: {error!r}: {told}") from error
            self.outcomes["lost"] += 1
            return
        self.outcomes[kind] += 1
        if text is not None:
            self.answers.append((prompt, num_tokens, text))

    async def live(
        self, kind: str, prompt: list[int], num_tokens: int, source: Any, target: Any, another: Any
    ) -> str | None:
        body = {"prompt": prompt, "max_tokens": num_tokens}
        if kind == "local":
            return await target.text(body)
        params = await source.prefill(prompt)
        if kind == "never fetched":
            return None
        body |= {"kv_transfer_params": params}
        if kind == "streamed":
            return await stream(target, body)
        if kind == "twice":
            return (await asyncio.gather(target.text(body), another.text(body)))[0]
        asking = asyncio.create_task(target.text(body))
        if kind in ("left", "cancelled"):
            await asyncio.sleep(self.rng.random() * (0.01 if kind == "left" else 0.2))
            asking.cancel()
            await asyncio.wait([asking])
            return None if asking.cancelled() or asking.exception() else asking.result()
        return await asking

    def make_prompt(self) -> list[int]:
        """Return a prompt that shares any length with others, or nothing."""
        offset, longest = self.rng.randrange(4) * 41, self.load.max_stem_len
        stem = [3 + (offset + i * i) % 2999 for i in range(longest)]
        tail = [self.rng.randrange(3, 3000) for _ in range(self.rng.randrange(1, self.load.max_tail_len))]
        return stem[: self.rng.choice((0, 16, self.rng.randrange(longest + 1)))] + tail


async def stream(worker: Any, body: dict[str, Any]) -> str:
    body = {"temperature": 0, "ignore_eos": True, "stream": True} | body
    text = ""
    async with worker.client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("seed", range(8))
async def test_after_minutes_of_everything_every_counter_is_zero_and_every_answer_was_right(
    seed: int, serve: Callable[..., Any], much_kv: Path
) -> None:
    agent = ("shared_memory", "nixl")[seed % 2]
    model, load = ((bundled_model_path(), SMALL), (much_kv, LARGE))[seed // 2 % 2]
    bounce = ("--kv-transfer-bounce-mib", "64") if seed < 4 else ()
    if agent == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    async with AsyncExitStack() as exits:

        async def start() -> Any:
            flags = (*FLAGS, *load.flags, *bounce, "--kv-transfer-agent", agent)
            return await exits.enter_async_context(serve(model, *flags, is_bounced=True))

        fleet = Fleet(random.Random(seed), start)
        await fleet.open()
        clients = [Client(f"{seed}/{i}", load, fleet) for i in range(NUM_CLIENTS)]
        await suffer(clients, fleet)
        for worker in fleet.workers.values():
            assert not worker.has_ended
            await worker.is_idle()
        outcomes = sum((client.outcomes for client in clients), Counter[str]())
        answers = [each for client in clients for each in client.answers]
        assert len(answers) > 10
        await check_answers(answers, await start())
        await check_pairs(fleet)
        logs = "".join(worker.log.read_text() for worker in (*fleet.workers.values(), *fleet.dead))
        assert not re.search("Traceback|CRITICAL|step failed", logs), logs
        reasons = [reason for worker in (*fleet.workers.values(), *fleet.dead) for reason in worker.failures()]
        assert [reason for reason in reasons if not REASONS.fullmatch(reason)] == []
        kinds = Counter(re.sub(r"tcp://\S+", "P", reason) for reason in reasons)
        print(f"\nseed={seed} agent={agent} {dict(outcomes)} killed={len(fleet.dead)} reasons={dict(kinds)}")


async def suffer(clients: list[Client], fleet: Fleet) -> None:
    """Send all requests; from time to time, while they last, something happens to a worker."""

    async def send_all(client: Client) -> None:
        for _ in range(client.load.num_requests // NUM_CLIENTS):
            await client.send()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_all(client)) for client in clients]
        for _ in range(NUM_TROUBLES):
            await asyncio.wait(tasks, timeout=fleet.rng.random() * 1.5)
            if all(task.done() for task in tasks):
                break
            await fleet.make_trouble()


async def check_answers(answers: list[tuple[list[int], int, str]], alone: Any) -> None:
    """Fail unless one worker that does all says the same."""
    for prompt, num_tokens, text in answers:
        assert text == await alone.text({"prompt": prompt, "max_tokens": num_tokens}), prompt


async def check_pairs(fleet: Fleet) -> None:
    """Fail unless everyone still does a request with everyone."""
    for source in (fleet.workers["P1"], fleet.workers["P2"]):
        for target in (fleet.workers["D1"], fleet.workers["D2"]):
            prompt = [random.Random(source.pid * target.pid).randrange(3, 3000) for _ in range(50)]
            before = await target.metric("engine_prompts_fetched")
            params = await source.prefill(prompt)
            text = await target.text({"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
            assert text == await source.text({"prompt": prompt, "max_tokens": 4})
            assert await target.metric("engine_prompts_fetched") == before + 1
    for worker in fleet.workers.values():
        await worker.is_idle()

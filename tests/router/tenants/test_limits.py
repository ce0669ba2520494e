"""Limits against a plain token bucket, and what a client is told whose tenant has reached one, at whichever process."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from random import Random
from typing import Any

import httpx
import pytest

from kvist.openai.errors import RequestError
from kvist.router.config import RouterConfig
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.load import LoadTracker
from kvist.router.tenants import rows
from kvist.router.tenants.limits import Limits, Spending
from kvist.router.tenants.tenant import DEFAULT, Tenant


class Clock:
    """Ticks in 64ths of a second, which floats have exactly, and what is filled in one."""

    now_s = 4096.0

    def __call__(self) -> float:
        return self.now_s


def limits_of(clock: Clock, num_fronts: int) -> list[Limits]:
    board = LoadBoard(num_fronts=num_fronts)
    return [Limits(LoadTracker(board, front).tenants, clock) for front in range(num_fronts)]


class Bucket:
    """The oracle: filled at every tick."""

    def __init__(self, per_minute: int | None) -> None:
        self.per_minute, self.level = per_minute, Fraction(per_minute or 0)

    def tick(self) -> None:
        if self.per_minute is not None:
            self.level = min(Fraction(self.per_minute), self.level + Fraction(self.per_minute, 64 * 60))


@pytest.mark.parametrize("num_fronts", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_limits_are_those_of_token_buckets_and_a_count(seed: int, num_fronts: int) -> None:
    random, clock = Random(seed), Clock()
    limits = {"requests_per_minute": 60, "prefill_tokens_per_minute": 61440, "max_requests": 5}
    given = {name: value for name, value in limits.items() if seed < 2 or random.random() < 0.7}
    tenant, other = Tenant(name="a", **given), Tenant(name="b", **given)
    fronts, running = limits_of(clock, num_fronts), list[Spending]()
    requests, tokens = Bucket(given.get("requests_per_minute")), Bucket(given.get("prefill_tokens_per_minute"))
    outcomes = set()
    for step in range(3000):
        for _ in range(random.choice([0, 0, 1, 4, 16])):
            clock.now_s += 1 / 64
            requests.tick()
            tokens.tick()
        if running and random.random() < 0.5:
            spending, num_tokens = random.choice(running), random.choice([0, 5 if step // 500 % 2 else 5000])
            if random.random() < 0.5:
                tokens.level -= num_tokens - spending.num_tokens
                spending.charge(num_tokens)
            else:
                running.remove(spending)
                spending.finish()
                spending.finish()
            continue
        is_full = "max_requests" in given and len(running) >= 5
        is_short = requests.per_minute is not None and requests.level < 1
        is_short |= tokens.per_minute is not None and tokens.level <= 0
        if is_full or is_short:
            with pytest.raises(RequestError) as refusal:
                random.choice(fronts).enter(tenant)
            outcomes.add(refusal.value.message.partition(":")[0])
            assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
            continue
        spending = random.choice(fronts).enter(tenant)
        assert (spending is None) == (not given)
        if spending is not None:
            running.append(spending)
            requests.level -= 1
    assert outcomes <= set(given)
    assert bool(outcomes) == bool(given)
    if "max_requests" in given:
        assert fronts[0].enter(other) is not None  # whose limits are its own


def test_who_comes_back_when_told_is_let_in() -> None:
    clock = Clock()
    tenant = Tenant(name="a", requests_per_minute=2, prefill_tokens_per_minute=100)
    (limits,) = limits_of(clock, 1)
    spending = limits.enter(tenant)
    assert spending is not None
    spending.charge(350)  # a long prompt is begun, and paid for afterwards
    with pytest.raises(RequestError, match="prefill_tokens_per_minute") as refusal:
        limits.enter(tenant)
    assert refusal.value.retry_after_s == 150
    clock.now_s += 149
    with pytest.raises(RequestError):
        limits.enter(tenant)
    clock.now_s += 1.1
    assert limits.enter(tenant) is not None
    assert limits.enter(DEFAULT) is None


def test_thousands_of_tenants_have_cells_of_their_own_and_beyond_that_the_busy_ones() -> None:
    board = LoadBoard(num_fronts=2)
    one, other = (LoadTracker(board, front).tenants for front in range(2))
    names = [f"tenant-{number}" for number in range(rows.NUM_PLACES // 4)]
    for number, name in enumerate(names):
        one.count(name, 1 + number)
        other.count(name, 1)
        one.write(name, rows.Field.FINISH, float(number))
    assert [other.num_running(name) for name in names] == [2 + number for number in range(len(names))]
    assert [other.read(name)[-1] for name in names] == list(range(len(names)))
    for number in range(4 * rows.NUM_PLACES):
        one.write(f"passing-{number}", rows.Field.FINISH, 1.0)
    assert [other.num_running(name) for name in names] == [2 + number for number in range(len(names))]


async def test_a_client_is_told_which_limit_and_when_to_come_back(worker, router, tenants, tenant, bearing) -> None:
    path = tenants(
        tenant("few", requests_per_minute=3), tenant("short", prefill_tokens_per_minute=50), tenant("free", share=2.0)
    )
    async with worker(cached_tokens=60) as one, router(one.url, tenants=path, admin_key="x", ready=False) as front:

        async def ask(key: str) -> httpx.Response:
            body = {"model": "m", "prompt": [1] * 50}
            return await front.client.post("/v1/completions", json=body, headers=bearing(key))

        assert [(await ask("few")).status_code for _ in range(4)] == [200, 200, 200, 429]
        # Of 100 tokens 40 are computed: 50 - 40 is left for one more.
        assert [(await ask("short")).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask("short")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "prefill_tokens_per_minute" in refused.json()["error"]["message"]
        assert 30 <= int(refused.headers["retry-after"]) <= 36
        assert [(await ask("free")).status_code for _ in range(10)] == [200] * 10
        answer = await front.client.get("/usage", headers=bearing("x"))
        limited = {each["tenant"]: each["limited"] for each in answer.json()["usage"]}
        assert limited == {"few": 1, "short": 2, "free": 0}


async def test_what_runs_at_another_process_counts(
    worker, fronts_of, tenants, tenant, bearing, http_bytes, until
) -> None:
    gate = asyncio.Event()

    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(http_bytes.response(http_bytes.completion()))

    path = tenants(tenant("a", max_requests=2, requests_per_minute=4))
    async with (
        worker(answer=answer) as one,
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        fronts_of(RouterConfig(worker_urls=(one.url,), port=0, tenants=path), 2) as fronts,
    ):

        def ask(front: int) -> Any:
            body, url = {"model": "m", "prompt": "x"}, f"{fronts[front].url}/v1/completions"
            return client.post(url, json=body, headers=bearing("a"))

        running = [asyncio.create_task(ask(front)) for front in (0, 1)]
        await until(lambda: len(one.completions) == 2)
        for front in (0, 1):
            refused = await ask(front)
            assert "max_requests" in refused.json()["error"]["message"]
        gate.set()
        assert [each.status_code for each in await asyncio.gather(*running)] == [200, 200]
        assert [(await ask(front)).status_code for front in (1, 0, 1, 0)] == [200, 200, 429, 429]

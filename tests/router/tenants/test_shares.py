"""Who waits is served by shares of tenants: against a plain model, by the bound that theory gives, and over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from random import Random
from typing import Any

import pytest

from kvist.events import WorkerRank
from kvist.http.deadline import LoopClock
from kvist.openai.errors import RequestError
from kvist.router.admission import Admission, Place
from kvist.router.fleet.board import LoadBoard
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.load import LoadTracker
from kvist.router.policy.decision import Prompt
from kvist.router.tenants.tenant import Tenant

SHARES = {"a": 1, "b": 1, "c": 2, "d": 4}


class Fronts:
    """Admission at several processes, of a fleet that takes one request at a time, and has one at the start."""

    def __init__(self, number: int, max_queued: int = 10_000) -> None:
        board, clock = LoadBoard(num_fronts=number), LoopClock(asyncio.get_running_loop())
        loads = [LoadTracker(board, front) for front in range(number)]
        self._load = loads[0]
        self.admissions = [
            Admission(Fleet(16, None, lambda: 1.0), load, lambda: 1.0, clock, max_queued, max_requests=1)
            for load in loads
        ]
        self.served: list[Asked] = []
        self.begin()

    def begin(self) -> None:
        self._running = self._load.begin(WorkerRank("http://w", 0), Prompt(1, 16), 0)

    def enter(self, front: int, asked: Asked) -> Place:
        tenant = Tenant(name=asked.tenant, share=float(SHARES[asked.tenant]))
        place = self.admissions[front].enter(asked, "m", asked.priority, 1e9, tenant, lambda: float(asked.work), 1.0)
        assert place is not None
        return place

    def serve(self, random: Random) -> Asked:
        """End the request that runs; return who is begun, while fronts look for room in any order."""
        self._running.finish(0.0)
        num_served = len(self.served)
        while len(self.served) == num_served:
            random.choice(self.admissions).admit_waiting()
        return self.served[-1]


@dataclass(eq=False)
class Asked:
    fronts: Fronts
    tenant: str
    work: int
    priority: int = 0
    refusals: list[str | None] = field(default_factory=list)

    def on_room(self) -> None:
        self.fronts.served.append(self)
        self.fronts.begin()

    def on_refused(self, error: RequestError) -> None:
        self.refusals.append(error.code)


@dataclass
class Waiting:
    """The oracle's: what a tenant's first will start at is known when it is first."""

    asked: Asked
    place: Place
    front: int
    came_at: Fraction
    number: int


@pytest.mark.parametrize("num_fronts", [1, 3])
@pytest.mark.parametrize("seed", range(6))
async def test_the_order_is_that_of_start_times_in_fractions(seed: int, num_fronts: int) -> None:
    random, fronts = Random(seed), Fronts(num_fronts)
    now, finish, waiting = Fraction(0), defaultdict[str, Fraction](Fraction), list[Waiting]()
    for number in range(2000):
        if not waiting or random.random() < 0.5:
            asked = Asked(fronts, random.choice("aaaabbcd"), random.choice([1, 16, 1000]), random.choice([0, 0, 0, 7]))
            front = random.randrange(num_fronts)
            waiting.append(Waiting(asked, fronts.enter(front, asked), front, now, number))
        elif random.random() < 0.3:  # a client leaves
            left = waiting.pop(random.randrange(len(waiting)))
            fronts.admissions[left.front].leave(left.place)
        else:
            firsts: dict[tuple[str, int], Waiting] = {}  # those of a tenant go by arrival at each front
            for each in sorted(waiting, key=lambda each: (each.asked.priority, each.number)):
                firsts.setdefault((each.asked.tenant, each.front), each)
            ranks = {
                each.asked: (each.asked.priority, max(each.came_at, finish[each.asked.tenant]), each.number)
                for each in firsts.values()
            }
            asked = fronts.serve(random)
            assert ranks[asked][:2] == min(ranks.values())[:2]
            assert num_fronts > 1 or ranks[asked] == min(ranks.values())  # times of arrival are all the same here
            now = max(now, ranks[asked][1])
            finish[asked.tenant] = ranks[asked][1] + Fraction(asked.work, SHARES[asked.tenant])
            waiting = [each for each in waiting if each.asked is not asked]


@pytest.mark.parametrize("num_fronts", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_tenants_that_always_wait_get_work_by_their_shares_in_any_stretch_of_time(
    seed: int, num_fronts: int
) -> None:
    random, fronts = Random(seed), Fronts(num_fronts)
    works = {"a": [1, 1000], "b": [400], "c": [1, 50], "d": [1000]}
    for _ in range(1000):
        for number, tenant in enumerate(works):  # each at a front of its own, or at any
            front = number % num_fronts if seed % 2 else random.randrange(num_fronts)
            fronts.enter(front, Asked(fronts, tenant, random.choice(works[tenant])))
    served = [fronts.serve(random) for _ in range(900)]
    for one, other in combinations(works, 2):
        lead, leads = 0.0, [0.0]
        for each in served:
            lead += {one: 1, other: -1}.get(each.tenant, 0) * each.work / SHARES[each.tenant]
            leads.append(lead)
        assert max(leads) - min(leads) <= max(works[one]) / SHARES[one] + max(works[other]) / SHARES[other]


async def test_who_fills_the_queue_makes_room_for_others_and_nobody_pays_for_what_was_not_served() -> None:
    random, fronts = Random(1), Fronts(1, max_queued=20)
    flood = [Asked(fronts, "a", 100) for _ in range(20)]
    places = [fronts.enter(0, asked) for asked in flood]
    with pytest.raises(RequestError, match="too many requests wait"):
        fronts.enter(0, Asked(fronts, "a", 100))
    for _ in range(10):
        fronts.enter(0, Asked(fronts, "b", 100))
    assert [asked.refusals for asked in flood] == [[]] * 10 + [["displaced"]] * 10
    for tenant in "ab":
        with pytest.raises(RequestError, match="too many requests wait"):
            fronts.enter(0, Asked(fronts, tenant, 100))
    for place in (*places[:8], places[0]):
        fronts.admissions[0].leave(place)
    assert [fronts.serve(random).tenant for _ in range(6)] == ["a", "b", "a", "b", "b", "b"]
    fronts.enter(0, Asked(fronts, "a", 100))
    assert [fronts.serve(random).tenant for _ in range(2)] == ["a", "b"]


async def test_a_flood_holds_another_tenant_up_by_no_more_than_its_share(
    worker, router, tenants, tenant, bearing, http_bytes, until
) -> None:
    gate = asyncio.Semaphore(0)

    async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
        await gate.acquire()
        writer.write(http_bytes.response(http_bytes.completion()))

    path = tenants("flood", tenant("paying", share=3.0), tenant("vip", priority=-1))
    options = {"max_worker_requests": 1, "admin_key": "x", "ready": False}
    async with worker(answer=answer) as one, router(one.url, tenants=path, **options) as front:

        def queued() -> int:
            return sum(front.service._forwarder.admission.queued.values())

        asked: list[asyncio.Task[Any]] = []

        async def ask(key: str, num_tokens: int, **fields: Any) -> None:
            body = {"model": "m", "prompt": [len(asked)] * num_tokens, **fields}
            asked.append(asyncio.create_task(front.client.post("/v1/completions", json=body, headers=bearing(key))))
            await until(lambda: len(one.completions) + queued() == len(asked))

        for key, number in (("flood", 13), ("paying", 6), ("vip", 1)):
            for _ in range(number):
                await ask(key, 100 if key == "flood" else 50)
        await ask("flood", 100, priority=-5)  # may not
        await ask("vip", 50, priority=5)
        gate.release()
        for _ in asked:
            gate.release()
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
    numbers = [json.loads(received.body)["prompt"][0] for received in one.completions]
    names = ["vip" if each in (19, 21) else "paying" if 13 <= each < 19 else "flood" for each in numbers]
    # The first was begun at once; then the vip; then six of 50 tokens by a share of 3 for each of 100.
    assert names == ["flood", "vip", "flood", *["paying"] * 6, *["flood"] * 12, "vip"]


async def test_who_waits_for_room_and_then_for_one_worker_pays_and_counts_once(
    worker, router, tenants, bearing, http_bytes, until
) -> None:
    gates = [asyncio.Semaphore(0), asyncio.Semaphore(0)]

    def gated(gate: asyncio.Semaphore) -> Any:
        async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
            await gate.acquire()
            writer.write(http_bytes.response(http_bytes.completion()))

        return answer

    long, options = list(range(50_000)), {"max_worker_requests": 1, "block_size": 16, "expected_cache_tokens": 0}
    one, two = (worker(answer=gated(gate)) for gate in gates)
    async with one, two, router(one.url, two.url, tenants=tenants("a"), admin_key="x", ready=False, **options) as front:
        front.hold(one.url, long)
        admission = front.service._forwarder.admission

        def ask(prompt: list[int]) -> asyncio.Task[Any]:
            body = {"model": "m", "prompt": prompt}
            return asyncio.create_task(front.client.post("/v1/completions", json=body, headers=bearing("a")))

        await until(lambda: len(front.service.fleet.routable("m")) == 2)
        asked = [ask(long)]
        await until(lambda: len(one.completions) == 1)
        asked.append(ask([7] * 16))
        await until(lambda: len(two.completions) == 1)
        asked.append(ask([*long, 7]))
        await until(lambda: sum(admission.queued.values()) == 1)
        front.service.fleet.get(one.url).capacity.ends_a_second = 2.0
        gates[1].release()
        await until(lambda: list(admission._queues) == [("m", one.url)])
        paid = admission.load.tenants.read("a")[-1]
        gates[0].release()
        gates[0].release()
        assert {(await each).status_code for each in asked} == {200}
        assert len(one.completions) == 2
        assert admission.load.tenants.read("a")[-1] == paid > 0
        metrics = (await front.client.get("/metrics", headers=bearing("x"))).text
        assert 'kvist_router_queue_seconds_count{model="m"} 1.0' in metrics

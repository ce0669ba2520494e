"""A random life of a fleet, decision by decision: each is the cheapest that `docs/policy.md` says, of those that may.

The oracle keeps a log of what happened, and counts all of it anew for each decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lives import seeds

from kvist.events import WorkerRank
from kvist.events.hashing import block_hashes
from kvist.openai.errors import RequestError
from kvist.router.admission import Admission
from kvist.router.config import RouterConfig
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.identity import Identity, ServedModel
from kvist.router.fleet.load import ActiveRequest, LoadTracker
from kvist.router.fleet.models import Models
from kvist.router.fleet.worker import Capacity, CircuitBreaker, CircuitState, HealthGauge, Worker
from kvist.router.index import Overlaps, RankStatus
from kvist.router.prompts import ParsedRequest
from kvist.router.routing import Routing

LIVES = seeds(12)
NUM_STEPS = 120
BLOCK, STRIDE, LONGEST = 16, 16, 6000
ALPHA, CREDITS = 2.9e-5, (1.0, 0.75, 0.25, 0.0)
FAMILIES = [np.arange(LONGEST, dtype=np.uint32) + 10_000 * number for number in range(4)]
CHAINS = [block_hashes(tokens, BLOCK) for tokens in FAMILIES]


class Caches:
    """What is known to be cached: how many leading blocks of each family a rank has, tier by tier."""

    def __init__(self) -> None:
        self.held: dict[WorkerRank, list[tuple[int, ...]]] = {}
        self.statuses: dict[str, list[RankStatus]] = {}
        self.block_sizes: dict[str, int] = {}
        self.has_joined = True
        self.num_clearings = 0

    def match(self, hashes: Any, num_usable: int | None = None, _: int | None = None) -> Overlaps:
        family = next((idx for idx, chain in enumerate(CHAINS) if len(hashes) and chain[0] == hashes[0]), None)
        most = len(hashes) if num_usable is None else num_usable
        if family is None:
            return {}
        found = {rank: tuple(min(depth, most) for depth in held[family]) for rank, held in self.held.items()}
        return {rank: depths for rank, depths in found.items() if depths[-1]}

    def ranks(self, worker: str) -> list[RankStatus]:
        return self.statuses[worker]

    def is_expecting(self, _: str) -> bool:
        return False


@dataclass(eq=False)
class Sent:
    """A request, as the oracle knows it."""

    key: tuple[WorkerRank, int]
    active: ActiveRequest
    sent_s: float
    work: int
    uncached: int
    unit_s: float
    window_s: float
    num_tokens: int
    marks: list[int]
    is_streamed: bool
    is_answered: bool = False
    has_ended: bool = False


@dataclass
class Known:
    """What the oracle counts of one rank from its log."""

    queued: int = 0
    whole: int = 0
    context: int = 0
    running: int = 0
    prefill: int = 0
    answered_s: float = 0.0
    busy_s: float = 0.0
    started_s: float | None = None
    recent: float = 0.0
    given: float = 0.0
    given_s: float = 0.0
    requests: float = 0.0
    lessons: list[tuple[float, int]] = field(default_factory=list)
    takes: list[tuple[float, int]] = field(default_factory=list)

    def learnt(self) -> tuple[float, float]:
        return decayed([seconds for seconds, _ in self.lessons]), decayed([work for _, work in self.lessons])

    def took(self) -> tuple[float, float]:
        seconds = [0.25 * work * unit_s for unit_s, work in self.takes]
        return decayed(seconds), decayed([0.25 * work for _, work in self.takes])


def decayed(values: list[float]) -> float:
    return math.fsum(value * 0.995 ** (len(values) - 1 - idx) for idx, value in enumerate(values))


def work_of(num_tokens: float) -> float:
    return num_tokens + ALPHA / 2 * num_tokens**2


class Life:
    """Workers come and go, requests are decided, answered and end, as a seed has it."""

    def __init__(self, seed: int) -> None:
        self.random, self.now_s = Random(seed), 1000.0
        choose = self.random.choice
        self.policy = choose(["kv", "kv", "kv", "least-loaded"])
        self.engines = choose([None, None, frozenset({"vllm"})])
        self.caches, self.load = Caches(), LoadTracker()
        self.fleet = Fleet(BLOCK, self.caches, self.clock, self.engines)
        config = RouterConfig(policy=self.policy, block_size=BLOCK)
        known = SimpleNamespace(fleet=self.fleet, models=Models(config, self.fleet), load=self.load, index=self.caches)
        self.routing = Routing(known, Random(seed), self.clock)
        self.most_prefill = choose([None, None, 3000])
        self.admission = Admission(self.fleet, self.load, self.clock, None, 10, self.most_prefill)  # type: ignore[arg-type]
        self.log: list[tuple[float, str, Sent, int]] = []
        self.sent: list[Sent] = []
        self.slots: dict[int, tuple[int, dict[tuple[WorkerRank, int], float]]] = {}
        self.asked_s: dict[int, tuple[int, list[float]]] = {}
        self.lives: dict[str, int] = {}
        self.num_lives = 0

    def clock(self) -> float:
        return self.now_s

    def live(self) -> None:
        acts = {
            self.ask: 40,
            self.first_token: 20,
            self.grow: 8,
            self.end: 20,
            self.wait: 15,
            self.cache: 10,
            self.join: 3,
            self.leave: 1,
            self.change: 6,
        }
        self.join()
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
            act()

    # --- Workers ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        url = self.random.choice([f"http://w{number}" for number in range(4)])
        if url in self.lives:
            return
        self.num_lives += 1
        self.lives[url] = self.num_lives
        models = self.random.choice([("m",), ("m",), ("m", "n"), ("n",)])
        entries = tuple(ServedModel(name, {"id": name, "owned_by": "x"}) for name in models)
        worker = Worker(url, (), HealthGauge(is_healthy=True), CircuitBreaker(2, 5.0))
        worker.set_identity(Identity(engine=self.random.choice(["vllm", "vllm", "other"]), models=entries))
        worker.capacity = Capacity(self.random.choice([None, None, 1, 2]))
        worker.capacity.ends_a_second = self.random.choice([0.0, 0.5, 20.0])
        ranks = [WorkerRank(url, number) for number in range(self.random.choice([1, 1, 2]))]
        self.caches.statuses[url] = [RankStatus(rank, num_blocks=self.random.randrange(3)) for rank in ranks]
        for rank in ranks:
            self.caches.held[rank] = [(0, 0, 0, 0)] * len(FAMILIES)
        self.load.register(ranks[0])
        if worker.capacity.fixed_requests is not None:
            self.fleet.bounded.add(url)
        self.fleet.put(worker)

    def leave(self) -> None:
        if self.lives:
            url = self.random.choice([*self.lives])
            del self.lives[url]
            self.load.forget(url)
            self.fleet.remove(url)
            for status in self.caches.statuses.pop(url):
                del self.caches.held[status.target]

    def change(self) -> None:
        if not self.fleet.workers:
            return
        worker = self.random.choice(self.fleet.workers)
        match self.random.choice(["sick", "well", "well", "drain", "stay", "fail", "succeed", "spare"]):
            case "sick":
                worker.health.is_healthy = self.random.choice([False, None])
            case "well":
                worker.health.is_healthy = True
            case "drain":
                worker.is_draining = True
            case "stay":
                worker.is_draining = False
            case "fail":
                worker.breaker.fail(self.now_s)
            case "succeed":
                worker.breaker.succeed()
            case "spare":
                worker.capacity.paused_until_s = self.now_s + 1.0
                self.fleet.bounded.add(worker.url)

    def cache(self) -> None:
        """Let a rank hold so many blocks of a family, some of them in slower tiers."""
        if self.caches.held:
            rank = self.random.choice([*self.caches.held])
            depths = sorted(self.random.choice([0, 0, 5, 40, 100, 375]) for _ in range(4))
            if self.random.random() < 0.5:
                depths = [depths[-1]] * 4
            self.caches.held[rank][self.random.randrange(len(FAMILIES))] = tuple(depths)

    # --- Requests ---------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        self.now_s += self.random.choice([0.001, 0.03, 0.2, 1.0, 7.0])

    def ask(self) -> None:
        random = self.random
        family, num_tokens = random.randrange(len(FAMILIES)), random.choice([1, 17, 300, 1024, 1025, 5000])
        tokens = FAMILIES[family][:num_tokens] if random.random() < 0.9 else None
        ask = ParsedRequest(random.choice(["m", "m", "n"]), num_tokens, tokens, fields={"model": "m"})
        excluded = {url for url in self.lives if random.random() < 0.1}
        prefix = self.routing.match(ask)
        assert prefix is not None
        full = self.admission.full_workers(ask.model, excluded)
        able, room_s = self.able(ask.model, excluded)
        try:
            plan = self.routing.plan(ask, prefix, excluded, full)
        except RequestError:
            assert not able
            return
        targets = [status.target for url in able for status in self.caches.statuses[url]]
        chosen = plan.answer.chosen.target
        assert chosen in targets
        is_streamed, blocks = random.random() < 0.7, CHAINS[family][: num_tokens // BLOCK] if tokens is not None else []
        known = [self.recount((target, self.lives[target.worker])) for target in targets]
        num_held = {status.target: status.num_blocks for url in able for status in self.caches.statuses[url]}
        if self.policy == "kv":
            costs = self.costs(targets, known, family, num_tokens, tokens is not None, blocks, room_s)
            cost_s, work, unit_s, window_s = (dict(zip(targets, each, strict=True)) for each in costs)
            order = {target: (round(cost_s[target], 9), num_held[target]) for target in targets}
            least = min(cost_s.values())
            prices = plan.answer.prices
            assert prices is not None
            assert prices.cost_s.tolist() == pytest.approx([cost_s[each] for each in targets], rel=1e-9, abs=1e-12)
            assert cost_s[chosen] <= least + 1e-9
            assert any(order[each] == order[chosen] for each in targets)
            sent_work, sent_unit_s, sent_window_s = round(work[chosen]), unit_s[chosen], window_s[chosen]
        else:
            keys = {target: (each.running, each.prefill) for target, each in zip(targets, known, strict=True)}
            assert keys[chosen] == min(keys.values())
            sent_work = sent_unit_s = sent_window_s = 0
        active = self.routing.begin(self.now_s, plan.answer, is_streamed=is_streamed)
        usable = max(0, num_tokens - 1) // BLOCK
        depth = min(self.caches.held[chosen][family][-1], usable) if tokens is not None else 0
        uncached = num_tokens - depth * BLOCK
        assert plan.answer.overlap_tokens == depth * BLOCK
        marks = [int(blocks[depth - 1]) for depth in range(STRIDE, len(blocks) + 1, STRIDE)]
        key = chosen, self.lives[chosen.worker]
        sent = Sent(
            key, active, self.now_s, sent_work, uncached, sent_unit_s, sent_window_s, num_tokens, marks, is_streamed
        )
        if self.policy == "kv":
            self.mark(sent)
        self.sent.append(sent)
        self.log.append((self.now_s, "dispatch", sent, 0))

    def first_token(self) -> None:
        waiting = [each for each in self.sent if not each.is_answered]
        if waiting:
            sent = self.random.choice(waiting)
            sent.is_answered = True
            sent.active.end_prefill()
            sent.active.on_first_token(self.now_s)
            self.log.append((self.now_s, "answer", sent, 0))
            if sent.is_streamed:
                self.settle(sent, self.now_s + 5.0)

    def grow(self) -> None:
        if self.sent:
            sent = self.random.choice(self.sent)
            sent.active.add_tokens(7)
            self.log.append((self.now_s, "grow", sent, 7))

    def end(self) -> None:
        if self.sent:
            sent = self.sent.pop(self.random.randrange(len(self.sent)))
            num_tokens = self.random.choice([None, 5, 200])
            for _ in range(self.random.choice([1, 2])):
                sent.active.finish(self.now_s, num_tokens)
            if not sent.is_streamed:
                self.settle(sent, self.now_s + 5.0)
            elif not sent.is_answered:
                self.settle(sent, 0.0)
            self.log.append((self.now_s, "end", sent, -1 if num_tokens is None else num_tokens))

    # --- The oracle -------------------------------------------------------------------------------------------------

    def able(self, model: str, excluded: Iterable[str]) -> tuple[list[str], dict[str, float]]:
        """Return who may take a request, in the order they came, and how long it would wait for those that are full."""
        able, room_s = [], dict[str, float]()
        for worker in self.fleet.workers:
            breaker = worker.breaker
            is_open = breaker.state is CircuitState.OPEN and self.now_s < breaker.retry_at_s
            is_known = self.engines is None or worker.engine in self.engines
            is_well = worker.health.is_healthy is True and not worker.is_draining and not is_open
            if is_well and is_known and model in (worker.model_ids or ()) and worker.url not in excluded:
                able.append(worker.url)
        for url in able:
            worker = next(each for each in self.fleet.workers if each.url == url)
            every = [self.recount((status.target, self.lives[url])) for status in self.caches.statuses[url]]
            running, prefill = sum(each.running for each in every), sum(each.prefill for each in every)
            most, rate = worker.capacity.fixed_requests, worker.capacity.ends_a_second
            is_spared = worker.capacity.paused_until_s > self.now_s
            is_computing = self.most_prefill is not None and running > 0 and prefill >= self.most_prefill
            if is_spared or (most is not None and running >= most) or is_computing:
                has_time = most is not None and rate and not is_spared and self.policy == "kv"
                room_s[url] = (max(0, running - most) + 1) / rate if has_time else math.inf
        if any(url not in room_s for url in able):
            able = [url for url in able if room_s.get(url, 0.0) < math.inf]
        else:
            room_s = {}
        return able, room_s

    def recount(self, key: tuple[WorkerRank, int]) -> Known:
        known = Known()
        for at_s, what, sent, number in self.log:
            if sent.key != key:
                continue
            match what:
                case "dispatch":
                    sent.is_counted = False  # type: ignore[attr-defined]
                    known.running += 1
                    known.prefill += sent.uncached
                    known.context += sent.num_tokens
                    known.recent += sent.work * 2 ** (-(self.now_s - at_s) / 60.0)
                    known.requests += math.exp((at_s - self.now_s) / 5.0)
                    known.started_s = known.started_s or at_s
                    if self.policy == "kv":
                        decay = math.exp(-(at_s - known.given_s) / sent.window_s) if known.given_s else 0.0
                        known.given, known.given_s = known.given * decay + sent.work * sent.unit_s, at_s
                    if sent.is_streamed:
                        known.answered_s = at_s if known.queued <= 0 else known.answered_s
                        known.queued += sent.work
                    elif sent.work:
                        known.busy_s = max(at_s, known.busy_s) + sent.work * sent.unit_s
                        known.whole += sent.work
                case "answer":
                    sent.is_counted = True  # type: ignore[attr-defined]
                    known.prefill -= sent.uncached
                    if sent.is_streamed:
                        since_s = max(sent.sent_s, known.answered_s)
                        known.queued -= sent.work
                        known.answered_s = at_s
                        if sent.work > 256 and known.busy_s <= since_s:
                            known.lessons.append((at_s - since_s, sent.work))
                case "grow":
                    known.context += number
                case "end":
                    known.running -= 1
                    known.prefill -= 0 if sent.is_counted else sent.uncached  # type: ignore[attr-defined]
                    known.context -= sent.num_tokens + sum(
                        each[3] for each in self.log if each[1] == "grow" and each[2] is sent
                    )
                    if not sent.is_streamed:
                        known.whole -= sent.work
                        if sent.work > 256 and number >= 0 and at_s > sent.sent_s:
                            known.takes.append(((at_s - sent.sent_s) / (sent.work + 400 * number), sent.work))
                    elif not sent.is_counted:  # type: ignore[attr-defined]
                        known.queued -= sent.work
                        known.answered_s = at_s
        return known

    def costs(
        self,
        targets: list[WorkerRank],
        known: list[Known],
        family: int,
        num_tokens: int,
        is_read: bool,
        blocks: Any,
        room_s: dict[str, float],
    ) -> tuple[list[float], ...]:
        """Return cost, work, and seconds a unit, of each; and the window of utilisation."""
        learnt = [each.learnt() for each in known]
        took = [each.took() for each in known]
        fleet_s = 500 * 40e-6 + math.fsum(seconds for seconds, _ in learnt)
        fleet_unit_s = fleet_s / (500 + math.fsum(work for _, work in learnt))
        all_took_s, all_took = (math.fsum(each[idx] for each in took) for idx in (0, 1))
        scale = fleet_unit_s * all_took / all_took_s if all_took_s else 0.0
        units = [
            (seconds + scale * took_s + 2e5 * fleet_unit_s) / (work + took_work + 2e5)
            for (seconds, work), (took_s, took_work) in zip(learnt, took, strict=True)
        ]
        window_s = max(10.0, 1e5 * fleet_unit_s)
        given = math.fsum(each.given * math.exp(-(self.now_s - each.given_s) / window_s) for each in known)
        begun_s = min((each.started_s for each in known if each.started_s is not None), default=self.now_s)
        seen_s = max(3.0, self.now_s - begun_s)
        utilisation = min(0.99, given / (window_s * (1 - math.exp(-seen_s / window_s)) * len(targets)))
        price = min(40.0, 2.5 * utilisation**2 / (1 - utilisation))
        usable = max(0, num_tokens - 1) // BLOCK
        num_all = math.fsum(each.requests for each in known)
        works, pendings, parts = [], [], []
        for target in targets:
            held = self.caches.held[target][family] if is_read else (0, 0, 0, 0)
            coming = max(held[0], self.under_way((target, self.lives[target.worker]), blocks))
            before = saved = 0.0
            for credit, depth in zip(CREDITS, held, strict=True):
                there = work_of(min(max(depth, coming), usable) * BLOCK)
                saved, before = saved + credit * (there - before), there
            works.append(work_of(num_tokens) - saved)
            pendings.append(work_of(min(coming, usable) * BLOCK) - work_of(min(held[0], usable) * BLOCK))
            depth = min(max(held[-1], coming), usable)
            parts.append(self.shared_and_unpriced(blocks, depth, usable, len(targets), num_all))
        most_s = max(0.03 * each.context * unit_s for each, unit_s in zip(known, units, strict=True))
        mean_s, costs = math.fsum(units) / len(units), []
        terms = zip(targets, known, units, works, parts, pendings, strict=True)
        for target, each, unit_s, work, (shared, unpriced), pending in terms:
            wait_s = abs(each.queued * unit_s + each.answered_s - self.now_s) if each.queued > 0 else 0.0
            wait_s += min(max(each.busy_s - self.now_s, 0.0), each.whole * unit_s) + room_s.get(target.worker, 0.0)
            priced = work - shared + price * (work - unpriced) + (1 - utilisation) * pending + 0.03 * each.context
            rest_s = 0.02 * each.context * unit_s + 0.03 * each.recent * mean_s
            costs.append(wait_s + max(priced * unit_s, most_s) + rest_s)
        return costs, works, units, [window_s] * len(targets)

    def mark(self, sent: Sent) -> None:
        for mark in sent.marks:
            held_by = self.slots.get(mark % 4096, (None, {}))
            name, until_s = held_by if held_by[0] == mark else (mark, dict[Any, float]())
            until_s[sent.key] = sent.sent_s + 300.0
            assert len(until_s) <= 8
            self.slots[mark % 4096] = name, until_s  # type: ignore[assignment]
            asked = self.asked_s.get(mark % 4096, (None, []))
            self.asked_s[mark % 4096] = mark, [*(asked[1] if asked[0] == mark else []), sent.sent_s]

    def settle(self, sent: Sent, then_s: float) -> None:
        for mark in sent.marks:
            name, until_s = self.slots.get(mark % 4096, (None, {}))
            if name == mark and until_s.get(sent.key) == sent.sent_s + 300.0:
                until_s[sent.key] = then_s

    def shared_and_unpriced(
        self, blocks: Any, depth: int, usable: int, num_ranks: int, num_all: float
    ) -> tuple[float, float]:
        """Return the work that later requests take over, and that has no price: by the marks a rank may lack."""
        ends = range(STRIDE, len(blocks) + 1, STRIDE)
        asked = [self.asked_s.get(int(blocks[end - 1]) % 4096, (None, [])) for end in ends]
        counts = [
            math.fsum(math.exp((at_s - self.now_s) / 5.0) for at_s in times if name == int(blocks[end - 1]))
            for end, (name, times) in zip(ends, asked, strict=True)
        ]
        shared = unpriced = 0.0
        for idx, end in enumerate(ends):
            if idx > depth // STRIDE:
                num = max(counts[idx:])
                work = work_of(min(end, usable) * BLOCK) - work_of(min(end - STRIDE, usable) * BLOCK)
                shared += min(2 / 3, num / (num + num_ranks)) * work
                unpriced += (num / max(num, num_all)) ** 2 * work if num > 1.0 else 0.0
        return shared, unpriced

    def under_way(self, key: tuple[WorkerRank, int], blocks: Any) -> int:
        found = 0
        for depth in range(STRIDE, len(blocks) + 1, STRIDE):
            name, until_s = self.slots.get(int(blocks[depth - 1]) % 4096, (None, {}))
            if name == int(blocks[depth - 1]) and until_s.get(key, 0.0) > self.now_s:
                found = depth
        return found


@pytest.mark.parametrize("seed", LIVES)
def test_each_decision_is_the_cheapest_of_those_that_may(seed: int) -> None:
    Life(seed).live()

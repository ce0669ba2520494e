"""Loads on a board that several processes share are what one process would have counted."""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from lives import seeds

from kvist.events import WorkerRank
from kvist.router.fleet.board import LoadBoard, board_bytes, clear_row
from kvist.router.fleet.load import ActiveRequest, LoadTracker
from kvist.router.policy.decision import Load, Prompt
from kvist.router.policy.priced import PricedPolicy
from kvist.router.policy.settings import PriceSettings
from kvist.router.policy.work import CONTEXT, QUEUED, UNSTREAMED

LIVES = seeds(30)
NUM_STEPS, NUM_FRONTS, NUM_RANKS = 150, 3, 3
WORKERS = [f"http://worker-{number}" for number in range(4)]
TENANTS = ["a", "b"]
CHAIN = np.arange(1, 65, dtype=np.uint64)


@dataclass(eq=False)
class Running:
    """A request, and what it should count."""

    active: ActiveRequest
    target: WorkerRank
    life: int
    tenant: str
    num_uncached: int
    num_tokens: int
    work: int
    is_streamed: bool
    is_answered: bool = False


@dataclass
class Front:
    """A process that takes requests: `lives` are the workers that it was told of, and which of their lives."""

    tracker: LoadTracker
    policy: PricedPolicy
    lives: dict[str, int] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    ended: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By worker and life, those that it has seen end."""
    begun: Counter[tuple[str, int]] = field(default_factory=Counter)
    queued: Counter[int] = field(default_factory=Counter)


class Life:
    """A keeper that names and fronts that count, each of which may die; a worker that comes back begins a new life."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.memory = mmap.mmap(-1, board_bytes(NUM_FRONTS))
        self.keeper = self.new_keeper()
        self.fronts = [self.new_front(number) for number in range(NUM_FRONTS)]
        self.lives: dict[str, int] = {}
        self.num_lives = 0
        self.now_s = 1.0

    def live(self) -> None:
        acts = {
            self.add: 8,
            self.remove: 3,
            self.tell: 12,
            self.begin: 40,
            self.go_on: 45,
            self.queue: 6,
            self.kill_front: 2,
            self.kill_keeper: 2,
        }
        for act in self.random.choices([*acts], [*acts.values()], k=NUM_STEPS):
            self.now_s += 0.01
            act()
            self.check()
        for front in self.fronts:
            while front.running:
                self.finish(front, front.running[0])
        self.check()
        assert not self.fronts[0].tracker.board.work[:, [QUEUED, CONTEXT, UNSTREAMED]].any()

    # --- Processes and workers --------------------------------------------------------------------------------------

    def new_keeper(self) -> LoadTracker:
        return LoadTracker(LoadBoard(self.memory, num_fronts=NUM_FRONTS))

    def new_front(self, number: int) -> Front:
        tracker = LoadTracker(LoadBoard(self.memory, num_fronts=NUM_FRONTS, names_columns=False), number)
        return Front(tracker, tracker.pricing(PriceSettings(), 16))

    def add(self) -> None:
        worker = self.random.choice(WORKERS)
        if worker not in self.lives:
            self.num_lives += 1
            self.lives[worker] = self.num_lives
            self.name(self.keeper, worker)
            board = self.keeper.board
            for column in (board.columns[WorkerRank(worker, rank)] for rank in range(NUM_RANKS)):
                assert not board.work[:, :, column].any(), "of whoever had the column before"
                assert not board.in_flight["until_s"][board.in_flight["rank"] == column].any()

    def remove(self) -> None:
        worker = self.random.choice(WORKERS)
        if self.lives.pop(worker, None) is not None:
            self.keeper.forget(worker)

    def name(self, tracker: LoadTracker, worker: str) -> None:
        for rank in range(NUM_RANKS):
            assert tracker.register(WorkerRank(worker, rank)) is not None

    def tell(self, number: int | None = None) -> None:
        told = self.fronts[self.random.randrange(NUM_FRONTS) if number is None else number]
        for worker in WORKERS:
            if told.lives.get(worker) != self.lives.get(worker):
                told.tracker.forget(worker)
                told.lives.pop(worker, None)
            if worker in self.lives:
                told.lives[worker] = self.lives[worker]
                self.name(told.tracker, worker)

    def kill_front(self) -> None:
        number = self.random.randrange(NUM_FRONTS)
        clear_row(self.memory, number)
        self.fronts[number] = self.new_front(number)
        self.tell(number)

    def kill_keeper(self) -> None:
        self.keeper = self.new_keeper()
        for worker in self.lives:
            self.name(self.keeper, worker)

    # --- Requests ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        front, worker = self.random.choice(self.fronts), self.random.choice(WORKERS)
        life = front.lives.get(worker)
        if life is None or life != self.lives.get(worker):
            return
        target, tracker = WorkerRank(worker, self.random.randrange(NUM_RANKS)), front.tracker
        num_tokens, overlap = self.random.randint(1, 1000), self.random.choice([0, 16, 1200])
        is_streamed, column = self.random.random() < 0.7, tracker.column(target)
        prices = front.policy.weigh(self.now_s, num_tokens, CHAIN[: num_tokens // 16], [0], np.array([column]))
        priced = front.policy.dispatched(self.now_s, column, prices, 0, is_streamed=is_streamed)
        active = tracker.begin(target, Prompt(num_tokens, 16), overlap, priced)
        tenant, num_uncached = self.random.choice(TENANTS), max(0, num_tokens - overlap)
        tracker.tenants.count(tenant, 1)
        front.running.append(Running(active, target, life, tenant, num_uncached, num_tokens, priced.work, is_streamed))

    def go_on(self) -> None:
        front = self.random.choice(self.fronts)
        if not front.running:
            return
        each = self.random.choice(front.running)
        match self.random.choice(["answer", "tokens", "finish"]):
            case "answer" if not each.is_answered:
                each.active.end_prefill()
                each.active.on_first_token(self.now_s)
                each.is_answered, each.num_uncached = True, 0
                front.begun[each.target.worker, each.life] += 1
            case "tokens":
                each.active.add_tokens(9)
                each.num_tokens += 9
            case "finish":
                self.finish(front, each)

    def finish(self, front: Front, each: Running) -> None:
        for _ in range(self.random.choice([1, 2])):
            each.active.finish(self.now_s, self.random.choice([None, 20]))
        front.tracker.tenants.count(each.tenant, -1)
        front.ended[each.target.worker, each.life] += 1
        front.running.remove(each)

    def queue(self) -> None:
        front, model = self.random.choice(self.fronts), self.random.randrange(1, 4)
        number = -1 if front.queued[model] and self.random.random() < 0.6 else 1
        front.tracker.add_queued(model, number)
        front.queued[model] += number

    # --- What must be so --------------------------------------------------------------------------------------------

    def check(self) -> None:
        every = [each for front in self.fronts for each in front.running]
        counted: dict[tuple[int, WorkerRank], Counter[str]] = {}
        for each in every:
            counts = counted.setdefault((each.life, each.target), Counter())
            counts.update(running=1, prefill=each.num_uncached, context=each.num_tokens)
            counts["queued"] += each.work if each.is_streamed and not each.is_answered else 0
            counts["whole"] += 0 if each.is_streamed else each.work
        told = [(self.keeper, self.lives), *((front.tracker, front.lives) for front in self.fronts)]
        for tracker, lives in told:
            for worker, life in lives.items():
                if life != self.lives.get(worker):
                    continue  # it was not told yet
                num_running = 0
                for target in (WorkerRank(worker, rank) for rank in range(NUM_RANKS)):
                    counts, load = counted.get((life, target), Counter()), tracker.load(target)
                    assert (load.running_requests, load.prefill_tokens) == (counts["running"], counts["prefill"])
                    work = tracker.board.work[:, [QUEUED, CONTEXT, UNSTREAMED], tracker.column(target)].sum(0)
                    assert work.tolist() == [counts["queued"], counts["context"], counts["whole"]]
                    num_running += counts["running"]
                assert tracker.running_requests(worker) == num_running
                num_ended, num_begun = (
                    sum(getattr(front, what)[worker, life] for front in self.fronts) for what in ("ended", "begun")
                )
                assert sum(tracker.ended_requests(worker)) == num_ended
                assert tracker.num_steps(worker) == num_ended + num_begun
            assert tracker.num_running == len(every)
            for tenant in TENANTS:
                assert tracker.tenants.num_running(tenant) == sum(each.tenant == tenant for each in every)
            for model in range(1, 4):
                assert tracker.num_queued(model) == sum(front.queued[model] for front in self.fronts)


@pytest.mark.parametrize("seed", LIVES)
def test_loads_are_those_of_all_fronts_whoever_dies(seed: int) -> None:
    Life(seed).live()


def test_columns_are_reused_once_nothing_runs_in_them() -> None:
    memory = mmap.mmap(-1, board_bytes(2))
    keeper = LoadTracker(LoadBoard(memory, num_fronts=2))
    front = LoadTracker(LoadBoard(memory, num_fronts=2, names_columns=False), 1)
    for number in range(50):
        target = WorkerRank(f"http://{number}", 0)
        keeper.register(target)
        request = front.begin(target, Prompt(100, 16), 0)
        keeper.forget(target.worker)
        request.finish(0.0)
        front.forget(target.worker)
    assert keeper.ints[0] == 1
    keeper.register(WorkerRank("http://last", 0))
    assert front.load(WorkerRank("http://last", 0)) == Load()
    assert front.ended_requests("http://last") == [0, 0]


def test_a_front_finds_the_column_that_the_keeper_assigns_and_another_keeper_finds_it_too() -> None:
    memory, target = mmap.mmap(-1, board_bytes(2)), WorkerRank("http://" + "a" * 1000, 0)
    keeper, front = LoadBoard(memory, num_fronts=2), LoadBoard(memory, num_fronts=2, names_columns=False)
    assert keeper.column(WorkerRank("http://w", 0)) == 0
    assert front.cells(target) is None
    assert keeper.cells(target) == front.cells(target) == LoadBoard(memory, num_fronts=2).cells(target)

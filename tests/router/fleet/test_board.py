"""Loads on a board that several processes share are what one process would have counted."""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.router.fleet.board import MAX_NAME_BYTES, LoadBoard, board_bytes, clear_row
from kvist.router.fleet.load import ActiveRequest, LoadTracker
from kvist.router.policy.decision import Load, Prompt

NUM_FRONTS = 3
WORKERS = [f"http://worker-{number}" for number in range(4)]
FRONTS, RANKS = st.integers(0, NUM_FRONTS - 1), st.integers(0, 2)


@dataclass
class Running:
    """A request, and what it should count."""

    active: ActiveRequest
    target: WorkerRank
    life: int
    num_uncached: int


@dataclass
class Front:
    """A process that takes requests: `lives` are the workers that it was told of, and which of their lives."""

    tracker: LoadTracker
    lives: dict[str, int] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)


class Boards(RuleBasedStateMachine):
    """A keeper that names and fronts that count, each of which may die; a worker that comes back begins a new life."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = mmap.mmap(-1, board_bytes(NUM_FRONTS))
        self.keeper = self.new_keeper()
        self.fronts = [self.new_front(number) for number in range(NUM_FRONTS)]
        self.lives: dict[str, int] = {}
        self.num_lives = 0

    def new_keeper(self) -> LoadTracker:
        return LoadTracker(LoadBoard(self.memory, num_fronts=NUM_FRONTS))

    def new_front(self, number: int) -> Front:
        return Front(LoadTracker(LoadBoard(self.memory, num_fronts=NUM_FRONTS, names_columns=False), number))

    @rule(worker=st.sampled_from(WORKERS))
    def add(self, worker: str) -> None:
        if worker not in self.lives:
            self.num_lives += 1
            self.lives[worker] = self.num_lives
            for rank in range(3):
                self.keeper.name(WorkerRank(worker, rank))

    @rule(worker=st.sampled_from(WORKERS))
    def remove(self, worker: str) -> None:
        if self.lives.pop(worker, None) is not None:
            self.keeper.forget(worker)

    @rule(front=FRONTS)
    def tell(self, front: int) -> None:
        told = self.fronts[front]
        for worker in WORKERS:
            if told.lives.get(worker) != self.lives.get(worker):
                told.tracker.forget(worker)
                told.lives.pop(worker, None)
            if worker in self.lives:
                told.lives[worker] = self.lives[worker]
                for rank in range(3):
                    told.tracker.name(WorkerRank(worker, rank))

    @rule(
        front=FRONTS,
        worker=st.sampled_from(WORKERS),
        rank=RANKS,
        tokens=st.integers(1, 100),
        overlap=st.integers(0, 120),
    )
    def begin(self, front: int, worker: str, rank: int, tokens: int, overlap: int) -> None:
        life = self.fronts[front].lives.get(worker)
        if life is not None and life == self.lives.get(worker):
            target, num_uncached = WorkerRank(worker, rank), max(0, tokens - overlap)
            active = self.fronts[front].tracker.begin(target, Prompt(tokens, 16), overlap, 0.0)
            self.fronts[front].running.append(Running(active, target, life, num_uncached))

    @precondition(lambda self: any(front.running for front in self.fronts))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        front = data.draw(st.sampled_from([front for front in self.fronts if front.running]))
        each = data.draw(st.sampled_from(front.running))
        match data.draw(st.sampled_from(["prefill", "tokens", "finish"])):
            case "prefill":
                each.active.end_prefill()
                each.num_uncached = 0
            case "tokens":
                each.active.add_tokens(9)
            case "finish":
                each.active.finish(0.0)
                each.active.finish(0.0)
                front.running.remove(each)

    @rule(front=FRONTS)
    def kill_front(self, front: int) -> None:
        clear_row(self.memory, front)
        self.fronts[front] = self.new_front(front)
        self.tell(front)

    @rule()
    def kill_keeper(self) -> None:
        self.keeper = self.new_keeper()
        for worker in self.lives:
            for rank in range(3):
                self.keeper.name(WorkerRank(worker, rank))

    @invariant()
    def loads_are_those_of_all_fronts(self) -> None:
        expected: dict[tuple[int, WorkerRank], Counter[str]] = {}
        for each in (each for front in self.fronts for each in front.running):
            counted = expected.setdefault((each.life, each.target), Counter())
            counted.update(running=1, prefill=each.num_uncached)
        for tracker, lives in [(self.keeper, self.lives), *((front.tracker, front.lives) for front in self.fronts)]:
            for worker, life in lives.items():
                if life != self.lives.get(worker):
                    continue  # it was not told yet
                num_running = 0
                for rank in range(3):
                    target = WorkerRank(worker, rank)
                    counted, load = expected.get((life, target), Counter()), tracker.load(target, 0.0)
                    assert (load.running_requests, load.prefill_tokens) == (counted["running"], counted["prefill"])
                    num_running += counted["running"]
                assert tracker.running_requests(worker) == num_running
        assert self.keeper.num_running == sum(len(front.running) for front in self.fronts)


TestBoards = Boards.TestCase
TestBoards.settings = settings(max_examples=60, stateful_step_count=40)


def test_columns_are_reused_once_nothing_runs_in_them() -> None:
    memory = mmap.mmap(-1, board_bytes(2))
    keeper = LoadTracker(LoadBoard(memory, num_fronts=2))
    front = LoadTracker(LoadBoard(memory, num_fronts=2, names_columns=False), 1)
    for number in range(50):
        target = WorkerRank(f"http://{number}", 0)
        keeper.name(target)
        request = front.begin(target, Prompt(100, 16), 0, 0.0)
        keeper.forget(target.worker)
        request.finish(0.0)
        front.forget(target.worker)
    assert keeper.ints[0] == 1
    keeper.name(WorkerRank("http://last", 0))
    assert front.load(WorkerRank("http://last", 0), 0.0) == Load()
    assert front.ended_requests("http://last") == 0


def test_a_name_that_is_being_written_is_nobodys() -> None:
    memory, target = mmap.mmap(-1, board_bytes(2)), WorkerRank("http://w", 0)
    keeper = LoadBoard(memory, num_fronts=2)
    assert keeper.cells(target) is not None
    start = memory.find(b"0 http://w")
    memory[start] = 0
    front = LoadBoard(memory, num_fronts=2, names_columns=False)
    assert front.cells(target) is None
    memory[start] = ord("0")
    assert front.cells(target) == keeper.cells(target)


def test_a_name_too_long_for_the_board_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="url"):
        LoadTracker().name(WorkerRank("http://" + "a" * MAX_NAME_BYTES, 0))
